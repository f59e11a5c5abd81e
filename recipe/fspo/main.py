"""``python -m recipe.fspo.main [algo=...] [experiment=...] [KEY=VALUE ...]``: verl's own run with FSPO (--help)."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import sys
import tempfile
import warnings
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
from hydra.errors import InstantiationException  # noqa: E402
from hydra.types import RunMode  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from recipe.fspo import CONF_DIR, TRAINER_MODES  # noqa: E402
from recipe.runner.checkpoints import integrity  # noqa: E402
from recipe.runner.faults.processes import own_run_id  # noqa: E402
from recipe.runner.launch import machine, run_folder, secrets  # noqa: E402
from recipe.runner.launch.run_folder import Start  # noqa: E402
from recipe.runner.launch.settings import MachineProblem, Refused  # noqa: E402
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
            words = run_folder.with_words_of_the_run(words)
            # Python's parser takes overrides side by side only.
            flags = [word for word in words if word in ("-m", "--multirun") or re.match("--[^=]+=", word)]
            others = [word for word in words if word not in flags]
            first = next((i for i, word in enumerate(others) if re.match("~|[^-].*=", word)), len(others))
            others.insert(first, f"hydra.sweep.dir={unread}")  # of -m: Hydra writes multirun.yaml there
            sys.argv[1:] = [*flags, *others]
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
    with machine.private_run(*own), machine.forked_workers(*own, _MODULES):
        start = prepared(arm)
        # Here, beside the workers: verl must wait until the platform is exported.
        from recipe.runner.launch.train import how_far, train

        folder = Path(config.trainer.default_local_dir)
        ENDING.how_far = lambda: "\n".join([how_far(config), *_next_commands(config)])
        with run_folder.locked(folder):
            write_task(config.data)
            if start.checkpoint and integrity.is_checkpoint_of(config.trainer, start.checkpoint.folder):
                integrity.name_latest(start.checkpoint)  # it may be an earlier one
            run_folder.begin(folder, start, arm.words)
            status = train(config)
        try:
            if status == 0:
                print(_conclusion(config), flush=True)
            print(*_next_commands(config, finished=status == 0), sep="\n", flush=True)
        except (OSError, ValueError) as error:  # a full disk, nobody who reads, nothing scored: training has ended
            with contextlib.suppress(OSError):
                print(f"error: the conclusion cannot be written: {error}", file=sys.stderr, flush=True)
            return status or (FAILED if config.evaluate else 0)
        return status


def prepared(arm: Arm, elsewhere: bool = False) -> Start:
    """The one step from a composed configuration to a start: what machine, folder and method add, and all checks.

    Writes nothing. With ``elsewhere`` the run will be on another machine, and what only that can settle is no error.
    Raises Refused if the command, the machine or the folder cannot serve the run.
    """
    from recipe.fspo import checks
    from recipe.fspo import config as method
    from recipe.runner.launch import checks as of_a_run
    from recipe.runner.launch import end_of_turn
    from recipe.runner.launch.check_values import value_problems

    config = arm.config
    for alone in (  # other rules do arithmetic with values, and other sentences show them
        value_problems(config, {"fspo": method.FspoSettings}),
        secrets.literal_problems(OmegaConf.to_container(config)),
        trainer_problems(config.trainer),
    ):
        if wrong := list(alone):
            raise Refused(*wrong)
    machine.on_this_machine(config, elsewhere)
    start = Start(config, secrets.references(config))
    OmegaConf.resolve(config)

    trainer, folder = config.trainer, Path(config.trainer.default_local_dir)
    settings, contents = run_folder.settings_of_the_run(folder), config.actor_rollout_ref.actor.checkpoint.load_contents
    found = [*run_folder.foreign_files(folder), *run_folder.path_without_effect(trainer, settings)]
    found += task_problems(config.data)
    if not (config.evaluate and trainer.resume_mode == "resume_path"):  # it scores the checkpoint that is named
        run_folder.choose_checkpoint(trainer, settings)
    start.checkpoint = integrity.resumed_from(trainer)
    if settings is not None and (repaired := integrity.tracker_repair(trainer, contents)) is not None:
        note, start.checkpoint = repaired  # the tracker is written within the folder's lock
        start.notes.append(note)
    elif settings is not None and start.checkpoint is None and not config.evaluate:
        start.notes.append(f"{trainer.default_local_dir} holds no complete checkpoint: the run starts as it began")
    found += integrity.resume_problems(trainer, contents, start.checkpoint)
    if config.evaluate:
        run_folder.turn_into_evaluation(config, start.checkpoint)
        found += run_folder.foreign_files(Path(trainer.default_local_dir))

    joins = not machine.starts_ray(config.ray_kwargs.ray_init)
    found += secrets.printed_problems(start.references, joins)
    # The method first: its trial of the loss imports an own one's module, which may register more than a loss.
    found += [*checks.method_problems(config), *of_a_run.problems(config)]
    start.unsettled = [problem for problem in found if elsewhere and isinstance(problem, MachineProblem)]
    if refused := [problem for problem in dict.fromkeys(found) if problem not in start.unsettled]:
        raise Refused(*refused)
    start.notes += checks.notes(config)  # of what was given
    start.stop_tokens, note = end_of_turn.add_stop_token(config, settings, elsewhere)  # loads what is checked above
    start.notes += [*filter(None, [note]), *method.complete(config)]
    start.facts = method.facts_of(config, arm.name)
    _ask_verl(config)
    if settings is not None and not config.evaluate:
        start.changed = run_folder.changed_settings(config, settings, start.references, start.facts["algo"])
    if not elsewhere:
        print(*(f"note: {note}\n" for note in start.notes), sep="", end="", file=sys.stderr, flush=True)
    return start


def trainer_problems(trainer: DictConfig) -> Iterator[str]:
    """A trainer of verl's: it would measure nothing, write no table and take no signal."""
    if trainer.v1.trainer_mode not in TRAINER_MODES:
        yield (
            f"trainer.v1.trainer_mode={trainer.v1.trainer_mode}: recipe.fspo.main runs the trainers "
            f"{', '.join(TRAINER_MODES)} (mode=sync, colocate_async, separate_async); for verl's own take its command"
        )


