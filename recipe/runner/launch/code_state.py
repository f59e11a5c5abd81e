"""The code that a run uses: the commit, what differs from it, and what the configuration names beside it.

What differs is copied into ``code/ID`` of the run folder, once for each state: a resumed run that uses other code
leaves both there, and says so in ``run.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fspo.files import atomic_folder
from recipe.runner.faults.texts import masked_text

CODE_FOLDER: Final = "code"
_SUFFIXES: Final = (".py", ".sh", ".toml", ".yaml", ".yml", ".cfg", ".jinja")
#: Their values are names of a class and of a module.
_MODULE_KEYS: Final = ("_target_", "external_lib")
#: How long git may take, seconds.
_GIT_S: Final = 30
_STDLIB: Final = sysconfig.get_path("stdlib")


class _GitError(Exception):
    """git does not answer: there is none, this is no checkout, or the reason that the message gives."""


def _git(*arguments: str) -> bytes:
    """Output of git in the folder of this package; _GitError outside a checkout or without git."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=_GIT_S).stdout
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip().splitlines()
        raise _GitError(f"git {arguments[0]}: {why[0] if why else f'status {error.returncode}'}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise _GitError(f"git {arguments[0]}: {error}") from error


@dataclass(frozen=True)
class CodeState:
    """What :func:`code_state` reads.

    Attributes:
        commit: Of the checkout that holds this package; None where it is installed.
        diff: The checkout's difference from the commit, as a patch.
        files: The content of each named file that is neither in the commit nor installed, by its path.
        problem: Why git does not say what differs from the commit, in a checkout; None if it does.
    """

    commit: str | None = None
    diff: bytes = b""
    files: dict[Path, bytes] = field(default_factory=dict)
    problem: str | None = None

    @property
    def id(self) -> str:
        """A commit, or a hash of what differs from it; equal for equal code."""
        if not self.diff and not self.files:
            return (self.commit or "installed")[:12]
        return hashlib.sha256(repr((self.commit, self.diff, self.files)).encode()).hexdigest()[:12]

    def facts(self) -> dict[str, Any]:
        """Entries of ``run.json``; ``dirty`` is None where there is no commit to compare with, or git does not say."""
        dirty = bool(self.diff or self.files) or (False if self.commit and not self.problem else None)
        return {"commit": self.commit, "dirty": dirty, "code": {"id": self.id}}

    def save(self, run_dir: Path) -> None:
        """Copy what differs to ``code/ID``, unless it is there."""
        folder = run_dir / CODE_FOLDER / self.id
        if not (self.diff or self.files) or folder.exists():
            return
        with atomic_folder(folder) as temporary:
            if self.diff:
                (temporary / "diff.patch").write_bytes(self.diff)
            for path, content in self.files.items():
                place = temporary.joinpath("elsewhere", *path.parts[1:])
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)


def code_state(config: Any = None, composed: Sequence[Path] = ()) -> CodeState:
    """The commit, what differs from it, and files that the configuration names; without secrets.

    A file that is new since the commit, staged or not, is no code of the run's unless the configuration names it.

    Args:
        config: Resolved, in plain containers.
        composed: The user's configuration files that it was composed from.
    """
    here = Path(__file__).resolve().parent
    commit, diff, tracked, problem = "", b"", set[Path](), None
    try:
        # A package that is installed below somebody else's checkout does not belong to it.
        if _git("ls-files", "--", str(here)):
            root = _git("rev-parse", "--show-toplevel").decode().strip()
            commit = _git("rev-parse", "HEAD").decode().strip()
            names = _git("-C", root, "ls-tree", "-r", "--name-only", "-z", "HEAD").split(b"\0")
            tracked = {Path(root, os.fsdecode(name)) for name in names}
            diff = _git("diff", "--no-ext-diff", "--diff-filter=a", "HEAD")
    except _GitError as error:
        # In a folder without a checkout, git has nothing to say.
        problem = str(error) if any((folder / ".git").exists() for folder in (here, *here.parents)) else None
    named = [*_named_files(config), *map(str, composed)]
    # An installed file may be a link to a cache; git's paths are those behind links.
    own = {Path(name).resolve() for name in named if name.endswith(_SUFFIXES) and not _is_installed(name)}
    files = {path: _masked(path.read_bytes()) for path in sorted(own - tracked) if path.is_file()}
    return CodeState(commit or None, _masked(diff), files, problem)


def _masked(content: bytes) -> bytes:
    return masked_text(content.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def _is_installed(name: str) -> bool:
    # rollout.prometheus.file lies in session_latest, and each Ray session writes it anew.
    return name.startswith(_STDLIB) or "-packages/" in name or "/session_latest/" in name


def _named_files(value: Any, key: str = "") -> Iterator[str]:
    """Paths that a configuration names, and those of the modules that it names: ``pkg://``, a class, a library."""
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else ((key, item) for item in value):
            yield from _named_files(item, str(name))
    elif isinstance(value, str) and (value.startswith("pkg://") or key in _MODULE_KEYS):
        module = value.removeprefix("pkg://").replace("/", ".")
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(module.rpartition(".")[0] if key == "_target_" else module)
            yield (spec.origin or "") if spec else ""
    elif isinstance(value, str):
        yield value.removeprefix("file://")
