"""One training step's diagnostics: a flat dict of metrics from the sums of its mini-batches.

METRICS says what each metric means. Everything is computed on the driver from exact sums, so it depends on neither the
micro-batch split nor the number of ranks. In mini-batch 0 of a rollout batch the policy has not moved and S = 0, so it
is left out of all metrics but those named ``first_minibatch``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fspo.acceptance import acceptance_counts, stack_sums
from fspo.fairness import equal_mass_starts, length_reweighting_error, merge_bins
from fspo.sums import FINE_LENGTH_EDGES, Z_EDGES, SequenceSums, length_bin

Array = npt.NDArray[np.float64]

METRICS: Final[dict[str, str]] = {
    "fspo/sequences": "sequences in the step's acceptance statistics (count)",
    "fspo/accept_rate": "share with S inside the band, whatever the sign of A (symmetric acceptance)",
    "fspo/clip_frac": "1 - accept_rate: share with S outside the band",
    "fspo/clip_active_frac": "share whose gradient the clip removed (clip_high_frac + clip_low_frac)",
    "fspo/clip_high_frac": "share with S above the band and A > 0",
    "fspo/clip_low_frac": "share with S below the band and A < 0",
    "fspo/overflow_frac": "share with a log-weight above the log-ratio clamp s_max",
    "fspo/dual_clip_frac": "share whose gradient the dual clip removed",
    "fspo/truncated_frac": "share cut at the maximum response length",
    "fspo/advantage_zero_frac": "share with A = 0 (groups without dispersion)",
    "fspo/accept_rate_mass": "share of the weight kept, sum(w * accepted) / sum(w)",
    "fspo/accept_rate_truncated": "symmetric acceptance of the truncated sequences",
    "fspo/accept_rate_advantage_zero": "symmetric acceptance of the sequences with A = 0",
    "fspo/drift_per_token": "sum(S) / sum(L) (nats per token)",
    "fspo/sigma_hat": "std of (S - drift_per_token * L) / sqrt(L), the dispersion (nats per sqrt(token))",
    "fspo/S_mean": "mean of S (nats)",
    "fspo/S_std": "standard deviation of S (nats)",
    "fspo/S_q{quantile}": "quantile of S in percent (nats), from the histogram of S / sqrt(L): within 7%",
    "fspo/z_mean": "mean of z = S / sqrt(L) (nats per sqrt(token))",
    "fspo/z_std": "standard deviation of z (nats per sqrt(token))",
    "fspo/z_q{quantile}": "quantile of z in percent (nats per sqrt(token)), from the histogram: within 7%",
    "fspo/ratio_mean": "mean of exp(S); 1 in expectation over the old policy's samples",
    "fspo/weight_mean": "mean of the algorithm's weight",
    "fspo/ess_frac": "sum(w)**2 / (n * sum(w**2)), effective share of the sequences",
    "fspo/first_minibatch_z_rms": "root mean square of z in mini-batch 0: 0 unless log-probs are not reproduced",
    "fspo/noise_floor/S_rms/bin_{bin}": "root mean square of S before any weight has moved, by length bin (nats)",
    "fspo/noise_floor/margin": "smallest half-width of the band over that noise, over the bins; absent if S is 0",
    "fspo/lre": "Length Reweighting Error over the window, symmetric acceptance, plug-in",
    "fspo/lre_max": "largest |a_b / abar - 1| over the window's bins",
    "fspo/lre_debiased": "LRE with the share explained by noise taken out",
    "fspo/lre_ci_low": "lower end of its 95% interval (bootstrap over mini-batches)",
    "fspo/lre_ci_high": "upper end of its 95% interval",
    "fspo/lre_noise_floor": "mean LRE that a flat rate would give with these counts",
    "fspo/lre_active": "plug-in LRE, active acceptance",
    "fspo/lre_active_debiased": "debiased LRE, active acceptance",
    "fspo/lre_mass": "plug-in LRE, share of weight kept",
    "fspo/lre_mass_debiased": "debiased LRE, share of weight kept",
    "fspo/lre_nonzero_advantage": "plug-in LRE without the sequences with A = 0",
    "fspo/lre_untruncated": "plug-in LRE without truncated sequences",
    "fspo/window_sequences": "sequences in the window behind the LREs (count)",
    "fspo/accept/bin_{bin}": "symmetric acceptance in the window's length bin",
    "fspo/accept_low/bin_{bin}": "lower end of its 95% interval",
    "fspo/accept_high/bin_{bin}": "upper end of its 95% interval",
    "fspo/clip_high/bin_{bin}": "share with S above the band and A > 0, by bin",
    "fspo/clip_low/bin_{bin}": "share with S below the band and A < 0, by bin",
    "fspo/count/bin_{bin}": "sequences in the bin (count)",
    "fspo/length/bin_{bin}": "mean length in the bin (tokens)",
    "fspo/z_mean/bin_{bin}": "mean of z in the bin (nats per sqrt(token))",
    "fspo/z_std/bin_{bin}": "standard deviation of z in the bin (nats per sqrt(token))",
    "fspo/drift_per_token/bin_{bin}": "sum(S) / sum(L) in the bin (nats per token)",
    "fspo/by_{attribute}/lre": "plug-in LRE over the bins of another attribute (fspo.attributes), this step",
    "fspo/by_{attribute}/lre_debiased": "debiased LRE over the attribute's bins",
    "fspo/by_{attribute}/noise_floor": "mean LRE that a flat rate would give with these counts",
    "fspo/by_{attribute}/accept/{label}": "symmetric acceptance of the sequences in one bin of the attribute",
    "fspo/by_{attribute}/count/{label}": "sequences in that bin (count)",
    "fspo/funnel/{stage}": "responses that ended in this stage, this step (count)",
    "fspo/funnel/under_way": "responses started that have not ended (count)",
    "fspo/funnel/tokens_lost": "share of the tokens of finished responses that no update used",
    "fspo/funnel/length_trained": "mean length of the responses that were trained on (tokens)",
    "fspo/funnel/length_lost": "mean length of the finished responses that no update used (tokens)",
    "fspo/funnel/staleness": "mean over responses trained on: steps since the prompt was issued",
    "fspo/funnel/versions": "mean over responses trained on: policy versions that generated it",
    "fspo/funnel/lre_{stage}": "debiased LRE of passing this stage, over the window of steps",
    "fspo/funnel/lre_kept": "debiased LRE of being trained on, among finished responses, over the window",
    "fspo/outcome/{name}/bin_{bin}": "mean of a per-sequence outcome (reward, accuracy) in the window's length bin",
}
"""What each metric means, with its unit; without one it is a ratio. {bin} is two digits, 00 holds the shortest."""

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
            Metrics by name (see METRICS). An undefined metric (a mean of nothing, the LRE where nothing was accepted)
            is absent rather than nan. A rollout batch of a single mini-batch has no acceptance statistics.

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
            counts = acceptance_counts(stacked, view)
            effective = None if counts.effective is None else merge_bins(counts.effective, starts)
            error = length_reweighting_error(
                merge_bins(counts.accepted, starts),
                merge_bins(counts.total, starts),
                effective=effective,
                resamples=self.resamples,
            )
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
        "fspo/dual_clip_frac": share("dual_clipped"),
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


def dispersion(sums: SequenceSums, drift_per_token: float | None = None) -> float:
    """sigma_hat: standard deviation of (S - mu L) / sqrt(L) about its mean, with mu the drift per token. Defined here.

    The sums are enough to compute it, since (S - mu L)^2 / L = z^2 - 2 mu S + mu^2 L.

    Args:
        sums: Of any set of sequences.
        drift_per_token: mu (nats per token); None means sum(S) / sum(L).

    Returns:
        sigma_hat in nats per sqrt(token); nan for no sequence.
    """
    n = sums.total("count")
    if n == 0:
        return float("nan")
    mu = sums.total("S") / sums.total("length") if drift_per_token is None else drift_per_token
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
