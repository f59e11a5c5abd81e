"""The job of this recipe: what it hands to :mod:`recipe.runner`. Imports neither verl nor ray."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig
from recipe.fspo import CONF_DIR
from recipe.fspo.old_keys import FORMER_KEYS, INSTEAD, OLD_KEYS
from recipe.math.data.offline_task import write_dataset
from recipe.runner.launch import compose as runner
from recipe.runner.launch.job import Job, Passes

from fspo.fairness.lre import lre_in_words


def _problems(config: DictConfig) -> Iterator[str]:
    import recipe.fspo.policy_loss  # the losses, which are tried
    import recipe.fspo.sqrt_mask  # noqa: F401  (a rule of the asynchronous modes)
    from recipe.fspo.rules import problems  # imports verl: after the platform is exported

    return problems(config)


def _recorded(settings: Mapping[str, Any]) -> Iterator[str]:
    from recipe.fspo.rules import recorded_problems

    return recorded_problems(settings)


def _complete(config: DictConfig) -> Mapping[str, Any]:
    from recipe.fspo.config import complete
    from recipe.fspo.rules import complete_skipping, idle_penalty

    facts = complete(config)
    if note := idle_penalty(config):
        print(f"note: {note}", flush=True)
    if (note := complete_skipping(config)) and not config.get("evaluate"):
        print(f"note: {note}", flush=True)
    return facts


def _passes(config: DictConfig) -> Passes:
    settings = config.fspo
    return Passes(reference_at_validations=settings.kl_to_start, keeps_old_weights=settings.pi_old == "actor")


def _outlook(config: DictConfig, overrides: Sequence[Override], checkpoint: Path | None = None) -> Iterator[str]:
    """Lines of the plan and the dry run. For a script moved from verl they include the defaults that differ here."""
    from recipe.fspo.outlook import outlook
    from recipe.runner.launch import left_to_verl

    chosen = {runner.key_of(override): override.value() for override in overrides}
    if chosen.get("experiment") == "own":
        if "algo" not in chosen:
            yield "without algo= this trains FSPO's loss (algo=fspo): docs/verl.md#your-script names a script's"
        yield from left_to_verl.lines(config, overrides)
    yield from outlook(config, checkpoint)


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
    modules=("recipe.fspo.in_runner.trainer",),
    problems=_problems,
    no_effect=Path(__file__).with_name("no_effect.yaml"),
    complete=_complete,
    passes=_passes,
    outlook=_outlook,
    write_data=write_dataset,
    conclude=_conclude,
    old_keys=OLD_KEYS,
    former_keys=FORMER_KEYS,
    recorded=_recorded,
    instead=INSTEAD,
    headline=(
        "fspo/advantage_zero_frac",
        "fspo/clip_active_frac",
        "fspo/clip_frac",
        "fspo/drift_per_token",
        "fspo/kl_to_start",
        "fspo/lre_active_debiased",
        "fspo/lre_debiased",
        "fspo/noise_floor/margin",
        "fspo/sigma_hat",
        "fspo/truncated_frac",
    ),
    columns=(
        ("length", "fspo/funnel/length_trained", "{:.0f}".format, ""),  # verl's own counts a tool's tokens, too
        ("clipped", "fspo/clip_frac", "{:.1%}".format, "-"),
        ("LRE", "fspo/lre_debiased fspo/lre_ci_low fspo/lre_ci_high", lre_in_words, "-"),
        ("KL to start", "fspo/kl_to_start", "{:.4f}".format, ""),
    ),
)


def compose(overrides: Sequence[str] = (), own: Collection[str] = ()) -> DictConfig:
    """The configuration of ``python -m recipe.fspo.main`` with these overrides, as :func:`recipe.runner.launch.compose`
    composes it.
    """
    return runner.compose(JOB, runner.parsed(overrides), own)


def choices(group: str, overrides: Sequence[str] = ()) -> list[str]:
    """The options of a configuration group, such as ``algo``: those shipped, and those of the user's own folders."""
    return runner.choices(JOB, group, runner.parsed(overrides))
