"""A run folder knows its settings: a resumed run goes on with them, and a change is refused or recorded.

``run.json`` keeps the overrides of the command that began the run, ``config.yaml`` what they resolved to. A command
that names the folder starts from the former (:func:`with_settings_of_run`); what it would change of the latter is
compared key by key before Ray starts (:func:`changed_settings`, :func:`check_changes`).
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from fspo.records import CONFIG_FILE, INFO_FILE, STEP_FILES, read_object
from recipe.runner.checkpoints.integrity import is_own, latest
from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.launch.compose import own_folders, parsed, quoted, search_path
from recipe.runner.launch.job import Job
from recipe.runner.launch.removed import EarlierNames
from recipe.runner.launch.values import PreflightError

#: What a start replaces, or adds to.
_FILES: Final = (CONFIG_FILE, INFO_FILE, *STEP_FILES, "driver.log", "phase.json", "hang.txt", "run.png", "code")
#: Keys (and whatever lies below them) that may change when a run goes on: how long it runs, what it saves and logs, and
#: the machine it runs on. None of them changes what a step computes; how long it runs does where the learning rate
#: depends on it (:func:`check_changes`).
MAY_CHANGE: Final = (
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "data.dataloader_num_workers",
    "run.allow_changed",
    "run.hang_after_s",
    "run.log",
    "run.restarts",
    "ray_kwargs",
    "reward.num_workers",
    "trainer.default_local_dir",
    "trainer.esi_redundant_time",
    "trainer.experiment_name",
    "trainer.log_val_generations",
    "trainer.logger",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.project_name",
    "trainer.resume_from_path",
    "trainer.resume_mode",
    "trainer.rollout_data_dir",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.val_before_train",
    "trainer.validation_data_dir",
    "transfer_queue",
)
#: Keys of files that a start makes absolute: a run may be resumed from another working folder.
_PATHS: Final = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.tokenizer_path",
    "data.train_files",
    "data.val_files",
    "reward.custom_reward_function.path",
    "reward.reward_manager.module.path",
)
#: Overrides that are for one start: where it is, what the user allows this time, the cluster that it joins, and what it
#: begins with (:func:`recall_beginning`).
_NOT_KEPT: Final = (
    "run.dir",
    "run.allow_changed",
    "ray_kwargs.ray_init.address",
    "trainer.default_local_dir",
    "trainer.resume_mode",
    "trainer.resume_from_path",
)
#: Set by every start for its own processes (:mod:`recipe.runner.launch.machine` and ``start``); no user's setting.
_OF_A_START: Final = (
    "ray_kwargs.ray_init.runtime_env.py_executable",
    f"ray_kwargs.ray_init.runtime_env.env_vars.{RUN_ID_VARIABLE}",
)
#: How a run may stand, in its run.json.
STATUSES: Final = ("running", "finished", "failed", "preempted", "interrupted", "killed")
_ABSENT: Final = "(not set)"


def evaluates(config: DictConfig) -> bool:
    """Whether the run scores the validation sets and ends, without training."""
    return bool(config.get("evaluate"))


def run_info(folder: Path) -> dict[str, Any] | None:
    """``run.json`` of a run folder; None if there is none, or it is not one of this recipe's."""
    info = read_object(folder / INFO_FILE)
    return info if info.get("status") in STATUSES and {"versions", "algo"} & info.keys() else None


def with_settings_of_run(arguments: Sequence[str], job: Job) -> list[str]:
    """The command line of a run, with the overrides that its folder keeps before those of the command itself.

    ``resume=FOLDER`` and ``run.dir=FOLDER`` name the folder; without one, or for a new one, nothing changes.

    Raises:
        PreflightError: if ``resume`` names a folder without a run, or one of an algorithm that was removed.
        hydra.errors.HydraException: for an argument that is no override.
    """
    new = {override.key_or_group: override for override in parsed(arguments)}
    both = [each for each in new.values() if each.key_or_group in ("resume", "run.dir")]
    if len({os.path.abspath(str(each.value())) for each in both}) > 1:
        raise PreflightError(
            "resume=FOLDER is another way to write run.dir=FOLDER: give one of them. To begin with a run's "
            "checkpoint in another folder, or to evaluate it there: run.dir=FOLDER "
            "trainer.resume_mode=resume_path trainer.resume_from_path=RUN/checkpoints/global_step_N"
        )
    named = new.get("resume") or new.get("run.dir")
    if named is None or named.is_sweep_override() or "${" in (named.input_line or ""):
        return list(arguments)
    folder = Path(str(named.value())).absolute()
    info = run_info(folder)
    if "resume" in new and info is None:
        raise PreflightError(f"resume={folder}: there is no run in it (no {INFO_FILE}); give the folder of one")
    given = {*new, *_NOT_KEPT}
    kept = parsed(_current_overrides([] if info is None else info.get("overrides", []), folder, job.earlier_names))
    for override in kept:
        if _key(override) not in new and (sentence := job.earlier_names.remedy(_key(override), override.value())):
            raise PreflightError(f"{folder} holds a run of an earlier version that cannot go on: {sentence}")
        if _key(override) == "trainer.default_local_dir" and not (folder / "checkpoints").exists():
            raise PreflightError(
                f"{folder} has its checkpoints in {override.value()}: move that folder to {folder}/checkpoints, or "
                "make a link of this name"
            )
    arguments = [f"run.dir={quoted(folder)}" if a.startswith("resume=") else a for a in arguments]
    return [*(str(override.input_line) for override in kept if _key(override) not in given), *arguments]


