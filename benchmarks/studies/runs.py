"""Starting the programs of a study."""

from __future__ import annotations

import subprocess
import sys


def module(*arguments: str) -> int:
    """The exit status of ``python -m ARGUMENTS``."""
    return subprocess.run([sys.executable, "-m", *arguments], check=False).returncode
