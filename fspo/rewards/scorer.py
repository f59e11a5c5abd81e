"""Scoring math answers: `MathScorer`."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from fspo.rewards.extraction import bounded, decide_exactly, decisive_part
from fspo.rewards.normalise import normalised
from fspo.rewards.pool import Task, WorkerPool
from fspo.rewards.verdict import Status, Verdict

_MAX_CHUNK = 16
_CACHE_SIZE = 65_536

Key = tuple[str, str, bool]
"""Decisive part, ground truth, exact: what a cached verdict depends on."""


def _task(response: object, ground_truth: object) -> Task:
    if not isinstance(response, str) or not isinstance(ground_truth, str):
        raise TypeError(f"expected a response and a ground truth, got {type(response)} and {type(ground_truth)}")
    text = bounded(response)
    return decisive_part(text), text, ground_truth.strip(), False


def _final(normalised_status: Status, plain: Status) -> Status:
    """The rewritten pair decides where it could be compared."""
    return normalised_status if normalised_status in (Status.CORRECT, Status.WRONG) else plain


def _key(task: Task) -> Key | None:
    part, _, truth, exact = task
    return None if part is None else (part, truth, exact)


def _normalised_task(task: Task) -> Task | None:
    """The same answer and truth rewritten by :mod:`fspo.rewards.normalise`; None if no rule applies."""
    rewritten = normalised(*task[:3])
    return None if rewritten is None else (rewritten[0], rewritten[0], rewritten[1], True)


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
        self._cache: OrderedDict[Key, Status] = OrderedDict()
        self._in_progress: dict[Key, threading.Event] = {}
        self._counts: Counter[str] = Counter()

    def score(self, response: str, ground_truth: str) -> Verdict:
        """Verdict on one response. It waits for the verdict; call it from several threads to use several workers.

        Raises:
            TypeError: the response or the ground truth is not a string.
            WorkerStartError: math-verify cannot be run at all on this machine.
        """
        task = _task(response, ground_truth)
        plain = self._status(task)
        rewritten = _normalised_task(task) if self._normalise else None
        verdict = Verdict.of(plain if rewritten is None else _final(self._status(rewritten), plain), plain)
        self._count([verdict])
        return verdict

    def _status(self, task: Task) -> Status:
        status = self._without_worker(task)
        if status is not None:
            return status
        key = _key(task)
        return self._judge([task])[0] if key is None else self._judge_once(task, key)

    def _judge_once(self, task: Task, key: Key) -> Status:
        """Judge a decisive part; other threads that ask for the same part wait until its verdict is cached."""
        with self._lock:
            other = self._in_progress.get(key)
            if other is None:
                self._in_progress[key] = threading.Event()
        if other is not None:
            other.wait()
            status = self._without_worker(task)
            return self._judge([task])[0] if status is None else status
        try:
            return self._judge([task])[0]
        finally:
            with self._lock:
                self._in_progress.pop(key).set()

    def score_batch(self, responses: Sequence[str], ground_truths: Sequence[str]) -> list[Verdict]:
        """Verdicts in the order of `responses`, using all workers.

        Raises:
            ValueError: the two sequences differ in length.
            TypeError: a response or ground truth is not a string.
            WorkerStartError: math-verify cannot be run at all on this machine.
        """
        if len(responses) != len(ground_truths):
            raise ValueError(f"{len(responses)} responses but {len(ground_truths)} ground truths")
        tasks = [_task(response, truth) for response, truth in zip(responses, ground_truths, strict=True)]
        plain = self._statuses(tasks)
        final = list(plain)
        if self._normalise:
            rewritten = {i: new for i, task in enumerate(tasks) if (new := _normalised_task(task)) is not None}
            for i, status in zip(rewritten, self._statuses(list(rewritten.values())), strict=True):
                final[i] = _final(status, plain[i])
        verdicts = [Verdict.of(*pair) for pair in zip(final, plain, strict=True)]
        self._count(verdicts)
        return verdicts

    def _statuses(self, tasks: list[Task]) -> list[Status]:
        statuses: dict[int, Status] = {}
        pending = list(range(len(tasks)))
        # Responses of a group often have the same ending. The first of them is judged, and the others find its verdict
        # in the cache. If nothing could be read from the part, each is judged by its own whole text.
        for _ in range(2):
            first: dict[object, int] = {}
            waiting: list[int] = []
            for i in pending:
                status = self._without_worker(tasks[i])
                if status is not None:
                    statuses[i] = status
                elif first.setdefault(_key(tasks[i]) or tasks[i], i) != i:
                    waiting.append(i)
            chosen = list(first.values())
            statuses.update(zip(chosen, self._judge([tasks[i] for i in chosen]), strict=True))
            pending = waiting
        statuses.update(zip(pending, self._judge([tasks[i] for i in pending]), strict=True))
        return [statuses[i] for i in range(len(tasks))]

    def _count(self, verdicts: list[Verdict]) -> None:
        with self._lock:
            self._counts.update(verdict.status.value for verdict in verdicts)
            self._counts["normalised"] += sum(verdict.status is not verdict.plain for verdict in verdicts)

    def _without_worker(self, task: Task) -> Status | None:
        part, text, truth, _ = task
        if not text.strip():
            return Status.NO_ANSWER
        key = _key(task)
        if part is None or key is None:
            return None
        equal = decide_exactly(part, truth)
        if equal is not None:
            with self._lock:
                self._counts["decided_exactly"] += 1
            return Status.CORRECT if equal else Status.WRONG
        with self._lock:
            status = self._cache.get(key)
            if status is not None:
                self._cache.move_to_end(key)
                self._counts["from_cache"] += 1
        return status

    def _judge(self, tasks: list[Task]) -> list[Status]:
        if not tasks:
            return []
        n = self._pool.n_workers
        size = max(1, min(_MAX_CHUNK, len(tasks) // (4 * n)))
        chunks = [tasks[start : start + size] for start in range(0, len(tasks), size)]
        if len(chunks) == 1:
            outcomes = self._pool.run(chunks[0])
        else:
            with ThreadPoolExecutor(min(n, len(chunks)), thread_name_prefix="fspo-rewards") as executor:
                outcomes = [outcome for result in executor.map(self._pool.run, chunks) for outcome in result]
        for task, (status, cacheable) in zip(tasks, outcomes, strict=True):
            key = _key(task)
            # A crash may have had another cause, so the same answer is judged again next time.
            if key is not None and cacheable and status is not Status.CRASHED:
                self._remember(key, status)
        return [status for status, _ in outcomes]

    def _remember(self, key: Key, status: Status) -> None:
        with self._lock:
            self._cache[key] = status
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)

    def counts(self) -> dict[str, int]:
        """Number of verdicts since the start, by status.

        Every status is present. Further keys are `normalised` (verdicts that differ from math-verify's own),
        `decided_exactly` and `from_cache` (judgements that needed no worker), and `workers_replaced`.
        """
        with self._lock:
            counts = {key: self._counts[key] for key in [*Status, "normalised", "decided_exactly", "from_cache"]}
        return {str(key): n for key, n in counts.items()} | {"workers_replaced": self._pool.replaced}

    def close(self) -> None:
        """End the worker processes; they start again if the scorer is used again."""
        self._pool.close()

    def __enter__(self) -> MathScorer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
