"""Clip values measured on a run's own responses, then held fixed. Defined here.

A loss's band keeps its shape; both of its clip values are multiplied by one factor, so that a wanted share of the
responses lies inside. The factor is measured twice: on the first rollout batches, as few as make it certain enough, and
on those that follow, because an optimizer's first steps move the policy farther than its later ones. From then on it is
fixed: a policy that moves farther is clipped more, as a trust region should.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fspo.fairness.lre import Array, percentile_ends
from fspo.types import SequenceLossSettings

#: The first value is set at this standard error (relative to the value) ...
SMALL_ERROR: Final = 0.05
#: ... or after so many rollout batches; the second on as many that follow it.
BATCHES: Final = 5
#: Groups that the resampling needs.
FEWEST_GROUPS: Final = 20
_RESAMPLES: Final = 400
_SEED: Final = 0


def needed_scale(
    log_ratio_B: npt.ArrayLike, length_B: npt.ArrayLike, settings: SequenceLossSettings, drift_per_token: float = 0.0
) -> Array:
    r"""The smallest factor on both clip values at which each sequence is accepted, float64 [B].

    With x = (S + kl L) / L**exponent it is ``max(x / c_high, -x / c_low)``.

    Args:
        log_ratio_B: S in nats.
        length_B: L in tokens, at least 1.
        settings: A band that is not measured, both clip values above 0.
        drift_per_token: kl >= 0 in nats per token; a loss with ``drift="kl"`` has its centre at -L kl, others at 0.

    Raises:
        ValueError: if a clip value is 0, which no factor scales, or if the band is measured.
    """
    if settings.calibrated or min(settings.c_low, settings.c_high) <= 0:
        raise ValueError(
            f"band={settings.band!r} with c_low={settings.c_low!r} and c_high={settings.c_high!r}: "
            "no factor scales a clip value of 0, or a band that is measured itself"
        )
    length = np.asarray(length_B, dtype=np.float64)
    drift = drift_per_token if settings.drift == "kl" else 0.0
    x = (np.asarray(log_ratio_B, dtype=np.float64) + drift * length) / length**settings.exponent
    needed: Array = np.maximum(x / settings.c_high, -x / settings.c_low)
    return needed


def scaled(settings: SequenceLossSettings, scale: float) -> SequenceLossSettings:
    """The loss with both clip values multiplied by ``scale``."""
    return dataclasses.replace(settings, c_low=settings.c_low * scale, c_high=settings.c_high * scale)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A factor, its 95% interval and its standard error relative to it, resampled by prompt group."""

    scale: float
    low: float
    high: float
    error: float


def scale_for(sorted_B: Array, weight_B: Array, accept: float) -> float:
    """The smallest of the sorted factors (:func:`needed_scale`) with which the share ``accept`` of the weight lies
    inside.
    """
    reached_B = np.cumsum(weight_B)
    return float(sorted_B[np.searchsorted(reached_B, accept * reached_B[-1] * (1 - 1e-12))])


def estimate(
    needed_B: Array, group_B: npt.NDArray[np.int64], accept: float, count_B: Array | None = None
) -> Estimate | None:
    """The factor with which the share ``accept`` of the sequences lies inside the band.

    It is a quantile of :func:`needed_scale`. Responses to one prompt are no independent draws, so whole groups are
    resampled (400 times, with a fixed seed). The result depends neither on the order of the sequences nor on the
    numbers of the groups.

    Args:
        needed_B: :func:`needed_scale` of each sequence.
        group_B: A number for each prompt group.
        accept: Wanted share, in (0, 1).
        count_B: Sequences that each entry stands for; one by default.

    Returns:
        None for fewer than 20 groups, or where so many S lie at the centre that the factor would be 0.
    """
    groups, group_B = np.unique(group_B, return_inverse=True)
    if len(groups) < FEWEST_GROUPS:
        return None
    count_B = np.ones(len(needed_B)) if count_B is None else count_B
    # Groups in an order of their own, so that a draw takes the same ones however they were numbered.
    rank_G = np.argsort(np.argsort(np.bincount(group_B, needed_B * count_B), kind="stable"), kind="stable")
    order = np.argsort(needed_B, kind="stable")
    sorted_B, group_B, count_B = needed_B[order], rank_G[group_B[order]], count_B[order]

    scale = scale_for(sorted_B, count_B, accept)
    if scale <= 0:
        return None
    random = np.random.default_rng(_SEED)
    draws = random.integers(0, len(groups), (_RESAMPLES, len(groups)))
    weights = (np.bincount(draw, minlength=len(groups)).astype(np.float64)[group_B] * count_B for draw in draws)
    again = np.array([scale_for(sorted_B, weight_B, accept) for weight_B in weights])
    return Estimate(scale, *percentile_ends(again, len(groups)), float(again.std() / scale))


