"""Diagnostics from exact sums by length: metrics of a step and of a window of steps, and the noise floor of S.

docs/fairness.md says what each metric means. Everything is computed on the driver, so it depends on neither the
micro-batch split nor the number of ranks. In mini-batch 0 of a rollout batch the policy has not moved and S = 0, so it
is left out of all metrics but those named ``first_minibatch`` and ``noise_floor``.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fspo.acceptance import acceptance_counts, could_clip, stack_sums
from fspo.fairness.lre import Array, equal_mass_starts, merge_bins
from fspo.losses import acceptance_band
from fspo.sums import FIELDS, FINE_LENGTH_EDGES, SequenceSums, length_bin
from fspo.types import BandState, SequenceLossSettings

Bins = npt.NDArray[np.int64]

#: A band's half-width should be at least so many times the noise floor: then noise alone clips next to nothing.
SAFE_MARGIN: Final = 5.0

#: Sequences of a bin from which on its mean says something.
_FEWEST: Final = 50

#: Metrics of a step that are one column of the sums over another.
_STEP: Final = {
    "accept_rate": ("accepted", "count"),
    "clip_high_frac": ("clipped_high", "count"),
    "clip_low_frac": ("clipped_low", "count"),
    "overflow_frac": ("overflow", "count"),
    "truncated_frac": ("truncated", "count"),
    "advantage_zero_frac": ("advantage_zero", "count"),
    "drift_per_token": ("S", "length"),
    "z_mean": ("z", "count"),
}
#: Those of them that say how much was clipped.
_OF_CLIP: Final = ("accept_rate", "clip_high_frac", "clip_low_frac")
#: The same by length bin, over the window.
_BY_BIN: Final = {
    "length": ("length", "count"),
    "clip_high": ("clipped_high", "count"),
    "clip_low": ("clipped_low", "count"),
    "z_mean": ("z", "count"),
    "drift_per_token": ("S", "length"),
}


class LengthDiagnostics:
    """Turns each step's sums into metrics, with length bins of equal mass over a window of steps. Defined here.

    Args:
        bins: Length bins wanted; tied lengths may give fewer (see :func:`fspo.fairness.lre.equal_mass_starts`).
        window: Steps in the window behind the LREs and everything by bin.
        resamples: Of the bootstrap behind the intervals.
    """

    def __init__(self, bins: int = 8, window: int = 10, resamples: int = 200) -> None:
        self.bins, self.resamples = bins, resamples
        self._window: deque[list[SequenceSums]] = deque(maxlen=window)

    def update(self, minibatches: Sequence[SequenceSums]) -> dict[str, float]:
        """Metrics of one step.

        Args:
            minibatches: Sums over all ranks of each mini-batch of the rollout batch, in order; the first has S = 0.

        Returns:
            Metrics by name (docs/fairness.md). An undefined metric is absent rather than nan: a mean of nothing, the
            LRE where nothing was accepted or nothing clipped, a clip rate where nothing could be
            (:func:`fspo.acceptance.could_clip`). A rollout batch of a single mini-batch has no acceptance statistics.
        """
        first, *later = minibatches
        metrics = {"fspo/first_minibatch_z_rms": float(np.sqrt(_ratio(first, "z_squared", "count")))}
        if later:
            metrics |= step_metrics(sum(later, SequenceSums.zeros()))
            self._window.append(later)
        if self._window:
            metrics |= self._window_metrics()
        return {name: value for name, value in metrics.items() if np.isfinite(value)}

    def bin_starts(self) -> Bins:
        """First fine bin of each of the window's length bins, int64 [J]."""
        whole = sum(itertools.chain(*self._window), SequenceSums.zeros())
        return equal_mass_starts(whole.column("count").numpy(), self.bins)

    def drift_warning(self, settings: SequenceLossSettings, state: BandState | None = None) -> str | None:
        """A sentence once long responses drift out of a band c L**exponent about 0; None otherwise. Defined here.

        In the window's longest bin the mean of S is more than a third of the band's half-width, by two standard errors.

        Args:
            settings: The loss. A band about the drift, or one that grows as fast as it, gets no sentence.
            state: Measured parts of its band.
        """
        if settings.needs_state or settings.exponent >= 1 or not self._window:
            return None
        whole, starts = sum(itertools.chain(*self._window), SequenceSums.zeros()), self.bin_starts()
        n, length, total, squares = (
            float(merge_bins(whole.column(name).numpy(), starts)[-1]) for name in ("count", "length", "S", "S_squared")
        )
        if n < _FEWEST:
            return None
        mean, length = total / n, length / n
        error = math.sqrt(max(squares / n - mean**2, 0.0) / n)
        lower, upper = (float(edge[0]) for edge in band_edges(np.array([length]), settings, state))
        half_width = upper if mean > 0 else -lower
        if abs(mean) - 2 * error <= half_width / 3:
            return None
        return (
            f"warning: at lengths near {length:.0f} the mean of S is {mean:.2g}, {abs(mean) / half_width:.0%} of the "
            f"band's half-width of {half_width:.2g}: long responses drift out of it. drift=kl (fspo_v1) centres it at "
            "the drift"
        )

    def outcome_metrics(self, name: str, value_B: torch.Tensor, length_B: torch.Tensor) -> dict[str, float]:
        """Mean of a per-sequence outcome, such as reward or accuracy, by the window's length bins.

        Args:
            name: Of the outcome, as it appears in the name of the metric.
            value_B: One value per sequence of the step's batch.
            length_B: Response lengths; sequences of length 0 are left out.
        """
        kept = length_B > 0
        k, size, starts = length_bin(length_B[kept].cpu()).numpy(), len(FINE_LENGTH_EDGES) - 1, self.bin_starts()
        value = value_B[kept].detach().cpu().to(torch.float64).numpy()
        total, count = (merge_bins(np.bincount(k, weights, size), starts) for weights in (value, None))
        return {f"fspo/outcome/{name}/bin_{j:02d}": float(total[j] / count[j]) for j in np.flatnonzero(count)}

    def _window_metrics(self) -> dict[str, float]:
        parts, starts = list(itertools.chain(*self._window)), self.bin_starts()
        stacked, whole = stack_sums(parts), sum(parts, SequenceSums.zeros())
        error = acceptance_counts(stacked, "symmetric").error(starts, self.resamples)
        metrics = {"fspo/window_sequences": whole.total("count")}
        if error.is_informative:
            metrics |= {
                "fspo/lre": error.lre,
                "fspo/lre_debiased": error.debiased.value,
                "fspo/lre_max": error.lre_max,
                "fspo/lre_ci_low": error.debiased.low,
                "fspo/lre_ci_high": error.debiased.high,
                "fspo/lre_noise_floor": error.noise_floor,
            }
        active = acceptance_counts(stacked, "active").error(starts, self.resamples)
        if active.is_informative:
            metrics |= {"fspo/lre_active": active.lre, "fspo/lre_active_debiased": active.debiased.value}
        by_bin = {"accept": error.rate_K}
        merged = {name: merge_bins(whole.column(name).numpy(), starts) for name in FIELDS}
        with np.errstate(invalid="ignore"):  # no sequence at all; otherwise every bin of the window holds one
            by_bin |= {name: merged[column] / merged[over] for name, (column, over) in _BY_BIN.items()}
            z_squared = merged["z_squared"] / merged["count"]
        by_bin |= {"count": merged["count"], "z_std": _deviation(by_bin["z_mean"], z_squared)}
        return metrics | {
            f"fspo/{name}/bin_{j:02d}": float(value)
            for name, values in by_bin.items()
            for j, value in enumerate(values)
        }

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