def _key(override: Override) -> str:
    return str(override.key_or_group)


def _current_overrides(overrides: Sequence[str], folder: Path, names: EarlierNames) -> list[str]:
    """The overrides that a run folder keeps, without settings that were removed since, and with today's names."""
    result, left_out = [], []
    for override in parsed(overrides):
        line, key = str(override.input_line), _key(override)
        if names.is_removed(key):
            left_out.append(line)
        else:
            line = line.replace(key, names.new_name(key), 1)
            for old, new in names.renamed.items():
                line = re.sub(rf"(?<=\$\{{){re.escape(old)}(?=[.}}])", new, line)
            result.append(line)
    _note_left_out(folder / INFO_FILE, left_out)
    return result


def _note_left_out(path: Path, left_out: Sequence[str]) -> None:
    if left_out:
        print(f"note: {path} has settings of an earlier version, left out: {', '.join(left_out)}", file=sys.stderr)


def kept_overrides(overrides: Sequence[str]) -> list[str]:
    """Overrides as the run folder keeps them: with absolute paths, the user's folders of configuration files last."""
    folders, task = own_folders(overrides)
    absolute = [_with_absolute_paths(override) for override in parsed(task) if not _key(override).startswith("hydra.")]
    return [*absolute, *([search_path(folders)] if folders else [])]


def _with_absolute_paths(override: Override) -> str:
    value = override.value() if _key(override) in _PATHS else None
    given = [str(each) for each in (value if isinstance(value, list) else [value])]
    absolute = [str(Path(each).expanduser().absolute()) if Path(each).expanduser().exists() else each for each in given]
    if value is None or absolute == given:  # nothing, pkg:// or a name of the hub
        return str(override.input_line)
    return f"{str(override.input_line).partition('=')[0]}=" + (
        f"[{','.join(map(quoted, absolute))}]" if isinstance(value, list) else quoted(*absolute)
    )


