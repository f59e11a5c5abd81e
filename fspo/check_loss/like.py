"""Is a loss the one that its name says? Its gradient beside that of a named loss, on the same tensors. Defined here.

The tensors are twelve responses of 1 to 333 tokens. Their mean log-ratio per token grows from 0 to 2.4 nats, or until
|S| is 8. For either sign of A, some responses move up and some move down. Where both losses agree on these, they are
compared once more with |S| up to 90 and with A of 30 and -30, where clamps act, and before that on policy with one of
40,001 tokens. Padding, masks, micro-batches and
rollout weights are the subject of :mod:`fspo.check_loss.checks`.

Let ``G_i`` be the gradient of the loss for response i, and ``H_i`` that of the named loss. If on policy
``G_i = k L_i**a H_i`` for all responses, with 2a a whole number, then ``k L**a`` is the factor. It holds *up to* the
largest log-ratio below which no response differs from it by more than TOLERANCE of its largest entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from fspo.check_loss.by_length import MOVES, normalisation, place, power, sides, weight_and_bound
from fspo.check_loss.call import Batch, LossError, PolicyLoss, synthetic_batch

#: Relative to the largest entry of a response. The rounding of a loss that sums in float32 stays well below.
TOLERANCE: Final = 1e-3
#: Largest |S|, nats: the log-ratio clamps of losses begin above the first.
_LARGEST, _BEYOND = 8.0, 90.0
#: The longest one exposes a loss that counts lengths in bfloat16 or int8.
_LENGTHS: Final = (333, 3, 17, 1, 28, 9, 33, 6, 22, 12, 2, 38)
#: Of a last comparison on policy: int16 does not hold the first, and no limit on lengths in use is above it.
_LONG: Final = (40_001, 3, 3_001, 17)
_ADVANTAGES: Final = (3.0, -1.0, 0.7, -1.3, -0.8, 0.5, -2.6, 0.0, 2.1, -0.4, 0.9, 1.2)
_UP: Final = (1, 1, -1, -1, 1, 1, -1, 1, -1, -1, 1, 1)
_WIDTH: Final = 340
#: A of the responses that have a large one where clamps are looked for. These do not move, so that no clip acts.
_LARGE: Final = {10: 30.0, 3: -30.0}


class Comparison(NamedTuple):
    """The verdict on a loss beside a named one, and a line for each property in which the two differ."""

    equal: bool
    verdict: str
    differences: Sequence[str] = ()


class _Pair(NamedTuple):
    """Gradients of the loss and of the named loss, and the length of each response."""

    mine_BT: torch.Tensor
    like_BT: torch.Tensor
    length_B: torch.Tensor

    def factor(self) -> tuple[float, float] | None:
        """(k, a) with ``G_i = k L_i**a H_i`` for all responses; None if there is none."""
        used_B = (self.like_BT != 0).any(-1)
        k_B = ((self.mine_BT * self.like_BT).sum(-1) / self.like_BT.square().sum(-1))[used_B]
        length_B = self.length_B[used_B]
        if not bool((k_B.isfinite() & (k_B != 0)).all()):
            return None
        exponent = round(2 * np.polyfit(length_B.log().numpy(), k_B.abs().log().numpy(), 1)[0]) / 2
        k = float((k_B / length_B**exponent).median())
        return (k, exponent) if bool(self.agrees(k, exponent).all()) else None

    def agrees(self, k: float, exponent: float) -> torch.Tensor:
        """Whether the factor holds for each response, within TOLERANCE, [B]."""
        expected_BT = k * self.length_B[:, None] ** exponent * self.like_BT
        # Where the named loss has no gradient, only rounding relative to the other responses is allowed.
        limit_B = torch.maximum(expected_BT.abs().amax(-1), 1e-9 * expected_BT.abs().max())
        return (self.mine_BT - expected_BT).abs().amax(-1) <= TOLERANCE * limit_B

    def cosine(self) -> float:
        """Cosine of the two gradients, each as one vector over all responses; 0 if one of them is 0 or not finite."""
        cosine = float(torch.nn.functional.cosine_similarity(self.mine_BT.flatten(), self.like_BT.flatten(), 0, 1e-300))
        return cosine if cosine == cosine else 0.0


def compare(mine: PolicyLoss, like: PolicyLoss) -> Comparison:
    """Compare a loss with a named one.

    Raises:
        LossError: If one of the two raises, if one has no finite gradient on policy, or if the named one has none at
            all there.
    """

    def pair(batch: Batch) -> _Pair:  # of copies, because a loss may change its inputs
        mine_BT, like_BT = (loss.gradient(batch.map(torch.clone))[0].double() for loss in (mine, like))
        return _Pair(mine_BT, like_BT, batch.mask_BT.sum(-1).double())

    on_policy = pair(_batch(0.0))
    if not bool(on_policy.mine_BT.isfinite().all()):
        raise LossError("not comparable: on policy the gradient of the loss is not finite: run it without --like")
    if not bool(on_policy.like_BT.isfinite().all() and on_policy.like_BT.any()):
        raise LossError("not comparable: on policy the named loss has no finite gradient: name another one")
    if not bool(on_policy.mine_BT.any()):
        return Comparison(False, "no gradient on policy, where the named loss has one")
    if (factor := on_policy.factor()) is None:
        return Comparison(False, f"another loss: on policy cosine {on_policy.cosine():.2f}", _differences(mine, like))
    words, upto = _in_words(*factor), "on policy only"
    moved = [(move, pair(_batch(move))) for move in MOVES]
    for index, (move, at) in enumerate(moved):
        if not bool(at.agrees(*factor).all()):
            cosine, worst = min((at.cosine(), move) for move, at in moved[index:])
            says = f"{words} {upto}, then cosine {cosine:.2f} (at {worst:.2g})"
            return Comparison(False, says, _differences(mine, like))
        upto = f"up to log-ratio {move:.2g}"
    long = pair(synthetic_batch(_LONG, (0.01,) * 4, (1.0, -1.0, 2.0, -0.5)).on_policy()).factor()
    # k may hang on the sizes of a batch, unless the two are equal.
    if long is None or long[1] != factor[1] or (words == "equal" and _in_words(*long) != words):
        return Comparison(False, f"{words}, but not with a response of {_LONG[0]:,} tokens")
    if clamp := _clamp(pair, factor, on_policy.like_BT.abs().amax(-1)):
        return Comparison(False, f"{words}, but not where {clamp}: look for a clamp")
    return Comparison(words == "equal", words)


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


def _clamp(pair: Callable[[Batch], _Pair], factor: tuple[float, float], on_policy_B: torch.Tensor) -> str:
    """Where the factor ends with large |S| or |A|, in words; empty if it does not.

    Left out are responses on which the named loss itself grows or shrinks by more than exp(8).
    """
    batch = _batch(0.3, _BEYOND, turn=-1)  # the longest response moves down: with A > 0 no clip acts
    for row, advantage in _LARGE.items():
        batch.log_prob_BT[row], batch.advantages_BT[row] = batch.old_log_prob_BT[row], advantage
    at = pair(batch.padding())
    size_B = at.like_BT.abs().amax(-1)
    judged_B = ((size_B / on_policy_B).log().abs() < _LARGEST) | ((size_B == 0) & (on_policy_B > 0))
    wrong_B = judged_B & ~at.agrees(*factor)
    if not bool(wrong_B.any()):
        return ""
    return "A is 30 or -30" if bool(wrong_B[list(_LARGE)].any()) else f"|S| exceeds {_LARGEST:g}"


def _in_words(k: float, exponent: float) -> str:
    """The factor in words, such as ``equal``, ``2 times``, ``L times`` or ``0.0569 L times``."""
    number = "" if abs(k - 1) <= TOLERANCE else f"{k:.4g} "
    if not exponent:
        return f"{number}times" if number else "equal"
    power = {1.0: "L", -1.0: "1/L", 0.5: "sqrt(L)", -0.5: "1/sqrt(L)"}.get(exponent, f"L^{exponent:g}")
    return f"{number}{power} times (L: the tokens of a response)"


def _differences(*losses: PolicyLoss) -> list[str]:
    """Weight, normalisation and the log-ratios at which the clip acts: a line for each in which two losses differ."""
    both: list[dict[str, str]] = []
    for loss in losses:
        weight, bound = weight_and_bound(loss)
        said = {"weight near the old policy": f"{weight or 'another'}{bound}"}
        said["gradient per token on policy"] = power(normalisation(loss)[1])
        both.append(said | {f"clip at {side}": place(log_ratio) for side, log_ratio in sides(loss, weight).items()})
    mine, like = both
    return [f"{name}: {mine[name]} in place of {like[name]}" for name in mine if mine[name] != like[name]]
