"""One training step's diagnostics: a flat dict of metrics from the sums of its mini-batches.

docs/metrics.md says what each metric means. Everything is computed on the driver from exact sums, so it depends on
neither the micro-batch split nor the number of ranks. In mini-batch 0 of a rollout batch the policy has not moved and
S = 0, so it is left out of all metrics but those named ``first_minibatch``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fspo.acceptance import acceptance_counts, stack_sums
from fspo.fairness import equal_mass_starts, merge_bins
from fspo.sums import FINE_LENGTH_EDGES, Z_EDGES, SequenceSums, length_bin

Array = npt.NDArray[np.float64]

QUANTILES: Final = (5, 25, 50, 75, 95)


class LengthDiagnostics:
    """Turns each step's sums into metrics, with length bins of equal mass over a window of steps. Defined here.

    Args:
        bins: Length bins wanted; tied lengths may give fewer (see :func:`fspo.fairness.equal_mass_starts`).
        window: Steps in the window behind the LREs and everything by bin.
        resamples: Of the bootstrap behind the intervals.

    Raises:
        ValueError: If an argument is below 1.
    """

    def __init__(self, bins: int = 8, window: int = 10, resamples: int = 200) -> None:
        if min(bins, window, resamples) < 1:
            raise ValueError(f"bins, window and resamples must be at least 1, got {bins}, {window}, {resamples}")
        self.bins, self.resamples = bins, resamples
        self._window: deque[list[SequenceSums]] = deque(maxlen=window)

    def update(self, minibatches: Sequence[SequenceSums]) -> dict[str, float]:
        """Metrics of one step.

        Args:
            minibatches: Sums over all ranks of each mini-batch of the rollout batch, in order; the first has S = 0.

        Returns:
            Metrics by name (docs/metrics.md). An undefined metric (a mean of nothing, the LRE where nothing was
            accepted) is absent rather than nan. A rollout batch of a single mini-batch has no acceptance statistics.

        Raises:
            ValueError: If there is no mini-batch.
        """
        if not minibatches:
            raise ValueError("LengthDiagnostics.update needs the sums of at least one mini-batch")
        metrics = _first_minibatch_metrics(minibatches[0])
        later = list(minibatches[1:])
        if later:
            metrics |= step_metrics(sum(later, SequenceSums.zeros()))
            self._window.append(later)
        parts = [part for step in self._window for part in step]
        if parts:
            metrics |= self._window_metrics(parts)
        return {name: value for name, value in metrics.items() if np.isfinite(value)}

    def bin_starts(self) -> npt.NDArray[np.int64]:
        """First fine bin of each of the window's length bins, int64 [J]."""
        parts = [part for step in self._window for part in step]
        whole = sum(parts, SequenceSums.zeros())
        return equal_mass_starts(whole.column("count").numpy(), self.bins)

    def outcome_metrics(self, name: str, value_B: torch.Tensor, length_B: torch.Tensor) -> dict[str, float]:
        """Mean of a per-sequence outcome, such as reward or accuracy, by the window's length bins.

        Args:
            name: Of the outcome, as it appears in the name of the metric.
            value_B: One value per sequence of the step's batch.
            length_B: Response lengths; sequences of length 0 are left out.
        """
        kept = length_B > 0
        k = length_bin(length_B[kept].cpu())
        fine = torch.zeros(2, len(FINE_LENGTH_EDGES) - 1, dtype=torch.float64)
        fine[0].index_add_(0, k, value_B[kept].detach().cpu().to(torch.float64))
        fine[1].index_add_(0, k, torch.ones_like(k, dtype=torch.float64))
        total, count = merge_bins(fine.numpy(), self.bin_starts())
        return {f"fspo/outcome/{name}/bin_{j:02d}": float(total[j] / count[j]) for j in np.flatnonzero(count)}

    def _window_metrics(self, parts: Sequence[SequenceSums]) -> dict[str, float]:
        whole = sum(parts, SequenceSums.zeros())
        stacked, starts = stack_sums(parts), self.bin_starts()
        metrics = {"fspo/window_sequences": whole.total("count")}
        for view, suffix in (
            ("symmetric", ""),
            ("active", "_active"),
            ("mass", "_mass"),
            ("nonzero_advantage", "_nonzero_advantage"),
            ("untruncated", "_untruncated"),
        ):
            error = acceptance_counts(stacked, view).error(starts, self.resamples)
            metrics[f"fspo/lre{suffix}"] = error.lre
            if view in ("symmetric", "active", "mass"):
                metrics[f"fspo/lre{suffix}_debiased"] = error.debiased.value
            if view == "symmetric":
                metrics |= {
                    "fspo/lre_max": error.lre_max,
                    "fspo/lre_ci_low": error.debiased.low,
                    "fspo/lre_ci_high": error.debiased.high,
                    "fspo/lre_noise_floor": error.noise_floor,
                }
                for j in range(len(starts)):
                    metrics[f"fspo/accept/bin_{j:02d}"] = float(error.rate_K[j])
                    metrics[f"fspo/accept_low/bin_{j:02d}"] = float(error.rate_low_K[j])
                    metrics[f"fspo/accept_high/bin_{j:02d}"] = float(error.rate_high_K[j])
        return metrics | _bin_metrics(whole, starts)

    def state_dict(self) -> dict[str, Any]:
        """The window, for a checkpoint."""
        return {"window": [[part.state_dict() for part in step] for step in self._window]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the window; of a longer one, its newest steps.

        Raises:
            ValueError: If the sums were saved with another layout.
        """
        self._window.clear()
        self._window.extend([SequenceSums.from_state_dict(part) for part in step] for step in state["window"])


def step_metrics(sums: SequenceSums) -> dict[str, float]:
    """Metrics over all lengths from the summed mini-batches of one step; undefined ones are nan."""
    n = sums.total("count")

    def share(name: str, of: float = n) -> float:
        return sums.total(name) / of if of > 0 else float("nan")

    accept = share("accepted")
    mean_s, mean_z = share("S"), share("z")
    metrics = {
        "fspo/sequences": n,
        "fspo/accept_rate": accept,
        "fspo/clip_frac": 1.0 - accept,
        "fspo/clip_active_frac": share("clipped_high") + share("clipped_low"),
        "fspo/clip_high_frac": share("clipped_high"),
        "fspo/clip_low_frac": share("clipped_low"),
        "fspo/overflow_frac": share("overflow"),
        "fspo/truncated_frac": share("truncated"),
        "fspo/advantage_zero_frac": share("advantage_zero"),
        "fspo/accept_rate_mass": share("weight_accepted", sums.total("weight")),
        "fspo/accept_rate_truncated": share("truncated_accepted", sums.total("truncated")),
        "fspo/accept_rate_advantage_zero": share("advantage_zero_accepted", sums.total("advantage_zero")),
        "fspo/drift_per_token": share("S", sums.total("length")),
        "fspo/sigma_hat": dispersion(sums),
        "fspo/S_mean": mean_s,
        "fspo/S_std": float(np.sqrt(max(share("S_squared") - mean_s**2, 0.0))),
        "fspo/z_mean": mean_z,
        "fspo/z_std": float(np.sqrt(max(share("z_squared") - mean_z**2, 0.0))),
        "fspo/ratio_mean": share("ratio"),
        "fspo/weight_mean": share("weight"),
        "fspo/ess_frac": share("weight") ** 2 / share("weight_squared") if n > 0 else float("nan"),
    }
    if n > 0:
        z_H = _cell_values()
        root_K = (sums.column("length_sqrt") / sums.column("count").clamp(min=1)).numpy()
        hist = sums.hist_KH.numpy()
        z_quantiles = _weighted_quantiles(z_H, hist.sum(0), QUANTILES)
        s_quantiles = _weighted_quantiles((root_K[:, None] * z_H).ravel(), hist.ravel(), QUANTILES)
        for q, z_value, s_value in zip(QUANTILES, z_quantiles, s_quantiles, strict=True):
            metrics[f"fspo/z_q{q:02d}"], metrics[f"fspo/S_q{q:02d}"] = float(z_value), float(s_value)
    return metrics


def dispersion(sums: SequenceSums) -> float:
    """sigma_hat: standard deviation of (S - mu L) / sqrt(L) about its mean, with mu = sum(S) / sum(L). Defined here.

    The sums are enough to compute it, since (S - mu L)^2 / L = z^2 - 2 mu S + mu^2 L.

    Returns:
        sigma_hat in nats per sqrt(token); nan for no sequence.
    """
    n = sums.total("count")
    if n == 0:
        return float("nan")
    mu = sums.total("S") / sums.total("length")
    square = sums.total("z_squared") - 2 * mu * sums.total("S") + mu**2 * sums.total("length")
    mean = (sums.total("z") - mu * sums.total("length_sqrt")) / n
    return float(np.sqrt(max(square / n - mean**2, 0.0)))


def _first_minibatch_metrics(sums: SequenceSums) -> dict[str, float]:
    n = sums.total("count")
    return {"fspo/first_minibatch_z_rms": float(np.sqrt(sums.total("z_squared") / n)) if n else float("nan")}


def _bin_metrics(sums: SequenceSums, starts: npt.NDArray[np.int64]) -> dict[str, float]:
    names = ("count", "clipped_high", "clipped_low", "length", "S", "z", "z_squared")
    merged = {name: merge_bins(sums.column(name).numpy(), starts) for name in names}
    metrics: dict[str, float] = {}
    for j in np.flatnonzero(merged["count"]):
        n, tail = float(merged["count"][j]), f"bin_{j:02d}"
        mean_z = float(merged["z"][j] / n)
        metrics |= {
            f"fspo/count/{tail}": n,
            f"fspo/length/{tail}": float(merged["length"][j] / n),
            f"fspo/clip_high/{tail}": float(merged["clipped_high"][j] / n),
            f"fspo/clip_low/{tail}": float(merged["clipped_low"][j] / n),
            f"fspo/z_mean/{tail}": mean_z,
            f"fspo/z_std/{tail}": float(np.sqrt(max(merged["z_squared"][j] / n - mean_z**2, 0.0))),
            f"fspo/drift_per_token/{tail}": float(merged["S"][j] / merged["length"][j]),
        }
    return metrics


def _cell_values() -> Array:
    """One value of z for each histogram cell: its geometric middle, or the inner edge of the overflow cells."""
    edges = Z_EDGES.numpy()
    low, high = edges[:-1], edges[1:]
    with np.errstate(invalid="ignore"):
        middle = np.sign(low + high) * np.sqrt(np.abs(low * high))
    middle[0], middle[-1] = edges[1], edges[-2]
    return np.asarray(np.nan_to_num(middle))


def _weighted_quantiles(values: Array, weights: npt.NDArray[Any], percent: Sequence[int]) -> Array:
    order = np.argsort(values, kind="stable")
    cumulative = np.cumsum(weights[order])
    targets = np.asarray(percent) / 100 * cumulative[-1]
    return np.asarray(values[order][np.searchsorted(cumulative, targets)])
