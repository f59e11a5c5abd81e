"""What any policy loss must satisfy in distributed training, tested on the loss as verl calls it. Defined here.

:mod:`fspo.check_loss` is the command, :mod:`fspo.check_loss.call` says what a loss is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from fspo.check_loss.call import Batch, LossError, PolicyLoss, synthetic_batch
from fspo.check_loss.held import finite_differences

#: Of the largest entry of the gradient: rounding of a loss that computes in float32 stays below.
_TOLERANCE: Final = 1e-5
_FLOAT32_DIFFERENCES: Final = 3e-2
_FLOAT64_DIFFERENCES: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Check:
    """A property that a loss must have: its name, whether it has it, and in words what was found."""

    name: str
    passed: bool
    says: str


def _mini_batch() -> Batch:
    """Twelve responses of 1 to 40 tokens, of both signs of A and A = 0, some far off policy, with masked tokens."""
    length = [40, 3, 17, 1, 28, 9, 33, 6, 22, 12, 2, 38]
    sigma = [0.01, 0.3, 0.03, 0.2, 0.1, 0.5, 0.05, 0.02, 0.2, 0.1, 0.4, 0.03]
    advantage = [3.0, -1.0, 0.7, 1.3, -0.8, 0.5, -2.6, 0.0, 2.1, -0.4, 0.9, -1.2]
    return synthetic_batch(length, sigma, advantage, seed=1, gaps=True)


def checks(loss: PolicyLoss) -> list[Check]:
    """Every check, in the order of the report.

    Raises:
        LossError: If the loss cannot be called at all.
    """
    batch = _mini_batch()
    found = loss.gradient(batch.map(torch.clone))  # what a call changes in place is not changed by a second one
    return [
        _repeats(loss, batch, found),
        _padding(loss, batch, found),
        _compared("micro-batches", "the gradient does not depend on the split", found, _splits(loss, batch)),
        _compared("order", "the order of the responses does not matter", found, _orders(loss, batch)),
        _compared("ranks", "two ranks give the gradient of one", found, _ranks(loss, batch)),
        _finite(loss),
        _differences(loss),
        _direction(loss, batch),
    ]


Outcome = tuple[torch.Tensor, float]


def _change(found: Outcome, other: Outcome) -> tuple[float, str]:
    """How far the second outcome is from the first, over the tolerance, and in words."""
    (gradient_BT, value), (other_BT, other_value) = found, other
    largest = float(gradient_BT.abs().max()) or 1.0
    gap = float((gradient_BT - other_BT).abs().max()) / largest
    value_gap = abs(value - other_value) / max(1.0, abs(value))
    if not (math.isfinite(gap) and math.isfinite(value_gap)):
        return math.inf, "the gradient or the loss is no longer finite"
    if gap >= value_gap:
        return gap / _TOLERANCE, f"the gradient changes by {gap:.2g} times its largest entry"
    return value_gap / _TOLERANCE, f"the loss changes from {value:.6g} to {other_value:.6g}"


def _compared(name: str, good: str, found: Outcome, others: Iterator[tuple[str, Outcome]]) -> Check:
    """The worst of several variants that must give the same outcome."""
    worst, says = 1.0, good
    try:
        for what, other in others:
            change, words = _change(found, other)
            if change > worst:
                worst, says = change, f"{what}: {words}"
    except LossError as error:
        return Check(name, False, str(error))
    return Check(name, worst <= 1.0, says)


def _repeats(loss: PolicyLoss, batch: Batch, found: Outcome) -> Check:
    before = batch.map(torch.clone)
    again = loss.gradient(batch, seed=1)
    changed = [
        field.name.removesuffix("_BT")
        for field in dataclasses.fields(Batch)
        if not torch.equal(getattr(batch, field.name), getattr(before, field.name))
    ]
    if changed:
        return Check("repeats", False, f"a call changes its input {', '.join(changed)} in place")
    return _compared("repeats", "two calls agree and leave their inputs alone", found, iter([("a second call", again)]))


def _padding(loss: PolicyLoss, batch: Batch, found: Outcome) -> Check:
    rows, width = batch.mask_BT.shape

    def outcome(padded: Batch) -> Outcome:
        gradient_BT, value = loss.gradient(padded)
        outside = gradient_BT.masked_fill(padded.mask_BT, 0.0)
        return gradient_BT[:rows, :width] + outside.abs().max(), value  # a gradient of padding is a change too

    def padded(rows: int, columns: int) -> Batch:
        return batch.map(lambda each: torch.nn.functional.pad(each, (0, columns, 0, rows)))

    def variants() -> Iterator[tuple[str, Outcome]]:
        yield "5 columns of padding", outcome(padded(0, 5))
        yield "3 rows without a token", outcome(padded(3, 0))
        yield "other values in the padding", outcome(batch.padding(-3.0))

    return _compared("padding", "no value outside the mask matters", found, variants())


def _parts(loss: PolicyLoss, batch: Batch, sizes: Sequence[int], dp_size: int = 1) -> Outcome:
    ends = np.cumsum([0, *sizes]).tolist()
    parts = [loss.gradient(batch.rows(slice(a, b)), dp_size, batch) for a, b in itertools.pairwise(ends)]
    return torch.cat([gradient_BT for gradient_BT, _ in parts]) / dp_size, sum(value for _, value in parts) / dp_size


def _splits(loss: PolicyLoss, batch: Batch) -> Iterator[tuple[str, Outcome]]:
    for sizes in ((6, 6), (1, 7, 4), (1,) * 12):
        yield (
            f"micro-batches of {', '.join(map(str, sizes[:3]))}{', ...' * (len(sizes) > 3)}",
            _parts(loss, batch, sizes),
        )


def _ranks(loss: PolicyLoss, batch: Batch) -> Iterator[tuple[str, Outcome]]:
    for dp_size in (2, 4):
        yield f"{dp_size} ranks", _parts(loss, batch, (12 // dp_size,) * dp_size, dp_size)


def _orders(loss: PolicyLoss, batch: Batch) -> Iterator[tuple[str, Outcome]]:
    for name, order in (
        ("the reverse order", torch.arange(11, -1, -1)),
        ("another order", torch.tensor([7, 2, 11, 0, 5, 9, 3, 8, 1, 10, 6, 4])),
    ):
        gradient_BT, value = loss.gradient(batch.rows(order))
        yield name, (gradient_BT[order.argsort()], value)


#: Responses that a diverged update gives: name, log-ratio of each token, length.
_EXTREMES: Final = tuple(
    (f"token log-ratios of {d:+g} over {length} token{'s' * (length > 1)}", d, length)
    for d, length in ((20, 1), (-20, 1), (90, 4), (-90, 4), (1, 400), (-1, 400), (0, 400))
)


def _finite(loss: PolicyLoss) -> Check:
    for dtype in (torch.float32, torch.bfloat16):
        for what, d, length in _EXTREMES:
            for advantage in (1.0, -1.0, 30.0):
                old_BT = torch.full((2, length), min(-1.0, -1.0 - d))
                # The second response is an ordinary one: a fault of the first must not reach it.
                log_prob_BT = torch.stack([old_BT[0] + d, old_BT[1]])
                batch = Batch(
                    log_prob_BT, old_BT, torch.full_like(old_BT, advantage), torch.ones_like(old_BT, dtype=torch.bool)
                )
                case = f"{what}, A = {advantage:g}, {str(dtype).removeprefix('torch.')}"
                try:
                    gradient_BT, value = loss.gradient(batch.to(dtype))
                except LossError as error:
                    return Check("finite", False, f"{case}: {error}")
                if not math.isfinite(value) or not bool(torch.isfinite(gradient_BT).all()):
                    what = "loss" if not math.isfinite(value) else "gradient"
                    return Check("finite", False, f"{case}: the {what} is not finite")
    return Check("finite", True, "loss and gradient are finite to log-ratios of 90 a token and 400 in sum")


def _differences(loss: PolicyLoss) -> Check:
    length, sigma = [6, 1, 8, 3, 5, 7], [0.02, 0.1, 0.05, 0.6, 0.3, 0.002]
    batch = synthetic_batch(length, sigma, [1.0, -1.0, 0.8, -0.5, 1.5, -1.1], seed=2)

    def value(log_prob_BT: torch.Tensor) -> torch.Tensor:
        return loss.value(dataclasses.replace(batch, log_prob_BT=log_prob_BT))

    gradient_BT, _ = loss.gradient(batch)
    largest = float(gradient_BT.abs().max()) or 1.0
    tolerance = _FLOAT64_DIFFERENCES if value(batch.log_prob_BT).dtype == torch.float64 else _FLOAT32_DIFFERENCES
    found = finite_differences(value, batch.log_prob_BT, batch.mask_BT)
    gap_BT = torch.stack([(each - gradient_BT).abs() for each in found]).amin(0)
    if float(gap_BT.max()) <= tolerance * largest:
        return Check("gradient", True, "autograd agrees with finite differences, what the loss detaches held fixed")
    row, token = divmod(int(gap_BT.argmax()), gap_BT.shape[1])
    said, expected = float(gradient_BT[row, token]), float(found[0][row, token])
    return Check(
        "gradient",
        False,
        f"autograd gives {said:.4g} at a token where finite differences give {expected:.4g} (A = "
        f"{float(batch.advantages_BT[row, 0]):g}, log-ratio "
        f"{float((batch.log_prob_BT - batch.old_log_prob_BT)[row, token]):+.3f}): look for a backward pass of its own",
    )


def _direction(loss: PolicyLoss, batch: Batch) -> Check:
    gradient_BT, _ = loss.gradient(batch.on_policy())
    if not bool(torch.isfinite(gradient_BT).all()):
        return Check("direction", False, "on policy, the gradient is not finite")
    wrong_BT = batch.mask_BT & (gradient_BT * batch.advantages_BT.sign() > 0)
    if bool(wrong_BT.any()):
        return Check(
            "direction",
            False,
            f"on policy, the gradient of {int(wrong_BT.sum())} of {int(batch.mask_BT.sum())} tokens has the sign of A: "
            "descending it makes good responses less likely; look for a missing minus",
        )
    if not bool(gradient_BT.any()):
        return Check("direction", False, "on policy, the gradient is 0 everywhere: nothing would be learned")
    return Check("direction", True, "on policy, descent makes responses with A > 0 likelier and those with A < 0 less")
