"""``python -m recipe.fspo.main [algo=...] [experiment=...] [KEY=VALUE ...]``: verl's own run with FSPO (--help)."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from recipe.runner.faults.preemption import ENDING, FAILED, take_signals

#: The sweep that is going on.
_SWEEP: Sweep | None = None


def take(signum: signal.Signals) -> None:
    """What a signal does: a sweep passes it on, a run saves and ends."""
    (_SWEEP or ENDING).take(signum)


if __name__ == "__main__":
    # Before numpy is imported: it starts threads, in which the signals would not be blocked, and Ray's handler or the
    # default one would take them there.
    take_signals(take)

# isort: split
import hydra  # noqa: E402
from hydra import initialize_config_dir  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from hydra.types import RunMode  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from recipe.fspo import CONF_DIR  # noqa: E402
from recipe.fspo.start import Start, prepared  # noqa: E402
from recipe.runner.checkpoints import integrity  # noqa: E402
from recipe.runner.faults.processes import own_run_id  # noqa: E402
from recipe.runner.launch import machine, resume, secrets  # noqa: E402
from recipe.runner.launch.problems import Refused  # noqa: E402
from recipe.runner.launch.sweep import Arm, Sweep  # noqa: E402

#: Exit status of a command that is refused, as ``argparse`` uses it; nothing was written.
REFUSED: Final = 2
#: What the workers of a run import, so that they are forked with it on CPUs.
_MODULES: Final = ("recipe.fspo.trainer",)
_OF_THE_LOSS: Final = ("actor_rollout_ref.actor", "algorithm.adv_estimator", "fspo")
#: What Hydra has composed, and in which modes.
_ARMS: Final = list[Arm]()
_MODES: Final = set[RunMode]()


@hydra.main(config_path=str(CONF_DIR), config_name="fspo", version_base="1.3")
def compose_by_hydra(config: DictConfig) -> None:
    """Keep what Hydra has composed: one run, or each of a sweep."""
    of_hydra = HydraConfig.get()
    given = OmegaConf.to_container(of_hydra.overrides)  # as it is: read one by one, references would be resolved
    own = [word for word in given["hydra"] if not word.startswith(("hydra.mode=", "hydra.sweep."))]
    own += [
        f"--config-dir={Path(source.path.removeprefix('file://')).absolute()}"
        for source in of_hydra.runtime.config_sources
        if source.provider == "command-line"
    ]
    _MODES.add(of_hydra.mode)
    _ARMS.append(Arm(config, (*given["task"], *own), of_hydra.runtime.choices.get("algo")))


def composed(words: Sequence[str] = ()) -> DictConfig:
    """The configuration of a command with these words, without running it; imports no verl."""
    os.environ["VERL_CONFIG"] = str(machine.verl_config())
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return hydra.compose("fspo", list(words))


def main(words: Sequence[str]) -> int:
    """Run a command; its exit status."""
    global _SWEEP
    try:
        if literal := list(secrets.problems_of_words(words)):
            raise Refused(*literal)  # alone: other sentences show the words
        os.environ["VERL_CONFIG"] = str(machine.verl_config())
        with tempfile.TemporaryDirectory() as unread:
            words = resume.with_words_of_the_run(words)
            # Python's parser takes overrides side by side only.
            flags = [word for word in words if word in ("-m", "--multirun") or re.match("--[^=]+=", word)]
            others = [word for word in words if word not in flags]
            sys.argv[1:] = [*flags, f"hydra.sweep.dir={unread}", *others]  # of -m: Hydra writes multirun.yaml there
            compose_by_hydra()
        if not _ARMS:
            return 0  # after --cfg
        if RunMode.MULTIRUN not in _MODES:
            return run(_ARMS[0])
        _SWEEP = Sweep("recipe.fspo.main", _ARMS, _OF_THE_LOSS)
        return _SWEEP.run(bool(_ARMS[0].config.dry_run))
    except Refused as refused:
        print(refused, file=sys.stderr)
        return REFUSED
    except OSError as error:  # before Ray: once it runs, its errors say where they come from
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror or error}; nothing was started: mend the place", file=sys.stderr)
        return REFUSED


def run(arm: Arm) -> int:
    """One run, or what ``dry_run=true`` says of it; the exit status."""
    config = arm.config
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")  # this process only; workers log to their files as they do
    machine.export_platform(config.trainer, elsewhere=bool(config.dry_run))
    if config.dry_run:
        from recipe.fspo.dry_run import said

        print("\n".join(said(prepared(arm, elsewhere=True))), flush=True)
        return 0
    own_run_id()  # before anything is started: whatever is, inherits it
    own = (config.trainer, config.ray_kwargs.ray_init)
    with machine.private_run(*own) as private, machine.forked_workers(*own, _MODULES):
        start = prepared(arm)
        # Here, beside the workers: verl must wait until the platform is exported.
        from recipe.runner.launch.run_folder import begin, locked
        from recipe.runner.launch.train import how_far, train

        folder = Path(start.config.trainer.default_local_dir)
        ENDING.how_far = lambda: "\n".join([how_far(start.config), *_next_commands(start)])
        with locked(folder):
            write_task(start.config.data)
            if start.checkpoint and integrity.is_checkpoint_of(start.config.trainer, start.checkpoint.folder):
                integrity.name_latest(start.checkpoint)  # it may be an earlier one
            begin(folder, start.written(), arm.words, start.facts, start.step, start.changed, start.stop_tokens)
            status = train(start.config)
            private.failed = (resume.run_info(folder) or {}).get("status") == "failed"
        try:
            if status == 0:
                print(_conclusion(start.config), flush=True)
            print(*_next_commands(start, finished=status == 0), sep="\n", flush=True)
        except (OSError, ValueError) as error:  # a full disk, nobody who reads, nothing scored: training has ended
            with contextlib.suppress(OSError):
                print(f"error: the conclusion cannot be written: {error}", file=sys.stderr, flush=True)
            return status or (FAILED if config.evaluate else 0)
        return status


def write_task(data: DictConfig) -> None:
    """Write those files of the recipe's own task that the run reads."""
    from recipe.math.data.offline_task import write_dataset
    from recipe.runner.launch.check_data import splits_to_write

    if splits := splits_to_write(data):
        try:
            write_dataset(**data.offline_task, splits=splits)
        except FileExistsError as error:
            raise Refused(f"data.offline_task: {error}") from error


def _conclusion(config: DictConfig) -> str:
    """What a finished run ends with."""
    folder = Path(config.trainer.default_local_dir)
    if config.evaluate:
        from recipe.math.evaluation import conclude_evaluation

        return conclude_evaluation(folder)
    from fspo.report.build import summarise

    return summarise(folder)


def _next_commands(start: Start, finished: bool = False) -> Iterator[str]:
    """The commands that continue, export and report a run that has ended, as far as they would find something."""
    folder = Path(start.config.trainer.default_local_dir)
    if start.config.evaluate:
        return
    again = f"python -m recipe.fspo.main {shlex.quote(f'resume={folder}')}"
    if integrity.latest(folder) is not None:
        yield f"continue: {again}" + (" trainer.total_training_steps=N" if finished else "")
        yield f"export: python -m recipe.runner.export {shlex.quote(str(folder))} --out DIR"
    elif not finished:
        yield f"begin again (nothing was saved): {again}"
    if resume.has_results(folder):
        yield f"report: python -m fspo.report {shlex.quote(str(folder))} --out DIR"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
