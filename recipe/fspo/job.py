"""The job of this recipe: what it hands to :mod:`recipe.runner`. Imports neither verl nor ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig
from recipe.fspo import CONF_DIR
from recipe.math.data.offline_task import write_dataset
from recipe.runner.launch import compose as runner
from recipe.runner.launch.job import Job


def _problems(config: DictConfig) -> Iterator[str]:
    import recipe.fspo.sqrt_rejection  # noqa: F401  (a rule of the asynchronous modes)
    from recipe.fspo.rules import problems  # imports verl: after the platform is exported

    return problems(config)


def _complete(config: DictConfig) -> Mapping[str, Any]:
    from recipe.fspo.config import complete
    from recipe.fspo.rules import complete_skipping, idle_penalty

    facts = complete(config)
    if note := idle_penalty(config):
        print(f"note: {note}", flush=True)
    if (note := complete_skipping(config)) and not config.get("evaluate"):
        print(f"note: {note}", flush=True)
    return facts


def _conclude(config: DictConfig) -> None:
    folder = Path(config.run.dir)
    if config.evaluate:
        from recipe.math.evaluation import conclude_evaluation

        print(conclude_evaluation(folder, config.seed), flush=True)
    else:
        from fspo.report.summary import summarise

        print(summarise(folder), flush=True)


JOB: Final = Job(
    command="recipe.fspo.main",
    config=CONF_DIR / "fspo.yaml",
    name="fspo",
    modules=("recipe.fspo.trainer",),
    problems=_problems,
    complete=_complete,
    write_data=write_dataset,
    conclude=_conclude,
)


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration of ``python -m recipe.fspo.main`` with these overrides, as :func:`recipe.runner.launch.compose`
    composes it.
    """
    return runner.compose(JOB, runner.parsed(overrides))


def choices(group: str, overrides: Sequence[str] = ()) -> list[str]:
    """The options of a configuration group, such as ``algo``: those shipped, and those of the user's own folders."""
    return runner.choices(JOB, group, runner.parsed(overrides))
