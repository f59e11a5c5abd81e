"""Metrics of a step and of a window of steps from recorded responses, and the noise floor of S. Defined here.

docs/fairness.md says what each metric means. Everything is computed on the driver, so it depends on neither the
micro-batch split nor the number of ranks. Before a weight has moved S is 0, but for rounding; these mini-batches are
left out of all metrics but those named ``first_minibatch`` and ``noise_floor``.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from fspo.fairness.lre import Array
from fspo.losses import acceptance_band
from fspo.responses import Responses
from fspo.types import BandState, SequenceLossSettings

#: A band's half-width should be at least so many times the noise floor: then noise alone clips next to nothing.
SAFE_MARGIN: Final = 5.0

#: Fewest sequences for the mean of a bin to be judged.
_FEWEST: Final = 50


class LengthDiagnostics:
    """Turns each step's responses into metrics, with length bins of equal mass over a window of steps.

    Args:
        window: Steps in the window behind the LREs and everything by bin.
    """

    def __init__(self, window: int = 10) -> None:
        self._steps: deque[Responses] = deque(maxlen=window)
        self._window = Responses.join([])

    def update(self, step: Responses) -> dict[str, float]:
        """Metrics of one step, given all responses of its rollout batch; those that are not defined are absent."""
        metrics, moved, unmoved = {}, step.moved(), step.unmoved()
        if len(unmoved):
            metrics["fspo/first_minibatch_z_rms"] = float(np.sqrt(np.mean(unmoved.z_B**2)))
        if len(moved):
            metrics |= step_metrics(moved)
            self._steps.append(moved)
            self._window = Responses.join(list(self._steps))
        if len(self._window):
            metrics |= _window_metrics(self._window)
        return {name: value for name, value in metrics.items() if np.isfinite(value)}

    def drift_warning(self, settings: SequenceLossSettings, state: BandState | None = None) -> str | None:
        """A sentence once long responses drift out of a band c L**exponent about 0; None otherwise.

        In the window's longest bin the mean of S is more than a third of the band's half-width, by two standard errors.
        A band about the drift, or one that grows as fast as it, gets no sentence.
        """
        if settings.needs_state or settings.exponent >= 1 or not len(self._window):
            return None
        longest_B = self._window.bin_B == self._window.bin_B.max()
        s_N, n = self._window.s_B[longest_B], int(longest_B.sum())
        if n < _FEWEST:
            return None
        mean, length = float(s_N.mean()), float(self._window.length_B[longest_B].mean())
        lower, upper = (float(edge[0]) for edge in band_edges(np.array([length]), settings, state))
        half_width = upper if mean > 0 else -lower
        if abs(mean) - 2 * float(s_N.std()) / math.sqrt(n) <= half_width / 3:
            return None
        return (
            f"warning: at lengths near {length:.0f} the mean of S is {mean:.2g}, {abs(mean) / half_width:.0%} of the "
            f"band's half-width of {half_width:.2g}: long responses drift out of it. drift=kl (fspo_v1) centres it at "
            "the drift"
        )

    def outcome_metrics(self, name: str, value_B: torch.Tensor, length_B: torch.Tensor) -> dict[str, float]:
        """Mean of an outcome, such as reward or accuracy, by the window's length bins; lengths of 0 do not count."""
        kept_B, window = length_B > 0, self._window
        ends = [window.length_B[window.bin_B == j].min() for j in range(1, int(window.bin_B.max(initial=0)) + 1)]
        bin_B = np.searchsorted(ends, length_B[kept_B].cpu().numpy(), side="right")
        total_J = np.bincount(bin_B, value_B[kept_B].detach().cpu().double().numpy())
        with np.errstate(invalid="ignore"):  # a bin without a sequence
            return _by_bin(f"outcome/{name}", total_J / np.bincount(bin_B))


def _by_bin(name: str, values_J: Array) -> dict[str, float]:
    return {f"fspo/{name}/bin_{j:02d}": float(value) for j, value in enumerate(values_J) if math.isfinite(value)}


def _window_metrics(window: Responses) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if window.rule_known:
        if (error := window.error("outside")).is_informative:
            ends = {"debiased": error.debiased.value, "ci_low": error.debiased.low, "ci_high": error.debiased.high}
            metrics |= {f"fspo/lre_{name}": value for name, value in ends.items()}
        if (active := window.error("removed")).is_informative:
            metrics["fspo/lre_active_debiased"] = active.debiased.value
        metrics |= _by_bin("accept", *window.means(window.inside_B))
    length_J, z_J, square_J = window.means(window.length_B, window.z_B, window.z_B**2)
    return metrics | _by_bin("length", length_J) | _by_bin("z_std", np.sqrt(np.maximum(square_J - z_J**2, 0.0)))


