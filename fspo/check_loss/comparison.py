"""Is a loss the one that its name says? Its gradient beside that of a named loss, on the same tensors. Defined here.

The tensors are twelve responses of 1 to 333 tokens. Their mean log-ratio per token grows from 0 to about 2.4 nats, or
until |S| is 8. For either sign of A, some responses move up and some move down. Where both losses agree on these, they
are compared with |S| up to 90 (but for responses on which the named loss grows or shrinks by more than exp(8)), with an
A of 30 and one of -30, with rollout weights, and on batches that are split, padded and masked otherwise.

Let ``G_i`` be the gradient of the loss for response i, and ``H_i`` that of the named loss. If on policy
``G_i = k L_i**a H_i`` for all responses, with a in EXPONENTS, then ``k L**a`` is the factor. It holds *up to* the
largest log-ratio below which no response differs from it by more than TOLERANCE of its largest entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from fspo.check_loss.call import Batch, LossError, PolicyLoss
from fspo.check_loss.length_bias import normalisation, sides, weight_and_bound

#: Relative to the largest entry of a response. The rounding of a loss that sums in float32 stays well below.
TOLERANCE: Final = 1e-3
EXPONENTS: Final = {0.0: "", 1.0: "L", -1.0: "1/L", 0.5: "sqrt(L)", -0.5: "1/sqrt(L)"}
#: Mean log-ratios per token, nats. The smallest is below 3e-4, where GSPO's clip begins to act.
_MOVES: Final = tuple(2.4 * 2 ** (-k / 4) for k in range(59, -1, -1))
#: Largest |S|, nats. The log-ratio clamps of losses begin above it.
_LARGEST: Final = 8.0
#: |S| of the longest response, nats, for losses whose weight stays moderate there, such as GSPO's.
_LONG: Final = 90.0
#: The longest one exposes a loss that counts lengths in bfloat16 or int8.
_LENGTHS: Final = (333, 3, 17, 1, 28, 9, 33, 6, 22, 12, 2, 38)
_ADVANTAGES: Final = (3.0, -1.0, 0.7, -1.3, -0.8, 0.5, -2.6, 0.0, 2.1, -0.4, 0.9, 1.2)
_UP: Final = (1, 1, -1, -1, 1, 1, -1, 1, -1, -1, 1, 1)
_WIDTH: Final = 340


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict on a loss beside a named one, and the properties in which the two differ."""

    equal: bool
    verdict: str
    differences: tuple[str, ...] = ()

    def text(self) -> str:
        """Verdict and differences, for the terminal."""
        return "\n  ".join([self.verdict, *self.differences])


def _batch(move: float, largest: float = _LARGEST, turn: int = 1) -> Batch:
    """The twelve responses with a mean log-ratio per token of about ``move`` nats; less where |S| would exceed largest.

    With ``turn`` -1, those that moved up move down.
    """
    rng = np.random.default_rng(4)
    shape = (len(_LENGTHS), _WIDTH)
    length_B, up_B = torch.tensor(_LENGTHS), turn * torch.tensor(_UP, dtype=torch.float64)
    mask_BT = torch.arange(_WIDTH) < length_B[:, None]
    # Log-ratios of one response have both signs, so that the mean of the ratios is far from the ratio of the mean.
    each_BT = torch.from_numpy(rng.uniform(-1, 3, shape)).masked_fill(~mask_BT, 0.0)
    mean_B = torch.from_numpy(2 ** rng.uniform(-0.12, 0.12, shape[0]))
    each_BT = (each_BT + (mean_B - each_BT.sum(-1) / length_B)[:, None]).masked_fill(~mask_BT, 0.0)
    move_B = torch.minimum(torch.tensor(move), largest / each_BT.sum(-1))
    d_BT = each_BT * (up_B * move_B)[:, None]
    old_BT = torch.from_numpy(rng.uniform(-3, -0.05, shape)) - d_BT.clamp(min=0)
    advantages_BT = torch.tensor(_ADVANTAGES, dtype=torch.float64)[:, None].expand(shape)
    return Batch(old_BT + d_BT, old_BT, advantages_BT, mask_BT).padding()