class NormClipWatch:
    """Says once that the clip of the gradient norm binds all the time. Defined here.

    A sum over tokens, as FSPO's, has a gradient about L times that of a mean, as GSPO's. Where ``optim.clip_grad``
    binds in every step, all steps are equally long whatever their gradients, and the loss's scale has no effect.

    Args:
        clip: ``actor.optim.clip_grad`` (``actor.grad_clip`` is read by nothing in verl 0.9.1).
    """

    STEPS: Final = 10

    def __init__(self, clip: float) -> None:
        self.clip, self._bound = clip, 0

    def warning(self, norm: float) -> str | None:
        """A sentence after the tenth step in a row whose gradients were longer than the clip; None otherwise.

        Args:
            norm: Of the step's gradients before clipping: the smallest, or, where only that is known, the mean.
        """
        self._bound = self._bound + 1 if norm > self.clip else 0
        if self._bound != self.STEPS:
            return None
        return (
            f"warning: the gradients of the last {self.STEPS} steps were longer than actor.optim.clip_grad="
            f"{self.clip:g} (norm now {norm:.3g}): all steps are equally long, whatever their gradients. Divide the "
            "loss by a typical length (policy_loss.grad_multiplier; in this recipe match_scale=matched), or raise "
            "clip_grad"
        )


def band_edges(length_N: Array, settings: SequenceLossSettings, state: BandState | None = None) -> tuple[Array, Array]:
    """Lower and upper edge of a band in nats, by length; lengths are rounded, to at least 1."""
    length = torch.from_numpy(np.maximum(1, np.rint(length_N))).to(torch.int64)
    lower, upper = acceptance_band(length, settings, state, torch.float64)
    return lower.numpy(), upper.numpy()


