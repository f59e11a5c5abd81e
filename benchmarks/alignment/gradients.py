"""Gradient alignment: what clipping does to the direction of the policy gradient.

A gradient has as many entries as the model has parameters, but only its inner products with the other gradients matter
here. The policy gradient of a sequence-level loss is a weighted sum ``sum_i c_i grad log pi(y_i)`` with one coefficient
``c_i`` per sequence (:mod:`fspo.losses`). Measured are V such sums, each over a part of the sequences:

* for each unclipped objective (weight and length scale), fold j and length bin k: ``u_jk``,
* for each clipped objective, fold and bin: ``c_jk``,
* for each fold of the held-out sequences: ``h_j``, the plain policy gradient (S = 0, weight 1).

A *fold* holds whole prompts; leaving out one fold at a time gives standard errors (delete-one-fold jackknife). The Gram
matrix of the V vectors determines every cosine, kappa and eta. A *round* is one repetition of the whole measurement.
All of this is defined here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from fspo.fairness import Array, Interval, equal_mass_starts, plain_lre
from fspo.fairness.bootstrap import student_quantile
from fspo.losses import sequence_policy_loss
from fspo.types import SequenceLossOutput, SequenceLossSettings

Indices = npt.NDArray[np.int64]

VIEWS: Final = ("symmetric", "active")
"""Definitions of acceptance for which the bound is computed (:data:`fspo.acceptance.VIEWS`)."""
WITHOUT_INTERVAL: Final = ("lre", "lre_max", "r", "bound", "mean_bound")
"""Figures with a maximum or an absolute value in them: a jackknife is not valid for these."""
_WIDE: Final = 1e9


# ---------------------------------------------------------------- the bound on the cosine
#
# p_b is the share of bin b, a_b its acceptance rate, abar = sum_b p_b a_b; g_b is the mean gradient of the unclipped
# objective over the bin's sequences, g = sum_b p_b g_b; gc_b and gc are the same for the clipped objective. With
# kappa = sum_b p_b |g_b| / |g| and eta = |sum_b p_b (gc_b - a_b g_b)| / (abar |g|),
#
#     r = kappa * LRE_max + eta < 1    implies    cos(gc, g) >= sqrt(1 - r**2),
#
# because |gc / abar - g| <= sum_b p_b |a_b / abar - 1| |g_b| + eta |g| <= r |g|. Derivation: docs/fairness.md.


def cosine(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    """Cosine of the angle between two vectors; nan if one of them is zero."""
    a, b = np.asarray(first, dtype=np.float64).ravel(), np.asarray(second, dtype=np.float64).ravel()
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms > 0 else float("nan")


def dispersion_of_gradients(share_B: npt.ArrayLike, gradient_BD: npt.ArrayLike) -> float:
    """kappa = sum_b p_b |g_b| / |sum_b p_b g_b| >= 1: how much the bins' gradients cancel; inf if completely.

    ``share_B`` are the shares p_b, which sum to 1, ``gradient_BD`` the mean unclipped gradient of each bin.
    """
    p, g = np.asarray(share_B, dtype=np.float64), np.asarray(gradient_BD, dtype=np.float64)
    whole = float(np.linalg.norm(p @ g))
    return float(p @ np.linalg.norm(g, axis=1)) / whole if whole > 0 else float("inf")


def interaction_error(
    share_B: npt.ArrayLike, rate_B: npt.ArrayLike, gradient_BD: npt.ArrayLike, clipped_gradient_BD: npt.ArrayLike
) -> float:
    """eta = |sum_b p_b (gc_b - a_b g_b)| / (abar |g|), above 0 where clipping within a bin depends on A and weight.

    ``rate_B`` are the acceptance rates a_b. inf if nothing is accepted or g is zero.
    """
    p, a = np.asarray(share_B, dtype=np.float64), np.asarray(rate_B, dtype=np.float64)
    g, gc = np.asarray(gradient_BD, dtype=np.float64), np.asarray(clipped_gradient_BD, dtype=np.float64)
    scale = float(p @ a) * float(np.linalg.norm(p @ g))
    return float(np.linalg.norm(p @ (gc - a[:, None] * g))) / scale if scale > 0 else float("inf")


def cosine_bound(kappa: float, lre_max: float, eta: float = 0.0) -> float:
    """Lower bound sqrt(1 - r**2) on the cosine, r = kappa * LRE_max + eta; -1, which says nothing, where r >= 1."""
    r = kappa * lre_max + eta
    return float(np.sqrt(1.0 - r * r)) if r < 1 else -1.0


def mean_cosine_bound(
    share_B: npt.ArrayLike, rate_B: npt.ArrayLike, gradient_BD: npt.ArrayLike, eta: float = 0.0
) -> float:
    """The sharper bound sqrt(1 - r**2), r = sum_b p_b |g_b| |a_b / abar - 1| / |g| + eta; -1 where r >= 1."""
    p, g = np.asarray(share_B, dtype=np.float64), np.asarray(gradient_BD, dtype=np.float64)
    a = np.asarray(rate_B, dtype=np.float64)
    overall, whole = float(p @ a), float(np.linalg.norm(p @ g))
    if overall <= 0 or whole <= 0:
        return -1.0
    r = float((p * np.linalg.norm(g, axis=1)) @ np.abs(a / overall - 1.0)) / whole + eta
    return float(np.sqrt(1.0 - r * r)) if r < 1 else -1.0


# ---------------------------------------------------------------- objectives


def without_clip(settings: SequenceLossSettings) -> SequenceLossSettings:
    """The same weight and length scale, with a band that accepts everything and no constant factor."""
    return dataclasses.replace(
        settings,
        band="sqrt",
        clip_low=_WIDE,
        clip_high=_WIDE,
        drift="none",
        target_acceptance=None,
        grad_multiplier=1.0,
    )


def gradient_coefficients(
    log_prob_BT: torch.Tensor,
    old_log_prob_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    settings: SequenceLossSettings,
) -> tuple[Array, SequenceLossOutput]:
    """``c_i = d loss_i / d log pi(y_i)`` of the training loss itself, by automatic differentiation.

    Returns:
        c [B], 0 where the clip is active and for rows without response tokens; and the output of the loss.
    """
    live_BT = log_prob_BT.detach().to(torch.float64).requires_grad_()
    output = sequence_policy_loss(live_BT, old_log_prob_BT.to(torch.float64), advantages_BT, response_mask_BT, settings)
    (gradient_BT,) = torch.autograd.grad(output.loss_B.sum(), live_BT)
    # The gradient is constant over the tokens of a row and 0 elsewhere, so its mean over the tokens is c.
    return (gradient_BT.sum(-1) / output.length_B.clamp(min=1)).numpy(), output


def assign_bins(length_B: npt.ArrayLike, n_bins: int) -> Indices:
    """Bin of each sequence: at most ``n_bins`` length bins of nearly equal mass; equal lengths stay together."""
    length = np.asarray(length_B, dtype=np.int64)
    starts = equal_mass_starts(np.bincount(length), n_bins)
    return np.asarray(np.searchsorted(starts, length, side="right") - 1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """Which weighted sums are measured, and their order among the V vectors.

    Attributes:
        folds: J of the measured sequences, and as many, H, of the held-out ones.
        bins: K, length bins.
        family_O: For each clipped objective the index of its unclipped one.
    """

    folds: int
    bins: int
    family_O: tuple[int, ...]

    @property
    def families(self) -> int:
        """F, number of unclipped objectives."""
        return max(self.family_O) + 1

    @property
    def measured(self) -> int:
        """Vectors of the measured sequences by fold and bin: of each unclipped objective, then of each clipped one."""
        return (self.families + len(self.family_O)) * self.folds * self.bins

    @property
    def vectors(self) -> int:
        """V: the measured vectors, then those of the held-out folds."""
        return self.measured + self.folds

    def weights(self, unclipped_FB: Array, clipped_OB: Array, fold_B: Indices, bin_B: Indices) -> Array:
        """[B, measured]: the coefficient of each sequence in each vector."""
        weights_BV = np.zeros((len(fold_B), self.measured))
        rows = np.arange(len(fold_B))
        for index, coefficient_B in enumerate([*unclipped_FB, *clipped_OB]):
            weights_BV[rows, (index * self.folds + fold_B) * self.bins + bin_B] = coefficient_B
        return weights_BV

    def held_out_weights(self, coefficient_B: Array, fold_B: Indices) -> Array:
        """[B, folds]: the same for the held-out sequences."""
        weights_BV = np.zeros((len(fold_B), self.folds))
        weights_BV[np.arange(len(fold_B)), fold_B] = coefficient_B
        return weights_BV

    def split(self, vectors_VD: Array) -> tuple[Array, Array, Array]:
        """(unclipped [F, J, K, D], clipped [O, J, K, D], held out [H, D])."""
        cells = vectors_VD[: self.measured].reshape(-1, self.folds, self.bins, vectors_VD.shape[1])
        return cells[: self.families], cells[self.families :], vectors_VD[self.measured :]


def embed(gram_VV: npt.ArrayLike) -> Array:
    """V vectors of V entries whose inner products are ``gram_VV``. They stand for the gradients in all that follows.

    Raises:
        ValueError: If the matrix is clearly indefinite.
    """
    gram = np.asarray(gram_VV, dtype=np.float64)
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    if not values[0] >= -1e-6 * float(np.abs(gram).max()):
        raise ValueError(f"the Gram matrix has the eigenvalue {values[0]:g}: it holds no inner products")
    return np.asarray(vectors * np.sqrt(np.clip(values, 0, None)))


# ---------------------------------------------------------------- figures of one round


@dataclass(frozen=True, slots=True)
class ClippedObjective:
    """The measured sums of a clipped objective, of its unclipped objective and of the held-out gradient.

    Attributes:
        unclipped_JKD, clipped_JKD, held_out_HD: Vectors of one space.
        total_JK: Sequences by fold and bin.
        accepted_VJK: Accepted ones under each of :data:`VIEWS`.
    """

    unclipped_JKD: Array
    clipped_JKD: Array
    held_out_HD: Array
    total_JK: Array
    accepted_VJK: Array

    def figures(self, keep_J: Array, keep_H: Array) -> dict[str, float]:
        """Everything that is reported of the objective, with folds weighted by ``keep_J`` and ``keep_H``.

        * ``cosine``: between the clipped and its own unclipped gradient; ``norm_ratio``: |clipped| / |unclipped|;
        * ``held_out``: cosine between the clipped and the held-out gradient; ``held_out_unclipped``: the same for the
          unclipped gradient; ``held_out_change``: the first minus the second;
        * ``kappa``;
        * ``share/k`` of each length bin in the clipped gradient c, <c_k, c> / <c, c>, and ``share_unclipped/k``: they
          add up to 1, and one is negative where a bin's gradient points against the whole;
        * for each view of acceptance (``symmetric/...``, ``active/...``): ``acceptance``, ``lre``, ``lre_max``,
          ``eta``, ``r`` = kappa * lre_max + eta, ``bound`` = sqrt(1 - r**2), and ``mean_bound``, the sharper bound with
          the gradient-weighted mean in place of the maximum. A bound of -1 says nothing.
        """
        total_K = keep_J @ self.total_JK
        filled = total_K > 0
        share_K = total_K[filled] / total_K.sum()
        bins_KD = np.einsum("j,jkd->kd", keep_J, self.unclipped_JKD)[filled] / total_K[filled, None]
        own_D = share_K @ bins_KD
        clipped_parts_KD = np.einsum("j,jkd->kd", keep_J, self.clipped_JKD)
        clipped_D = clipped_parts_KD.sum(0) / total_K.sum()
        held_out_D = keep_H @ self.held_out_HD
        norm, kappa = float(np.linalg.norm(own_D)), dispersion_of_gradients(share_K, bins_KD)
        found = {
            "cosine": cosine(clipped_D, own_D),
            "norm_ratio": float(np.linalg.norm(clipped_D)) / norm if norm > 0 else math.nan,
            "held_out": cosine(clipped_D, held_out_D),
            "held_out_unclipped": cosine(own_D, held_out_D),
            "kappa": kappa,
        }
        found["held_out_change"] = found["held_out"] - found["held_out_unclipped"]
        unclipped_parts_KD = np.einsum("j,jkd->kd", keep_J, self.unclipped_JKD)
        for name, parts_KD in (("share", clipped_parts_KD), ("share_unclipped", unclipped_parts_KD)):
            along_K = parts_KD @ parts_KD.sum(0)
            found |= {
                f"{name}/{k}": float(along / along_K.sum()) if along_K.sum() > 0 else math.nan
                for k, along in enumerate(along_K)
            }
        # Of the clipped gradients only their mean over the bins enters eta, so each bin may be given that mean.
        clipped_KD = np.broadcast_to(clipped_D, bins_KD.shape)
        for view, accepted_JK in zip(VIEWS, self.accepted_VJK, strict=True):
            accepted_K = (keep_J @ accepted_JK)[filled]
            rate_K = accepted_K / total_K[filled]
            lre, lre_max = (float(value) for value in plain_lre(accepted_K, total_K[filled]))
            eta = interaction_error(share_K, rate_K, bins_KD, clipped_KD)
            found |= {
                f"{view}/acceptance": float(share_K @ rate_K),
                f"{view}/lre": lre,
                f"{view}/lre_max": lre_max,
                f"{view}/eta": eta,
                f"{view}/r": kappa * lre_max + eta,
                f"{view}/bound": cosine_bound(kappa, lre_max, eta),
                f"{view}/mean_bound": mean_cosine_bound(share_K, rate_K, bins_KD, eta),
            }
        return found


@dataclass(frozen=True, slots=True)
class Jackknife:
    """Figures with all folds, and with each fold left out in turn: of the measured (J) and of the held-out ones (H)."""

    whole: Mapping[str, float]
    without_J: Sequence[Mapping[str, float]]
    without_H: Sequence[Mapping[str, float]]

    @classmethod
    def of(cls, figures: Callable[[Array, Array], Mapping[str, float]], folds: int) -> Jackknife:
        """Evaluate ``figures(keep_J, keep_H)`` once with ones and once without each fold."""
        one = np.ones(folds)
        return cls(
            whole=figures(one, one),
            without_J=[figures(one - row, one) for row in np.eye(folds)],
            without_H=[figures(one, one - row) for row in np.eye(folds)],
        )

    def variance(self, name: str) -> float:
        """Squared standard error, taking the two kinds of folds as independent; nan where a figure is undefined."""
        total = 0.0
        for replicates in (self.without_J, self.without_H):
            values = np.array([replicate[name] for replicate in replicates])
            total += (len(values) - 1) * float(values.var()) if np.isfinite(values).all() else math.nan
        return total

    @property
    def freedom(self) -> int:
        """Degrees of freedom, of one kind of folds."""
        return len(self.without_J) - 1


def mean_over_rounds(rounds: Sequence[Jackknife], name: str) -> Interval:
    """Mean of one figure over independent rounds, with the jackknife's 95% interval (Student's t); ``n`` counts folds.

    The interval is for other prompts and responses at the same policy. It is nan for :data:`WITHOUT_INTERVAL` and with
    fewer than two folds. The ends of a cosine's interval are cut to -1 and 1.
    """
    value = float(np.mean([each.whole[name] for each in rounds]))
    freedom, last = sum(each.freedom for each in rounds), name.rpartition("/")[2]
    half = math.nan
    if last not in WITHOUT_INTERVAL and freedom > 0:
        variance = sum(each.variance(name) for each in rounds) / len(rounds) ** 2
        half = student_quantile(0.975, freedom) * math.sqrt(variance)
    low, high = value - half, value + half
    if last in ("cosine", "held_out", "held_out_unclipped"):
        low, high = max(low, -1.0), min(high, 1.0)
    return Interval(value, low, high, freedom + len(rounds))


# ---------------------------------------------------------------- noise


def split_half_cosine(vectors_JD: Array) -> float:
    """Mean cosine between the sums over two halves of the folds, of 200 random splits; nan with fewer than two folds.

    Two estimates of the *same* gradient, each from half of the data, agree no better than this.
    """
    folds = len(vectors_JD)
    if folds < 2:
        return math.nan
    rng = np.random.default_rng(0)
    found = []
    for _ in range(200):
        order = rng.permutation(folds)
        half = folds // 2
        found.append(cosine(vectors_JD[order[:half]].sum(0), vectors_JD[order[half : 2 * half]].sum(0)))
    return float(np.mean(found))


def whole_from_half(half: float) -> float:
    """Reliability of the whole sum from the cosine of two halves, ``2 h / (1 + h)`` (Spearman and Brown); 0 for h <= 0.

    It is the expected cosine between two independent wholes. Its square root is that between a whole and the gradient
    without noise.
    """
    return 2 * half / (1 + half) if half > 0 else (0.0 if half <= 0 else math.nan)


def noise_ceiling(first_half: float, second_half: float) -> float:
    """Expected cosine between two noisy estimates of one direction: the root of the product of their reliabilities."""
    return math.sqrt(whole_from_half(first_half) * whole_from_half(second_half))
