"""A run goes on in its folder: the words of its command, its checkpoint, what a start would change of its settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from fspo.files import CONFIG_FILE, INFO_FILE, METRICS_FILE, read_object, read_steps
from fspo.table import FOLDER, holds_table
from recipe.runner.checkpoints.integrity import TRACKER_FILE, Checkpoint, is_checkpoint_of, latest
from recipe.runner.faults.preemption import FAILED, PREEMPTED, STOP_FILE
from recipe.runner.launch.problems import Refused
from recipe.runner.launch.secrets import as_given, is_reference
from recipe.runner.launch.settings import is_below, key_of, parsed, quoted

#: Files that a start replaces or appends to.
_FILES: Final = (
    *(CONFIG_FILE, INFO_FILE, METRICS_FILE, FOLDER, "ends.jsonl", "launcher.log", "phase.json", "progress.log"),
    *("global_step_*", "generation_config.json", STOP_FILE),
)
#: Keys (and whatever lies below them) that may change when a run goes on: how long it runs, what it saves and logs, and
#: the machine it runs on. None of them changes what a step computes.
_MAY_CHANGE: Final = (
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "data.dataloader_num_workers",
    "dry_run",
    "evaluate",
    "ray_kwargs",
    "reward.num_workers",
    "run",
    "trainer",
    "transfer_queue",
)
#: Exceptions to it, which change what a step computes. So does the run's length where the learning rate depends on it.
_MAY_NOT: Final = ("trainer.balance_batch", "trainer.critic_warmup", "trainer.device", "trainer.use_v1", "trainer.v1")
#: Words of one start, which ``resume=FOLDER`` leaves out.
_PER_START: Final = ("dry_run", "evaluate", "ray_kwargs", "run.allow_changed")
#: The key of a run's folder.
RUN: Final = "trainer.default_local_dir"
_LENGTH: Final = ("trainer.total_training_steps", "trainer.total_epochs")
_STATUSES: Final = ("running", "finished", "failed", "preempted", "interrupted", "killed")


def run_info(folder: Path) -> dict[str, Any] | None:
    """``run.json`` of a run folder; None if it is missing, or not this recipe's."""
    info = read_object(folder / INFO_FILE)
    return info if info.get("status") in _STATUSES and {"versions", "overrides"} & info.keys() else None


def last_steps(folder: Path) -> tuple[int, int]:
    """The last step that a run has saved, and the last one that it has done; 0: none."""
    checkpoint = latest(folder)
    saved = checkpoint.step if checkpoint else 0
    # A validation has the number of the step before it; a step is logged after it has been saved.
    return saved, max([saved, *(line["step"] for line in read_steps(folder / METRICS_FILE))])


def status_after_failure(folder: Path) -> int:
    """Exit status after a process of a run has died or hung: where a step was done, another start may do more."""
    return PREEMPTED if last_steps(folder)[1] else FAILED


def has_results(folder: Path) -> bool:
    """Whether a step, or a part of one, was recorded or saved."""
    metrics, saved = folder / METRICS_FILE, any(folder.glob("global_step_*")) or holds_table(folder / FOLDER)
    return saved or (metrics.is_file() and metrics.stat().st_size > 0)


# ---------------------------------------------------------------- words


def _key(word: str) -> str:
    """The key of a word; an option of Hydra's counts as one."""
    return word.lstrip("+~").partition("=")[0]


def with_words_of_the_run(words: Sequence[str]) -> list[str]:
    """The words of a command with ``resume=FOLDER``: those of that run first, but for keys that the command gives.

    Raises Refused if there is no run in the folder.
    """
    named = [word for word in words if word.startswith("resume=")]
    if not named:
        return list(words)
    text = named[-1].partition("=")[2]  # of a folder like seed=1,algo=fspo, too, which Hydra's grammar does not take
    folder = Path(text.strip("'\"")).expanduser().absolute()
    info = run_info(folder) or {}
    if "overrides" not in info:
        raise Refused(f"{named[-1]}: there is no run with a readable {INFO_FILE} in {folder}: give the folder of one")
    new = [word for word in words if word not in named]
    replaced = [*map(_key, new), *_PER_START, RUN]
    kept = [word for word in info["overrides"] if not is_below(_key(word), replaced)]
    place = words.index(named[0])  # before --cfg job, for example
    kept.append(f"{RUN}={quoted(folder)}")
    return [*words[:place], *kept, *(word for word in words[place:] if word not in named)]


