"""A run folder knows its settings: a resumed run goes on with them, and a change is refused or recorded.

``run.json`` keeps the overrides of the command that began the run, ``config.yaml`` what they resolved to. A command
that names the folder starts from the former (:func:`with_settings_of_run`); what it would change of the latter is
compared key by key before Ray starts (:func:`allowed_changes`).
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from fspo.reading import read_yaml, wrong_fields
from fspo.records import (
    CONFIG_FILE,
    INFO_FILE,
    METRICS_FILE,
    RUN_FIELDS,
    STEP_FILES,
    grid_of,
    numbered_steps,
    read_info,
    read_object,
)
from fspo.table import FOLDER, holds_table
from recipe.runner.checkpoints.integrity import is_checkpoint_of, latest, step_of
from recipe.runner.faults.texts import MASK
from recipe.runner.launch.compose import own_folders, parsed, quoted, search_path
from recipe.runner.launch.job import Job
from recipe.runner.launch.masking import (
    is_plain_variable,
    is_reference,
    is_secret,
    is_variable,
    masked,
    masked_override,
)
from recipe.runner.launch.values import PreflightError

#: Files that a start replaces or appends to.
_FILES: Final = (
    *(CONFIG_FILE, INFO_FILE, *STEP_FILES, FOLDER, "launcher.log", "phase.json", "progress.log", "hang.txt", "run.png"),
    *("code", "checkpoints/global_step_*"),
)
#: Keys (and whatever lies below them) that may change when a run goes on: how long it runs, what it saves and logs, and
#: the machine it runs on. None of them changes what a step computes.
MAY_CHANGE: Final = (
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "data.dataloader_num_workers",
    "reward.num_workers",
    "run",
    "trainer",
    "transfer_queue",
)
#: Exceptions to MAY_CHANGE: these keys change what a step computes. So does the run's length where the learning rate
#: depends on it (:func:`_of_schedule`).
_MAY_NOT: Final = ("trainer.balance_batch", "trainer.critic_warmup", "trainer.device", "trainer.use_v1", "trainer.v1")
#: Ray's part of a configuration names what belongs to one start: its cluster, its workers' environment. It is neither
#: read from a run's folder nor compared; nor are secrets, which the folder does not hold.
_OF_A_START: Final = "ray_kwargs"
#: Keys of files that a start makes absolute: a run may be resumed from another working folder.
_PATHS: Final = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.tokenizer_path",
    "data.train_files",
    "data.val_files",
    "reward.custom_reward_function.path",
    "reward.reward_manager.module.path",
)
#: verl's earlier name of a path, which its migration moves.
_LEGACY_REWARD: Final = "custom_reward_function.path"
#: Overrides that hold for one start only: its folder, the changes that it allows and its checkpoint.
_NOT_KEPT: Final = (
    "run.dir",
    "run.allow_changed",
    "trainer.resume_mode",
    "trainer.resume_from_path",
)
#: Values of ``status`` in run.json.
STATUSES: Final = ("running", "finished", "failed", "preempted", "interrupted", "killed")
_ABSENT: Final = "(not set)"
#: Fields of run.json without which a start could not know how the run began.
_NEEDED: Final = ("overrides", "resume_from_path")


def run_info(folder: Path) -> dict[str, Any] | None:
    """``run.json`` of a run folder without fields of a wrong kind; None if it is missing, or not this recipe's."""
    info = read_info(folder)
    return info if info.get("status") in STATUSES and {"versions", "algo"} & info.keys() else None


def has_results(folder: Path) -> bool:
    """Whether a step, or a part of one, was recorded or saved."""
    records = [folder / name for name in STEP_FILES]
    saved = any(folder.glob("checkpoints/global_step_*")) or holds_table(folder / FOLDER)
    return saved or any(record.is_file() and record.stat().st_size for record in records)


# ---------------------------------------------------------------- the overrides of a run


_OF_BEFORE: Final = (
    "take another run.dir, or go on in the checkout that began this run; its weights can be exported (python -m "
    "recipe.runner.export)"
)


