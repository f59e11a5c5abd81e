"""Starting the runs of a study: grids of ``recipe.fspo.compare``, which go on with what is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def module(*arguments: str) -> int:
    """The exit status of ``python -m ARGUMENTS``."""
    return subprocess.run([sys.executable, "-m", *arguments], check=False).returncode


def compare(out: Path, algos: Sequence[str], seeds: Sequence[int], *overrides: str) -> int:
    """The exit status of a grid's command."""
    own = [f"algos=[{','.join(algos)}]", f"seeds=[{','.join(map(str, seeds))}]", f"out={out}"]
    return module("recipe.fspo.compare", *own, *overrides)
