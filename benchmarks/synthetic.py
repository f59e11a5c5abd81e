"""Synthetic sequence log-ratios that satisfy E_old[exp S] = 1, from one token to any length.

Samples come from pi_old, so the mean of exp(S) is 1 whatever the model. This forces a drift: S cannot have dispersion
without a negative mean. Short responses hide the drift, so bands are studied here on log-ratios for which the identity
holds *exactly*. Used by the tests and by ``python -m benchmarks.bands``. Defined here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch

from fspo.clipping import acceptance_band
from fspo.sums import SequenceSums, length_bin, z_cell
from fspo.types import BandState, SequenceLossSettings

__all__ = [
    "TokenKinds",
    "gaussian_acceptance",
    "gaussian_log_ratios",
    "measured_acceptance",
    "sums_of_log_ratios",
    "uneven_rollout_batch",
]

Array = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenKinds:
    """Tokens with two outcomes: at a position of kind j, the first has probability p_j under pi_old and q_j under pi.

    A token's log-ratio is ``log(q/p)`` with probability p and ``log((1-q)/(1-p))`` otherwise, so its exponential has
    mean ``q + (1 - q) = 1`` exactly, and so has ``exp(S)`` at any length. The kind of each position is drawn uniformly.

    Attributes:
        p_J: Probabilities under pi_old, between 0 and 1.
        q_J: Probabilities under pi.
    """

    p_J: Array
    q_J: Array

    @classmethod
    def random(cls, sigma: float, rng: np.random.Generator, kinds: int = 256) -> TokenKinds:
        """Half near-certain tokens, half open ones, moved so that Var(S) is about ``sigma**2 * L``."""
        logit = np.where(rng.random(kinds) < 0.5, rng.normal(5.0, 1.0, kinds), rng.normal(0.0, 1.0, kinds))
        p = 1 / (1 + np.exp(-logit))
        shift = rng.normal(0.0, 1.0, kinds)
        shift *= sigma / math.sqrt(float(np.mean(p * (1 - p) * shift**2)))
        return cls(p, 1 / (1 + np.exp(-(logit + shift))))

    @property
    def kl_per_token(self) -> float:
        """KL(pi_old || pi) per token, in nats: the exact drift is ``-L`` times this."""
        p, q = self.p_J, self.q_J
        return float(np.mean(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))))

    @property
    def sigma(self) -> float:
        """Standard deviation of the log-ratio of one token: ``Var(S) = sigma**2 * L`` exactly."""
        up, down = self._log_ratios_J()
        return float(math.sqrt(np.mean(self.p_J * up**2 + (1 - self.p_J) * down**2) - self.kl_per_token**2))

    def log_ratios(self, length_B: Lengths, rng: np.random.Generator) -> Array:
        """S of sequences of the given lengths, by counting hits per kind instead of drawing tokens one by one."""
        kinds = self.p_J.size
        positions_BJ = rng.multinomial(length_B, np.full(kinds, 1 / kinds))
        hits_BJ = rng.binomial(positions_BJ, self.p_J)
        up, down = self._log_ratios_J()
        result: Array = hits_BJ @ up + (positions_BJ - hits_BJ) @ down
        return result

    def log_probs(
        self, length_B: Lengths, width: int, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token by token, as a loss sees them: ``(log_prob_BT, old_log_prob_BT, response_mask_BT)``, zero-padded."""
        mask_BT = np.arange(width) < length_B[:, None]
        kind_BT = rng.integers(self.p_J.size, size=mask_BT.shape)
        p_BT, q_BT = self.p_J[kind_BT], self.q_J[kind_BT]
        hit_BT = rng.random(mask_BT.shape) < p_BT
        log_prob_BT = np.where(mask_BT, np.log(np.where(hit_BT, q_BT, 1 - q_BT)), 0.0)
        old_log_prob_BT = np.where(mask_BT, np.log(np.where(hit_BT, p_BT, 1 - p_BT)), 0.0)
        return torch.from_numpy(log_prob_BT), torch.from_numpy(old_log_prob_BT), torch.from_numpy(mask_BT)

    def _log_ratios_J(self) -> tuple[Array, Array]:
        return np.log(self.q_J / self.p_J), np.log((1 - self.q_J) / (1 - self.p_J))


def gaussian_log_ratios(length_B: Lengths, sigma_B: Array | float, rng: np.random.Generator) -> Array:
    """``S ~ N(-sigma**2 * L / 2, sigma**2 * L)``: the Gaussian S of that dispersion with E[exp S] = 1."""
    variance_B = np.square(sigma_B) * length_B
    result: Array = rng.normal(-variance_B / 2, np.sqrt(variance_B))
    return result


def gaussian_acceptance(
    length_B: Lengths, sigma: float, kl: float, settings: SequenceLossSettings, state: BandState
) -> Array:
    """Probability that ``S ~ N(-L * kl, sigma**2 * L)`` lies inside the band, for each length."""
    _, lower_B, upper_B = acceptance_band(torch.from_numpy(length_B), settings, state, torch.float64)
    cdf = np.vectorize(NormalDist().cdf)
    mean_B, std_B = -kl * length_B, sigma * np.sqrt(length_B)
    result: Array = cdf((upper_B.numpy() - mean_B) / std_B) - cdf((lower_B.numpy() - mean_B) / std_B)
    return result


def measured_acceptance(
    S_B: Array, length_B: Lengths, settings: SequenceLossSettings, state: BandState
) -> npt.NDArray[np.bool_]:
    """Whether each log-ratio lies inside its (closed) band."""
    _, lower_B, upper_B = acceptance_band(torch.from_numpy(length_B), settings, state, torch.float64)
    result: npt.NDArray[np.bool_] = (lower_B.numpy() <= S_B) & (upper_B.numpy() >= S_B)
    return result


def sums_of_log_ratios(S_B: Array, length_B: Lengths) -> SequenceSums:
    """Those columns of :class:`SequenceSums` that calibration reads, from S and L alone; the others stay 0."""
    sums = SequenceSums.zeros()
    S, L = torch.from_numpy(S_B), torch.from_numpy(length_B)
    root = L.double().sqrt()
    k, z = length_bin(L), S / root
    fields = {"count": torch.ones_like(S), "S": S, "z_squared": z * z, "length": L.double(), "length_sqrt": root}
    for name, values in fields.items():
        sums.column(name).index_add_(0, k, values)
    sums.hist_KH.index_put_((k, z_cell(z)), torch.ones_like(k), accumulate=True)
    return sums


def uneven_rollout_batch(
    rng: np.random.Generator, batch: int, mini_batches: int = 4, dispersion: float = 0.033
) -> list[tuple[Array, Lengths]]:
    """``(S_B, length_B)`` of each mini-batch of a rollout batch whose dispersion is *not* sqrt(L).

    Like a small recorded run it has lengths from 1 to 220, a dispersion that is low below 20 tokens and high from 20 to
    60, and sequences of uneven scale (heavy tails). A common scale varies by rollout batch and grows with the position
    of the mini-batch, from 0 in the first.
    """
    level = dispersion * math.exp(rng.normal(0.0, 0.15))
    result = []
    for position in range(mini_batches):
        length_B = np.clip(rng.gamma(2.2, 40.0, batch), 1, 220).astype(np.int64)
        shape_B = np.interp(np.log(length_B), np.log([1, 15, 35, 80, 220]), [0.5, 0.5, 1.45, 0.95, 0.9])
        sigma_B = level * position / (mini_batches - 1) * shape_B * np.exp(rng.normal(0.0, 0.4, batch))
        result.append((gaussian_log_ratios(length_B, sigma_B, rng), length_B))
    return result
