"""Synthetic tokens that satisfy E_old[exp S] = 1 exactly, at any length. Defined here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenKinds:
    """Tokens with two outcomes: at a position of kind j, the first has probability p_j under pi_old and q_j under pi.

    A token's log-ratio is ``log(q/p)`` with probability p and ``log((1-q)/(1-p))`` otherwise, so its exponential has
    mean ``q + (1 - q) = 1`` exactly, and so has ``exp(S)`` at any length. The kind of each position is drawn uniformly.
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
