"""Scoring math answers: `MathScorer`."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future

from recipe.math.answers.extraction import bounded, decide_exactly, sole_box
from recipe.math.answers.pool import WorkerPool
from recipe.math.answers.verdict import Status, Verdict

_CACHE_SIZE = 65_536


class MathScorer:
    r"""Scores responses against ground truths by math-verify, in worker processes: their crashes cannot end the caller.

    The answer of a response is its last `\boxed{...}`, else its final answer or number. With `normalise` answer and
    ground truth are read into kinds first (`reading`), and math-verify compares what has one; without it math-verify
    judges the whole response alone. An integer in an only box is decided in the calling process, the pool judges all
    others. The verdict on an only box is cached, since the responses of a group often have the same one.

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
        self._cache: OrderedDict[tuple[int, str, str], Future[Status]] = OrderedDict()

    def score(self, response: str, ground_truth: str) -> Verdict:
        """Verdict on one response. It waits for the verdict; call it from several threads to use several workers.

        Raises:
            WorkerStartError: math-verify cannot be run at all on this machine.
        """
        text, truth = bounded(response), ground_truth.strip()
        if not text.strip():
            return Verdict.of(Status.NO_ANSWER)
        content = sole_box(text) if self._normalise else None
        if content is None:
            return Verdict.of(self._pool.run(text, truth, self._normalise))
        if (equal := decide_exactly(content, truth)) is not None:
            return Verdict.of(Status.CORRECT if equal else Status.WRONG)
        return Verdict.of(self._judged(content, truth))

    def _judged(self, content: str, truth: str) -> Status:
        """The pool's verdict on a box; equal ones are judged once, also while the first of them is in flight."""
        key = (os.getpid(), content, truth)
        with self._lock:
            pending = self._cache.get(key)
            if mine := pending is None:
                pending = self._cache[key] = Future()
        if not mine:
            return pending.result()
        keep = False
        try:
            status = self._pool.run(f"\\boxed{{{content}}}", truth, True)
            # A crash or a refusal may have had another cause, so the same answer is judged again next time.
            keep = status not in (Status.CRASHED, Status.REFUSED)
            pending.set_result(status)
            return status
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