def comparable(words: Sequence[str]) -> list[str]:
    """The words of a command that decide what a run computes."""
    left_out, kept = ("hydra", *_PER_START, *_MAY_CHANGE), (*_MAY_NOT, *_LENGTH)
    deciding = (word for word in words if not is_below(_key(word), left_out) or is_below(_key(word), kept))
    return sorted(map(_meaning, deciding))


def _meaning(word: str) -> str:
    """A word with its value as Hydra reads it: a sweep hands on ``False`` where the command has ``false``."""
    try:
        (override,) = parsed([word])
    except HydraException:  # an option
        return word
    return word if override.is_delete() else f"{key_of(override)}={override.value()}"


# ---------------------------------------------------------------- the folder


def foreign_files(folder: Path) -> str | None:
    """Why a folder is in the way of a run: it holds files of a run's names, but is no run's; None if it is not."""
    if (folder / STOP_FILE).is_dir():
        return f"{folder / STOP_FILE} is a folder, and a file of that name asks the run to end: remove or rename it"
    foreign = [str(path.relative_to(folder)) for name in _FILES for path in folder.glob(name)]
    if not foreign or run_info(folder) is not None:
        return None
    return (
        f"{RUN}={folder} holds {', '.join(foreign)}, but is not the folder of a run: give another one, so that nothing "
        "of yours is replaced"
    )


def settings_of_the_run(folder: Path) -> Mapping[str, Any] | None:
    """The settings of the run in a folder, with its present place; None without a result; Refused if damaged."""
    if run_info(folder) is None or not has_results(folder):
        return None
    try:
        settings: Any = OmegaConf.to_container(OmegaConf.load(folder / CONFIG_FILE))
        return _moved(settings, settings["trainer"]["default_local_dir"], str(folder))  # type: ignore[no-any-return]
    except Exception as error:
        raise Refused(f"{folder / CONFIG_FILE} cannot be read ({error}): restore it, or give another {RUN}") from error


def _moved(value: Any, old: str, new: str) -> Any:
    """``value`` with the run folder's old place replaced by its new one."""
    if isinstance(value, dict):
        return {name: _moved(part, old, new) for name, part in value.items()}
    if isinstance(value, list):
        return [_moved(part, old, new) for part in value]
    return re.sub(rf"^{re.escape(old)}(?=/|$)", lambda _: new, value) if isinstance(value, str) else value


def path_without_effect(trainer: DictConfig, settings: Mapping[str, Any] | None) -> str | None:
    """Why a path that the command gives has no effect; None if it has, or is that of the run's beginning."""
    path, mode = trainer.resume_from_path, trainer.resume_mode
    if not path or mode == "resume_path" or path == (settings or {}).get("trainer", {}).get("resume_from_path"):
        return None
    return f"trainer.resume_from_path={path} has no effect with resume_mode={mode}: give resume_mode=resume_path"


def choose_checkpoint(trainer: DictConfig, settings: Mapping[str, Any] | None) -> None:
    """Choose between the run's own checkpoints and the one that the command names; changes ``trainer``.

    A command that names the same path once more is a requeue: what was saved since comes first. Raises Refused for
    another run's checkpoint, or none, in a folder with results.
    """
    if settings is None or trainer.resume_mode == "auto":
        return
    first, path = settings["trainer"].get("resume_from_path"), trainer.resume_from_path
    folder = Path(trainer.default_local_dir)
    if trainer.resume_mode == "resume_path" and path == first and (folder / TRACKER_FILE).exists():
        trainer.resume_mode = "auto"  # the path stays, so that the next start knows it again
    elif trainer.resume_mode == "disable" or not (path == first or is_checkpoint_of(trainer, path)):
        raise Refused(
            f"trainer.resume_mode={trainer.resume_mode} trainer.resume_from_path={path} would put another run's "
            f"metrics beside those in {folder}: give another {RUN}"
        )


