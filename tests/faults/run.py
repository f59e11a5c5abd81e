"""``python tests/faults/run.py [NUMBER ...]``: whether the promises' tests catch the planted faults of faults.toml.

Copies the tracked files to a temporary folder, and runs a fault's command there as they are, where it must pass, and
then with the fault's patch, where it must fail. Faults that share a command share its first run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
#: pytest's status where tests have failed; another one is no verdict.
FAILED = 1


def copied(to: Path) -> None:
    """The tracked files, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run(copy: Path, *words: str) -> tuple[int, str]:
    """Status and end of the output of a Python command in the copy, whose modules come before any installed ones."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True)
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-15:])


def main() -> int:
    faults = {str(fault["number"]): fault for fault in tomllib.loads((HERE / "faults.toml").read_text())["fault"]}
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy, passed = Path(folder).resolve() / "copy", dict[tuple[str, ...], bool]()
        copied(copy)
        places = "import fspo, recipe.fspo; print(fspo.__file__, recipe.fspo.__file__)"
        _, found = run(copy, "-c", places)
        if found.split() != [str(copy / "fspo/__init__.py"), str(copy / "recipe/fspo/__init__.py")]:
            raise SystemExit(f"the copy in {copy} is not what is imported: {found}")
        for number in sys.argv[1:] or faults:
            fault, began = faults[number], time.monotonic()
            command, patch = (*PYTEST, *fault["tests"]), str(HERE / fault["patch"])
            if command not in passed:
                status, output = run(copy, *command)
                passed[command] = status == 0
                if status:
                    print(f"{number}: fails without the fault: {' '.join(command)}\n{output}", flush=True)
            if not passed[command]:
                missed += 1
                continue
            subprocess.run(["git", "apply", patch], cwd=copy, check=True)
            status, output = run(copy, *command)
            subprocess.run(["git", "apply", "-R", patch], cwd=copy, check=True)
            verdict = "caught" if status == FAILED else "NOT CAUGHT"
            missed += status != FAILED
            print(f"{number}: {verdict} in {time.monotonic() - began:.0f} s (promise {fault['promise']})", flush=True)
            if status not in (0, FAILED):
                print(output, flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