def changes(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Key, old and new value of every leaf in which two configurations differ. Lists are leaves."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            below = f"{key}.{name}" if key else str(name)
            yield from changes(old.get(name, _ABSENT), new.get(name, _ABSENT), below)
    elif old != new:
        yield key, old, new


def _is_below(key: str, parents: Sequence[str]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def moved(value: Any, old: str, new: str) -> Any:
    """``value`` with the run folder's old place replaced by its new one: a run folder may be moved."""
    if isinstance(value, dict):
        return {name: moved(each, old, new) for name, each in value.items()}
    if isinstance(value, list):
        return [moved(each, old, new) for each in value]
    return re.sub(rf"^{re.escape(old)}(?=/|$)", lambda _: new, value) if isinstance(value, str) else value


def recall_beginning(config: DictConfig) -> DictConfig:
    """The configuration of a start that knows which checkpoint the start before it was told to begin with.

    With ``trainer.resume_mode=auto`` a path then means: what the run itself has saved, or the path while there is
    nothing (:func:`recipe.runner.checkpoints.integrity.begin_with_path`). A command that names the same path once more
    means that, too: a restart or a requeued job would else lose what was done since. An evaluation is of what it names.
    """
    config = copy.deepcopy(config)
    trainer, before = config.trainer, (run_info(Path(config.run.dir)) or {}).get("resume_from_path")
    if trainer.resume_mode != "resume_path":
        recalled = trainer.resume_mode == "auto" and not is_own(config, before)  # the tracker knows of its own
        trainer.resume_from_path = before if recalled else None
    elif trainer.resume_from_path == before and before and not evaluates(config):
        print(f"note: the start before this one began with {before}, too: what was saved since comes first", flush=True)
        trainer.resume_mode = "auto"
    return config


def check_folder(config: DictConfig, resumes: bool) -> None:
    """Refuse a folder that holds something else than this run.

    Args:
        config: Prepared.
        resumes: Whether the run would go on where that in the folder has ended, and save.

    Raises:
        PreflightError: if files of these names are not a run's, if checkpoints are not this run's, or if the run would
            begin again beside the records of its first beginning.
    """
    folder, saved = Path(config.run.dir), Path(os.path.abspath(config.trainer.default_local_dir))
    is_run = run_info(folder) is not None
    foreign = [name for name in _FILES if (folder / name).exists()]
    if foreign and not is_run:
        raise PreflightError(
            f"run.dir={folder} holds {', '.join(foreign)}, but is not the folder of a run: give another one, "
            "so that nothing of yours is replaced"
        )
    if not resumes:
        return
    if not is_run and any(saved.glob("global_step_*")):
        raise PreflightError(
            f"{saved} holds checkpoints, but run.dir={folder} is not the folder of their run: give another "
            "run.dir. To go on from one of them there, add "
            f"trainer.resume_mode=resume_path trainer.resume_from_path={saved}/global_step_N"
        )
    mode, begins = config.trainer.resume_mode, config.trainer.resume_from_path
    other = mode == "resume_path" and not is_own(config, begins)
    if is_run and has_results(folder) and (mode == "disable" or other):
        key = f"resume_mode={mode}" + (f" trainer.resume_from_path={begins}" if other else "")
        raise PreflightError(
            f"trainer.{key} would put another run's metrics beside those in {folder}: give another run.dir"
        )


def changed_settings(config: DictConfig, job: Job) -> list[tuple[str, Any, Any]]:
    """What a command would change of the run that its folder holds: key, old and new value.

    Empty for a new run, and for one that died before anything was measured or saved.

    Raises:
        PreflightError: if the run's configuration is damaged.
    """
    folder = Path(config.run.dir)
    if not has_results(folder):
        return []
    try:
        old, left_out = job.earlier_names.current(OmegaConf.to_container(OmegaConf.load(folder / CONFIG_FILE)))
        old = moved(old, old["run"]["dir"], str(folder))
    except Exception as error:
        raise PreflightError(
            f"{folder / CONFIG_FILE} cannot be read ({error}), so that the settings of the run are not known: restore "
            "it, or begin another run with another run.dir"
        ) from error
    _note_left_out(folder / CONFIG_FILE, left_out)
    found = changes(old, OmegaConf.to_container(config, resolve=True))
    return [each for each in found if not _is_below(each[0], _OF_A_START)]


def next_commands(config: DictConfig, job: Job, finished: bool) -> list[str]:
    """The commands that continue, export and report a run that has ended, as far as they would find something."""
    name = str(config.run.dir)
    folder = shlex.quote(name)
    # Two read it, the shell and then Hydra; most names need no quotes for either.
    named = f"resume={name if re.fullmatch('[A-Za-z0-9_./-]+', name) else quoted(name)}"
    resume = f"python -m {job.command} {shlex.quote(named)}"
    commands = {}
    if latest(Path(config.trainer.default_local_dir)) is not None:
        longer = f"{resume} trainer.total_training_steps=N"
        if of_schedule := _of_schedule(config):
            longer += f" 'run.allow_changed=[{of_schedule[0]}]'"
        commands["continue"] = longer if finished else resume
        commands["export"] = f"python -m recipe.runner.export {folder} --out DIR"
    elif not finished:
        commands["begin again (nothing was saved)"] = resume
    if has_results(Path(config.run.dir)):
        commands["report"] = f"python -m fspo.report {folder} --out DIR"
    return [f"{what}: {command}" for what, command in commands.items()]


def has_results(folder: Path) -> bool:
    """Whether a step, or a part of one, was recorded or saved."""
    records = [folder / name for name in STEP_FILES]
    return any(folder.glob("checkpoints/global_step_*")) or any(r.is_file() and r.stat().st_size for r in records)


def _of_schedule(config: DictConfig) -> list[str]:
    """The keys of the run's length, if the learning rate depends on it: with a cosine, or a warm-up that is a share."""
    optim = config.actor_rollout_ref.actor.optim
    kinds = {optim.lr_scheduler_type, optim.get("warmup_style") or "constant"}  # verl's older key replaces the other
    if kinds == {"constant"} and (optim.lr_warmup_steps > 0 or optim.lr_warmup_steps_ratio <= 0):
        return []
    epochs = ["trainer.total_epochs"] if config.trainer.total_training_steps is None else []
    return ["trainer.total_training_steps", *epochs]


def check_changes(config: DictConfig, changed: Sequence[tuple[str, Any, Any]]) -> None:
    """Raise PreflightError if the run folder's settings would change in a way that nobody has allowed."""
    of_schedule = _of_schedule(config)
    allowed = [*(key for key in MAY_CHANGE if key not in of_schedule), *config.run.allow_changed]
    refused = [each for each in changed if not _is_below(each[0], allowed)]
    if not refused:
        return
    said = (
        f"{config.run.dir} holds a run with other settings: "
        + "; ".join(f"{key} was {old!r} and would be {new!r}" for key, old, new in refused[:8])
        + (f"; and {len(refused) - 8} more" if len(refused) > 8 else "")
        + ". Go on with the run's own settings (give run.dir alone), take another run.dir, or allow the "
        f"change with 'run.allow_changed=[{','.join(key for key, _, _ in refused)}]'"
    )
    raise PreflightError(said)
