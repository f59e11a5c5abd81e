"""The possible results of judging one answer."""

from __future__ import annotations

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
