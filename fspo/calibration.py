"""Measuring where the acceptance bands should lie: drift and quantile widths.

The centre with ``drift="kl"`` and the ``quantile`` band depend on whole mini-batches over all ranks, and a worker sees
one micro-batch. So the estimates are *causal*: the driver makes them from the responses of past rollout batches
(:class:`fspo.responses.Responses`), and sends a :class:`~fspo.types.BandState` before the next update.

All of this is defined here. It is not taken from the paper (arXiv 2509.09177), of which only the
abstracts, the beginning and public reviews were available. docs/architecture.md gives the measurements behind the
choices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from fspo.clip import scale_for
from fspo.fairness.lre import Array
from fspo.length_bins import FINE_BINS
from fspo.responses import Responses
from fspo.types import BandState, SequenceLossSettings

_REACH: Final = 8
"""A local quantile takes in at most this many fine bins (one octave of length) on either side."""
_PRIOR_COUNT: Final = 20.0
"""The pooled quantile counts as much as this many sequences in a local quantile."""


def drift_per_token(log_ratio_sum: float, length_sum: float) -> float:
    r"""Estimate of kl, the drift per token with its sign changed: ``max(0, -sum S / sum L)``.

    S is measured on samples of pi_old, so ``-sum S / sum L`` estimates KL(pi_old || pi) per token without bias and
    without assuming a distribution. It is also what the centre of the band needs, the mean of S itself.
    docs/architecture.md, decision 4, compares it with other estimators.

    Args:
        log_ratio_sum: Sum of S over the sequences.
        length_sum: Sum of L over the same sequences.

    Returns:
        kl in nats per token, 0 if there are no tokens.
    """
    return max(0.0, -log_ratio_sum / length_sum) if length_sum > 0 else 0.0


def local_half_widths(z_B: Array, fine_B: Array, target_acceptance: float, min_count: float) -> tuple[float, ...]:
    r"""Half-width of the band for S / sqrt(L) in every fine length bin.

    For each fine bin, the nearest bins are pooled until they hold ``min_count`` sequences, up to one octave of length
    on either side. The target quantile of \|z\| of those n sequences is then shrunk towards the pooled quantile over
    all lengths (which alone is the sqrt(L) band): ``(n * local + 20 * pooled) / (n + 20)``.

    Args:
        z_B: S / sqrt(L) of each sequence.
        fine_B: Its fine length bin (:mod:`fspo.length_bins`).
        target_acceptance: The quantile, between 0 and 1.
        min_count: Sequences wanted for a local quantile.

    Returns:
        One half-width per fine bin; empty if there is no data or no dispersion.
    """
    # Sorted, so that the result does not depend on the order in which ranks and micro-batches delivered.
    order = np.argsort(fine_B, kind="stable")
    z_B, end_K = np.abs(z_B[order]), np.searchsorted(fine_B[order], np.arange(FINE_BINS + 1))
    if not z_B.any():
        return ()
    pooled = scale_for(z_B, target_acceptance)
    widths = []
    for k in range(FINE_BINS):
        for reach in range(_REACH + 1):
            near = z_B[end_K[max(k - reach, 0)] : end_K[min(k + reach + 1, FINE_BINS)]]
            if len(near) >= min_count:
                break
        n = len(near)
        local = scale_for(near, target_acceptance) if n else pooled
        widths.append((n * local + _PRIOR_COUNT * pooled) / (n + _PRIOR_COUNT))
    return tuple(widths)


class BandController:
    """Turns the responses of a finished rollout batch into the :class:`~fspo.types.BandState` of the next.

    On the driver. It estimates what the band needs, over the last ``window`` rollout batches:

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

    def update(self, step: Responses) -> BandState:
        """Add all responses of a finished rollout batch and return the state for the next one."""
        if self._settings.calibrated:
            moved = step.moved()
            measured = np.stack([moved.z_B, moved.fine_B.astype(np.float64)])
        else:
            measured = np.stack([np.bincount(step.update_B, values_B) for values_B in (step.s_B, step.length_B)])
        self._window.append(measured)
        self.state = self._estimate()
        return self.state

    def _estimate(self) -> BandState:
        window, target = list(self._window), self._settings.target_acceptance
        if not window:
            return BandState()
        if target is None:
            totals_2M = np.zeros((2, max(measured.shape[1] for measured in window)))
            for measured in window:
                totals_2M[:, : measured.shape[1]] += measured
            return BandState(drift_by_mini_batch=tuple(drift_per_token(*column) for column in totals_2M.T))
        z_B, fine_B = np.concatenate(window, axis=1)
        return BandState(half_width_K=local_half_widths(z_B, fine_B, target, self._min_count))

    @property
    def _measures(self) -> str:
        """What the arrays of the window hold."""
        return f"band={self._settings.band!r}, drift={self._settings.drift!r}"

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
