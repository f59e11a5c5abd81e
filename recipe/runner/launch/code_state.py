"""The code that a run uses: the commit, and what differs from it.

What differs is copied into ``code/ID`` of the run folder, once for each state: a resumed run that uses other code
leaves both there, and says so in ``run.json``.
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fspo.files import atomic_folder
from recipe.runner.faults.texts import masked_text

CODE_FOLDER: Final = "code"
#: How long git may take, seconds.
_GIT_S: Final = 30


class _GitError(Exception):
    """git does not answer: there is none, this is no checkout, or the reason that the message gives."""


def _git(*arguments: str) -> str:
    """Output of git in the folder of this package; _GitError outside a checkout or without git."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_GIT_S)
        return done.stdout.decode("utf-8", "surrogateescape")
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
        diff: The checkout's difference from the commit, as a patch without secrets.
        problem: Why git does not say what differs from the commit, in a checkout; None if it does.
    """

    commit: str | None = None
    diff: str = ""
    problem: str | None = None

    @property
    def id(self) -> str:
        """A commit, or a hash of what differs from it; equal for equal code."""
        if not self.diff:
            return (self.commit or "installed")[:12]
        return hashlib.sha256(repr((self.commit, self.diff)).encode()).hexdigest()[:12]

    def facts(self) -> dict[str, Any]:
        """Entries of ``run.json``; ``dirty`` is None where there is no commit to compare with, or git does not say."""
        dirty = bool(self.diff) or (False if self.commit and not self.problem else None)
        return {"commit": self.commit, "dirty": dirty, "code": {"id": self.id}}

    def save(self, run_dir: Path) -> None:
        """Copy what differs to ``code/ID``, unless it is there."""
        folder = run_dir / CODE_FOLDER / self.id
        if self.diff and not folder.exists():
            with atomic_folder(folder) as temporary:
                (temporary / "diff.patch").write_text(self.diff, encoding="utf-8", errors="surrogateescape")


def code_state() -> CodeState:
    """The commit, and what differs from it; a file that is new since the commit, staged or not, does not."""
    here = Path(__file__).resolve().parent
    commit = None
    try:
        # A package that is installed below somebody else's checkout does not belong to it.
        if not _git("ls-files", "--", str(here)):
            return CodeState()
        commit = _git("rev-parse", "HEAD").strip()
        return CodeState(commit, masked_text(_git("diff", "--no-ext-diff", "--diff-filter=a", "HEAD")))
    except _GitError as error:
        # In a folder without a checkout, git has nothing to say.
        in_checkout = any((folder / ".git").exists() for folder in (here, *here.parents))
        return CodeState(commit, problem=str(error) if in_checkout else None)