# ---------------------------------------------------------------- what a start changes


def _changes(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Key, old and new value of every leaf in which two configurations differ. Lists are leaves."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*old, *new]):
            below = f"{key}.{name}" if key else str(name)
            yield from _changes(old.get(name, "(not set)"), new.get(name, "(not set)"), below)
    elif old != new:
        yield key, old, new


def changed_settings(
    config: DictConfig,
    settings: Mapping[str, Any],
    references: Mapping[str, str],
    also: Sequence[tuple[str, Any, Any]] = (),
) -> list[tuple[str, Any, Any]]:
    """Key, old and new value of what a start changes of its run's settings, but for texts from the environment.

    ``references`` has these by key; ``also`` are further changes, whose old and new values may be equal. Raises Refused
    if one may not, and is not in ``run.allow_changed``.
    """
    new = as_given(OmegaConf.to_container(config, resolve=True), references)
    differing = [change for change in also if change[1] != change[2]]
    # A text that came from the environment, and now does not, differs: a shell lacks the variable of the beginning.
    differing += [change for change in _changes(settings, new) if not is_reference(change[2])]
    fixed = [*_MAY_NOT, *(_LENGTH if _schedule_has_a_length(config) else ())]
    unlike = [change for change in differing if not is_below(change[0], config.run.allow_changed)]
    if refused := [one for one in unlike if is_below(one[0], fixed) or not is_below(one[0], _MAY_CHANGE)]:
        raise Refused(
            f"{config.trainer.default_local_dir} holds a run with other settings: "
            + "; ".join(f"{key} was {old!r} and would be {new!r}" for key, old, new in refused)
            + f". Go on with the run's own (resume=FOLDER alone), take another {RUN}, or allow the change with "
            f"'run.allow_changed=[{','.join(key for key, _, _ in refused)}]'"
        )
    per_start = (*_PER_START, "trainer.resume_mode", "trainer.resume_from_path")
    return [change for change in differing if not is_below(change[0], per_start)]


def _schedule_has_a_length(config: DictConfig) -> bool:
    """Whether the learning rate depends on the run's length: a cosine, or a warm-up given as a share."""
    optim = config.actor_rollout_ref.actor.optim
    kinds = {optim.lr_scheduler_type, optim.get("warmup_style") or "constant"}  # verl's older key replaces the other
    return not (kinds == {"constant"} and (optim.lr_warmup_steps > 0 or optim.lr_warmup_steps_ratio <= 0))


def turn_into_evaluation(config: DictConfig, checkpoint: Checkpoint | None) -> None:
    """Make it the configuration of a run that validates once and ends, into ``evaluation/`` in its folder; in place.

    The next one goes to ``evaluation_2/``. The weights are those of ``checkpoint``; without one, the model itself.
    Raises Refused if it is a run's folder without a checkpoint.
    """
    run = Path(config.trainer.default_local_dir)
    if run_info(run) is not None and checkpoint is None:
        raise Refused(f"{run} has saved no checkpoint that could be evaluated: train on, or give another {RUN}")
    number = 1
    while any((folder := run / (f"evaluation_{number}" if number > 1 else "evaluation")).glob("validation/*.jsonl")):
        number += 1
    with open_dict(config):
        config.trainer.default_local_dir = str(folder)
        config.trainer.val_before_train = config.trainer.val_only = True  # with the second alone verl trains
        config.trainer.validation_data_dir = str(folder / "validation")
        config.trainer.resume_mode = "resume_path" if checkpoint else "disable"
        config.trainer.resume_from_path = str(checkpoint) if checkpoint else None
