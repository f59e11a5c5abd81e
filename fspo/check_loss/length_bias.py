"""What a policy loss does to responses of different lengths: by its normalisation, and by its clip. Defined here.

Nothing of it is right or wrong; it is measured, on the gradient alone, so that any loss can be compared with any other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from fspo.acceptance import UnclippedWeight, acceptance_counts, kept_output, stack_sums
from fspo.check_loss.call import Batch, PolicyLoss, synthetic_batch
from fspo.check_loss.token_kinds import TokenKinds
from fspo.fairness import LengthReweightingError, equal_mass_starts
from fspo.sums import FINE_LENGTH_EDGES, SequenceSums

#: The views of acceptance that are computed of what a loss keeps (fspo.acceptance.VIEWS).
VIEWS: Final = ("symmetric", "active", "mass")
LENGTHS: Final = (4, 16, 64, 256)
#: Of synthetic log-ratios, in nats per sqrt(token): about that of the demo, and one at which clips of tokens act.
DISPERSIONS: Final = (0.03, 0.1)
_MINI_BATCHES, _RESPONSES, _LONGEST = 40, 128, 512
_PROBED, _TOKENS, _PROBE = 5, 12, 1e-4


def normalisation(loss: PolicyLoss) -> tuple[list[float], float]:
    """Mean gradient of a token by the length of its response, on policy with A = 1, times the number of responses.

    Returns:
        The mean over the tokens of a response of each of LENGTHS, and the exponent a in ``mean ~ L**a``: 0 if every
        token counts alike, -1 if every response does, NaN if some mean is not positive.
    """
    batch = synthetic_batch(LENGTHS, (0.01,) * len(LENGTHS), (1.0,) * len(LENGTHS)).on_policy()
    gradient_BT, _ = loss.gradient(batch)
    mean = [-float(row.sum()) * len(LENGTHS) / length for row, length in zip(gradient_BT, LENGTHS, strict=True)]
    exponent = float(np.polyfit(np.log(LENGTHS), np.log(mean), 1)[0]) if min(mean) > 0 else math.nan
    return mean, exponent


def find_weight(loss: PolicyLoss) -> UnclippedWeight | None:
    """By what the loss weighs a token near the policy that sampled, found by moving one log-ratio at a time.

    ``token`` if the gradient of a token grows with its own ratio, ``prefix`` if with those up to it, ``sequence`` or
    ``length_normalised`` if with all of its response, ``none`` if with none; None if it does something else.
    """
    batch = synthetic_batch((_TOKENS,) * 4, (0.01,) * 4, (1.0,) * 4, seed=3).on_policy()
    noise_BT = 1e-6 * torch.linspace(-1, 1, 4 * _TOKENS, dtype=torch.float64).reshape(4, _TOKENS)
    near = dataclasses.replace(batch, log_prob_BT=batch.old_log_prob_BT + noise_BT)
    moved_BT = near.log_prob_BT.clone()
    moved_BT[:, _PROBED] += _PROBE
    before_BT, after_BT = (
        loss.gradient(each)[0].abs() for each in (near, dataclasses.replace(near, log_prob_BT=moved_BT))
    )
    response_T = ((after_BT.log() - before_BT.log()) / _PROBE).median(dim=0).values
    token_T = torch.arange(_TOKENS)
    shapes: dict[UnclippedWeight, torch.Tensor] = {
        "none": torch.zeros(_TOKENS),
        "token": (token_T == _PROBED).double(),
        "prefix": (token_T >= _PROBED).double(),
        "length_normalised": torch.full((_TOKENS,), 1 / _TOKENS),
        "sequence": response_T[_PROBED].expand(_TOKENS),  # of whatever power
    }
    return next((name for name, shape_T in shapes.items() if bool(((response_T - shape_T).abs() < 0.02).all())), None)


@dataclass(frozen=True, slots=True)
class Clip:
    """What a loss keeps, by length.

    Attributes:
        kept: Mean over the responses of the share of its weight that each keeps, with its own A.
        errors: LRE of each of VIEWS.
        starts: Shortest length of each bin.
        kept_J: Mean share kept in each bin.
    """

    kept: float
    errors: dict[str, LengthReweightingError]
    starts: tuple[int, ...]
    kept_J: tuple[float, ...]


def clip_by_length(loss: PolicyLoss, weight: UnclippedWeight, samples: Sequence[Batch]) -> Clip:
    """What the loss keeps of the responses of several mini-batches, by length bins of equal mass.

    Args:
        loss: The loss.
        weight: What it weighs by without its clip.
        samples: Mini-batches: the intervals resample them.
    """
    parts = []
    for batch in samples:

        def gradient(log_prob_BT: torch.Tensor, advantages_BT: torch.Tensor, batch: Batch = batch) -> torch.Tensor:
            changed = dataclasses.replace(batch, log_prob_BT=log_prob_BT, advantages_BT=advantages_BT)
            return loss.gradient(changed)[0]

        output = kept_output(
            gradient, batch.log_prob_BT, batch.old_log_prob_BT, batch.advantages_BT, batch.mask_BT, weight
        )
        parts.append(SequenceSums.zeros().add_(output))
    sums_MKF = stack_sums(parts)
    starts = equal_mass_starts(acceptance_counts(sums_MKF).total.sum(0))
    errors = {view: acceptance_counts(sums_MKF, view).error(starts) for view in VIEWS}
    active = errors["active"]
    lengths = tuple(int(edge) for edge in FINE_LENGTH_EDGES[torch.from_numpy(starts)])
    return Clip(active.rate, errors, lengths, tuple(float(rate) for rate in active.rate_K))


def synthetic(sigma: float) -> list[Batch]:
    """Mini-batches of responses of 4 to 512 tokens, A independent of S; sigma: dispersion of S, nats per sqrt(token).

    Tokens have two outcomes (:class:`~fspo.check_loss.token_kinds.TokenKinds`), half of them nearly certain, so
    that E_old[exp S] = 1 and probabilities are those of the log-ratios; float32.
    """
    rng = np.random.default_rng(0)
    kinds = TokenKinds.random(sigma, rng)
    found = []
    for _ in range(_MINI_BATCHES):
        length_B = np.exp(rng.uniform(np.log(4), np.log(_LONGEST + 1), _RESPONSES)).astype(np.int64)
        log_prob_BT, old_log_prob_BT, mask_BT = kinds.log_probs(length_B, _LONGEST, rng)
        advantage_B = torch.from_numpy(rng.choice([-1.0, 1.0], _RESPONSES))
        batch = Batch(log_prob_BT, old_log_prob_BT, advantage_B[:, None].expand_as(log_prob_BT), mask_BT)
        found.append(batch.padding(0.0).to(torch.float32))
    return found
