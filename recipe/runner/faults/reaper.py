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

from recipe.runner.faults.phase import during, read_phase
from recipe.runner.faults.processes import RUN_ID_VARIABLE, is_alive, kill, processes_of

#: How long processes may take to end by themselves once the launching process has ended, and are killed after that.
_PATIENCE_S, _KILL_S = 6.0, 10.0
#: Told at last, with the folder that goes, too: the launching process ends by itself, and has said why.
BYE = "bye"


class Reaper:
    """The launching process's handle."""

    def __init__(self, run_id: str, run_dir: str) -> None:
        command = [sys.executable, "-m", "recipe.runner.faults.reaper", run_id, run_dir, str(os.getpid())]
        environment = {name: value for name, value in os.environ.items() if name != RUN_ID_VARIABLE}
        apart = {"stdout": subprocess.DEVNULL, "env": environment, "cwd": "/", "start_new_session": True}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, **apart)

    def tell(self, sentence: str) -> None:
        """What to print as the reason if this process ends before it has said ``BYE``."""
        with contextlib.suppress(OSError):  # the reaper was killed; the run goes on without it
            self._process.stdin.write(sentence + "\n")
            self._process.stdin.flush()


def main(run_id: str, run_dir: str, launcher: str) -> None:
    """Wait for the end of the launching process (the end of the input), then see to what it has left."""
    *_, reason = ["", *sys.stdin.read().splitlines()]
    word, _, folder = reason.partition(" ")
    if word != BYE:
        died = f"the launching process (process {launcher}) died{during(read_phase(run_dir))}"
        print(f"error: {reason or f'{died}; its log: {run_dir}/launcher.log'}", file=sys.stderr, flush=True)
    limit = time.monotonic() + _PATIENCE_S
    while is_alive(int(launcher)):
        if time.monotonic() > limit:
            return  # it goes on with something else; its own processes have the same id
        time.sleep(0.1)
    while processes_of(run_id) and time.monotonic() < limit:
        time.sleep(0.2)
    limit = time.monotonic() + _KILL_S
    # Again until nothing is left: what is killed may have started something in between.
    while (left := processes_of(run_id)) and time.monotonic() < limit:
        kill(left)
        time.sleep(0.2)
    if word == BYE and folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
