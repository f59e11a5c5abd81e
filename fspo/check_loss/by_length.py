"""What a policy loss does to responses of different lengths: normalisation, weight, clip. Defined here.

None of it is right or wrong. All is measured on the gradient alone, so that any two losses can be compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from fspo.check_loss.call import Batch, PolicyLoss, synthetic_batch
from fspo.fairness.lre import LengthReweightingError
from fspo.kept import UnclippedWeight, kept_share, unclipped_weight
from fspo.responses import Responses

LENGTHS: Final = (4, 16, 64, 256)
DISPERSIONS: Final = (0.03, 0.1)
"""Of synthetic log-ratios, nats per sqrt(token): about that of the demo, and one at which clips of tokens act."""
MOVES: Final = tuple(2.4 * 2 ** (-k / 4) for k in range(85, -1, -1))
"""Log-ratios per token at which losses are looked at, 1e-6 to 2.4 nats, upwards."""
_MINI_BATCHES, _RESPONSES = 40, 128
#: Number of tokens, which no usual block size divides, and a move of log-ratios whose sum stays inside GSPO's 3e-4.
_TOKENS, _PROBE = 37, 1.5e-4


def normalisation(loss: PolicyLoss) -> tuple[list[float], float]:
    """Mean gradient of a token on policy with A = 1 by LENGTHS, times the responses; a in ``mean ~ L**a``, or NaN."""
    batch = synthetic_batch(LENGTHS, (0.01,) * len(LENGTHS), (1.0,) * len(LENGTHS)).on_policy()
    gradient_BT, _ = loss.gradient(batch)
    mean = [-float(row.sum()) * len(LENGTHS) / length for row, length in zip(gradient_BT, LENGTHS, strict=True)]
    exponent = float(np.polyfit(np.log(LENGTHS), np.log(mean), 1)[0]) if min(mean) > 0 else math.nan
    return mean, exponent


def power(exponent: float) -> str:
    """``L^-1.00`` of an exponent of :func:`normalisation`."""
    return "no power of L" if math.isnan(exponent) else f"L^{round(exponent, 2) + 0.0:.2f}"


def weight_and_bound(loss: PolicyLoss) -> tuple[UnclippedWeight | None, str]:
    """The importance weight that a loss uses near pi_old, by how its gradients react when two log-ratios move.

    It is None for a reaction as to none of :func:`fspo.kept.unclipped_weight`, or if the two signs of A differ. The
    text after it is ``, at most 1`` or ``, at least 1`` if the weight acts on one side of 1 only, else empty.
    """
    up, down = ({x for sign in (1.0, -1.0) for x in _weights(loss, sign, step)} for step in (_PROBE, -_PROBE))
    if len(up | down) == 1:
        return next(iter(up | down)), ""
    if len(up) == len(down) == 1 and None not in up | down and "none" in up | down:
        return next(iter((up | down) - {"none"})), ", at most 1" if "none" in up else ", at least 1"
    return None, ""


def _weights(loss: PolicyLoss, advantage: float, step: float) -> list[UnclippedWeight | None]:
    """The weight that explains how the gradients react to a small move (or None); empty if all gradients are 0."""
    batch = synthetic_batch((_TOKENS,) * 4, (0.01,) * 4, (advantage,) * 4, seed=3).on_policy()
    near_BT = batch.old_log_prob_BT + 5e-8 * torch.linspace(-1, 1, 4 * _TOKENS, dtype=torch.float64).reshape(4, _TOKENS)
    moved_T = torch.zeros(_TOKENS, dtype=torch.float64)
    moved_T[5], moved_T[8] = 1.0, 0.5  # two: a sum, not a largest one
    moves = (near_BT, near_BT + step * moved_T * (torch.arange(4)[:, None] < 3))  # one stays: some compare responses
    before_BT, after_BT = (loss.gradient(dataclasses.replace(batch, log_prob_BT=x))[0].abs() for x in moves)
    if not before_BT.any():
        return []
    response_T = ((after_BT.log() - before_BT.log()) / step)[:3].median(dim=0).values
    mean, total = moved_T.mean(), moved_T.sum()
    shapes: dict[UnclippedWeight, torch.Tensor] = {"none": 0 * moved_T, "token": moved_T, "prefix": moved_T.cumsum(0)}
    shapes |= {"length_normalised": mean.expand(_TOKENS), "sequence": total.expand(_TOKENS)}
    # The mean over a response is told from that over several.
    fits = (name for name, x_T in shapes.items() if bool(((response_T - x_T).abs() < 0.004 + 0.02 * x_T.abs()).all()))
    return [next(fits, None)]


def kept_by_clip(loss: PolicyLoss, batch: Batch, weight: UnclippedWeight) -> torch.Tensor:
    """:func:`fspo.kept.kept_share` of each response under A of 1 or -1, [B]; NaN without a gradient on policy."""
    d_BT = batch.log_prob_BT - batch.old_log_prob_BT
    whole_BT = loss.gradient(batch.on_policy())[0].abs() * unclipped_weight(d_BT, batch.mask_BT, weight)
    return kept_share(-batch.advantages_BT.sign() * loss.gradient(batch)[0], whole_BT)


def sides(loss: PolicyLoss, weight: UnclippedWeight | None) -> dict[str, float]:
    """The log-ratio per token at which the clip acts: the smallest of MOVES that leaves a response less than half.

    If the weight is not known, it is the smallest without a gradient. There is one for each sign of A and side, such as
    ``A > 0 above``: infinite if a response keeps half its weight at all MOVES, NaN without a gradient on policy.
    """
    d_BT = torch.tensor([*MOVES, *(-d for d in MOVES)], dtype=torch.float64)[:, None].expand(-1, 4)
    old_BT, mask_BT = -0.3 - d_BT.clamp(min=0), torch.ones_like(d_BT, dtype=torch.bool)  # no probability exceeds 1
    smallest: dict[str, float] = {}
    for name, sign in (("A > 0", 1.0), ("A < 0", -1.0)):
        batch = Batch(old_BT + d_BT, old_BT, torch.full_like(old_BT, sign), mask_BT)
        for side, share in zip(("above", "below"), kept_by_clip(loss, batch, weight or "none").chunk(2), strict=True):
            lost = [d for d, kept in zip(MOVES, share.tolist(), strict=True) if kept < (0.5 if weight else 1e-30)]
            smallest[f"{name} {side}"] = math.nan if bool(share.isnan().any()) else min(lost, default=math.inf)
    return smallest


def place(log_ratio: float) -> str:
    """Where the clip acts in words, of a value of :func:`sides`."""
    if log_ratio == MOVES[0]:
        return f"from under {log_ratio:.2g}"
    return f"from {log_ratio:.2g}".replace("from inf", "never").replace("from nan", "everywhere")


class Clip(NamedTuple):
    """What a clip keeps by length: the LRE of the shares kept, and the shortest length of each of its bins."""

    error: LengthReweightingError
    starts: tuple[int, ...]


def clip_by_length(loss: PolicyLoss, weight: UnclippedWeight, samples: Sequence[Batch]) -> Clip:
    """What the clip keeps of mini-batches; a response without a gradient on policy keeps all of it."""
    parts = []
    for batch in samples:
        kept_B, length_B = kept_by_clip(loss, batch, weight).nan_to_num(1.0).numpy(), batch.mask_BT.sum(-1).numpy()
        parts.append(Responses.of_rows({"S": 0 * kept_B, "L": length_B, "inside": kept_B}))
    all_B = Responses.join(parts)
    starts = (int(all_B.length_B[all_B.bin_B == j].min()) for j in np.unique(all_B.bin_B))
    return Clip(all_B.error(), tuple(starts))


def synthetic(sigma: float, mini_batches: int = _MINI_BATCHES) -> list[Batch]:
    """Mini-batches of responses of 4 to 512 tokens, A independent of S; float32. sigma: nats per sqrt(token)."""
    rng, batches = np.random.default_rng(0), []
    for seed in range(mini_batches):
        length_B = np.exp(rng.uniform(np.log(4), np.log(513), _RESPONSES)).astype(np.int64)
        advantage_B = rng.choice([-1.0, 1.0], _RESPONSES)
        batch = synthetic_batch(length_B.tolist(), (sigma,) * _RESPONSES, advantage_B.tolist(), seed)
        batches.append(batch.map(lambda x: x.float() if x.is_floating_point() else x))
    return batches