def refuse_former(folder: Path, job: Job, before: Mapping[str, Any]) -> None:
    """Refuse a folder whose run was begun with settings that have another meaning now, or none.

    Raises:
        PreflightError: if it was.
    """
    if former := list(job.recorded(before)):
        raise PreflightError(*(f"{folder / CONFIG_FILE}: {problem}; {_OF_BEFORE}" for problem in former))


def with_settings_of_run(arguments: Sequence[str], old_keys: Mapping[str, str] | None = None) -> list[str]:
    """The command line of a run, with the overrides that its folder keeps before those of the command itself.

    ``resume=FOLDER`` and ``run.dir=FOLDER`` name the folder; without one, or for a new one, nothing changes. Secrets
    and what belongs to one start are not taken from the folder.

    Raises:
        PreflightError: if ``resume`` names a folder without a run, or a run was begun with one of ``old_keys``, which
            nobody could take out of its words, or the command lacks a secret of the run's.
        hydra.errors.HydraException: for an argument that is no override.
    """
    new = {_key(override): override for override in parsed(arguments)}
    named = [new[key] for key in ("resume", "run.dir") if key in new]
    for override in named:
        if not str(override.value() or "").strip():
            raise PreflightError(f"{override.input_line}: a run needs a folder; is a variable of the shell not set?")
    if len({os.path.abspath(str(override.value())) for override in named}) > 1:
        raise PreflightError(
            "resume=FOLDER is another way to write run.dir=FOLDER: give one of them. To begin another run with a "
            "checkpoint: trainer.resume_mode=resume_path trainer.resume_from_path=RUN/checkpoints/global_step_N"
        )
    if not named or "${" in str(named[0].input_line):
        return list(arguments)
    folder = Path(str(named[0].value())).absolute()
    info = run_info(folder)
    problems: list[str] = []
    wrong = wrong_fields(read_object(folder / INFO_FILE, problems), RUN_FIELDS)
    if "resume" in new and info is None:
        problems += [f"{folder / INFO_FILE}: {name} {sentence}" for name, sentence in wrong.items()]
        why = "; ".join(problems) or f"{INFO_FILE} does not say how it ended"
        raise PreflightError(f"resume={folder}: there is no run in it ({why}); give the folder of one")
    for name, sentence in wrong.items() if info is not None else ():
        if name in _NEEDED:
            raise PreflightError(
                f"{folder / INFO_FILE}: {name} {sentence}: mend it, or begin again with another run.dir"
            )
        print(f"note: {folder / INFO_FILE}: {name} {sentence}: left out", file=sys.stderr)
    kept, missing = [], []
    for override in parsed((info or {}).get("overrides", [])):
        key, line = _key(override), str(override.input_line)
        if old := next((old for old in old_keys or () if _is_below(key, [old])), None):
            raise PreflightError(
                f"{folder / INFO_FILE}: the run was begun with {line}, and there is no {old}; {_OF_BEFORE}"
            )
        if key in (*new, *_NOT_KEPT):
            continue
        of_environment = is_secret(key) and is_reference(override.value())
        hidden = of_environment or MASK in line or masked_override(line) != line
        if hidden and not is_plain_variable(key):
            name = key.rpartition(".")[2]
            given = any(_is_below(other, [key]) for other in new)
            if not given and is_variable(key) and name not in os.environ:
                missing.append(f"set {name} in the environment")
            elif not given and not is_variable(key):
                head = line.partition("=")[0]
                missing.append(
                    shlex.quote(line) if MASK not in line and of_environment else f"{head}='${{oc.env:NAME}}'"
                )
        elif _is_below(key, [_OF_A_START]):
            print(f"note: {line} is not taken from {folder}: give it again if this start needs it", file=sys.stderr)
        else:
            kept.append(line)
    if missing:
        raise PreflightError(
            f"{folder} keeps no secrets, and the run was given some: give them again, {'; '.join(missing)}"
        )
    return [*kept, *(f"run.dir={quoted(folder)}" if word.startswith("resume=") else word for word in arguments)]


