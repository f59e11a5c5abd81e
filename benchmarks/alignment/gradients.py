"""Gradient alignment: what clipping does to the direction of the policy gradient.

A gradient has as many entries as the model has parameters, but only its inner products with the other gradients matter
here. The policy gradient of a sequence-level loss is a weighted sum ``sum_i c_i grad log pi(y_i)`` with one coefficient
``c_i`` per sequence (:mod:`fspo.losses`). Measured are V such sums, each over a part of the sequences:

* for each unclipped objective (weight and length scale), fold j and length bin k: ``u_jk``,
* for each clipped objective, fold and bin: ``c_jk``,
* for each fold of the held-out sequences: ``h_j``, the plain policy gradient (S = 0, weight 1).

A *fold* holds whole prompts; leaving out one fold at a time gives standard errors (delete-one-fold jackknife). The Gram
matrix of the V vectors determines every cosine, kappa and eta. A *round* is one repetition of the whole measurement.

The bound on the cosine: p_b is the share of bin b, a_b its acceptance rate, abar = sum_b p_b a_b; g_b is the mean
gradient of the unclipped objective over the bin's sequences, g = sum_b p_b g_b; gc is that of the clipped objective
over all. With kappa = sum_b p_b |g_b| / |g| >= 1 (how much the bins' gradients cancel), and
eta = |gc - sum_b p_b a_b g_b| / (abar |g|) (above 0 where clipping within a bin depends on A and weight),

    r = kappa * LRE_max + eta < 1    implies    cos(gc, g) >= sqrt(1 - r**2),

because |gc / abar - g| <= sum_b p_b |a_b / abar - 1| |g_b| + eta |g| <= r |g|. The middle, over |g|, is the r of the
sharper *mean bound*. Derivation: docs/fairness.md. All of this is defined here.
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


def cosine(first: Array, second: Array) -> float:
    """Cosine of the angle between two vectors; nan if one of them is zero."""
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / norms if norms > 0 else math.nan


def bound(r: float) -> float:
    """Lower bound sqrt(1 - r**2) on the cosine; -1, which says nothing, where r is not below 1."""
    return math.sqrt(1.0 - r * r) if r < 1 else -1.0


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

    def weights(self, coefficient_XB: Sequence[Array], fold_B: Indices, bin_B: Indices) -> Array:
        """[B, measured]: the coefficient of each sequence in each vector; X, objectives, unclipped ones first."""
        cell_B = fold_B * self.bins + bin_B
        return np.hstack([in_columns(each_B, cell_B, self.folds * self.bins) for each_B in coefficient_XB])

    def split(self, vectors_VD: Array) -> tuple[Array, Array, Array]:
        """(unclipped [F, J, K, D], clipped [O, J, K, D], held out [H, D])."""
        cells = vectors_VD[: self.measured].reshape(-1, self.folds, self.bins, vectors_VD.shape[1])
        return cells[: self.families], cells[self.families :], vectors_VD[self.measured :]


def in_columns(coefficient_B: Array, column_B: Indices, columns: int) -> Array:
    """[B, columns]: the coefficient of each sequence in its column, 0 in the others."""
    return np.eye(columns)[column_B] * coefficient_B[:, None]


def embed(gram_VV: Array) -> Array:
    """V vectors of V entries whose inner products are ``gram_VV``. They stand for the gradients in all that follows."""
    values, vectors = np.linalg.eigh((gram_VV + gram_VV.T) / 2)
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
        count_K, share_K = total_K[filled], total_K[filled] / total_K.sum()
        unclipped_KD, clipped_KD = (
            np.einsum("j,jkd->kd", keep_J, cells_JKD) for cells_JKD in (self.unclipped_JKD, self.clipped_JKD)
        )
        own_D, clipped_D = (parts_KD.sum(0) / total_K.sum() for parts_KD in (unclipped_KD, clipped_KD))
        held_out_D = keep_H @ self.held_out_HD
        bins_KD = unclipped_KD[filled] / count_K[:, None]
        norm, norm_K = np.linalg.norm(own_D), np.linalg.norm(bins_KD, axis=1)
        figures = {
            "cosine": cosine(clipped_D, own_D),
            "held_out": cosine(clipped_D, held_out_D),
            "held_out_unclipped": cosine(own_D, held_out_D),
        }
        figures["held_out_change"] = figures["held_out"] - figures["held_out_unclipped"]
        with np.errstate(divide="ignore", invalid="ignore"):  # nan or inf where nothing is accepted, or g is zero
            figures["norm_ratio"] = np.linalg.norm(clipped_D) / norm
            figures["kappa"] = kappa = share_K @ norm_K / norm
            for name, parts_KD in (("share", clipped_KD), ("share_unclipped", unclipped_KD)):
                along_K = parts_KD @ parts_KD.sum(0)
                figures |= {f"{name}/{k}": along / along_K.sum() for k, along in enumerate(along_K)}
            for view, accepted_JK in zip(VIEWS, self.accepted_VJK, strict=True):
                accepted_K = (keep_J @ accepted_JK)[filled]
                rate_K = accepted_K / count_K
                overall = share_K @ rate_K
                lre, lre_max = (float(value) for value in plain_lre(accepted_K, count_K))
                eta = np.linalg.norm(clipped_D - (share_K * rate_K) @ bins_KD) / (overall * norm)
                r = kappa * lre_max + eta
                mean_r = (share_K * norm_K) @ np.abs(rate_K / overall - 1.0) / norm + eta
                figures |= {
                    f"{view}/acceptance": overall,
                    f"{view}/lre": lre,
                    f"{view}/lre_max": lre_max,
                    f"{view}/eta": eta,
                    f"{view}/r": r,
                    f"{view}/bound": bound(r),
                    f"{view}/mean_bound": bound(mean_r),
                }
        return {name: float(value) for name, value in figures.items()}


@dataclass(frozen=True, slots=True)
class Jackknife:
    """Figures with all folds, and their squared standard errors: each fold left out in turn, measured and held-out.

    The two kinds of folds count as independent. A variance is nan where a figure is undefined without one of them.
    """

    whole: Mapping[str, float]
    variance: Mapping[str, float]
    folds: int

    @classmethod
    def of(cls, figures: Callable[[Array, Array], Mapping[str, float]], folds: int) -> Jackknife:
        """Evaluate ``figures(keep_J, keep_H)`` once with ones and once without each fold."""
        one = np.ones(folds)
        whole, variance = figures(one, one), {}
        measured = [figures(one - row, one) for row in np.eye(folds)]
        held_out = [figures(one, one - row) for row in np.eye(folds)]
        with np.errstate(invalid="ignore"):
            for name in whole:
                values = [[each[name] for each in without] for without in (measured, held_out)]
                variance[name] = (folds - 1) * float(np.var(values, axis=1).sum())
        return cls(whole, variance, folds)


def mean_over_rounds(rounds: Sequence[Jackknife], name: str) -> Interval:
    """Mean of one figure over independent rounds, with the jackknife's 95% interval (Student's t); ``n`` counts folds.

    The interval is for other prompts and responses at the same policy. It is nan for :data:`WITHOUT_INTERVAL`. The ends
    of a cosine's interval are cut to -1 and 1.
    """
    value = float(np.mean([each.whole[name] for each in rounds]))
    folds, last = sum(each.folds for each in rounds), name.rpartition("/")[2]
    if last in WITHOUT_INTERVAL:
        return Interval(value, math.nan, math.nan, folds)
    error = math.sqrt(sum(each.variance[name] for each in rounds)) / len(rounds)
    half = student_quantile(0.975, folds - len(rounds)) * error
    low, high = value - half, value + half
    if last in ("cosine", "held_out", "held_out_unclipped"):
        low, high = max(low, -1.0), min(high, 1.0)
    return Interval(value, low, high, folds)
