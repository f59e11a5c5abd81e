"""`MathScorer` judges answers, by processes that it keeps."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from recipe.math.answers.extraction import answer_of
from recipe.math.answers.verdict import Status

#: Wall-clock seconds beyond the time limit after which a silent worker is replaced.
GRACE_S: Final = 5.0
MAX_REMEMBERED: Final = 65_536
_INTEGER: Final = re.compile(r"-?[0-9]{1,18}")


class MathScorer:
    """Judges responses by math-verify in worker processes: their crashes cannot end the caller.

    Two integers are compared in the calling process. Verdicts are remembered, since the responses of a group often have
    the same answer. It can be used from any number of threads, but not in a process forked from one that has used it:
    its threads are not there, and `judge` would wait for ever (`recipe.math.reward` has one a process). Workers start
    with the first answer that needs one; they end with `close()` or with the calling process.

    Args:
        n_workers: number of worker processes; None takes half of the processors this process may use, at least 2 and
            at most 8.
        time_limit_s: wall-clock time an answer may use in a worker, in seconds. Ordinary answers take 1 to 50 ms.
    """

    def __init__(self, n_workers: int | None = None, time_limit_s: float = 3.0) -> None:
        n_workers = n_workers or min(8, max(2, len(os.sched_getaffinity(0)) // 2))
        self._workers = [_Worker(time_limit_s) for _ in range(n_workers)]
        self._idle = deque(self._workers)
        self._threads = ThreadPoolExecutor(n_workers, "judge")  # callers wait in the order in which they came
        self._remembered: dict[tuple[str, str], Status] = {}

    def judge(self, response: str, ground_truth: str) -> Status:
        """Verdict on one response. It waits for the verdict; call it from several threads to use several workers.

        Raises RuntimeError if math-verify cannot be run at all on this machine.
        """
        answer, truth = answer_of(response), answer_of(ground_truth) or ground_truth.strip()
        if answer is None:
            return Status.NO_ANSWER
        if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(truth):
            return Status.CORRECT if int(answer) == int(truth) else Status.WRONG
        status = self._remembered.get((answer, truth))
        if status is None:
            status = self._threads.submit(self._judged, answer, truth).result()
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            if status is not Status.CRASHED:  # the worker may have been killed for another reason
                self._remembered[answer, truth] = status
        return status

    def _judged(self, answer: str, truth: str) -> Status:
        worker = self._idle.pop()  # there is one for each thread
        try:
            status = worker.ask(answer, truth)
            # Once more after a crash: the kernel may have killed it for another's memory.
            return worker.ask(answer, truth) if status is Status.CRASHED else status
        finally:
            self._idle.append(worker)

    def close(self) -> None:
        """End the worker processes; they start again if the scorer is used again."""
        for worker in self._workers:
            worker.close()


class _Worker:
    """A process of `worker`, started when it is first asked and after it has died; one thread at a time asks it."""

    def __init__(self, time_limit_s: float) -> None:
        self._time_limit_s = time_limit_s
        self._process: subprocess.Popen[str] | None = None

    def ask(self, answer: str, truth: str) -> Status:
        """The worker's verdict; TIMEOUT if none comes in time, CRASHED if the worker dies."""
        process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        status = Status.CRASHED
        with contextlib.suppress(OSError, ValueError):  # it is dead, or closed by another thread
            process.stdin.write(json.dumps([answer, truth]) + "\n")
            process.stdin.flush()
            # A line for each answer: no other one waits in the buffer of `stdout`, where select does not look.
            if select.select([process.stdout], [], [], self._time_limit_s + GRACE_S)[0]:
                return Status(process.stdout.readline().strip())
            status = Status.TIMEOUT
        self.close()
        return status

    def _started(self) -> subprocess.Popen[str]:
        paths = str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH")
        process = self._process = subprocess.Popen(  # -P: not the current folder; its session: Ctrl-C is the caller's
            [sys.executable, "-P", "-m", "recipe.math.answers.worker", str(self._time_limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert process.stdout is not None
        if not process.stdout.readline() and process.wait() == 1:
            raise RuntimeError(f"`{sys.executable} -c 'import math_verify'` must work: see its message above")
        return process

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError), process:  # which closes its pipes and waits
                process.kill()  # its child ends with its input