def band_edges(length_N: Array, settings: SequenceLossSettings, state: BandState | None = None) -> tuple[Array, Array]:
    """Lower and upper edge of a band in nats, by length; lengths are rounded, to at least 1."""
    length = torch.from_numpy(np.maximum(1, np.rint(length_N))).to(torch.int64)
    lower, upper = acceptance_band(length, settings, state, torch.float64)
    return lower.numpy(), upper.numpy()


def removed(responses: Responses) -> tuple[Array, Array]:
    """Share of the gradient that the clip removes of each response, from above (A > 0) and from below (A < 0), [B]."""
    removed_B = 1.0 - responses.kept_B
    return removed_B * (responses.advantage_B > 0), removed_B * (responses.advantage_B < 0)


def step_metrics(responses: Responses) -> dict[str, float]:
    """Metrics over all lengths of the responses of one step, at least one; undefined ones are nan.

    sigma_hat is the standard deviation of (S - mu L) / sqrt(L) about its mean, mu = sum(S) / sum(L).
    """
    mu = responses.s_B.sum() / responses.length_B.sum()
    high_B, low_B = removed(responses)
    shares = {"accept_rate": responses.inside_B, "clip_high_frac": high_B, "clip_low_frac": low_B}
    could_clip = responses.could_clip()
    metrics = {name: float(values_B.mean()) if could_clip else math.nan for name, values_B in shares.items()}
    metrics |= {
        "clip_frac": 1.0 - metrics["accept_rate"],
        "sequences": float(len(responses)),
        "drift_per_token": float(mu),
        "z_std": float(responses.z_B.std()),
        "sigma_hat": float(np.std((responses.s_B - mu * responses.length_B) / np.sqrt(responses.length_B))),
    }
    return {f"fspo/{name}": value for name, value in metrics.items()}


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """How much of S is rounding, by length bin, against the band. Defined here.

    Until the first weight moves, S should be 0. What it is instead comes from rounding: bf16, and another batch shape
    or kernel in one of the two passes. A band that is not much wider clips noise.

    Attributes:
        length_J: Mean length of each bin, in tokens.
        rms_J: Root mean square of S, in nats.
        half_width_J: The smaller distance from 0 to an edge at that length, in nats; nan for a loss without a band.
    """

    length_J: Array
    rms_J: Array
    half_width_J: Array

    @property
    def margin(self) -> float:
        """Smallest half-width over noise of any bin; inf where S is exactly 0, nan without a band."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return float((self.half_width_J / self.rms_J).min(initial=math.inf)) if len(self.rms_J) else math.nan

    def metrics(self) -> dict[str, float]:
        """Metrics by name (docs/fairness.md); infinite and undefined ones are absent."""
        margin = {"fspo/noise_floor/margin": self.margin} if math.isfinite(self.margin) else {}
        return _by_bin("noise_floor/S_rms", self.rms_J) | margin

    def warning(self) -> str | None:
        """A sentence with the remedy if the band is too close to the noise at a length that occurs; None otherwise."""
        if not self.margin < SAFE_MARGIN:
            return None
        worst = int(np.argmax(self.rms_J / self.half_width_J))
        return (
            f"warning: rounding alone moves S by {self.rms_J[worst]:.2g} nats at lengths near "
            f"{self.length_J[worst]:.0f}, and the band's half-width there is {self.half_width_J[worst]:.2g}: it clips "
            "noise (fspo/noise_floor/margin below 5). Give both passes the same packs, compute in fp16 or fp32, or "
            "widen the band"
        )


def noise_floor(
    unmoved: Responses, settings: SequenceLossSettings | None = None, state: BandState | None = None
) -> NoiseFloor:
    """The noise of S in mini-batches before which no weight had moved, beside the band of a loss, if it has one."""
    length_J, square_J = unmoved.means(unmoved.length_B, unmoved.s_B**2)
    half_width_J = np.full_like(length_J, np.nan)
    if settings is not None:
        lower, upper = band_edges(length_J, settings, state)
        half_width_J = np.minimum(-lower, upper)
    return NoiseFloor(length_J, np.sqrt(square_J), half_width_J)
