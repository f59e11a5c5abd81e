"""The possible results of judging one answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum


class Status(StrEnum):
    """Why an answer got its score. Those after WRONG mean that no comparison was completed."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # no box, no "answer is", or an empty one
    PARSE_FAILED = "parse_failed"  # an answer was found, but no expression could be read from all of it
    REFUSED = "refused"  # too long, too deep or too large to be evaluated
    TIMEOUT = "timeout"  # the worker was replaced
    CRASHED = "crashed"  # the worker died, out of memory say; it was replaced
    BAD_TRUTH = "bad_truth"  # the ground truth cannot be read: a defect of the data set

    @property
    def score(self) -> float:
        """1.0 for CORRECT, else 0.0."""
        return float(self is Status.CORRECT)


def status_rates(statuses: Iterable[str | None]) -> dict[str, float]:
    """Share of every status among `statuses`, and their number: metrics for a logger.

    Returns `{reward/status/<status>: share, ..., reward/status/n: count}`. Every status is present (0.0 if it did not
    occur), so that curves have no gaps. What is no status (None, or a text of another reward's) does not count.
    """
    counts = Counter(Status(status) for status in statuses if status in set(Status))
    n = counts.total()
    rates = {f"reward/status/{status.value}": counts[status] / n if n else 0.0 for status in Status}
    return rates | {"reward/status/n": float(n)}
