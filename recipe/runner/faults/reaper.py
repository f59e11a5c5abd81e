"""A small process beside the launching one: if that dies or hangs, it says so and ends what is left of the run.

Ray's processes end with the process that started them, but vLLM's engine and others that they started may not, and a
process that was killed (or left by Ray, whose node is gone) cannot print anything. Nor can a thread of it end one in
which a library waits with Python's lock held.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from recipe.runner.faults.phase import read_phase
from recipe.runner.faults.preemption import warning_waits
from recipe.runner.faults.processes import RUN_ID_VARIABLE, is_alive, is_stopped, kill, processes_of
from recipe.runner.faults.stacks import HANG_FILE, stacks_of

#: How long processes may take to end by themselves once the launching process has ended.
_PATIENCE_S = 6.0
#: How long it goes on killing what is still found after that.
_KILL_S = 10.0
#: How often the launching process says that it runs, by an empty line.
_BEAT_S = 2.0
_BYE = "bye"


class Reaper:
    """The launching process's handle. It tells the reaper what to say if it cannot say it itself.

    The reaper kills this process once it has seemed to hang for ``after_s`` seconds; with None it never does.
    """

    def __init__(self, run_id: str, run_dir: str, after_s: float | None = None) -> None:
        numbers = [str(os.getpid()), str(after_s or float("inf"))]
        command = [sys.executable, "-m", "recipe.runner.faults.reaper", run_id, run_dir, *numbers]
        environment = {name: value for name, value in os.environ.items() if name != RUN_ID_VARIABLE}
        with warning_waits():  # SLURM sends it to all processes of a job step
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="beat").start()

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_S):
            self.tell("")

    def bye(self) -> None:
        """This process ends by itself, and with it the reaper's input; it has said why."""
        self._over.set()
        self.tell(_BYE)

    def tell(self, sentence: str) -> None:
        """What to print as the reason if this process ends before it has said :meth:`bye`; empty: it runs."""
        with contextlib.suppress(OSError):  # the reaper was killed; the run goes on without it
            self._process.stdin.write(sentence + "\n")
            self._process.stdin.flush()


def _last_words(run_dir: Path, launcher: int, after_s: float) -> str:
    """What the launching process says last; returns after its end. One that says nothing for too long is killed."""
    reason, silent_s = "", 0.0  # not counted by the clock, which goes on while all processes are stopped
    while True:
        if select.select([sys.stdin], [], [], 1.0)[0]:
            words = os.read(sys.stdin.fileno(), 2**16).decode()
            if not words:
                return reason
            reason, silent_s = next((line for line in reversed(words.splitlines()) if line), reason), 0.0
        else:
            silent_s = 0.0 if is_stopped(launcher) else silent_s + 1.0  # by a person (Ctrl-Z)
        if silent_s > after_s:
            with contextlib.suppress(OSError):  # the disk may be full
                stacks = f"the launching process (process {launcher})\n{stacks_of(launcher)[1]}"
                (run_dir / HANG_FILE).write_text(stacks)
            reason = reason or f"the launching process (process {launcher}) hangs; its stacks: {run_dir / HANG_FILE}"
            kill([launcher])
            silent_s = 0.0


def main(run_id: str, run_dir: str, launcher: str, after_s: str) -> None:
    """Wait for the end of the launching process (the end of the input), then see to what it has left."""
    reason = _last_words(Path(run_dir), int(launcher), float(after_s))
    if reason != _BYE:
        phase = read_phase(run_dir)
        when = f" {phase.words()}" if phase else ""
        log = Path(run_dir) / "driver.log"
        reason = reason or f"the launching process (process {launcher}) died{when}; its log: {log}"
        print(f"error: {reason}", file=sys.stderr, flush=True)
    limit = time.monotonic() + _PATIENCE_S
    while is_alive(int(launcher)) and time.monotonic() < limit:
        time.sleep(0.1)
    if is_alive(int(launcher)):
        return  # a program that has called launch() and goes on; its own processes have the same id
    while processes_of(run_id) and time.monotonic() < limit:
        time.sleep(0.2)
    limit = time.monotonic() + _KILL_S
    # Again until nothing is found: what is killed may have started something in between.
    while (left := processes_of(run_id)) and time.monotonic() < limit:
        kill(left)
        time.sleep(0.2)


if __name__ == "__main__":
    main(*sys.argv[1:])
