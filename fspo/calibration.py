"""Measuring where the acceptance bands should lie: drift and quantile widths.

The centre with ``drift="kl"`` and the ``quantile`` band depend on whole mini-batches over all ranks, and a worker sees
one micro-batch. So the estimates are *causal*: the driver makes them from the sums (:class:`fspo.sums.SequenceSums`) of
past rollout batches, and sends a :class:`~fspo.types.BandState` before the next update.

All of this is defined here. It is not taken from the paper (arXiv 2509.09177), of which only the
abstracts, the beginning and public reviews were available. docs/architecture.md gives the measurements behind the
choices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from fspo.fairness.lre import Array
from fspo.sums import FINE_LENGTH_EDGES, LAYOUT_VERSION, Z_EDGES, ZERO_CELL, SequenceSums
from fspo.types import BandState, SequenceLossSettings

_K: Final = FINE_LENGTH_EDGES.numel() - 1
_MAGNITUDE: Final[Array] = Z_EDGES.numpy()[ZERO_CELL + 1 :]
"""Edges of the cells of |z|: 0, 1e-6, ..., 1e2, inf; the exact zeros belong to the first cell."""
_CELLS: Final = _MAGNITUDE.size - 1
_REACH: Final = 8
"""A local quantile takes in at most this many fine bins (one octave of length) on either side."""
_PRIOR_COUNT: Final = 20.0
"""The pooled quantile counts as much as this many sequences in a local quantile."""


def drift_per_token(log_ratio_sum: float, length_sum: float) -> float:
    r"""Estimate of kl, the drift per token with its sign changed: ``max(0, -sum S / sum L)``.

    S is measured on samples of pi_old, so ``-sum S / sum L`` estimates KL(pi_old || pi) per token without bias and
    without assuming a distribution. It is also what the centre of the band needs, the mean of S itself.
    docs/tables/drift-estimators.csv compares it with other estimators.

    Args:
        log_ratio_sum: Sum of S over the sequences.
        length_sum: Sum of L over the same sequences.

    Returns:
        kl in nats per token, 0 if there are no tokens.
    """
    return max(0.0, -log_ratio_sum / length_sum) if length_sum > 0 else 0.0


def local_half_widths(folded_KC: Array, target_acceptance: float, min_count: float) -> tuple[float, ...]:
    """Half-width of the band for S / sqrt(L) in every fine length bin, from a histogram of ``|S| / sqrt(L)``.

    For each fine bin, the nearest bins are pooled until they hold ``min_count`` sequences, up to one octave of length
    on either side. The target quantile of those n sequences is then shrunk towards the pooled quantile over all lengths
    (which alone is the sqrt(L) band): ``(n * local + 20 * pooled) / (n + 20)``.

    Args:
        folded_KC: Counts by fine length bin and cell of ``|z|``, see ``_MAGNITUDE``.
        target_acceptance: The quantile, between 0 and 1.
        min_count: Sequences wanted for a local quantile.

    Returns:
        One half-width per fine bin; empty if there is no data or no dispersion.
    """
    pooled = _quantile(folded_KC.sum(axis=0), target_acceptance)
    if pooled <= _MAGNITUDE[1]:
        return ()
    cumulative = np.concatenate([np.zeros((1, _CELLS)), np.cumsum(folded_KC, axis=0)])
    widths = []
    for k in range(_K):
        for reach in range(_REACH + 1):
            near = cumulative[min(k + reach + 1, _K)] - cumulative[max(k - reach, 0)]
            if (n := float(near.sum())) >= min_count:
                break
        local = _quantile(near, target_acceptance) if n > 0 else pooled
        widths.append((n * local + _PRIOR_COUNT * pooled) / (n + _PRIOR_COUNT))
    return tuple(widths)


def _quantile(counts_C: Array, level: float) -> float:
    """Quantile of |z| from its histogram, log-linear within a cell; 0 without data."""
    cumulative = np.cumsum(counts_C)
    total = float(cumulative[-1])
    if total <= 0:
        return 0.0
    cell = int(np.searchsorted(cumulative, level * total))
    low, high = float(_MAGNITUDE[cell]), float(_MAGNITUDE[cell + 1])
    if cell == 0 or not np.isfinite(high):
        return low
    share = (level * total - float(cumulative[cell - 1])) / float(counts_C[cell])
    return float(low * (high / low) ** share)


def _fold(sums: SequenceSums) -> Array:
    """Histogram of ``|S| / sqrt(L)`` by fine length bin, from the signed one."""
    hist = sums.hist_KH.numpy().astype(np.float64)
    folded: Array = hist[:, ZERO_CELL + 1 :] + hist[:, ZERO_CELL - 1 :: -1]
    folded[:, 0] += hist[:, ZERO_CELL]
    return folded


class BandController:
    """Turns the sums of a finished rollout batch into the :class:`~fspo.types.BandState` of the next. On the driver.

    It estimates what the band needs, over the last ``window`` rollout batches:

    * ``drift="kl"``: :func:`drift_per_token` by position of the mini-batch in its rollout batch (0 at the first
      position, where the policy has not moved). With a pooled drift, the on-policy point S = 0 of the first mini-batch
      would lie outside the band of long sequences.
    * ``quantile``: :func:`local_half_widths` of the mini-batches after the policy has moved.

    Widths are pooled over the rollout batch and do not follow the position. A band that widens with every optimizer
    step would not limit how far the policy moves.

    Args:
        settings: The loss whose bands are calibrated.
        window: Number of rollout batches to remember.
        min_count: Sequences wanted for a local quantile, see :func:`local_half_widths`.
    """

    def __init__(self, settings: SequenceLossSettings, *, window: int = 8, min_count: int = 100) -> None:
        self._settings = settings
        self._min_count = min_count
        self._window: deque[Array] = deque(maxlen=window)
        #: The state for the next rollout batch; the default before any data.
        self.state = BandState()

    def update(self, mini_batches: Sequence[SequenceSums], unmoved: int = 1) -> BandState:
        """Add a finished rollout batch and return the state for the next one.

        Args:
            mini_batches: The sums over all ranks of each mini-batch, in the order of their use, including the first.
            unmoved: How many mini-batches came before the policy had moved, so that S = 0; they are left out of the
                widths. 0 if even the first one is off-policy, more than 1 where the learning rate was 0.
        """
        if self._settings.band == "quantile":
            measured = sum((_fold(sums) for sums in mini_batches[unmoved:]), np.zeros((_K, _CELLS)))
        else:
            measured = np.array([[sums.total("S"), sums.total("length")] for sums in mini_batches])
        self._window.append(measured)
        self.state = self._estimate()
        return self.state

    def _estimate(self) -> BandState:
        window, target = list(self._window), self._settings.target_acceptance
        if not window:
            return BandState()
        if target is None:
            totals_M2 = np.zeros((max(map(len, window)), 2))
            for measured in window:
                totals_M2[: len(measured)] += measured
            return BandState(drift_by_mini_batch=tuple(drift_per_token(*row) for row in totals_M2))
        return BandState(half_width_K=local_half_widths(np.sum(window, axis=0), target, self._min_count))

    @property
    def _measures(self) -> str:
        """What the arrays of the window hold."""
        return f"band={self._settings.band!r}, drift={self._settings.drift!r}, layout {LAYOUT_VERSION}"

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit after a restart."""
        return {"measures": self._measures, "window": [measured.copy() for measured in self._window]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` saved; a shorter window keeps the latest rollout batches.

        Raises:
            ValueError: If it was saved with another band or drift, or by another version of fspo.
        """
        if (saved := state.get("measures")) != self._measures:
            raise ValueError(
                f"the saved band state has {saved or 'no name, of an older version'}, this run has {self._measures}; "
                "resume with the same setting, or start from the weights alone"
            )
        self._window.clear()
        self._window.extend(measured.copy() for measured in state["window"])
        self.state = self._estimate()
