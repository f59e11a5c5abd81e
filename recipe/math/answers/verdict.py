"""The possible results of scoring one answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Why an answer got its score. Only CORRECT scores 1.

    All statuses after WRONG mean that no comparison was completed. More of them point to a fault, not to a weaker
    policy.
    """

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # the text has nothing that looks like an answer
    PARSE_FAILED = "parse_failed"  # an answer was found but no expression could be read from it
    COMPARE_FAILED = "compare_failed"  # both sides were read, but their comparison raised (division by zero, recursion)
    REFUSED = "refused"  # not evaluated: beyond the limits (length, nesting, digits), or no room for a process
    TIMEOUT = "timeout"  # used up its run time; the worker was replaced
    CRASHED = "crashed"  # the worker died for another reason; it was replaced
    BAD_TRUTH = "bad_truth"  # the ground truth cannot be read: a defect of the data set


@dataclass(frozen=True, slots=True)
class Verdict:
    """Score of one answer: 1.0 if CORRECT, else 0.0, and the reason."""

    score: float
    status: Status

    @classmethod
    def of(cls, status: Status) -> Verdict:
        return cls(1.0 if status is Status.CORRECT else 0.0, status)


def status_rates(statuses: Iterable[str | None]) -> dict[str, float]:
    """Share of every status among `statuses`, and their number: metrics for a logger.

    Returns `{reward/status/<status>: share, ..., reward/status/n: count}`. Every status is present (0.0 if it did not
    occur), so that curves have no gaps. What is no status (None, or a text of another reward's) does not count.
    """
    counts = Counter(Status(status) for status in statuses if status in set(Status))
    n = counts.total()
    rates = {f"reward/status/{status.value}": counts[status] / n if n else 0.0 for status in Status}
    return rates | {"reward/status/n": float(n)}
