"""Scoring math answers: `MathScorer`."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

from fspo.rewards.extraction import bounded, decide_exactly, decisive_part
from fspo.rewards.normalise import normalised
from fspo.rewards.pool import Task, WorkerPool
from fspo.rewards.verdict import Status, Verdict

_CACHE_SIZE = 65_536


class MathScorer:
    r"""Scores responses against ground truths by math-verify, in worker processes: their crashes cannot end the caller.

    The verdict on a response is math-verify's on its text: the last `\boxed{...}`, else the final answer or number.
    With `normalise`, answers to which a rule of that module applies are rewritten first; `Verdict.plain` is then the
    verdict without it.
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
        #: The oldest first, by what a verdict depends on: decisive part, ground truth, exact.
        self._cache: OrderedDict[tuple[str, str, bool], Status] = OrderedDict()

    def score(self, response: str, ground_truth: str) -> Verdict:
        """Verdict on one response. It waits for the verdict; call it from several threads to use several workers.

        Raises:
            WorkerStartError: math-verify cannot be run at all on this machine.
        """
        text, truth = bounded(response), ground_truth.strip()
        part = decisive_part(text)
        status = plain = self._status((part, text, truth, False))
        if self._normalise and (rewritten := normalised(part, text, truth)) is not None:
            answer, target = rewritten
            compared = self._status((answer, answer, target, True))
            # The rewritten pair decides where it could be compared.
            status = compared if compared in (Status.CORRECT, Status.WRONG) else plain
        return Verdict.of(status, plain)

    def _status(self, task: Task) -> Status:
        part, text, truth, exact = task
        if not text.strip():
            return Status.NO_ANSWER
        if part is None:
            return self._pool.run(task)[0]
        if (equal := decide_exactly(part, truth)) is not None:
            return Status.CORRECT if equal else Status.WRONG
        key = (part, truth, exact)
        with self._lock:
            if (known := self._cache.get(key)) is not None:
                return known
        status, cacheable = self._pool.run(task)
        # A crash may have had another cause, so the same answer is judged again next time.
        if cacheable and status is not Status.CRASHED:
            with self._lock:
                self._cache[key] = status
                if len(self._cache) > _CACHE_SIZE:
                    self._cache.popitem(last=False)
        return status

    def close(self) -> None:
        """End the worker processes; they start again if the scorer is used again."""
        self._pool.close()

    def __enter__(self) -> MathScorer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
