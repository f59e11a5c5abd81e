"""Seven checks that any policy loss must pass in distributed training. It is called as verl calls it. Defined here."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

import torch

from fspo.check_loss.by_length import place, sides, weight_and_bound
from fspo.check_loss.call import Batch, LossError, PolicyLoss, synthetic_batch

#: Between two calls of a loss that computes in float32, relative to the largest entry of the gradient.
_TOLERANCE: Final = 1e-5
#: What to change in a loss that fails a check.
_REMEDIES: Final = {
    "repeats": "keep no state between calls, and draw no random numbers",
    "padding": "apply torch.where(response_mask, ..., 0.0) before each sum, divide by no width or number of rows, and "
    "take A inside the mask",
    "gaps": "count tokens by response_mask.sum(-1) and response_mask.cumsum(-1), not by columns, and take A inside the "
    "mask",
    "weights": "multiply the loss of each token by rollout_is_weights, once",
    "micro-batches": "divide by config.global_batch_info's batch_num_tokens or global_batch_size and multiply by its "
    "dp_size, once; compare no responses. If the caller averages a mean over the rows, as TRL does: --average caller",
}

Outcome = tuple[torch.Tensor, float]
#: A change, its outcome, and the outcome that it must have: the gradient and the loss.
Variants = Iterator[tuple[str, Outcome, Outcome]]


class Check(NamedTuple):
    """The result of one check: its name, whether the loss passes, and the reason in words."""

    name: str
    passed: bool
    says: str


def mini_batch() -> Batch:
    """Twelve responses of 1 to 40 tokens, of both signs of A and A = 0, some far off policy, with masked tokens."""
    length = [40, 3, 17, 1, 28, 9, 33, 6, 22, 12, 2, 38]
    sigma = [0.01, 0.3, 0.03, 0.2, 0.1, 2.0, 0.05, 0.02, 0.2, 1.0, 0.4, 0.03]
    advantage = [3.0, -1.0, 0.7, 1.3, -0.8, 0.5, -2.6, 0.0, 2.1, -0.4, 0.9, -1.2]
    return synthetic_batch(length, sigma, advantage, seed=16, gaps=True)


def checks(loss: PolicyLoss) -> list[Check]:
    """Every check, in the order of the report; LossError if the loss cannot be called at all."""
    batch = mini_batch()
    # Of copies: what a call changes in place is not changed by a second one.
    first, on_policy = (loss.gradient(x.map(torch.clone)) for x in (batch, batch.on_policy()))
    if not all(torch.as_tensor(x).isfinite().all() for x in (*first, *on_policy)):
        return [Check("direction", False, "the loss or its gradient is not finite: look for a division by 0")]
    return [
        _repeats(loss, batch, first),
        _compared("padding", "no value outside the mask matters", _padding(loss, batch)),
        _compared("gaps", "masked tokens inside a response, a tool's, count nowhere", _gaps(loss, batch)),
        _weights(loss, batch, first),
        _compared("micro-batches", "the gradient does not depend on the split or the ranks", _splits(loss, batch)),
        _direction(on_policy[0], batch),
        _sides(loss),
    ]


def _compared(name: str, good: str, variants: Variants) -> Check:
    """Variants beside the outcomes that they must have, up to the first that differs."""
    try:
        for what, (gradient_BT, value), (expected_BT, expected) in variants:
            gap = float((gradient_BT - expected_BT).abs().max()) / (float(expected_BT.abs().max()) or 1.0)
            value_gap = abs(value - expected) / max(1.0, abs(expected))
            if gap <= _TOLERANCE and value_gap <= _TOLERANCE:
                continue
            words = "the gradient or the loss is no longer finite"
            if math.isfinite(gap + value_gap):
                words = f"the loss changes from {expected:.6g} to {value:.6g}"
                if gap > _TOLERANCE:
                    words = f"the gradient changes by {gap:.2g} times its largest entry"
            return Check(name, False, f"{what}: {words}; {_REMEDIES[name]}")
    except LossError as error:
        return Check(name, False, str(error))
    return Check(name, True, good)


def _repeats(loss: PolicyLoss, batch: Batch, first: Outcome) -> Check:
    before, again = batch.map(torch.clone), loss.gradient(batch, seed=1)
    for field in dataclasses.fields(Batch):
        if not torch.equal(getattr(batch, field.name), getattr(before, field.name)):
            what = field.name.removesuffix("_BT")
            return Check("repeats", False, f"a call changes {what} in place: clone it")
    return _compared("repeats", "two calls agree and leave their inputs alone", iter([("a second call", again, first)]))


def _padding(loss: PolicyLoss, batch: Batch) -> Variants:
    (rows, width), pad = batch.mask_BT.shape, torch.nn.functional.pad
    expected = loss.gradient(batch.map(torch.clone))
    for what, padded in (
        ("5 columns of padding", batch.map(lambda x: pad(x, (0, 5)))),
        ("3 rows without a token", batch.map(lambda x: pad(x, (0, 0, 0, 3)))),
        ("other values in the padding", batch.padding(-3.0, -2.0, -4.0)),
    ):
        gradient_BT, value = loss.gradient(padded)
        outside = gradient_BT.masked_fill(padded.mask_BT, 0.0).abs().max()  # a gradient of padding is a change too
        yield what, (gradient_BT[:rows, :width] + outside, value), expected
    empty = dataclasses.replace(batch, mask_BT=torch.zeros_like(batch.mask_BT)).padding()
    yield "a micro-batch without a token", loss.gradient(empty, whole=batch), (0.0 * batch.log_prob_BT, 0.0)


def _gaps(loss: PolicyLoss, batch: Batch) -> Variants:
    to_front_BT = (~batch.mask_BT).byte().argsort(stable=True).argsort()
    expected = loss.gradient(batch.map(torch.clone))
    gradient_BT, value = loss.gradient(batch.map(lambda x: torch.zeros_like(x).scatter(1, to_front_BT, x)))
    yield "masked tokens taken out from between the others", (gradient_BT.gather(1, to_front_BT), value), expected


def _weights(loss: PolicyLoss, batch: Batch, first: Outcome) -> Check:
    weight_BT = torch.linspace(0.5, 1.5, len(batch.mask_BT), dtype=torch.float64)[:, None] * batch.mask_BT
    first_BT = batch.mask_BT & (batch.mask_BT.cumsum(-1) == 1)
    shifted_BT = batch.old_log_prob_BT - torch.where(first_BT, weight_BT, 1.0).log()
    in_ratio = dataclasses.replace(batch, old_log_prob_BT=shifted_BT)
    try:
        gradient_BT, value = loss.gradient(batch, weight_BT=weight_BT)
        if torch.equal(gradient_BT, first[0]):
            says = "ignores rollout_is_weights: a correction of the rollout does not reach this loss"
            return Check("weights", True, says)
        if torch.allclose(gradient_BT, loss.gradient(in_ratio)[0], 1e-4, 1e-9):
            return Check("weights", True, "rollout_is_weights are a factor of the ratio of their response")
    except LossError as error:
        return Check("weights", False, str(error))
    both = (gradient_BT * batch.mask_BT, value), (first[0] * weight_BT, value)
    what = "each response by its rollout_is_weights, beside such weights inside"
    return _compared("weights", "rollout_is_weights scale the gradient of their response", iter([(what, *both)]))


def _splits(loss: PolicyLoss, batch: Batch) -> Variants:
    """Micro-batches of one rank, also with advantages on which bounds act, then two and four ranks."""
    large = dataclasses.replace(batch, advantages_BT=1e3 * batch.advantages_BT)
    for what, whole in (("", batch), (" with A times 1,000", large)):
        expected = loss.gradient(whole.map(torch.clone))
        for sizes in ((6, 6), (1, 7, 4), (1,) * 12):
            name = f"micro-batches of {', '.join(map(str, sizes[:3]))}{', ...' * (len(sizes) > 3)}{what}"
            yield name, _parts(loss, whole, sizes), expected
    expected = loss.gradient(batch.map(torch.clone))
    for dp_size in (2, 4):
        yield f"{dp_size} ranks", _parts(loss, batch, (12 // dp_size,) * dp_size, dp_size), expected


def _parts(loss: PolicyLoss, batch: Batch, sizes: Sequence[int], dp_size: int = 1) -> Outcome:
    ends = [0, *itertools.accumulate(sizes)]
    parts = [loss.gradient(batch.map(itemgetter(slice(*pair))), dp_size, batch) for pair in itertools.pairwise(ends)]
    return torch.cat([gradient_BT for gradient_BT, _ in parts]) / dp_size, sum(value for _, value in parts) / dp_size


def _direction(gradient_BT: torch.Tensor, batch: Batch) -> Check:
    signed = (gradient_BT * batch.advantages_BT.sign())[batch.mask_BT]
    wrong, right = int((signed > 0).sum()), int((signed < 0).sum())
    if not bool(gradient_BT.any()):
        return Check("direction", False, "on policy, the gradient is 0 everywhere: look for a clip that acts there")
    if wrong:
        says = f"on policy, the gradient of {wrong} of {wrong + right} tokens has the sign of A, so that descent makes "
        says += "good responses less likely, and bad ones likelier; look for a "
        other = "term that changes the sign of A, such as a mean that is taken off"
        return Check("direction", False, says + ("missing minus" if wrong > right else other))
    says = "on policy, good responses get likelier, and bad ones less likely"
    for sign, words in ((1, ">"), (-1, "<")):
        if not bool(gradient_BT[sign * batch.advantages_BT > 0].any()):
            says += f"; those with A {words} 0 get no gradient"
    return Check("direction", True, says)


def _sides(loss: PolicyLoss) -> Check:
    weight, _ = weight_and_bound(loss)
    smallest = sides(loss, weight)
    words = ", ".join(f"{side} {place(d)}" for side, d in smallest.items())
    says = f"token log-ratios that lose {'half their weight' if weight else 'their gradient'}: {words}"
    good_up, good_down, _, bad_down = smallest.values()
    # A mask that is the same for both signs of A may be narrower below.
    if good_down < math.inf and (good_up == math.inf or 2 * good_down < min(good_up, bad_down)):
        says += ": the clip acts where a good response has become less likely"
        return Check("sides", False, f"{says}; take the larger of -A r and -A clip(r)")
    return Check("sides", True, says)
