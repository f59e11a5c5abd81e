"""Scoring math answers: `MathScorer`."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future

from recipe.math.answers.extraction import bounded, decide_exactly, decisive_part
from recipe.math.answers.pool import Outcome, Task, WorkerPool
from recipe.math.answers.verdict import Status, Verdict

_CACHE_SIZE = 65_536


class MathScorer:
    r"""Scores responses against ground truths by math-verify, in worker processes: their crashes cannot end the caller.

    The answer of a response is its last `\boxed{...}`, else its final answer or number. With `normalise` answer and
    ground truth are read into kinds first (`reading`), and math-verify compares what has one; `Verdict.plain` is the
    verdict of math-verify alone.
    Simple answers are decided in the calling process (see `extraction`); the pool judges all others. A verdict that
    depends only on the part is cached, since the responses of a group often have the same ending.

    It can be used from any number of threads, from Ray actors and from daemonic processes. Worker processes start with
    the first answer that needs one. They end with `close()`, with the interpreter, or when the calling process dies.

    Args:
        n_workers: number of worker processes; None takes half of the processors this process may use, at least 2 and
            at most 8.
        time_limit_s: processor time an answer may use, in seconds. Ordinary answers take 1 to 50 ms.
        memory_limit_mb: address space of a worker, in MiB.
        normalise: False gives math-verify's own verdicts.

    Raises:
        ValueError: a limit that is not positive, or less memory than a worker needs to exist.
    """

    def __init__(
        self,
        n_workers: int | None = None,
        time_limit_s: float = 1.0,
        memory_limit_mb: int = 1024,
        normalise: bool = True,
    ) -> None:
        if n_workers is None:
            n_workers = min(8, max(2, len(os.sched_getaffinity(0)) // 2))
        if n_workers < 1:
            raise ValueError(f"n_workers={n_workers}: give at least 1")
        if not 0 < time_limit_s < 3600:
            raise ValueError(f"time_limit_s={time_limit_s}: give a number of seconds between 0 and 3600")
        if memory_limit_mb < 256:
            raise ValueError(f"memory_limit_mb={memory_limit_mb}: a worker needs at least 256")
        self._pool = WorkerPool(n_workers, time_limit_s, memory_limit_mb)
        self._normalise = normalise
        self._lock = threading.Lock()
        #: The oldest first, by process (a fork does not finish what its parent began), answer and ground truth.
        self._cache: OrderedDict[tuple[int, str, str], Future[Outcome]] = OrderedDict()

    def score(self, response: str, ground_truth: str) -> Verdict:
        """Verdict on one response. It waits for the verdict; call it from several threads to use several workers.

        Raises:
            WorkerStartError: math-verify cannot be run at all on this machine.
        """
        text, truth = bounded(response), ground_truth.strip()
        if not text.strip():
            return Verdict.of(Status.NO_ANSWER)
        part = decisive_part(text)
        if part is not None and (equal := decide_exactly(part, truth)) is not None:
            return Verdict.of(Status.CORRECT if equal else Status.WRONG)
        status, plain, _ = self._judged((part, text, truth, self._normalise))
        return Verdict.of(status, plain)

    def _judged(self, task: Task) -> Outcome:
        """The pool's outcome; equal answers are judged once, also while the first of them is in flight."""
        part, text, truth, _ = task
        key = (os.getpid(), text if part is None else part, truth)
        with self._lock:
            pending = self._cache.get(key)
            if mine := pending is None:
                pending = self._cache[key] = Future()
        if not mine:
            outcome = pending.result()
            return outcome if outcome[2] or part is None else self._pool.run(task)
        keep = False
        try:
            outcome = self._pool.run(task)
            # A crash may have had another cause, so the same answer is judged again next time.
            keep = outcome[2] and outcome[0] is not Status.CRASHED
            pending.set_result(outcome)
            return outcome
        except BaseException as error:
            pending.set_exception(error)
            raise
        finally:
            with self._lock:
                if not keep:
                    self._cache.pop(key, None)
                elif len(self._cache) > _CACHE_SIZE:
                    self._cache.popitem(last=False)

    def close(self) -> None:
        """End the worker processes; they start again if the scorer is used again."""
        self._pool.close()

    def __enter__(self) -> MathScorer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