class ClipMeasurement:
    """Measures the factor twice on a run's rollout batches, and holds it fixed after that. On the driver.

    Args:
        settings: The loss with its published clip values.
        accept: Share of the responses that is to lie inside the band.
    """

    def __init__(self, settings: SequenceLossSettings, accept: float) -> None:
        self._settings, self._accept = settings, accept
        self._needed: list[Array] = []
        self._groups: list[npt.NDArray[np.int64]] = []
        self._batches = 0
        #: The factor in force; 1 (the published values) before the first measurement.
        self.scale = 1.0
        #: One entry for each measurement, as run.json has it.
        self.values: list[dict[str, Any]] = []

    @property
    def open(self) -> bool:
        """Whether there is something left to measure."""
        return len(self.values) < 2

    def add(
        self, needed: Sequence[Array], groups: Sequence[npt.NDArray[np.int64]], step: int
    ) -> SequenceLossSettings | None:
        """Add a rollout batch; returns the loss with its new clip values if that has settled a measurement.

        Args:
            needed: :func:`needed_scale` of the sequences of each mini-batch before which a weight had moved.
            groups: Their prompt groups, numbered within the rollout batch.
            step: Of the rollout batch.
        """
        if not self.open or not needed:
            return None
        first = max((int(group.max()) for group in self._groups if len(group)), default=-1) + 1
        self._needed.append(np.concatenate(needed))
        self._groups.append(np.concatenate(groups) + first)
        self._batches += 1
        enough = self._batches >= BATCHES
        measured = estimate(np.concatenate(self._needed), np.concatenate(self._groups), self._accept)
        if measured is None or not (enough or (not self.values and measured.error < SMALL_ERROR)):
            return None
        loss = scaled(self._settings, measured.scale)
        ends = [scaled(self._settings, end) for end in (measured.low, measured.high)]
        self.scale = measured.scale
        self.values.append(
            {
                "after_step": step,
                "c_low": loss.c_low,
                "c_high": loss.c_high,
                "c_low_interval": [end.c_low for end in ends],
                "c_high_interval": [end.c_high for end in ends],
                "responses": sum(map(len, self._needed)),
                "batches": self._batches,
                "accept": self._accept,
            }
        )
        self._needed, self._groups, self._batches = [], [], 0
        return loss

    def sentence(self) -> str:
        """The last measurement in a line."""
        value = self.values[-1]

        def side(name: str) -> str:
            low, high = value[f"{name}_interval"]
            return f"{name} = {value[name]:.3g} [{low:.3g}, {high:.3g}]"

        both = value["c_low"] == value["c_high"]
        shown = f"c_low = {side('c_high')}" if both else f"{side('c_low')}, {side('c_high')}"
        return (
            f"clip values: {shown} from step {value['after_step'] + 1} on: "
            f"{self._accept:.0%} of {value['responses']} responses of {value['batches']} rollout batches lie inside"
            + (f"; measured once more on the {BATCHES} batches that follow" if self.open else "; fixed from now on")
        )

    @property
    def _measures(self) -> str:
        return f"{self._settings}, accept={self._accept:g}"

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit after a restart."""
        return {
            "measures": self._measures,
            "needed": [factors.copy() for factors in self._needed],
            "groups": [group.copy() for group in self._groups],
            "batches": self._batches,
            "scale": self.scale,
            "values": [dict(value) for value in self.values],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` saved.

        Raises:
            ValueError: if it was measured for another loss or another share.
        """
        if state.get("measures") != self._measures:
            raise ValueError(
                f"the saved clip values were measured for {state.get('measures')}, and this run has {self._measures}: "
                "resume with the same settings, or start from the weights alone"
            )
        self._needed = [factors.copy() for factors in state["needed"]]
        self._groups = [group.copy() for group in state["groups"]]
        self._batches, self.scale = state["batches"], state["scale"]
        self.values = [dict(value) for value in state["values"]]