def _without(batch: Batch, masked_BT: torch.Tensor) -> Batch:
    return dataclasses.replace(batch, mask_BT=batch.mask_BT & ~masked_BT).padding()


class _Situation(NamedTuple):
    """A batch that tells apart losses which agree on an ordinary one."""

    name: str
    batch: Batch
    dp_size: int = 1
    whole: Batch | None = None
    weight_BT: torch.Tensor | None = None


def _situations(batch: Batch) -> Iterator[_Situation]:
    column_T, rows = torch.arange(_WIDTH), len(_LENGTHS)
    long_B1 = batch.mask_BT.sum(-1, keepdim=True) > 2
    scale_B1 = torch.ones(rows, 1, dtype=torch.float64)
    scale_B1[0], scale_B1[4] = 10.0, 37.5  # times 3 and -0.8
    large = dataclasses.replace(batch, advantages_BT=scale_B1 * batch.advantages_BT)
    yield _Situation("where one A is 30 and one is -30", large)
    yield _Situation("in a micro-batch of a larger mini-batch", batch.map(lambda x: x[:7]), 1, batch)
    yield _Situation("on two ranks", batch, 2)
    yield _Situation("with other values in the padding", batch.padding(-3.0, -2.0, -4.0))
    empty = dataclasses.replace(batch, mask_BT=batch.mask_BT & (torch.arange(rows) % 4 < 3)[:, None])
    yield _Situation("with rows without a token", empty.padding())
    yield _Situation("with masked tokens inside a response", _without(batch, long_B1 & (column_T % 3 == 1)))
    name = "where a mask leaves out the first token of a response"
    yield _Situation(name, _without(batch, long_B1 & (column_T == 0)))


def _weighed(batch: Batch) -> Iterator[_Situation]:
    """Rollout weights by response, and by token."""
    weight_B1 = torch.linspace(0.5, 1.5, len(_LENGTHS), dtype=torch.float64)[:, None]
    for of, weight_BT in (("response", 0 * batch.log_prob_BT + weight_B1), ("token", batch.old_log_prob_BT / -2)):
        weight_BT = weight_BT.masked_fill(~batch.mask_BT, 0.0)
        yield _Situation(f"with rollout_is_weights by {of}", batch, weight_BT=weight_BT)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Gradients of the loss and of the named loss, [B, T] each, and the length of each response."""

    mine_BT: torch.Tensor
    like_BT: torch.Tensor
    length_B: torch.Tensor

    @classmethod
    def of(cls, mine: PolicyLoss, like: PolicyLoss, situation: Batch | _Situation) -> _Pair:
        """The gradients on a batch."""
        at = _Situation("", situation) if isinstance(situation, Batch) else situation
        return cls(_gradient(mine, at), _gradient(like, at), at.batch.mask_BT.sum(-1).double())

    def factor(self) -> tuple[float, float] | None:
        """(k, a) with ``G_i = k L_i**a H_i`` for all responses; None if there is none, or a gradient is not finite."""
        if not bool((self.mine_BT.isfinite() & self.like_BT.isfinite()).all()):
            return None
        used_B = (self.like_BT != 0).any(-1)
        dot_B, square_B = (self.mine_BT * self.like_BT).sum(-1)[used_B], self.like_BT.square().sum(-1)[used_B]
        for exponent in EXPONENTS:
            k = float((dot_B / square_B / self.length_B[used_B] ** exponent).median())
            if k and self.agrees(k, exponent):
                return k, exponent
        return None

    def of_rows(self, rows_B: torch.Tensor) -> _Pair:
        return _Pair(self.mine_BT[rows_B], self.like_BT[rows_B], self.length_B[rows_B])

    def agrees(self, k: float, exponent: float) -> bool:
        """Whether the factor holds for every response, within TOLERANCE."""
        expected_BT = k * self.length_B.clamp(min=1)[:, None] ** exponent * self.like_BT
        # Where the named loss has no gradient, only rounding relative to the other responses is allowed.
        limit_B = torch.maximum(expected_BT.abs().amax(-1), 1e-9 * expected_BT.abs().max())
        return bool(((self.mine_BT - expected_BT).abs().amax(-1) <= TOLERANCE * limit_B).all())

    def cosine(self) -> float:
        """Cosine of the two gradients, each as one vector over all responses; 0 if one of them is 0 or not finite."""
        cosine = float(torch.nn.functional.cosine_similarity(self.mine_BT.flatten(), self.like_BT.flatten(), 0, 1e-300))
        return cosine if cosine == cosine else 0.0

    def size(self) -> float:
        """Norm of the gradient divided by that of the named loss's."""
        return float(self.mine_BT.norm() / self.like_BT.norm())