def kept_overrides(overrides: Sequence[str], config: DictConfig) -> list[str]:
    """A command's overrides as the run folder keeps them: the user's folders of configuration files last.

    Their paths are the absolute ones of the prepared ``config``.
    """
    folders, task = own_folders(overrides)
    kept = []
    for override in parsed(task):
        line, key = str(override.input_line), _key(override)
        place = f"reward.{key}" if key == _LEGACY_REWARD else key
        if place in _PATHS and "=" in line:
            line = f"{line.partition('=')[0]}={_as_override(OmegaConf.select(config, place))}"
        if not key.startswith("hydra."):
            kept.append(line)
    return [*kept, *([search_path(folders)] if folders else [])]


def _as_override(value: Any) -> str:
    if value is None or isinstance(value, str):
        return "null" if value is None else quoted(value)
    return f"[{','.join(map(quoted, value))}]"


def _key(override: Override) -> str:
    return str(override.key_or_group)


# ---------------------------------------------------------------- what a start changes


def check_folder(folder: Path, trainer: DictConfig, goes_on: bool) -> None:
    """Refuse a run folder that holds something else than this run, with these settings ``trainer.*``.

    A run that ``goes_on`` adds to the records of the run that the folder holds.

    Raises:
        PreflightError: if files of these names are not a run's, or if the run would begin again beside the records of
            its first beginning.
    """
    info = run_info(folder)
    foreign = [str(path.relative_to(folder)) for name in _FILES for path in folder.glob(name)]
    if foreign and info is None:
        raise PreflightError(
            f"run.dir={folder} holds {', '.join(foreign)}, but is not the folder of a run: give another one, "
            "so that nothing of yours is replaced"
        )
    mode, begins = trainer.resume_mode, trainer.resume_from_path
    other = (
        mode == "resume_path"
        and not is_checkpoint_of(trainer, begins)
        and begins != (info or {}).get("resume_from_path")
    )
    if goes_on and has_results(folder) and (mode == "disable" or other):
        key = f"resume_mode={mode}" + (f" trainer.resume_from_path={begins}" if other else "")
        raise PreflightError(
            f"trainer.{key} would put another run's metrics beside those in {folder}: give another run.dir"
        )


