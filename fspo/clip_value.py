"""The clip value with which a wanted share of the responses lies inside a band, with its interval. Defined here.

A band keeps its exponent and its sides' ratio; one factor scales both clip values. A run, an audit, a report and the
model of responses that nobody has sampled (``python -m fspo.audit expected``) take the factor from :func:`scale_for`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

import numpy as np
import numpy.typing as npt

from fspo.fairness.lre import Array, Interval, drawn_clusters, percentile_ends
from fspo.types import SequenceLossSettings

#: Share of the responses that is to lie inside a band.
ACCEPT: Final = 0.85
#: Groups that an interval over prompt groups or mini-batches needs.
FEWEST_GROUPS: Final = 20
#: So many values at most can a resample end at: of more responses, evenly taken quantiles.
_POINTS: Final = 4096


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


def _reached(values: int, share: float) -> int:
    """Index of the first of so many sorted values at which the share of them is reached."""
    return min(max(math.ceil(share * values * (1 - 1e-12)), 1), values) - 1


def scale_for(needed_B: Array, accept: float = ACCEPT) -> float:
    """The smallest of the factors of :func:`needed_scale` with which the share ``accept`` of the responses is inside.

    Raises:
        ValueError: If there is no response.
    """
    if not len(needed_B):
        raise ValueError("needed_B holds no response, so no factor follows: record responses with S other than 0 first")
    index = _reached(len(needed_B), accept)
    return float(np.partition(needed_B, index)[index])


def scale_with_interval(needed_B: Array, cluster_B: npt.NDArray[np.int64], accept: float = ACCEPT) -> Interval:
    """:func:`scale_for` with its 95% interval.

    Responses to one prompt, or of one rollout batch, are no independent draws, so whole clusters are resampled.

    Args:
        needed_B: :func:`needed_scale` of each response.
        cluster_B: Number of its cluster, from 0.
        accept: Share that is to be inside, in (0, 1).
    """
    clusters, count = int(cluster_B.max()) + 1, len(needed_B)
    order = np.argsort(needed_B, kind="stable")
    sorted_B = needed_B[order]
    points = np.unique(np.linspace(0, count - 1, min(count, _POINTS)).round().astype(np.int64))
    cell_B = np.searchsorted(points, np.arange(count))  # the first point at or above
    count_CP = np.bincount(cluster_B[order] * len(points) + cell_B, minlength=clusters * len(points))
    reached_RP = np.cumsum(drawn_clusters(clusters) @ count_CP.reshape(clusters, -1), axis=1)
    index_R = (reached_RP < accept * reached_RP[:, -1:] * (1 - 1e-12)).sum(axis=1)
    ends = percentile_ends(sorted_B[points[index_R]], clusters)
    return Interval(float(sorted_B[_reached(count, accept)]), *ends, clusters)
