"""How a policy loss treats responses of different lengths: by its normalisation, and by its clip. Defined here.

Neither is right or wrong. Both are measured on the gradient alone, so that any two losses can be compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from fspo.acceptance import UnclippedWeight, kept_output, unclipped_weight
from fspo.check_loss.call import Batch, PolicyLoss, synthetic_batch
from fspo.check_loss.token_kinds import TokenKinds
from fspo.fairness.lre import LengthReweightingError
from fspo.length_bins import FINE_LENGTH_EDGES
from fspo.responses import VIEWS, Responses

LENGTHS: Final = (4, 16, 64, 256)
#: Of synthetic log-ratios, in nats per sqrt(token): about that of the demo, and one at which clips of tokens act.
DISPERSIONS: Final = (0.03, 0.1)
_MINI_BATCHES, _RESPONSES, _LONGEST = 40, 128, 512
#: Number of tokens, which no usual block size divides, and a move of log-ratios whose sum stays inside GSPO's 3e-4.
TOKENS, _PROBE = 37, 1.5e-4
#: Log-ratios of each of four tokens, nats; their sum stays below the log-ratio clamps of losses.
_MOVES: Final = tuple(2.4 * 2 ** (-k / 4) for k in range(54))


def normalisation(loss: PolicyLoss) -> tuple[list[float], float]:
    """Mean gradient of a token on policy with A = 1 by LENGTHS, times the responses; a in ``mean ~ L**a``, or NaN."""
    batch = synthetic_batch(LENGTHS, (0.01,) * len(LENGTHS), (1.0,) * len(LENGTHS)).on_policy()
    gradient_BT, _ = loss.gradient(batch)
    mean = [-float(row.sum()) * len(LENGTHS) / length for row, length in zip(gradient_BT, LENGTHS, strict=True)]
    exponent = float(np.polyfit(np.log(LENGTHS), np.log(mean), 1)[0]) if min(mean) > 0 else math.nan
    return mean, exponent


def weight_and_bound(loss: PolicyLoss, at: tuple[int, int] = (5, 8)) -> tuple[UnclippedWeight | None, str]:
    """The importance weight that a loss uses near pi_old, by how its gradients react when two log-ratios move.

    ``at`` are the positions of the two, of TOKENS.

    It is ``token`` if the gradient of a token grows with its own ratio, ``prefix`` with the ratios up to it,
    ``sequence`` or ``length_normalised`` with all ratios of its response, and ``none`` with no ratio. It is None for
    any other reaction, or if the two signs of A differ. The text after it is ``, at most 1`` or ``, at least 1`` if the
    weight acts on one side of 1 only, else empty.
    """
    up, down = ({x for sign in (1.0, -1.0) for x in _weights(loss, sign, step, at)} for step in (_PROBE, -_PROBE))
    both = up | down
    if len(both) == 1:
        return next(iter(both)), ""
    if len(up) != 1 or len(down) != 1 or None in both or "none" not in both:
        return None, ""
    return next(iter(both - {"none"})), ", at most 1" if "none" in up else ", at least 1"


def _weights(loss: PolicyLoss, advantage: float, step: float, at: tuple[int, int]) -> list[UnclippedWeight | None]:
    """The weight that explains how the gradients react to a small move (or None); empty if all gradients are 0."""
    batch = synthetic_batch((TOKENS,) * 4, (0.01,) * 4, (advantage,) * 4, seed=3).on_policy()
    noise_BT = 5e-8 * torch.linspace(-1, 1, 4 * TOKENS, dtype=torch.float64).reshape(4, TOKENS)
    moved_T = torch.zeros(TOKENS, dtype=torch.float64)
    moved_T[at[0]], moved_T[at[1]] = 1.0, 0.5  # two: a sum, not a largest one
    near_BT = batch.old_log_prob_BT + noise_BT
    moves = (near_BT, near_BT + step * moved_T * (torch.arange(4)[:, None] < 3))  # one stays: some compare responses
    before_BT, after_BT = (loss.gradient(dataclasses.replace(batch, log_prob_BT=x))[0].abs() for x in moves)
    if not before_BT.any():
        return []
    response_T = ((after_BT.log() - before_BT.log()) / step)[:3].median(dim=0).values
    shapes: dict[UnclippedWeight, torch.Tensor] = {
        "none": 0 * moved_T,
        "token": moved_T,
        "prefix": moved_T.cumsum(0),
        "length_normalised": moved_T.mean(),
        "sequence": moved_T.sum(),
    }

    def fits(shape_T: torch.Tensor) -> bool:  # the mean over a response is told from that over several
        return bool(((response_T - shape_T).abs() < 0.004 + 0.02 * shape_T.abs()).all())

    return [next((name for name, shape_T in shapes.items() if fits(shape_T)), None)]


def sides(loss: PolicyLoss, weight: UnclippedWeight | None) -> dict[str, float]:
    """The log-ratio per token at which the clip acts: the smallest at which a response keeps less than half its weight.

    If the weight is not known, it is the smallest without a gradient. There is one for each sign of A and side, such as
    ``A > 0 above``. It is infinite if a response keeps half its weight up to 2.4 nats, and NaN without a gradient on
    policy.
    """
    d_BT = torch.tensor([*_MOVES, *(-d for d in _MOVES)], dtype=torch.float64)[:, None].expand(-1, 4)
    old_BT, mask_BT = -0.3 - d_BT.clamp(min=0), torch.ones_like(d_BT, dtype=torch.bool)  # no probability exceeds 1
    smallest: dict[str, float] = {}
    limit = 0.5 if weight else 1e-30
    for name, sign in (("A > 0", 1.0), ("A < 0", -1.0)):
        batch = Batch(old_BT + d_BT, old_BT, torch.full_like(old_BT, sign), mask_BT)
        whole_BT = loss.gradient(batch.on_policy())[0].abs() * unclipped_weight(d_BT, mask_BT, weight or "none")
        kept_BT = (-sign * loss.gradient(batch)[0]).clamp(min=0).minimum(whole_BT)
        for side, share in zip(("above", "below"), (kept_BT.sum(-1) / whole_BT.sum(-1)).chunk(2), strict=True):
            lost = [d for d, kept in zip(_MOVES, share.tolist(), strict=True) if kept < limit]
            smallest[f"{name} {side}"] = math.nan if bool(share.isnan().any()) else min(lost, default=math.inf)
    return smallest


@dataclass(frozen=True, slots=True)
class Clip:
    """What the clip of a loss keeps, by length.

    Attributes:
        kept: Mean share of its weight that a response keeps with its own A.
        errors: LRE in each of VIEWS.
        starts: Shortest length of each bin.
        kept_J: Mean share kept in each bin.
    """

    kept: float
    errors: dict[str, LengthReweightingError]
    starts: tuple[int, ...]
    kept_J: tuple[float, ...]


def clip_by_length(loss: PolicyLoss, weight: UnclippedWeight, samples: Sequence[Batch]) -> Clip:
    """What the clip keeps of mini-batches, by bins of equal mass; ``weight`` is the weight without the clip."""
    parts = []
    for batch in samples:

        def gradient(log_prob_BT: torch.Tensor, advantages_BT: torch.Tensor, batch: Batch = batch) -> torch.Tensor:
            changed = dataclasses.replace(batch, log_prob_BT=log_prob_BT, advantages_BT=advantages_BT)
            return loss.gradient(changed)[0]

        output = kept_output(
            gradient, batch.log_prob_BT, batch.old_log_prob_BT, batch.advantages_BT, batch.mask_BT, weight
        )
        parts.append(Responses.of_output(output))
    responses = Responses.join(parts)
    starts = responses.starts()
    errors = {view: responses.error(view, starts) for view in VIEWS}
    active = errors["active"]
    lengths = tuple(int(edge) for edge in FINE_LENGTH_EDGES[starts])
    return Clip(active.rate, errors, lengths, tuple(float(rate) for rate in active.rate_K))


def synthetic(sigma: float, mini_batches: int = _MINI_BATCHES) -> list[Batch]:
    """Mini-batches of responses of 4 to 512 tokens, A independent of S; float32. sigma: nats per sqrt(token)."""
    rng = np.random.default_rng(0)
    kinds = TokenKinds.random(sigma, rng)
    batches = []
    for _ in range(mini_batches):
        length_B = np.exp(rng.uniform(np.log(4), np.log(_LONGEST + 1), _RESPONSES)).astype(np.int64)
        log_prob_BT, old_log_prob_BT, mask_BT = kinds.log_probs(length_B, _LONGEST, rng)
        advantage_B = torch.from_numpy(rng.choice([-1.0, 1.0], _RESPONSES))
        batch = Batch(log_prob_BT, old_log_prob_BT, advantage_B[:, None].expand_as(log_prob_BT), mask_BT)
        batches.append(batch.padding().to(torch.float32))
    return batches
