"""Is a loss the one that it is called: its gradient beside that of a named loss, on the same tensors. Defined here.

For twelve responses of 1 to 333 tokens the log-ratio of a token grows from 0 to 2.4 nats, up for half of each sign of A
and down for the others. With ``G_i`` and ``H_i`` the gradients of response i of the loss and of the named one, the
factor is ``G_i = k L_i**a H_i`` on policy, with a in EXPONENTS. It holds *up to* the largest log-ratio below which no
response differs from it by more than TOLERANCE of its largest entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from fspo.check_loss.call import Batch, LossError, PolicyLoss
from fspo.check_loss.length_bias import normalisation, sides, weight_and_bound

#: Rounding of a loss that sums in float32 stays well below.
TOLERANCE: Final = 1e-3
EXPONENTS: Final = {0.0: "", 1.0: "L", -1.0: "1/L", 0.5: "sqrt(L)", -0.5: "1/sqrt(L)"}
#: Mean log-ratios of the tokens of a response, nats; GSPO's clip acts from 3e-4.
_MOVES: Final = tuple(2.4 * 2 ** (-k / 4) for k in range(59, -1, -1))
#: Largest |S|, nats: below the log-ratio clamps of losses.
_LARGEST: Final = 8.0
#: The longest shows lengths that are counted in bfloat16 or int8.
_LENGTHS: Final = (333, 3, 17, 1, 28, 9, 33, 6, 22, 12, 2, 38)
_ADVANTAGES: Final = (3.0, -1.0, 0.7, -1.3, -0.8, 0.5, -2.6, 0.0, 2.1, -0.4, 0.9, 1.2)
_UP: Final = (1, 1, -1, -1, 1, 1, -1, 1, -1, -1, 1, 1)
_WIDTH: Final = 340


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the gradient of a loss is beside that of the named loss: in words, and in what the two differ."""

    equal: bool
    verdict: str
    differences: tuple[str, ...] = ()

    def text(self) -> str:
        """For the terminal."""
        return "\n  ".join([self.verdict, *self.differences])


def _batch(move: float) -> Batch:
    """The responses at a mean log-ratio of a token, nats: about ``move``, and less where S would be too large."""
    rng = np.random.default_rng(4)
    shape = (len(_LENGTHS), _WIDTH)
    length_B, up_B = torch.tensor(_LENGTHS), torch.tensor(_UP, dtype=torch.float64)
    mask_BT = torch.arange(_WIDTH) < length_B[:, None]
    # Tokens of one response go both ways, so that a mean of ratios is no ratio of means.
    each_BT = torch.from_numpy(rng.uniform(-1, 3, shape)).masked_fill(~mask_BT, 0.0)
    mean_B = torch.from_numpy(2 ** rng.uniform(-0.12, 0.12, shape[0]))
    each_BT = (each_BT + (mean_B - each_BT.sum(-1) / length_B)[:, None]).masked_fill(~mask_BT, 0.0)
    move_B = torch.minimum(torch.tensor(move), _LARGEST / each_BT.sum(-1))
    d_BT = each_BT * (up_B * move_B)[:, None]
    old_BT = torch.from_numpy(rng.uniform(-3, -0.05, shape)) - d_BT.clamp(min=0)
    advantages_BT = torch.tensor(_ADVANTAGES, dtype=torch.float64)[:, None].expand(shape)
    return Batch(old_BT + d_BT, old_BT, advantages_BT, mask_BT).padding()


def _without(batch: Batch, masked_BT: torch.Tensor) -> Batch:
    return dataclasses.replace(batch, mask_BT=batch.mask_BT & ~masked_BT).padding()