def changes(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Key, old and new value of every leaf in which two configurations differ. Lists are leaves."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            below = f"{key}.{name}" if key else str(name)
            yield from changes(old.get(name, _ABSENT), new.get(name, _ABSENT), below)
    elif old != new:
        yield key, old, new


def _is_below(key: str, parents: Iterable[str]) -> bool:
    return any(f"{key}.".startswith(f"{parent}.") for parent in parents)


def moved(value: Any, old: str, new: str) -> Any:
    """``value`` with the run folder's old place replaced by its new one: a run folder may be moved."""
    if isinstance(value, dict):
        return {name: moved(part, old, new) for name, part in value.items()}
    if isinstance(value, list):
        return [moved(part, old, new) for part in value]
    return re.sub(rf"^{re.escape(old)}(?=/|$)", lambda _: new, value) if isinstance(value, str) else value


def recorded_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of the run that a folder holds.

    None for a new run, and for one that died before anything was measured or saved.

    Raises:
        PreflightError: if the run's configuration is damaged.
    """
    if not has_results(folder):
        return None
    try:
        old: Any = read_yaml(folder / CONFIG_FILE)
        return moved(old, old["run"]["dir"], str(folder))  # type: ignore[no-any-return]
    except Exception as error:
        raise PreflightError(
            f"{folder / CONFIG_FILE} cannot be read ({error}): restore it, or begin another run with another run.dir"
        ) from error


def changed_settings(
    config: DictConfig, before: dict[str, Any] | None, references: Mapping[str, str] | None = None
) -> list[tuple[str, Any, Any]]:
    """What a command would change of the run's settings ``before`` (:func:`recorded_settings`): key, old, new value.

    Secrets, and texts that come from the environment (``references``, by key), are not compared.
    """
    if before is None:
        return []
    differing = changes(masked(before), masked(OmegaConf.to_container(config, resolve=True), references=references))
    return [
        (key, old, new)
        for key, old, new in differing
        if not (_is_below(key, [_OF_A_START]) or MASK in (old, new) or is_reference(old) or is_reference(new))
    ]


def allowed_changes(
    config: DictConfig, before: dict[str, Any] | None, references: Mapping[str, str] | None = None
) -> list[tuple[str, Any, Any]]:
    """:func:`changed_settings`, if all of them are allowed.

    Raises:
        PreflightError: if one is neither in MAY_CHANGE nor in ``run.allow_changed``.
    """
    changed = changed_settings(config, before, references)
    fixed, allowed = [*_MAY_NOT, *_of_schedule(config)], config.run.allow_changed

    def is_allowed(key: str) -> bool:
        return _is_below(key, allowed) or (_is_below(key, MAY_CHANGE) and not _is_below(key, fixed))

    refused = [change for change in changed if not is_allowed(change[0])]
    if refused:
        raise PreflightError(
            f"{config.run.dir} holds a run with other settings: "
            + "; ".join(f"{key} was {old!r} and would be {new!r}" for key, old, new in refused)
            + ". Go on with the run's own settings (give run.dir alone), take another run.dir, or allow the "
            f"change with 'run.allow_changed=[{','.join(key for key, _, _ in refused)}]'"
        )
    return changed


def _of_schedule(config: DictConfig) -> list[str]:
    """The keys of the run's length, if the learning rate depends on them: a cosine, or a warm-up given as a share."""
    optim = config.actor_rollout_ref.actor.optim
    kinds = {optim.lr_scheduler_type, optim.get("warmup_style") or "constant"}  # verl's older key replaces the other
    if kinds == {"constant"} and (optim.lr_warmup_steps > 0 or optim.lr_warmup_steps_ratio <= 0):
        return []
    return ["trainer.total_training_steps", "trainer.total_epochs"]


def recorded(step: int, changed: Sequence[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
    """Changes as run.json has them, with the step after which they hold. Prints each."""
    for key, old, new in changed:
        print(f"note: {key} was {old!r}, from step {step + 1} on it is {new!r}", flush=True)
    return [{"after_step": step, "key": key, "old": old, "new": new} for key, old, new in changed]


# ---------------------------------------------------------------- what a person may do next


def how_far(config: DictConfig) -> str:
    """How far a run came that was ended early, and what of it is saved: the end of a sentence."""
    if config.get("evaluate"):
        return "before the evaluation was complete"
    checkpoint = latest(Path(config.trainer.default_local_dir))
    saved = step_of(checkpoint) if checkpoint else 0
    metrics = Path(config.run.dir) / METRICS_FILE
    # A validation has the number of the step before it; a step is logged after it has been saved.
    done = max([saved, *(line["step"] for _, line in numbered_steps(metrics, []))])
    if not done:
        return "before the end of the first step: there was nothing to save"
    if saved == done:
        return f"after step {done}, which is saved"
    if saved:
        return f"after step {done}; the last checkpoint is that of step {saved}"
    every = config.trainer.save_freq
    first = f"the first checkpoint comes after step {every}" if every > 0 else "no step is saved"
    return f"after step {done}; nothing is saved, because {first} (trainer.save_freq={every})"


def next_commands(config: DictConfig, job: Job, finished: bool) -> list[str]:
    """The commands that continue, export and report a run that has ended, as far as they would find something.

    A run of a grid goes on, and is reported on, with the others: alone it might get another length than theirs.
    """
    if (grid := grid_of(Path(config.run.dir).absolute())) is not None:
        again = f"continue: the command that began the grid in {grid}; it goes on where this run has stopped"
        return [] if finished else [again]
    name = str(config.run.dir)
    folder = shlex.quote(name)
    # Two read it, the shell and then Hydra; most names need no quotes for either.
    named = f"resume={name if re.fullmatch('[A-Za-z0-9_./-]+', name) else quoted(name)}"
    resume = f"python -m {job.command} {shlex.quote(named)}"
    commands = []
    if latest(Path(config.trainer.default_local_dir)) is not None:
        commands.append(f"continue: {resume}" + (" trainer.total_training_steps=N" if finished else ""))
        commands.append(f"export: python -m recipe.runner.export {folder} --out DIR")
    elif not finished:
        commands.append(f"begin again (nothing was saved): {resume}")
    if has_results(Path(config.run.dir)):
        commands.append(f"report: python -m fspo.report {folder} --out DIR")
    return commands
