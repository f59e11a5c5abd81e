"""From unequal acceptance to the direction of the gradient: a bound on the cosine, and its measured pieces.

The derivation is this project's; the paper proves a statement of this kind. Notation: p_b is the share of bin b, a_b
its acceptance rate, abar = sum_b p_b a_b; g_b is the mean gradient of the unclipped objective over the bin's sequences,
g = sum_b p_b g_b; gc_b and gc = sum_b p_b gc_b are the same for the clipped objective.

With kappa = sum_b p_b |g_b| / |g| and eta = |sum_b p_b (gc_b - a_b g_b)| / (abar |g|),

    r = kappa * LRE_max + eta < 1    implies    cos(gc, g) >= sqrt(1 - r**2),

because |gc / abar - g| <= sum_b p_b |a_b / abar - 1| |g_b| + eta |g| <= r |g|, and the angle between g and a vector
within r |g| of it is at most arcsin(r). The first step shows that LRE_max may be replaced by the mean of
|a_b / abar - 1| with weights proportional to p_b |g_b|, which is at most LRE_max. The LRE itself, with weights p_b, may
*not* be used: docs/fairness.md has a counter-example.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fspo.fairness.interval import Array


def cosine(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Cosine of the angle between two vectors; nan if one of them is zero."""
    a, b = np.asarray(first, dtype=np.float64).ravel(), np.asarray(second, dtype=np.float64).ravel()
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms > 0 else float("nan")


def dispersion_of_gradients(share_B: npt.ArrayLike, gradient_BD: npt.ArrayLike) -> float:
    """kappa = sum_b p_b |g_b| / |sum_b p_b g_b| >= 1: how much the bins' gradients cancel. Defined here.

    Args:
        share_B: [B] shares p_b, summing to 1.
        gradient_BD: [B, D] mean unclipped gradient of each bin.

    Returns:
        kappa; inf where the gradients cancel completely.

    Raises:
        ValueError: If shapes do not agree or the shares do not sum to 1.
    """
    p, g = _checked(share_B, gradient_BD)
    whole = float(np.linalg.norm(p @ g))
    return float(p @ np.linalg.norm(g, axis=1)) / whole if whole > 0 else float("inf")


def interaction_error(
    share_B: npt.ArrayLike, rate_B: npt.ArrayLike, gradient_BD: npt.ArrayLike, clipped_gradient_BD: npt.ArrayLike
) -> float:
    """eta = |sum_b p_b (gc_b - a_b g_b)| / (abar |g|). Defined here.

    It is above 0 where clipping within a bin depends on advantage and weight.

    Args:
        share_B, rate_B: [B] shares p_b and acceptance rates a_b.
        gradient_BD, clipped_gradient_BD: [B, D] mean gradient of each bin, unclipped and clipped.

    Returns:
        eta >= 0; 0 if the clipped gradient of each bin is a_b g_b; inf if nothing is accepted or g is zero.

    Raises:
        ValueError: As in :func:`dispersion_of_gradients`.
    """
    p, g = _checked(share_B, gradient_BD)
    _, gc = _checked(share_B, clipped_gradient_BD)
    a = np.asarray(rate_B, dtype=np.float64)
    scale = float(p @ a) * float(np.linalg.norm(p @ g))
    return float(np.linalg.norm(p @ (gc - a[:, None] * g))) / scale if scale > 0 else float("inf")


def cosine_bound(kappa: float, lre_max: float, eta: float = 0.0) -> float:
    """Lower bound sqrt(1 - r**2) on the cosine, r = kappa * LRE_max + eta; -1, which says nothing, where r >= 1."""
    r = kappa * lre_max + eta
    return float(np.sqrt(1.0 - r * r)) if r < 1 else -1.0


def mean_cosine_bound(
    share_B: npt.ArrayLike, rate_B: npt.ArrayLike, gradient_BD: npt.ArrayLike, eta: float = 0.0
) -> float:
    """The sharper bound, with the gradient-weighted mean deviation in place of LRE_max. Defined here.

    It is sqrt(1 - r**2) with r = sum_b p_b |g_b| |a_b / abar - 1| / |g| + eta, and -1 where r >= 1.

    Args:
        share_B, rate_B, gradient_BD: As in :func:`interaction_error`.
        eta: From :func:`interaction_error`.

    Raises:
        ValueError: As in :func:`dispersion_of_gradients`.
    """
    p, g = _checked(share_B, gradient_BD)
    a = np.asarray(rate_B, dtype=np.float64)
    overall, whole = float(p @ a), float(np.linalg.norm(p @ g))
    if overall <= 0 or whole <= 0:
        return -1.0
    r = float((p * np.linalg.norm(g, axis=1)) @ np.abs(a / overall - 1.0)) / whole + eta
    return float(np.sqrt(1.0 - r * r)) if r < 1 else -1.0


def _checked(share_B: npt.ArrayLike, gradient_BD: npt.ArrayLike) -> tuple[Array, Array]:
    p, g = np.asarray(share_B, dtype=np.float64), np.asarray(gradient_BD, dtype=np.float64)
    if p.ndim != 1 or g.ndim != 2 or len(p) != len(g):
        raise ValueError(f"shares {p.shape} and gradients {g.shape} must be [B] and [B, D]")
    if (p < 0).any() or not np.isclose(p.sum(), 1.0):
        raise ValueError(f"shares must be >= 0 and sum to 1, their sum is {p.sum()}")
    return p, g
