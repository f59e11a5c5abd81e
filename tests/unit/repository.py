"""A git repository for tests of what a run says of its code."""

from __future__ import annotations

import subprocess
from pathlib import Path


def checkout(folder: Path) -> Path:
    """A repository with a changed file, a file that is staged and one that is not."""
    folder.mkdir()

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x@x", *words], check=True)

    git("init", "--quiet")
    (folder / "module.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "x")
    (folder / "module.py").write_text("x = 2\nurl = 'https://u:SECRETADDRESS@h/x'\n")
    (folder / ".env.prod").write_text("SECRETSTAGED=1\n")
    git("add", ".env.prod")
    (folder / ".env").write_text("SECRETUNTRACKED=1\n")
    return folder