def _ask_verl(config: DictConfig) -> None:
    """Let verl refuse a configuration, in its own words and with its status, 1."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    warnings.filterwarnings("ignore", message="Disabled critic")  # verl says so for every estimator but GAE
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
            omega_conf_to_dataclass(config.actor_rollout_ref.rollout)  # as every worker does
    except (AssertionError, ValueError, TypeError, InstantiationException) as error:
        print(f"error: verl refuses the configuration: {error}", file=sys.stderr)
        sys.exit(FAILED)


def task_problems(data: DictConfig) -> Iterator[str]:
    """Files of the user's where those of the recipe's own task are to be."""
    from recipe.math.data.rows import check_replaceable
    from recipe.runner.launch.check_data import splits_to_write

    for path in splits_to_write(data):
        try:
            check_replaceable(Path(path))
        except FileExistsError as error:
            yield f"data.offline_task: {error}"


def write_task(data: DictConfig) -> None:
    """Write those files of the recipe's own task that the run reads."""
    from recipe.math.data.offline_task import write_dataset
    from recipe.runner.launch.check_data import splits_to_write

    if splits := splits_to_write(data):
        write_dataset(**data.offline_task, splits=tuple(splits.values()))


def _conclusion(config: DictConfig) -> str:
    """What a finished run ends with."""
    folder = Path(config.trainer.default_local_dir)
    if config.evaluate:
        from recipe.math.evaluation import conclude_evaluation

        return conclude_evaluation(folder)
    from fspo.report.build import summarise

    return summarise(folder)


def _next_commands(config: DictConfig, finished: bool = False) -> Iterator[str]:
    """The commands that continue, export and report a run that has ended, as far as they would find something."""
    folder = Path(config.trainer.default_local_dir)
    if config.evaluate:
        return
    again = f"python -m recipe.fspo.main {shlex.quote(f'resume={folder}')}"
    if integrity.latest(folder) is not None:
        yield f"continue: {again}" + (" trainer.total_training_steps=N" if finished else "")
        yield f"export: python -m recipe.runner.export {shlex.quote(str(folder))} --out DIR"
    elif not finished:
        yield f"begin again (nothing was saved): {again}"
    if run_folder.has_results(folder):
        yield f"report: python -m fspo.report {shlex.quote(str(folder))} --out DIR"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