def step_metrics(sums: SequenceSums) -> dict[str, float]:
    """Metrics over all lengths from the summed mini-batches of one step; undefined ones are nan."""
    share = {name: _ratio(sums, *columns) for name, columns in _STEP.items()}
    if not could_clip(sums.total):
        share |= dict.fromkeys(_OF_CLIP, math.nan)
    metrics = share | {
        "sequences": sums.total("count"),
        "clip_frac": 1.0 - share["accept_rate"],
        "clip_active_frac": share["clip_high_frac"] + share["clip_low_frac"],
        "sigma_hat": dispersion(sums),
        "z_std": _deviation(share["z_mean"], _ratio(sums, "z_squared", "count")),
        "ess_frac": _ratio(sums, "weight", "count") ** 2 / _ratio(sums, "weight_squared", "count"),
    }
    return {f"fspo/{name}": value for name, value in metrics.items()}


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
    return float(_deviation((sums.total("z") - mu * sums.total("length_sqrt")) / n, square / n))


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """How much of S is rounding, by length bin, against the band. Defined here.

    Until the first weight moves, the policy is the one that sampled, and S should be 0. What it is instead comes from
    rounding: bf16, and another batch shape or kernel in one of the two passes. A band that is not much wider clips
    noise.

    Attributes:
        length_J: Mean length of each bin with sequences, in tokens.
        rms_J: Root mean square of S, in nats.
        half_width_J: The smaller distance from the band's centre to an edge at that length, in nats; nan for a loss
            without a band on S.
    """

    length_J: Array
    rms_J: Array
    half_width_J: Array

    @property
    def margin(self) -> float:
        """Smallest half-width over noise of any bin; inf where S is exactly 0, nan without a band."""
        with np.errstate(divide="ignore", invalid="ignore"):
            margin_J = np.where(self.rms_J > 0, self.half_width_J / self.rms_J, np.inf)
        return float(margin_J.min()) if not np.isnan(self.half_width_J).any() and len(margin_J) else math.nan

    def metrics(self) -> dict[str, float]:
        """Metrics by name (docs/fairness.md); infinite and undefined ones are absent."""
        metrics = {f"fspo/noise_floor/S_rms/bin_{j:02d}": float(rms) for j, rms in enumerate(self.rms_J)}
        metrics["fspo/noise_floor/margin"] = self.margin
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def warning(self) -> str | None:
        """A sentence with the remedy if the band is too close to the noise at a length that occurs; None otherwise."""
        if not self.margin < SAFE_MARGIN:
            return None
        worst = int(np.argmin(self.half_width_J / np.maximum(self.rms_J, 1e-300)))
        return (
            f"warning: rounding alone moves S by {self.rms_J[worst]:.2g} nats at lengths near "
            f"{self.length_J[worst]:.0f}, and the band's half-width there is {self.half_width_J[worst]:.2g}: it clips "
            "noise (fspo/noise_floor/margin below 5). Give both passes the "
            "same packs, compute in fp16 or fp32, or widen the band"
        )


def noise_floor(
    unmoved: Sequence[SequenceSums],
    starts: Bins,
    settings: SequenceLossSettings | None = None,
    state: BandState | None = None,
) -> NoiseFloor:
    """Measure the noise of S, and hold the band of ``settings`` against it.

    Args:
        unmoved: Sums of mini-batches computed before any weight had moved.
        starts: First fine length bin of each bin (:func:`fspo.fairness.lre.equal_mass_starts`).
        settings: The loss; None for one without a band on S.
        state: Measured parts of its band.
    """
    whole = sum(unmoved, SequenceSums.zeros())
    count_J, length_J, squares_J = (
        merge_bins(whole.column(name).numpy(), starts) for name in ("count", "length", "S_squared")
    )
    kept = count_J > 0
    length_J, rms_J = length_J[kept] / count_J[kept], np.sqrt(squares_J[kept] / count_J[kept])
    half_width_J = np.full_like(length_J, np.nan)
    if settings is not None:
        lower, upper = band_edges(length_J, settings, state)
        half_width_J = np.minimum(-lower, upper)
    return NoiseFloor(length_J, rms_J, half_width_J)


def _ratio(sums: SequenceSums, column: str, over: str) -> float:
    """One column's sum over another's; nan over 0."""
    whole = sums.total(over)
    return sums.total(column) / whole if whole > 0 else float("nan")


def _deviation(mean: Any, mean_of_squares: Any) -> Any:
    """Standard deviation, of numbers or arrays."""
    return np.sqrt(np.maximum(mean_of_squares - mean**2, 0.0))
