"""How much of S is rounding: the sequence log-ratio before any weight has moved, by length, against the band.

Until the first weight moves, the policy is the one that sampled, and S should be 0. What it is instead comes from
rounding: bf16, and another batch shape or kernel in one of the two passes. A band that is not much wider clips noise.
Defined here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from fspo.clipping import acceptance_band
from fspo.fairness import merge_bins
from fspo.sums import SequenceSums
from fspo.types import BandState, SequenceLossSettings

#: A band's half-width should be at least so many times the noise floor: then noise alone clips next to nothing.
SAFE_MARGIN: Final = 5.0


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The noise of S by length bin.

    Attributes:
        length_J: Mean length of each bin with sequences, in tokens.
        rms_J: Root mean square of S, in nats.
        half_width_J: The smaller distance from the band's centre to an edge at that length, in nats; nan for a loss
            without a band on S.
    """

    length_J: npt.NDArray[np.float64]
    rms_J: npt.NDArray[np.float64]
    half_width_J: npt.NDArray[np.float64]

    @property
    def margin(self) -> float:
        """Smallest half-width over noise of any bin; inf where S is exactly 0, nan without a band."""
        with np.errstate(divide="ignore", invalid="ignore"):
            margin_J = np.where(self.rms_J > 0, self.half_width_J / self.rms_J, np.inf)
        return float(margin_J.min()) if not np.isnan(self.half_width_J).any() and len(margin_J) else math.nan

    def metrics(self) -> dict[str, float]:
        """Metrics by name (docs/metrics.md); infinite and undefined ones are absent."""
        found = {f"fspo/noise_floor/S_rms/bin_{j:02d}": float(rms) for j, rms in enumerate(self.rms_J)}
        found["fspo/noise_floor/margin"] = self.margin
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def warning(self) -> str | None:
        """A sentence with the remedy if the band is too close to the noise at a length that occurs; None otherwise."""
        if not self.margin < SAFE_MARGIN:
            return None
        worst = int(np.argmin(self.half_width_J / np.maximum(self.rms_J, 1e-300)))
        return (
            f"warning: rounding alone moves S by {self.rms_J[worst]:.2g} nats at lengths near "
            f"{self.length_J[worst]:.0f}, and the band's half-width there is {self.half_width_J[worst]:.2g}: it clips "
            "noise (fspo/noise_floor/margin below 5). Give both passes one shape "
            "(actor_rollout_ref.actor.fsdp_config.pad_to_length=true), compute in fp16 or fp32, or widen the band"
        )


def noise_floor(
    unmoved: Sequence[SequenceSums],
    starts: npt.NDArray[np.int64],
    settings: SequenceLossSettings | None = None,
    state: BandState | None = None,
) -> NoiseFloor:
    """Measure the noise of S, and hold the band of ``settings`` against it.

    Args:
        unmoved: Sums of mini-batches computed before any weight had moved.
        starts: First fine length bin of each bin (:func:`fspo.fairness.equal_mass_starts`).
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
        lengths = torch.from_numpy(np.maximum(1, np.rint(length_J))).to(torch.int64)
        centre, lower, upper = (edge.numpy() for edge in acceptance_band(lengths, settings, state, torch.float64))
        half_width_J = np.minimum(centre - lower, upper - centre)
    return NoiseFloor(length_J, rms_J, half_width_J)