def _situations(batch: Batch) -> Iterator[tuple[str, Batch, int, Batch | None]]:
    """Batches on which two losses may differ that agree on an ordinary one, with dp_size and the whole mini-batch."""
    column_T = torch.arange(_WIDTH)
    long_B1 = batch.mask_BT.sum(-1, keepdim=True) > 2
    yield "in a micro-batch of a larger mini-batch", batch.map(lambda x: x[:7]), 1, batch
    yield "on two ranks", batch, 2, None
    yield "with other values in the padding", batch.padding(-3.0, -2.0, -4.0), 1, None
    empty = dataclasses.replace(batch, mask_BT=batch.mask_BT & (torch.arange(len(_LENGTHS)) % 4 < 3)[:, None])
    yield "with rows without a token", empty.padding(), 1, None
    yield "with masked tokens inside a response", _without(batch, long_B1 & (column_T % 3 == 1)), 1, None
    yield "where a mask leaves out the first token of a response", _without(batch, long_B1 & (column_T == 0)), 1, None


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two gradients, [B, T], and the length of each response."""

    mine_BT: torch.Tensor
    like_BT: torch.Tensor
    length_B: torch.Tensor

    @classmethod
    def of(
        cls, mine: PolicyLoss, like: PolicyLoss, batch: Batch, dp_size: int = 1, whole: Batch | None = None
    ) -> _Pair:
        """Each on tensors of its own: a loss may change them."""
        mine_BT, like_BT = (loss.gradient(batch.map(torch.clone), dp_size, whole)[0].double() for loss in (mine, like))
        return cls(mine_BT, like_BT, batch.mask_BT.sum(-1).double())

    def factor(self) -> tuple[float, float] | None:
        """(k, a) of ``G_i = k L_i**a H_i``, or None."""
        if not bool((self.mine_BT.isfinite() & self.like_BT.isfinite()).all()):
            return None
        used_B = (self.like_BT != 0).any(-1)
        dot_B, square_B = (self.mine_BT * self.like_BT).sum(-1)[used_B], self.like_BT.square().sum(-1)[used_B]
        for exponent in EXPONENTS:
            k = float((dot_B / square_B / self.length_B[used_B] ** exponent).median())
            if k and self.agrees(k, exponent):
                return k, exponent
        return None

    def agrees(self, k: float, exponent: float) -> bool:
        """Whether the factor holds for every response."""
        expected_BT = k * self.length_B.clamp(min=1)[:, None] ** exponent * self.like_BT
        # A response without a gradient must have none, but for rounding of the others.
        limit_B = torch.maximum(expected_BT.abs().amax(-1), 1e-9 * expected_BT.abs().max())
        return bool(((self.mine_BT - expected_BT).abs().amax(-1) <= TOLERANCE * limit_B).all())

    def cosine(self) -> float:
        """Of the gradients of all responses as one vector; 0 if one of them is 0 or not finite."""
        cosine = float(torch.nn.functional.cosine_similarity(self.mine_BT.flatten(), self.like_BT.flatten(), 0, 1e-300))
        return cosine if cosine == cosine else 0.0

    def size(self) -> float:
        """Norm of the gradient over that of the named loss."""
        return float(self.mine_BT.norm() / self.like_BT.norm())


def compare(mine: PolicyLoss, like: PolicyLoss) -> Comparison:
    """What the first loss is beside the second; LossError if the two cannot be compared.

    They cannot if one of them raises, or has no finite gradient on policy, or if the second one has none at all.
    """
    on_policy = _Pair.of(mine, like, _batch(0.0))
    for name, gradient_BT in (("the loss", on_policy.mine_BT), ("the named loss", on_policy.like_BT)):
        if not bool(gradient_BT.isfinite().all()):
            raise LossError(f"not comparable: on policy the gradient of {name} is not finite: run it without --like")
    if not bool(on_policy.like_BT.any()):
        raise LossError("not comparable: on policy the named loss has no gradient: name another one")
    if not bool(on_policy.mine_BT.any()):
        return Comparison(False, "no gradient on policy, where the named loss has one")
    factor = on_policy.factor()
    moved = [(move, _Pair.of(mine, like, _batch(move))) for move in _MOVES]
    if factor is None:
        ends = _range([pair.size() for _, pair in moved])
        says = f"another loss: on policy cosine {on_policy.cosine():.2f}, {ends} times the gradient"
        return Comparison(False, says, _differences(mine, like))
    agreeing = [pair.agrees(*factor) for _, pair in moved]
    if not all(agreeing):
        first = agreeing.index(False)
        upto = f"up to log-ratio {moved[first - 1][0]:.2g}" if first else "on policy only"
        beyond = moved[first:]
        move, worst = min(beyond, key=lambda one: one[1].cosine())
        ends = _range([pair.size() for _, pair in beyond])
        says = (
            f"{_in_words(*factor)} {upto}, then cosine {worst.cosine():.2f} (at {move:.2g}), {ends} times the gradient"
        )
        return Comparison(False, says, _differences(mine, like))
    for move in (0.0, 3e-3, 0.3):
        for situation, batch, dp_size, whole in _situations(_batch(move)):
            if not _agree_too(mine, like, factor, batch, dp_size, whole):
                return Comparison(False, f"{_in_words(*factor)}, but not {situation}")
    return Comparison(_in_words(*factor) == "equal", _in_words(*factor))


def _agree_too(
    mine: PolicyLoss, like: PolicyLoss, factor: tuple[float, float], batch: Batch, dp_size: int, whole: Batch | None
) -> bool:
    k, exponent = factor
    try:
        pair = _Pair.of(mine, like, batch, dp_size, whole)
        if exponent and not torch.equal(batch.mask_BT, _batch(0.0).mask_BT) and whole is None:
            other = pair.factor()  # a mean over tokens beside one over responses: k is that of the lengths
            return other is not None and other[1] == exponent
        return pair.agrees(k, exponent)
    except LossError:
        return False


def _in_words(k: float, exponent: float) -> str:
    """Such as ``equal``, ``2 times``, ``L times`` or ``0.0569 L times``."""
    same = abs(k - 1) <= TOLERANCE
    if not exponent:
        return "equal" if same else f"{k:.4g} times"
    by_length = " (by length; L: the tokens of a response)"
    return f"{'' if same else f'{k:.4g} '}{EXPONENTS[exponent]} times{by_length}"


def _range(sizes: list[float]) -> str:
    known = [size for size in sizes if size < float("inf")]
    return (
        " to ".join(dict.fromkeys(f"{size:.2g}" for size in (min(known), max(known)))) if known else "infinitely many"
    )


def _differences(mine: PolicyLoss, like: PolicyLoss) -> tuple[str, ...]:
    """What tells the two losses apart, a line each: weight, normalisation, and where the clip acts."""
    weights = [weight_and_bound(loss) for loss in (mine, like)]
    lines = [("weight near the old policy", [f"{weight or 'another'}{bound}" for weight, bound in weights])]
    exponents = (normalisation(loss)[1] for loss in (mine, like))
    lines.append(("gradient per token on policy", [f"L^{a:.2f}".replace("L^nan", "no power of L") for a in exponents]))
    clips = [sides(loss, weight) for loss, (weight, _) in zip((mine, like), weights, strict=True)]
    words = (("from inf", "never"), ("from nan", "everywhere"))
    for side in clips[0]:
        values = [f"from {clip[side]:.2g}" for clip in clips]
        for old, new in words:
            values = [value.replace(old, new) for value in values]
        lines.append((f"clip at {side}", values))
    return tuple(f"{name}: {ours} in place of {theirs}" for name, (ours, theirs) in lines if ours != theirs)
