"""The code that a run uses: the commit, what differs from it, and files that neither a commit nor a package holds.

What differs is copied into ``code/ID`` of the run folder, once for each state: a resumed run that uses other code
leaves both there, and says so in ``run.json``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fspo.files import atomic_folder

CODE_FOLDER: Final = "code"
_SUFFIXES: Final = (".py", ".sh", ".toml", ".yaml", ".yml", ".cfg", ".jinja")
_ANY_BYTES: Final = "surrogateescape"
_INSTALLED: Final = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def _git(*arguments: str) -> str:
    """Output of git in the folder of this package; empty outside a checkout or without git."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors=_ANY_BYTES)  # a file of the checkout may be in any encoding


@dataclass(frozen=True)
class CodeState:
    """What :func:`code_state` finds.

    Attributes:
        commit: Of the checkout that holds this package; None where it is installed.
        diff: The checkout's difference from the commit, as a patch.
        files: The content of each file that is neither in the commit nor installed, by its path.
    """

    commit: str | None = None
    diff: str = ""
    files: dict[Path, bytes] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The same for the same code: a commit, or a hash of what differs from it."""
        if not self.diff and not self.files:
            return (self.commit or "installed")[:12]
        return hashlib.sha256(json.dumps([self.commit, self.diff, self.hashes()]).encode()).hexdigest()[:12]

    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file."""
        return {str(path): hashlib.sha256(content).hexdigest() for path, content in self.files.items()}

    def facts(self) -> dict[str, Any]:
        """Entries of ``run.json``; ``dirty`` is None where there is no commit to compare with."""
        dirty = bool(self.diff or self.files) or (False if self.commit else None)
        return {"commit": self.commit, "dirty": dirty, "code": {"id": self.id, "files": self.hashes()}}

    def save(self, run_dir: Path) -> None:
        """Copy what differs to ``code/ID``, unless it is there."""
        folder = run_dir / CODE_FOLDER / self.id
        if not (self.diff or self.files) or folder.exists():
            return
        with atomic_folder(folder) as temporary:
            if self.diff:
                (temporary / "diff.patch").write_text(self.diff, encoding="utf-8", errors=_ANY_BYTES)
            for path, content in self.files.items():
                place = temporary.joinpath("elsewhere", *path.parts[1:])
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)


def code_state(config: Any = None, folders: Sequence[str] = ()) -> CodeState:
    """The code of this process, and what the workers will load beside it.

    Args:
        config: Resolved, in plain containers; files of code that it names count, loaded here or not.
        folders: The user's folders of configuration files.
    """
    commit, diff, tracked = None, "", set[Path]()
    # A package that is installed below somebody else's checkout does not belong to it.
    if _git("ls-files", "--", str(Path(__file__).parent)):
        root = Path(_git("rev-parse", "--show-toplevel").strip())
        commit, diff = _git("rev-parse", "HEAD").strip() or None, _git("diff", "--no-ext-diff", "HEAD")
        tracked = {root / name for name in _git("-C", str(root), "ls-files", "-z").split("\0")}
    used = {*_loaded(), *(path for name in _strings(config) if (path := _code_file(name)) is not None)}
    for folder in (Path(each.removeprefix("file://")) for each in folders):
        used |= {*folder.glob("*.yaml"), *folder.glob("*/*.yaml")}  # files and groups
    own = sorted(path for path in used if path not in tracked and not _is_installed(path) and path.is_file())
    return CodeState(commit, diff, {path: path.read_bytes() for path in own})


def _loaded() -> Iterator[Path]:
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if name and name.endswith(".py"):
            yield from _own(name)


def _own(name: str) -> Iterator[Path]:
    """The file of a module unless it is installed: resolved as git's paths are, but an installed one may be a link."""
    if not _is_installed(Path(name).absolute()):
        yield Path(name).resolve()


def _is_installed(path: Path) -> bool:
    return str(path).startswith(_INSTALLED) or any(part.endswith("-packages") for part in path.parts)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _code_file(name: str) -> Path | None:
    """The file that ``pkg://module`` or a path to code means."""
    if name.startswith("pkg://"):
        try:
            spec = importlib.util.find_spec(name.removeprefix("pkg://").replace("/", "."))
        except (ImportError, ValueError):
            return None
        return next(_own(spec.origin), None) if spec is not None and spec.origin else None
    path = Path(name.removeprefix("file://"))
    if "session_latest" in path.parts:  # rollout.prometheus.file, which each Ray session writes anew
        return None
    return path.resolve() if path.suffix in _SUFFIXES and path.is_file() else None
