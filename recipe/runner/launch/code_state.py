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
#: Larger files, and what is more in all, are named with their size instead of copied.
MAX_FILE_BYTES, MAX_BYTES = 2**20, 2**24
#: Untracked files of a checkout that count as code; data and results do not.
_SUFFIXES: Final = (".py", ".pyx", ".c", ".cpp", ".cu", ".h", ".sh", ".toml", ".yaml", ".yml", ".cfg", ".jinja")
_ANY_BYTES: Final = "surrogateescape"
_INSTALLED: Final = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def _git(*arguments: str) -> str | None:
    """Output of git in the folder of this package; None outside a checkout or without git."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors=_ANY_BYTES)  # a file of the checkout may be in any encoding


@dataclass(frozen=True)
class CodeState:
    """What :func:`code_state` finds.

    Attributes:
        commit: Of the checkout that holds this package; None where it is installed.
        diff: The checkout's difference from the commit, as a patch.
        files: The content of each file of the user's, by its path.
        left_out: Files that are too large to be copied, with their size in bytes.
        root: The checkout.
    """

    commit: str | None = None
    diff: str = ""
    files: dict[Path, bytes] = field(default_factory=dict)
    left_out: dict[Path, int] = field(default_factory=dict)
    root: Path | None = None

    @property
    def id(self) -> str:
        """The same for the same code: a commit, or a hash of what differs from it."""
        if not self.diff and not self.files and not self.left_out:
            return (self.commit or "installed")[:12]
        told = json.dumps([self.commit, self.diff, self.facts_of_files()])
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    @property
    def dirty(self) -> bool | None:
        """Whether a commit does not hold all of it; None where there is no commit to compare with."""
        differs = bool(self.diff or self.files or self.left_out)
        return differs if differs or self.commit else None

    def facts_of_files(self) -> dict[str, Any]:
        """SHA-256 of each file, and the size of those left out."""
        return {
            "files": {str(path): hashlib.sha256(content).hexdigest() for path, content in self.files.items()},
            "left_out": {str(path): size for path, size in self.left_out.items()},
        }

    def facts(self) -> dict[str, Any]:
        """Entries of ``run.json``."""
        return {"commit": self.commit, "dirty": self.dirty, "code": {"id": self.id, **self.facts_of_files()}}

    def save(self, run_dir: Path) -> None:
        """Copy what differs to ``code/ID``, unless it is there; a file of the checkout lies below ``checkout/``."""
        folder = run_dir / CODE_FOLDER / self.id
        if not self.dirty or folder.exists():
            return
        with atomic_folder(folder) as temporary:
            if self.diff:
                (temporary / "diff.patch").write_text(self.diff, encoding="utf-8", errors=_ANY_BYTES)
            for path, content in self.files.items():
                place = Path("elsewhere", *path.parts[1:])
                if self.root is not None and path.is_relative_to(self.root):
                    place = "checkout" / path.relative_to(self.root)
                (temporary / place).parent.mkdir(parents=True, exist_ok=True)
                (temporary / place).write_bytes(content)


def code_state(config: Any = None, folders: Sequence[str] = ()) -> CodeState:
    """The code of this process, and what the workers will load beside it.

    Args:
        config: Resolved, in plain containers; files of code that it names count, loaded here or not.
        folders: The user's folders of configuration files.
    """
    top = _git("rev-parse", "--show-toplevel")
    # A package that is installed below somebody else's checkout does not belong to it.
    if top is None or not _git("ls-files", "--", str(Path(__file__).parent)):
        root, commit, diff, tracked, untracked = None, None, "", set[Path](), list[Path]()
    else:
        root = Path(top.strip())
        commit, diff = (_git("rev-parse", "HEAD") or "").strip() or None, _git("diff", "--no-ext-diff", "HEAD") or ""
        tracked = {root / name for name in (_git("-C", top.strip(), "ls-files", "-z") or "").split("\0")}
        listed = _git("-C", top.strip(), "ls-files", "-z", "--others", "--exclude-standard") or ""
        untracked = [root / name for name in listed.split("\0") if Path(name).suffix in _SUFFIXES]
    used = {*_loaded(), *(path for name in _strings(config) if (path := _code_file(name)) is not None)}
    for folder in (Path(each.removeprefix("file://")) for each in folders):
        used |= {*folder.glob("*.yaml"), *folder.glob("*/*.yaml")}  # files and groups
    own = {path for path in used if path not in tracked and not _is_installed(path)}
    own |= {path for path in untracked if not _is_result(path)}
    state, total = CodeState(commit, diff, root=root), 0
    for path in sorted(own):
        try:
            size = path.stat().st_size
            if size > MAX_FILE_BYTES or total + size > MAX_BYTES:
                state.left_out[path] = size
            else:
                state.files[path] = path.read_bytes()
                total += size
        except OSError:  # gone, or not readable: nothing that the run could have used
            continue
    return state


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
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


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


def _is_result(path: Path) -> bool:
    """Whether a file lies in a run folder."""
    return any((parent / "run.json").exists() for parent in path.parents)
