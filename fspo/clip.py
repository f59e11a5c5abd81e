"""Clip values: how wide a band must be for a wanted share of the responses, and a run's own. Defined here.

A band keeps its exponent and its sides' ratio; one factor scales both clip values. A run, an audit, a report and the
model of responses that nobody has sampled (``python -m fspo.audit expected``) take the factor from :func:`scale_for`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fspo.fairness.lre import Array, Interval, percentile_ends
from fspo.types import GradScale, SequenceLossSettings

#: Share of the responses that is to lie inside a band.
ACCEPT: Final = 0.85
#: Groups that an interval over prompt groups or mini-batches needs.
FEWEST_GROUPS: Final = 20
#: A run's clip values come from so many rollout batches ...
BATCHES: Final = 5
#: ... and are fixed after so many.
FIXED_AFTER: Final = 10
#: The share outside is looked at over so many rollout batches; it is said if it is so many times too large or small.
_WATCHED, _FAR = 10, 3.0
_RESAMPLES: Final = 400
_SEED: Final = 0
#: So many values within so many standard errors of the wanted quantile can a resample end at.
_POINTS, _ERRORS = 1024, 8.0


def needed_scale(
    log_ratio_B: npt.ArrayLike, length_B: npt.ArrayLike, settings: SequenceLossSettings, drift_per_token: float = 0.0
) -> Array:
    r"""The smallest factor k on both clip values at which each response is inside the band, float64 [B].

    ``max(x / c_high, -x / c_low)`` with x = (S - centre) / L**exponent.

    Args:
        log_ratio_B: S in nats.
        length_B: L in tokens, at least 1.
        settings: A band with both clip values above 0.
        drift_per_token: kl >= 0 in nats per token; a loss with ``drift="kl"`` has its centre at -L kl, others at 0.

    Raises:
        ValueError: If a clip value is 0, which no factor scales.
    """
    if min(settings.c_low, settings.c_high) <= 0:
        raise ValueError(f"c_low={settings.c_low!r} and c_high={settings.c_high!r}: no factor scales a clip value of 0")
    s_B, length_B = (np.asarray(values, dtype=np.float64) for values in (log_ratio_B, length_B))
    centre_B = -drift_per_token * length_B if settings.drift == "kl" else 0.0
    x_B = (s_B - centre_B) / length_B**settings.exponent
    needed_B: Array = np.maximum(x_B / settings.c_high, -x_B / settings.c_low)
    return needed_B


def scaled(settings: SequenceLossSettings, scale: float) -> SequenceLossSettings:
    """The loss with both clip values multiplied by ``scale``."""
    return dataclasses.replace(settings, c_low=settings.c_low * scale, c_high=settings.c_high * scale)


def clipped_cosine(
    kept_B: Array, advantage_B: Array, weight_B: Array, length_B: Array, grad_scale: GradScale = "1"
) -> float:
    """Cosine of the clipped and the unclipped update: ``sqrt(sum kept (A w h)^2 L / sum (A w h)^2 L)``; nan without A.

    It is exact if the gradients of different responses are orthogonal and their squared norms grow like L. The paper
    bounds this cosine; the formula is defined here, and docs/fairness.md has the bound.

    Args:
        kept_B: Share of each response's gradient that is kept, in [0, 1].
        advantage_B, weight_B, length_B: A, the importance weight w without its clip, and L in tokens.
        grad_scale: h(L) of the loss: ``"1/L"`` for GSPO.
    """
    square_B = (advantage_B * weight_B) ** 2 * length_B / (length_B**2 if grad_scale == "1/L" else 1.0)
    return math.sqrt((kept_B * square_B).sum() / square_B.sum()) if square_B.any() else math.nan


def _reached(sorted_B: Array, share: float) -> int:
    """Index of the first of the sorted values at which the share of them is reached."""
    return min(max(math.ceil(share * len(sorted_B) * (1 - 1e-12)), 1), len(sorted_B)) - 1


def scale_for(needed_B: Array, accept: float = ACCEPT) -> float:
    """The smallest of the factors of :func:`needed_scale` with which the share ``accept`` of the responses is inside.

    Args:
        needed_B: Of each response, at least one.
        accept: In (0, 1).

    Raises:
        ValueError: If there is no response.
    """
    if not len(needed_B):
        raise ValueError("needed_B holds no response, so no factor follows: record responses with S other than 0 first")
    index = _reached(needed_B, accept)
    return float(np.partition(needed_B, index)[index])


def resampled_clusters(clusters: int, resamples: int) -> Array:
    """How often each of so many clusters is drawn in each resample, [R, C]; with a fixed seed."""
    drawn_RC = np.random.default_rng(_SEED).integers(0, clusters, (resamples, clusters))
    flat = np.bincount((drawn_RC + np.arange(resamples)[:, None] * clusters).ravel(), minlength=resamples * clusters)
    return flat.reshape(resamples, clusters).astype(np.float64)


def scale_with_interval(needed_B: Array, cluster_B: npt.NDArray[np.int64], accept: float = ACCEPT) -> Interval:
    """:func:`scale_for` with its 95% interval by resampled clusters (400 times, with a fixed seed).

    Responses to one prompt, or of one rollout batch, are no independent draws, so whole clusters are resampled. The
    result does not depend on the order of the responses.

    Args:
        needed_B: :func:`needed_scale` of each response.
        cluster_B: Number of its cluster, from 0.
        accept: In (0, 1).
    """
    clusters = int(cluster_B.max()) + 1
    order = np.argsort(needed_B, kind="stable")
    sorted_B, cluster_B = needed_B[order], cluster_B[order]
    value = float(sorted_B[_reached(sorted_B, accept)])
    # A resample counts, of each cluster, the values up to each point. Points farther from the quantile than so many
    # standard errors are never reached.
    inside_C, number_C = (np.bincount(cluster_B, weights, clusters) for weights in (sorted_B <= value, None))
    reach = _ERRORS * float(np.sqrt(((inside_C - accept * number_C) ** 2).sum())) / len(sorted_B)
    low, high = (_reached(sorted_B, min(max(share, 0.0), 1.0)) for share in (accept - reach, accept + reach))
    points = np.unique(np.linspace(low, high, min(high - low + 1, _POINTS)).round().astype(np.int64))
    cell_B = np.searchsorted(points, np.arange(len(sorted_B)))  # the first point at or above
    width = len(points) + 1
    count_CP = np.bincount(cluster_B * width + cell_B, minlength=clusters * width).reshape(clusters, width)
    reached_RP = np.cumsum(resampled_clusters(clusters, _RESAMPLES) @ count_CP, axis=1)
    index_R = (reached_RP[:, :-1] < accept * reached_RP[:, -1:] * (1 - 1e-6)).sum(axis=1).clip(max=len(points) - 1)
    return Interval(value, *percentile_ends(sorted_B[points[index_R]], clusters), clusters)


class ClipMeasurement:
    """The clip values of a run: no clip, then from its own rollout batches, then fixed.

    A run begins without a clip, so that the first rollout batches of two losses differ in nothing but the loss. After
    each of the first :data:`FIXED_AFTER` rollout batches that count, the values are set from the last :data:`BATCHES`
    of them; an optimizer's first steps move the policy farther than its later ones. From then on they are fixed: a
    policy that moves farther is clipped more, as a trust region should.

    Args:
        settings: The loss; its exponent and the ratio of its clip values are kept.
        accept: Share of the responses that is to lie inside the band.
    """

    def __init__(self, settings: SequenceLossSettings, accept: float) -> None:
        self._settings, self._accept = settings, accept
        self._needed: deque[Array] = deque(maxlen=BATCHES)
        self._outside: deque[float] = deque(maxlen=_WATCHED)
        self._warned = False
        #: The factor in force; infinite (no clip) before the first rollout batch that counts.
        self.scale = math.inf
        #: One entry for each time that the values were set, as run.json has it.
        self.values: list[dict[str, Any]] = []

    @property
    def open(self) -> bool:
        """Whether the values are still to be set again."""
        return len(self.values) < FIXED_AFTER

    def add(self, needed_B: Array, step: int) -> str | None:
        """Add a rollout batch; returns a line for the person who watches when values are first set, fixed, or far off.

        Args:
            needed_B: :func:`needed_scale` of its responses of mini-batches before which a weight had moved.
            step: Of the rollout batch.
        """
        if len(needed_B) == 0:
            return None
        self._outside.append(float((needed_B > self.scale).mean()))
        self._needed.append(needed_B)
        if not self.open:
            return self._far_off()
        batch_B = np.repeat(np.arange(len(self._needed)), [len(batch) for batch in self._needed])
        measured = scale_with_interval(np.concatenate(self._needed), batch_B, self._accept)
        if measured.value <= 0:
            return None
        self.scale = measured.value
        loss = scaled(self._settings, self.scale)
        value: dict[str, Any] = {"after_step": step, "c_low": loss.c_low, "c_high": loss.c_high, "accept": self._accept}
        value |= {"responses": len(batch_B), "batches": len(self._needed)}
        if math.isfinite(measured.low):  # of one rollout batch there is none
            ends = [scaled(self._settings, end) for end in (measured.low, measured.high)]
            value |= {f"{name}_interval": [getattr(end, name) for end in ends] for name in ("c_low", "c_high")}
        self.values.append(value)
        if not self.open:
            self._outside.clear()
        return self.sentence() if len(self.values) in (1, FIXED_AFTER) else None

    def sentence(self) -> str:
        """The values in force, in a line."""
        value = self.values[-1]
        shown = ", ".join(_with_interval(name, value) for name in ("c_low", "c_high"))
        if value["c_low"] == value["c_high"]:
            shown = _with_interval("c_high", value).replace("c_high", "c")
        rest = "set again after each rollout batch" if self.open else "fixed from now on"
        return (
            f"clip values: {shown} from step {value['after_step'] + 1} on: {self._accept:.0%} of {value['responses']} "
            f"responses of {value['batches']} rollout batch{'es' * (value['batches'] > 1)} lie inside; {rest}"
        )

    def _far_off(self) -> str | None:
        """Once the share outside is far from the wanted one, a line with the value that would fit now."""
        if self._warned or len(self._outside) < _WATCHED:
            return None
        outside, wanted = float(np.mean(self._outside)), 1 - self._accept
        if wanted / _FAR <= outside <= wanted * _FAR:
            return None
        self._warned = True
        fitting = scaled(self._settings, scale_for(np.concatenate(self._needed), self._accept))
        return (
            f"warning: {outside:.1%} of the responses of the last {_WATCHED} rollout batches are outside the band, and "
            f"the clip values were measured for {wanted:.0%}: the policy moves otherwise than then. Nothing is "
            f"changed; c_low={fitting.c_low:.3g} c_high={fitting.c_high:.3g} would fit the last {len(self._needed)}"
        )

    @property
    def _measures(self) -> str:
        return f"{self._settings}, accept={self._accept:g}"

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit after a restart."""
        kept = {"needed": [needed_B.copy() for needed_B in self._needed], "outside": list(self._outside)}
        values = {"scale": self.scale, "values": [dict(value) for value in self.values], "warned": self._warned}
        return {"measures": self._measures, **kept, **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` saved.

        Raises:
            ValueError: If it was measured for another loss or another share.
        """
        if state.get("measures") != self._measures:
            raise ValueError(
                f"the saved clip values were measured for {state.get('measures')}, and this run has {self._measures}: "
                "resume with the same settings, or start from the weights alone"
            )
        self._needed = deque((needed_B.copy() for needed_B in state["needed"]), maxlen=BATCHES)
        self._outside = deque(state["outside"], maxlen=_WATCHED)
        self._warned, self.scale = state["warned"], state["scale"]
        self.values = [dict(value) for value in state["values"]]


def _with_interval(name: str, value: Mapping[str, Any]) -> str:
    ends: Sequence[float] = value.get(f"{name}_interval", ())
    return f"{name} = {value[name]:.3g}" + (f" [{ends[0]:.3g}, {ends[1]:.3g}]" if ends else "")
