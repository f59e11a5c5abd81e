"""The code that a run uses: the commit, and whether anything differs from it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Final

#: How long git may take, seconds.
_GIT_S: Final = 30


def _git(*arguments: str) -> str:
    """Output of git in the folder of this package."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=_GIT_S, text=True).stdout


def code_state() -> dict[str, Any]:
    """Entries of ``run.json``: ``commit`` and ``dirty``, None each where git does not say; a new file is dirt, too."""
    state: dict[str, Any] = {"commit": None, "dirty": None}
    try:
        # A package that is installed below somebody else's checkout does not belong to it.
        if _git("ls-files", "--", str(Path(__file__).resolve().parent)):
            state["commit"] = _git("rev-parse", "HEAD").strip()
            state["dirty"] = bool(_git("status", "--porcelain"))
    except (OSError, ValueError, subprocess.SubprocessError):  # there is no git, or no checkout
        pass
    return state
