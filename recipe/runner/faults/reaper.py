"""A small process beside the launching one: if that dies, it says so; and it ends what is left of the run.

Ray's processes end with the one that started them; vLLM's engine and others that they started may not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from recipe.runner.faults.phase import during, read_phase
from recipe.runner.faults.processes import RUN_ID_VARIABLE, is_alive, kill, processes_of

#: How long processes may take to end by themselves once the launching process has ended, and are killed after that.
_PATIENCE_S, _KILL_S = 6.0, 10.0


class Reaper:
    """The launching process's handle."""

    def __init__(self, run_id: str, run_dir: str) -> None:
        command = [sys.executable, "-m", "recipe.runner.faults.reaper", run_id, run_dir, str(os.getpid())]
        environment = {name: value for name, value in os.environ.items() if name != RUN_ID_VARIABLE}
        apart = {"stdout": subprocess.DEVNULL, "env": environment, "cwd": "/", "start_new_session": True}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, **apart)

    def bye(self, folder: Path | None = None) -> None:
        """Tell it that this process ends by itself and has said why; ``folder`` goes, too."""
        with contextlib.suppress(OSError):  # the reaper was killed; the run goes on without it
            self._process.stdin.write(f"{folder or ''}\n")
            self._process.stdin.flush()


def main(run_id: str, run_dir: str, launcher: str) -> None:
    """Wait for the end of the launching process, then see to what it has left."""
    told = sys.stdin.read()  # until it ends, or has no use for this process any more
    if not told:
        died = f"the launching process (process {launcher}) died{during(read_phase(run_dir))}"
        print(f"error: {died}; its log: {run_dir}/launcher.log", file=sys.stderr, flush=True)
    while is_alive(int(launcher)):  # its own processes have the same id
        time.sleep(0.1)
    patience = time.monotonic() + _PATIENCE_S
    # Again until nothing is left: what is killed may have started something in between.
    while (left := processes_of(run_id)) and time.monotonic() < patience + _KILL_S:
        if time.monotonic() > patience:
            kill(left)
        time.sleep(0.2)
    if folder := told.strip():
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
