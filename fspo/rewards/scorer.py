"""Scoring math answers: `MathScorer`."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from fspo.rewards.extraction import bounded, decide_exactly, decisive_part
from fspo.rewards.pool import Task, WorkerPool
from fspo.rewards.verdict import Status, Verdict

_MAX_CHUNK = 16
_CACHE_SIZE = 65_536


def _task(response: object, ground_truth: object) -> Task:
    if not isinstance(response, str) or not isinstance(ground_truth, str):
        raise TypeError(f"expected a response and a ground truth, got {type(response)} and {type(ground_truth)}")
    text = bounded(response)
    return decisive_part(text), text, ground_truth.strip()


class MathScorer:
    r"""Scores responses against ground truths by math-verify, in worker processes: their crashes cannot end the caller.

    The verdict on a response is math-verify's on its text: the last `\boxed{...}`, else the final answer or number.
    Simple answers are decided in the calling process (see `extraction`); the pool judges all others. A verdict that
    depends only on the part is cached, since the responses of a group often have the same ending.

    It can be used from any number of threads, from Ray actors and from daemonic processes. Worker processes start with
    the first answer that needs one. They end with `close()`, with the interpreter, or when the calling process dies.

    Args:
        n_workers: number of worker processes; None takes half of the processors this process may use, at least 2 and
            at most 8.
        time_limit_s: processor time an answer may use, in seconds. Ordinary answers take 1 to 50 ms.
        memory_limit_mb: address space of a worker, in MiB.

    Raises:
        ValueError: a limit that is not positive, or less memory than a worker needs to exist.
    """

    def __init__(self, n_workers: int | None = None, time_limit_s: float = 1.0, memory_limit_mb: int = 1024) -> None:
        if n_workers is None:
            n_workers = min(8, max(2, len(os.sched_getaffinity(0)) // 2))
        if n_workers < 1:
            raise ValueError(f"n_workers={n_workers}: give at least 1")
        if not 0 < time_limit_s < 3600:
            raise ValueError(f"time_limit_s={time_limit_s}: give a number of seconds between 0 and 3600")
        if memory_limit_mb < 256:
            raise ValueError(f"memory_limit_mb={memory_limit_mb}: a worker needs at least 256")
        self._pool = WorkerPool(n_workers, time_limit_s, memory_limit_mb)
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._in_progress: dict[tuple[str, str], threading.Event] = {}
        self._counts: Counter[str] = Counter()

    def score(self, response: str, ground_truth: str) -> Verdict:
        """Verdict on one response. It waits for the verdict; call it from several threads to use several workers.

        Raises:
            TypeError: the response or the ground truth is not a string.
            WorkerStartError: math-verify cannot be run at all on this machine.
        """
        task = _task(response, ground_truth)
        verdict = self._without_worker(task)
        if verdict is None:
            part, _, truth = task
            if part is None:
                (verdict,) = self._judge([task])
            else:
                verdict = self._judge_once(task, (part, truth))
        with self._lock:
            self._counts[verdict.status.value] += 1
        return verdict

    def _judge_once(self, task: Task, key: tuple[str, str]) -> Verdict:
        """Judge a decisive part; other threads that ask for the same part wait until its verdict is cached."""
        with self._lock:
            other = self._in_progress.get(key)
            if other is None:
                self._in_progress[key] = threading.Event()
        if other is not None:
            other.wait()
            verdict = self._without_worker(task)
            return self._judge([task])[0] if verdict is None else verdict
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
        verdicts: dict[int, Verdict] = {}
        pending = list(range(len(tasks)))
        # Responses of a group often have the same ending. The first of them is judged, and the others find its verdict
        # in the cache. If nothing could be read from the part, each is judged by its own whole text.
        for _ in range(2):
            first: dict[tuple[str | None, str, str], int] = {}
            waiting: list[int] = []
            for i in pending:
                part, text, truth = tasks[i]
                verdict = self._without_worker(tasks[i])
                if verdict is not None:
                    verdicts[i] = verdict
                elif first.setdefault((part, "" if part is not None else text, truth), i) != i:
                    waiting.append(i)
            chosen = list(first.values())
            verdicts.update(zip(chosen, self._judge([tasks[i] for i in chosen]), strict=True))
            pending = waiting
        verdicts.update(zip(pending, self._judge([tasks[i] for i in pending]), strict=True))
        with self._lock:
            self._counts.update(verdict.status.value for verdict in verdicts.values())
        return [verdicts[i] for i in range(len(tasks))]

    def _without_worker(self, task: Task) -> Verdict | None:
        part, text, truth = task
        if not text.strip():
            return Verdict.of(Status.NO_ANSWER)
        if part is None:
            return None
        equal = decide_exactly(part, truth)
        if equal is not None:
            with self._lock:
                self._counts["decided_exactly"] += 1
            return Verdict.of(Status.CORRECT if equal else Status.WRONG)
        with self._lock:
            verdict = self._cache.get((part, truth))
            if verdict is not None:
                self._cache.move_to_end((part, truth))
                self._counts["from_cache"] += 1
        return verdict

    def _judge(self, tasks: list[Task]) -> list[Verdict]:
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
        verdicts = []
        for (part, _, truth), (status, cacheable) in zip(tasks, outcomes, strict=True):
            verdict = Verdict.of(status)
            verdicts.append(verdict)
            # A crash may have had another cause, so the same answer is judged again next time.
            if part is not None and cacheable and status is not Status.CRASHED:
                self._remember((part, truth), verdict)
        return verdicts

    def _remember(self, key: tuple[str, str], verdict: Verdict) -> None:
        with self._lock:
            self._cache[key] = verdict
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)

    def counts(self) -> dict[str, int]:
        """Number of verdicts since the start, by status.

        Every status is present. Further keys are `decided_exactly` and `from_cache` (verdicts that needed no worker),
        and `workers_replaced`.
        """
        with self._lock:
            counts = {key: self._counts[key] for key in [*Status, "decided_exactly", "from_cache"]}
        return {str(key): n for key, n in counts.items()} | {"workers_replaced": self._pool.replaced}

    def close(self) -> None:
        """End the worker processes; they start again if the scorer is used again."""
        self._pool.close()

    def __enter__(self) -> MathScorer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