def compare(mine: PolicyLoss, like: PolicyLoss) -> Comparison:
    """Compare a loss with a named one.

    Raises:
        LossError: If one of the two raises, if one has no finite gradient on policy, or if the named one has none at
            all there.
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
    own, theirs_B = _in_words(*factor), on_policy.like_BT.abs().amax(-1)
    for move, turn in ((0.03, 1), (0.03, -1), (0.3, 1), (0.3, -1)):
        pair = _Pair.of(mine, like, _batch(move, _LONG, turn))
        change_B = (pair.like_BT.abs().amax(-1) / theirs_B).log()
        moderate_B = (change_B.abs() < _LARGEST) | ((pair.like_BT == 0).all(-1) & (theirs_B > 0))
        if not pair.of_rows(moderate_B).agrees(*factor):
            return Comparison(False, f"{own}, but not where |S| exceeds {_LARGEST:g}")
    for move in (0.0, 3e-3, 0.3):
        for situation in _situations(_batch(move)):
            if not _agree_too(mine, like, factor, situation):
                return Comparison(False, f"{own}, but not {situation.name}{_there(mine, like, factor, situation)}")
    ignored = False
    for situation in _weighed(_batch(3e-3)):
        try:
            pair, without_BT = _Pair.of(mine, like, situation), _gradient(mine, situation._replace(weight_BT=None))
        except LossError:  # one of the two takes no such weights
            continue
        if ignored := torch.equal(pair.mine_BT, without_BT):
            break
        if not pair.agrees(*factor):
            return Comparison(False, f"{own}, but not {situation.name}")
    words = "rollout_is_weights: ignored, and so not compared"
    return Comparison(own == "equal", own, (words,) * ignored)


def _gradient(loss: PolicyLoss, at: _Situation) -> torch.Tensor:
    """Of copies, because a loss may change its inputs."""
    weight_BT = None if at.weight_BT is None else at.weight_BT.clone()
    return loss.gradient(at.batch.map(torch.clone), at.dp_size, at.whole, weight_BT=weight_BT)[0].double()


def _agree_too(mine: PolicyLoss, like: PolicyLoss, factor: tuple[float, float], situation: _Situation) -> bool:
    k, exponent = factor
    try:
        pair = _Pair.of(mine, like, situation)
        if exponent and not torch.equal(situation.batch.mask_BT, _batch(0.0).mask_BT) and situation.whole is None:
            other = pair.factor()  # if only one averages over tokens, k depends on the lengths
            return other is not None and other[1] == exponent
        return pair.agrees(k, exponent)
    except LossError:
        return False


def _there(mine: PolicyLoss, like: PolicyLoss, factor: tuple[float, float], situation: _Situation) -> str:
    """The other factor of a situation; nothing, where the loss is equal elsewhere or has no factor there."""
    try:
        other = None if _in_words(*factor) == "equal" else _Pair.of(mine, like, situation).factor()
    except LossError:
        other = None
    return "" if other is None else f", where it is {_in_words(*other)}"


def _in_words(k: float, exponent: float) -> str:
    """The factor in words, such as ``equal``, ``2 times``, ``L times`` or ``0.0569 L times``."""
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
    """Weight, normalisation and the log-ratios at which the clip acts: a line for each in which the losses differ."""
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
