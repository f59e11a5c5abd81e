"""Metrics of a step and of a window of steps from recorded responses, and the noise floor of S.

docs/fairness.md says what each metric means. Everything is computed on the driver, so it depends on neither the
micro-batch split nor the number of ranks. Before a weight has moved S is 0, but for rounding; these mini-batches are
left out of all metrics but those named ``first_minibatch`` and ``noise_floor``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fspo.fairness.lre import Array, merge_bins
from fspo.length_bins import FINE_BINS, length_bin
from fspo.losses import acceptance_band
from fspo.responses import Responses
from fspo.types import BandState, SequenceLossSettings

Bins = npt.NDArray[np.int64]

#: A band's half-width should be at least so many times the noise floor: then noise alone clips next to nothing.
SAFE_MARGIN: Final = 5.0

#: Fewest sequences for the mean of a bin to be judged.
_FEWEST: Final = 50


class LengthDiagnostics:
    """Turns each step's responses into metrics, with length bins of equal mass over a window of steps. Defined here.

    Args:
        bins: Length bins wanted; tied lengths may give fewer (see :func:`fspo.fairness.lre.equal_mass_starts`).
        window: Steps in the window behind the LREs and everything by bin.
        resamples: Of the bootstrap behind the intervals.
        s_max: Log-ratio clamp of the loss; infinite for one without.
    """

    def __init__(self, bins: int = 8, window: int = 10, resamples: int = 200, s_max: float = math.inf) -> None:
        self.bins, self.resamples, self._s_max = bins, resamples, s_max
        self._window: deque[Responses] = deque(maxlen=window)

    def update(self, step: Responses) -> dict[str, float]:
        """Metrics of one step.

        Args:
            step: All responses of the rollout batch.

        Returns:
            Metrics by name (docs/fairness.md). An undefined metric is absent rather than nan: a mean of nothing, the
            LRE where nothing was accepted or nothing clipped, a clip rate where nothing could be
            (:meth:`fspo.responses.Responses.could_clip`). A rollout batch of a single mini-batch has no acceptance
            statistics.
        """
        metrics, moved, unmoved = {}, step.moved(), step.unmoved()
        if len(unmoved):
            metrics["fspo/first_minibatch_z_rms"] = float(np.sqrt(np.mean(unmoved.z_B**2)))
        if len(moved):
            metrics |= step_metrics(moved, self._s_max)
            self._window.append(moved)
        if self._window:
            metrics |= self._window_metrics()
        return {name: value for name, value in metrics.items() if np.isfinite(value)}

    def bin_starts(self) -> Bins:
        """First fine bin of each of the window's length bins, int64 [J]."""
        return Responses.join(list(self._window)).starts(self.bins)

    def drift_warning(self, settings: SequenceLossSettings, state: BandState | None = None) -> str | None:
        """A sentence once long responses drift out of a band c L**exponent about 0; None otherwise. Defined here.

        In the window's longest bin the mean of S is more than a third of the band's half-width, by two standard errors.

        Args:
            settings: The loss. A band about the drift, or one that grows as fast as it, gets no sentence.
            state: Measured parts of its band.
        """
        if settings.needs_state or settings.exponent >= 1 or not self._window:
            return None
        window = Responses.join(list(self._window))
        longest_B = window.fine_B >= window.starts(self.bins)[-1]
        s_N, n = window.s_B[longest_B], int(longest_B.sum())
        if n < _FEWEST:
            return None
        mean, length, error = (
            float(s_N.mean()),
            float(window.length_B[longest_B].mean()),
            float(s_N.std() / math.sqrt(n)),
        )
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
        k, starts = length_bin(length_B[kept].cpu().numpy()), self.bin_starts()
        value = value_B[kept].detach().cpu().to(torch.float64).numpy()
        total, count = (merge_bins(np.bincount(k, weights, FINE_BINS), starts) for weights in (value, None))
        return {f"fspo/outcome/{name}/bin_{j:02d}": float(total[j] / count[j]) for j in np.flatnonzero(count)}

    def _window_metrics(self) -> dict[str, float]:
        window = Responses.join(list(self._window))
        starts = window.starts(self.bins)
        metrics = {"fspo/window_sequences": float(len(window))}
        by_bin: dict[str, Array] = {}
        if window.rule_known:
            error = window.error("symmetric", starts, self.resamples)
            if error.is_informative:
                metrics |= {
                    "fspo/lre": error.lre,
                    "fspo/lre_debiased": error.debiased.value,
                    "fspo/lre_max": error.lre_max,
                    "fspo/lre_ci_low": error.debiased.low,
                    "fspo/lre_ci_high": error.debiased.high,
                    "fspo/lre_noise_floor": error.noise_floor,
                }
            active = window.error("active", starts, self.resamples)
            if active.is_informative:
                metrics |= {"fspo/lre_active": active.lre, "fspo/lre_active_debiased": active.debiased.value}
            by_bin["accept"] = error.rate_K
        count_J = merge_bins(window.count_K, starts)
        high_B, low_B = removed(window)
        means = {
            name: window.by_bin(values_B, starts) / count_J
            for name, values_B in {
                "length": window.length_B,
                "clip_high": high_B,
                "clip_low": low_B,
                "z_mean": window.z_B,
                "z_squared": window.z_B**2,
                "S": window.s_B,
            }.items()
        }
        z_squared, s_mean = means.pop("z_squared"), means.pop("S")
        by_bin |= means | {"drift_per_token": s_mean / means["length"], "count": count_J}
        by_bin["z_std"] = np.sqrt(np.maximum(z_squared - means["z_mean"] ** 2, 0.0))
        return metrics | {
            f"fspo/{name}/bin_{j:02d}": float(value)
            for name, values in by_bin.items()
            for j, value in enumerate(values)
        }

    def state_dict(self) -> dict[str, Any]:
        """The window, for a checkpoint: its columns by step."""
        return {"window": [step.state_dict() for step in self._window]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the window; of a longer one, its newest steps."""
        self._window.clear()
        self._window.extend(Responses.from_state_dict(step) for step in state["window"])


def band_edges(length_N: Array, settings: SequenceLossSettings, state: BandState | None = None) -> tuple[Array, Array]:
    """Lower and upper edge of a band in nats, by length; lengths are rounded, to at least 1."""
    length = torch.from_numpy(np.maximum(1, np.rint(length_N))).to(torch.int64)
    lower, upper = acceptance_band(length, settings, state, torch.float64)
    return lower.numpy(), upper.numpy()


def removed(responses: Responses) -> tuple[Array, Array]:
    """Share of the gradient that the clip removes of each response, from above (A > 0) and from below (A < 0), [B]."""
    removed_B = 1.0 - responses.kept_B
    return removed_B * (responses.advantage_B > 0), removed_B * (responses.advantage_B < 0)


def step_metrics(responses: Responses, s_max: float = math.inf) -> dict[str, float]:
    """Metrics over all lengths of the responses of one step, at least one; undefined ones are nan."""
    share_B = {"accept_rate": responses.inside_B}
    share_B["clip_high_frac"], share_B["clip_low_frac"] = removed(responses)
    share = {name: float(values_B.mean()) for name, values_B in share_B.items()}
    if not responses.could_clip():
        share = dict.fromkeys(share, math.nan)
    weight_B = responses.weight_B
    metrics = share | {
        # The clamp is exact; the table has weights in float32.
        "overflow_frac": float((weight_B >= math.exp(s_max - 1e-6)).mean()) if math.isfinite(s_max) else 0.0,
        "drift_per_token": float(responses.s_B.sum() / responses.length_B.sum()),
        "z_mean": float(responses.z_B.mean()),
        "z_std": float(responses.z_B.std()),
        "sequences": float(len(responses)),
        "clip_frac": 1.0 - share["accept_rate"],
        "clip_active_frac": share["clip_high_frac"] + share["clip_low_frac"],
        "sigma_hat": responses.sigma(),
        "ess_frac": float(weight_B.sum() ** 2 / (len(weight_B) * (weight_B**2).sum())),
    }
    return {f"fspo/{name}": value for name, value in metrics.items()}


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
    unmoved: Responses, bins: int = 8, settings: SequenceLossSettings | None = None, state: BandState | None = None
) -> NoiseFloor:
    """Measure the noise of S, and hold the band of ``settings`` against it.

    Args:
        unmoved: Of mini-batches computed before any weight had moved.
        bins: Bins of length of equal mass.
        settings: The loss; None for one without a band on S.
        state: Measured parts of its band.
    """
    starts = unmoved.starts(bins)
    count_J = merge_bins(unmoved.count_K, starts)
    kept = count_J > 0
    length_J, rms_J = (unmoved.by_bin(x_B, starts)[kept] / count_J[kept] for x_B in (unmoved.length_B, unmoved.s_B**2))
    rms_J = np.sqrt(rms_J)
    half_width_J = np.full_like(length_J, np.nan)
    if settings is not None:
        lower, upper = band_edges(length_J, settings, state)
        half_width_J = np.minimum(-lower, upper)
    return NoiseFloor(length_J, rms_J, half_width_J)
