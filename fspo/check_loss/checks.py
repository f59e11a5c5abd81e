"""Checks that any policy loss must pass in distributed training. It is called as verl calls it. Defined here."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from fspo.check_loss.call import Batch, LossError, PolicyLoss, synthetic_batch
from fspo.check_loss.finite_differences import finite_differences
from fspo.check_loss.length_bias import TOKENS, sides, weight_and_bound

#: Tolerances for a loss that computes in float32, relative to the largest entry of the gradient: between two calls, and
#: between autograd and finite differences.
_TOLERANCE: Final = 1e-5
_DIFFERENCES: Final = 2e-3
#: Lengths whose gradient per token follows a power of the length, if there is one, and lengths that must follow it.
#: POWER is the tolerance. bfloat16 has no odd numbers above 256, float16 none above 2,048, and int8 ends at 127.
_SHORT: Final = (5, 17, 67)
_LONG: Final = (131, 333, 2051)
_POWER: Final = 2e-4
#: What to change in a loss that fails a check of several variants.
_REMEDIES: Final = {
    "repeats": "keep no state between calls, and draw no random numbers",
    "padding": "apply torch.where(response_mask, ..., 0.0) before each sum, and divide by no width or number of rows",
    "gaps": "count tokens by response_mask.sum(-1) and response_mask.cumsum(-1), not by columns",
    "weights": "multiply the loss of each token by rollout_is_weights, once",
    "micro-batches": "divide by config.global_batch_info's batch_num_tokens or global_batch_size; compare no responses",
    "order": "do the same to each response, wherever it stands",
    "ranks": "multiply by config.global_batch_info's dp_size, once; compare no responses",
}


class Check(NamedTuple):
    """The result of one check: its name, whether the loss passes, and the reason in words."""

    name: str
    passed: bool
    says: str


def _mini_batch() -> Batch:
    """Twelve responses of 1 to 40 tokens, of both signs of A and A = 0, some far off policy, with masked tokens."""
    length = [40, 3, 17, 1, 28, 9, 33, 6, 22, 12, 2, 38]
    sigma = [0.01, 0.3, 0.03, 0.2, 0.1, 2.0, 0.05, 0.02, 0.2, 1.0, 0.4, 0.03]  # the largest where A > 0
    advantage = [3.0, -1.0, 0.7, 1.3, -0.8, 0.5, -2.6, 0.0, 2.1, -0.4, 0.9, -1.2]
    return synthetic_batch(length, sigma, advantage, seed=1, gaps=True)


def checks(loss: PolicyLoss) -> list[Check]:
    """Every check, in the order of the report; LossError if the loss cannot be called at all."""
    results = _checks(loss)
    failed = {check.name for check in results if not check.passed}
    if not failed or "repeats" in failed:  # which no advantage outside the mask makes fail
        return results
    try:
        passed = {check.name for check in _checks(_with_advantages_everywhere(loss)) if check.passed}
    except LossError:
        return results
    cause = "the cause is an advantage that is read outside the mask, as advantages[:, 0] does: take it inside"
    return [
        check._replace(says=f"{check.says.partition('; ')[0]}; {cause}")
        if not check.passed and check.name in passed
        else check
        for check in results
    ]


def _with_advantages_everywhere(loss: PolicyLoss) -> PolicyLoss:
    """The loss, given the advantage of each response at its masked tokens and in its padding, too."""

    def spread(advantages: torch.Tensor, response_mask: torch.Tensor, **others: Any) -> Any:
        count_B1 = response_mask.sum(-1, keepdim=True).clamp(min=1)
        mean_B1 = torch.where(response_mask, advantages, 0.0).sum(-1, keepdim=True) / count_B1
        return loss.function(advantages=mean_B1.expand_as(advantages).clone(), response_mask=response_mask, **others)

    return PolicyLoss(spread, loss.config, loss.loss_agg_mode)


def _checks(loss: PolicyLoss) -> list[Check]:
    batch = _mini_batch()
    first = loss.gradient(batch.map(torch.clone))  # what a call changes in place is not changed by a second one
    if not all(torch.as_tensor(x).isfinite().all() for x in first):
        return [Check("direction", False, "the loss or its gradient is not finite: look for a division by 0")]
    return [
        _repeats(loss, batch, first),
        _compared("padding", "no value outside the mask matters", first, _padding(loss, batch)),
        _compared("gaps", "masked tokens inside a response, a tool's, count nowhere", first, _gaps(loss, batch)),
        _weights(loss, batch, first),
        _compared("micro-batches", "the gradient does not depend on the split", first, _splits(loss, batch)),
        _compared("order", "the order of the responses does not matter", first, _orders(loss, batch)),
        _compared("ranks", "two ranks give the gradient of one", first, _ranks(loss, batch)),
        _differences(loss),
        _direction(loss, batch),
        _sides(loss),
        _ends(loss),
        _advantages(loss, batch),
        _lengths(loss),
    ]


Outcome = tuple[torch.Tensor, float]
#: A change and its outcome. A third entry is the outcome that it must have; without one, that of the unchanged batch.
Variants = Iterator[tuple[str, Outcome] | tuple[str, Outcome, Outcome]]


def _change(first: Outcome, other: Outcome) -> tuple[float, str]:
    """Distance between two outcomes as a multiple of the tolerance, and the same in words."""
    (gradient_BT, value), (other_BT, other_value) = first, other
    largest = float(gradient_BT.abs().max()) or 1.0
    gap = float((gradient_BT - other_BT).abs().max()) / largest
    value_gap = abs(value - other_value) / max(1.0, abs(value))
    if not (math.isfinite(gap) and math.isfinite(value_gap)):
        return math.inf, "the gradient or the loss is no longer finite"
    if gap >= value_gap:
        return gap / _TOLERANCE, f"the gradient changes by {gap:.2g} times its largest entry"
    return value_gap / _TOLERANCE, f"the loss changes from {value:.6g} to {other_value:.6g}"


def _compared(name: str, good: str, first: Outcome, others: Variants) -> Check:
    """The worst of several variants that must give the same outcome."""
    worst, says = 1.0, good
    try:
        for what, other, *expected in others:
            change, words = _change(expected[0] if expected else first, other)
            if change > worst:
                worst, says = change, f"{what}: {words}; {_REMEDIES[name]}"
    except LossError as error:
        return Check(name, False, str(error))
    return Check(name, worst <= 1.0, says)


def _repeats(loss: PolicyLoss, batch: Batch, first: Outcome) -> Check:
    before = batch.map(torch.clone)
    again = loss.gradient(batch, seed=1)
    names = [field.name for field in dataclasses.fields(Batch)]
    if changed := [name for name in names if not torch.equal(getattr(batch, name), getattr(before, name))]:
        return Check("repeats", False, f"a call changes {', '.join(changed).replace('_BT', '')} in place: clone it")
    return _compared("repeats", "two calls agree and leave their inputs alone", first, iter([("a second call", again)]))


def _padding(loss: PolicyLoss, batch: Batch) -> Variants:
    (rows, width), pad = batch.mask_BT.shape, torch.nn.functional.pad
    for what, padded in (
        ("5 columns of padding", batch.map(lambda x: pad(x, (0, 5)))),
        ("3 rows without a token", batch.map(lambda x: pad(x, (0, 0, 0, 3)))),
        ("other values in the padding", batch.padding(-3.0, -2.0, -4.0)),
    ):
        gradient_BT, value = loss.gradient(padded)
        outside = gradient_BT.masked_fill(padded.mask_BT, 0.0).abs().max()  # a gradient of padding is a change too
        yield what, (gradient_BT[:rows, :width] + outside, value)
    empty = dataclasses.replace(batch, mask_BT=torch.zeros_like(batch.mask_BT)).padding()
    yield "a micro-batch without a token", loss.gradient(empty, whole=batch), (0.0 * batch.log_prob_BT, 0.0)


def _gaps(loss: PolicyLoss, batch: Batch) -> Variants:
    rows, width = batch.mask_BT.shape
    to_front_BT = (~batch.mask_BT).byte().argsort(stable=True).argsort()
    in_place_BT = torch.arange(width).expand(rows, width)
    closed, spread, wide = (
        (gradient_BT.gather(1, to_BT), value)
        for to_BT, columns in ((to_front_BT, width), (2 * in_place_BT + 1, 2 * width), (in_place_BT, 2 * width))
        for gradient_BT, value in (loss.gradient(batch.map(partial(_moved, to_BT, columns))),)
    )
    yield "masked tokens taken out from between the others", closed
    yield "a masked token put in before each", spread, wide


def _moved(to_BT: torch.Tensor, columns: int, x_BT: torch.Tensor) -> torch.Tensor:
    return x_BT.new_zeros(len(x_BT), columns).scatter(1, to_BT, x_BT)


def _weights(loss: PolicyLoss, batch: Batch, first: Outcome) -> Check:
    weight_BT = torch.linspace(0.5, 1.5, len(batch.mask_BT), dtype=torch.float64)[:, None] * batch.mask_BT
    says = "rollout_is_weights scale the gradient of their response"
    first_BT = batch.mask_BT & (batch.mask_BT.cumsum(-1) == 1)
    shifted_BT = batch.old_log_prob_BT - torch.where(first_BT, weight_BT, 1.0).log()

    def variants() -> Variants:
        nonlocal says
        yield "rollout_is_weights of 1", loss.gradient(batch, weight_BT=batch.mask_BT.double())
        gradient_BT, value = loss.gradient(batch, weight_BT=weight_BT)
        in_ratio_BT, _ = loss.gradient(dataclasses.replace(batch, old_log_prob_BT=shifted_BT))
        if torch.equal(gradient_BT, first[0]):
            says = "ignores rollout_is_weights: a correction of the rollout does not reach this loss"
        elif torch.allclose(gradient_BT, in_ratio_BT, 1e-4, 1e-9):
            says = "rollout_is_weights are a factor of the ratio of their response"
        else:
            both = (gradient_BT * batch.mask_BT, value), (first[0] * weight_BT, value)
            yield "each response by its rollout_is_weights, beside such weights inside", *both

    check = _compared("weights", "", first, variants())
    return check._replace(says=says) if check.passed else check


def _parts(loss: PolicyLoss, batch: Batch, sizes: Sequence[int], dp_size: int = 1) -> Outcome:
    ends = np.cumsum([0, *sizes]).tolist()
    parts = [loss.gradient(batch.map(itemgetter(slice(*pair))), dp_size, batch) for pair in itertools.pairwise(ends)]
    return torch.cat([gradient_BT for gradient_BT, _ in parts]) / dp_size, sum(value for _, value in parts) / dp_size


def _splits(loss: PolicyLoss, batch: Batch) -> Variants:
    large = dataclasses.replace(batch, advantages_BT=1e3 * batch.advantages_BT)  # bounds on advantages act
    for what, whole in (("", batch), (" with A times 1,000", large)):
        expected = loss.gradient(whole.map(torch.clone))
        for sizes in ((6, 6), (1, 7, 4), (1,) * 12):
            name = f"micro-batches of {', '.join(map(str, sizes[:3]))}{', ...' * (len(sizes) > 3)}{what}"
            yield name, _parts(loss, whole, sizes), expected


def _ranks(loss: PolicyLoss, batch: Batch) -> Variants:
    for dp_size in (2, 4):
        yield f"{dp_size} ranks", _parts(loss, batch, (12 // dp_size,) * dp_size, dp_size)


def _orders(loss: PolicyLoss, batch: Batch) -> Variants:
    for name, order in (("reverse", range(11, -1, -1)), ("other", (7, 2, 11, 0, 5, 9, 3, 8, 1, 10, 6, 4))):
        order_B = torch.tensor(order)
        gradient_BT, value = loss.gradient(batch.map(itemgetter(order_B)))
        yield f"the {name} order", (gradient_BT[order_B.argsort()], value)


def _differences(loss: PolicyLoss) -> Check:
    length, sigma = [6, 1, 8, 3, 5, 7], [0.02, 0.1, 0.05, 0.6, 0.3, 0.002]
    batch = synthetic_batch(length, sigma, [1.0, -1.0, 0.8, -0.5, 1.5, -1.1], seed=2)

    def value(log_prob_BT: torch.Tensor) -> torch.Tensor:
        return loss.value(dataclasses.replace(batch, log_prob_BT=log_prob_BT))

    gradient_BT, _ = loss.gradient(batch)
    largest = float(gradient_BT[batch.mask_BT].abs().max()) or 1.0
    with torch.compiler.set_stance("force_eager"):  # compiled code detaches more than the loss does
        fine_BT, coarse_BT = finite_differences(value, batch.log_prob_BT, batch.mask_BT)
    # Rounding of a value in float32 spoils the fine step, and a clip that begins to act there the coarse one.
    nearer_BT = torch.where((fine_BT - gradient_BT).abs() < (coarse_BT - gradient_BT).abs(), fine_BT, coarse_BT)
    gap_BT = (nearer_BT - gradient_BT).abs().masked_fill(~batch.mask_BT, 0.0)
    if float(gap_BT.max()) <= _DIFFERENCES * largest:
        return Check("gradient", True, "autograd agrees with finite differences, what the loss detaches held fixed")
    autograds, expected = (float(x.flatten()[gap_BT.argmax()]) for x in (gradient_BT, nearer_BT))
    says = f"autograd gives {autograds:.4g} at a token where finite differences give {expected:.4g}"
    return Check("gradient", False, f"{says.replace('nan', 'no number')}: look for a backward pass of its own")


def _direction(loss: PolicyLoss, batch: Batch) -> Check:
    gradient_BT, _ = loss.gradient(batch.on_policy())
    if not bool(torch.isfinite(gradient_BT).all()):
        return Check("direction", False, "on policy, the gradient is not finite: look for a division by 0")
    wrong_BT = batch.mask_BT & (gradient_BT * batch.advantages_BT.sign() > 0)
    if bool(wrong_BT.any()):
        tokens = f"{int(wrong_BT.sum())} of {int(batch.mask_BT.sum())} tokens"
        says = f"on policy, the gradient of {tokens} has the sign of A: descending it makes good responses less likely"
        return Check("direction", False, f"{says}; look for a missing minus")
    if not bool(gradient_BT.any()):
        return Check("direction", False, "on policy, the gradient is 0 everywhere: look for a clip that acts there")
    words = []
    for name, does, sign in (("A > 0", "likelier", 1), ("A < 0", "less likely", -1)):
        of_sign_BT = batch.mask_BT & (batch.advantages_BT * sign > 0)
        still, total = int((of_sign_BT & (gradient_BT == 0)).sum()), int(of_sign_BT.sum())
        part = f"get {does}" + f" ({still} of their {total} tokens get no gradient)" * (still > 0)
        words.append(f"responses with {name} {'get no gradient' if still == total else part}")
    return Check("direction", True, f"on policy, {words[0]}; {words[1]}")


def _sides(loss: PolicyLoss) -> Check:
    smallest = sides(loss, weight := weight_and_bound(loss)[0])
    limits = (f"from {d:.2g}".replace("from inf", "never").replace("from nan", "all") for d in smallest.values())
    words = ", ".join(map(" ".join, zip(smallest, limits, strict=True)))
    says = f"token log-ratios that lose {'half their weight' if weight else 'their gradient'}: {words}"
    good_up, good_down, bad_up, bad_down = smallest.values()
    # A mask that is the same for both signs of A may be narrower below.
    if good_down < math.inf and (good_up == math.inf or 2 * good_down < min(good_up, bad_down)):
        says += ": the clip acts where a good response has become less likely"
        return Check("sides", False, f"{says}; take the larger of -A r and -A clip(r)")
    note = " (PPO's clip acts below for A < 0)" * (bad_up < math.inf == bad_down)
    return Check("sides", True, says + note)


def _ends(loss: PolicyLoss) -> Check:
    """Whether the first and the last token of a response count like the middle, on policy and in the weight.

    Not judged where the middle tokens differ, as in a loss that discounts by position.
    """
    remedy = "look for an index that is off by one, or a sum that takes it twice or not at all"
    length = (9, 12, 17, 30)
    batch = synthetic_batch(length, (0.01,) * 4, (1.0, -1.0, 0.6, -2.0), seed=5).on_policy()
    rows = [row[:n] for row, n in zip(loss.gradient(batch)[0], length, strict=True)]
    middles = [row[n // 4 : n - n // 4] for row, n in zip(rows, length, strict=True)]
    rows = [row / middle.mean() for row, middle in zip(rows, middles, strict=True) if bool(middle.any())]
    if all(float((middle / middle.mean() - 1).abs().max()) < 0.01 for middle in middles if bool(middle.any())):
        for name, index in (("first", 0), ("last", -1)):
            times = [float(row[index]) for row in rows]
            if times and min(abs(x - 1) for x in times) > 0.02:
                says = (
                    f"on policy, the {name} token of a response counts {np.mean(times):.3g} times as much as the middle"
                )
                return Check("ends", False, f"{says}: {remedy}")
    inner = weight_and_bound(loss)
    for name, index in (("first", 0), ("last", TOKENS - 1)):
        if inner[0] and (outer := weight_and_bound(loss, (index, 8))) != inner:
            weights = " and ".join(str(weight or "another").replace("_", "-") for weight, _ in (outer, inner))
            says = f"the {name} token of a response counts otherwise in the importance weight ({weights} weight)"
            return Check("ends", False, f"{says}: {remedy}")
    return Check("ends", True, "the first and the last token of a response count like the middle")


def _advantages(loss: PolicyLoss, batch: Batch) -> Check:
    """Whether the gradient grows like A, where A is so small that no bound on it acts."""
    base = batch.on_policy()

    def gradient(scale: float) -> torch.Tensor:
        return loss.gradient(dataclasses.replace(base, advantages_BT=scale * base.advantages_BT))[0]

    zero_BT = gradient(0.0)
    small_B, large_B = ((gradient(scale) - zero_BT).abs().amax(-1) for scale in (0.01, 0.1))
    used_B = (small_B > 0) & (large_B > 0)
    for sign, of_sign_B in (("A > 0", (base.advantages_BT > 0).any(-1)), ("A < 0", (base.advantages_BT < 0).any(-1))):
        times_B = (large_B / small_B)[used_B & of_sign_B]
        if len(times_B) and not bool(((times_B > 8) & (times_B < 12.5)).all()):
            says = f"where {sign}, 10 times the advantage is {float(times_B.median()):.3g} times the gradient"
            return Check("advantages", False, f"{says}: multiply by A once, as in -A * ratio")
    return Check("advantages", True, "the gradient grows like A where A is small")


def _lengths(loss: PolicyLoss) -> Check:
    """Whether long responses follow the power of the length that short ones follow."""
    length = torch.tensor(_SHORT + _LONG)
    mask_BT = torch.arange(max(_LONG)) < length[:, None]
    # All tokens alike, and the largest entry: a loss may weigh tokens by their probability, or choose some.
    log_prob_BT = torch.full(mask_BT.shape, -0.5, dtype=torch.float64)
    batch = Batch(log_prob_BT, log_prob_BT, torch.ones_like(log_prob_BT), mask_BT).padding()
    largest_B = loss.gradient(batch)[0].abs().amax(-1)
    if not bool((largest_B > 0).all()):
        return Check("lengths", True, "not judged: some responses have no gradient")
    log_length, log_largest = length.double().log().numpy(), largest_B.double().log().numpy()
    exponent, offset = np.polyfit(log_length[:3], log_largest[:3], 1)
    power = f"L^{round(exponent, 2) + 0.0:g}"
    times = np.exp(log_largest - exponent * log_length - offset)
    if np.abs(times[:3] - 1).max() > _POWER / 2:
        return Check("lengths", True, "not judged: the gradient per token follows no power of the length")
    worst = int(np.abs(times - 1).argmax())
    if abs(times[worst] - 1) > _POWER:
        says = f"on policy, a token of a response of {length[worst]} tokens counts {times[worst]:.4g} times as much as"
        remedy = "count lengths in int64 or float32, not in bfloat16 or 8 bits, and do not cap them"
        return Check("lengths", False, f"{says} the power {power} of shorter ones has it: {remedy}")
    return Check("lengths", True, f"the gradient per token follows {power} to {length[-1]} tokens")
