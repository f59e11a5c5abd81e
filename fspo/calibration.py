"""The drift of S, on which the band of ``drift="kl"`` is centred: measured from past rollout batches.

It depends on whole mini-batches over all ranks, and a worker sees one micro-batch. So the estimate is *causal*: the
driver makes it from the responses of past rollout batches and sends a :class:`~fspo.types.BandState` before the next
update. All of this is defined here; it is not taken from the paper (arXiv 2509.09177), of which only the abstracts, the
beginning and public reviews were available. docs/architecture.md gives the measurements behind the choices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from fspo.fairness.lre import Array
from fspo.responses import Responses
from fspo.types import BandState


class DriftMeasurement:
    r"""Turns the responses of a finished rollout batch into the :class:`~fspo.types.BandState` of the next.

    Measured is ``max(0, -sum S / sum L)`` over the last ``window`` rollout batches, by position of the mini-batch in
    its rollout batch: 0 at the first position, where the policy has not moved. With a pooled drift, the on-policy point
    S = 0 of the first mini-batch would lie outside the band of long sequences.

    S is measured on samples of pi_old, so ``-sum S / sum L`` estimates KL(pi_old || pi) per token without bias and
    without assuming a distribution. It is also what the centre of the band needs, the mean of S itself.

    Args:
        window: Number of rollout batches to remember.
    """

    def __init__(self, window: int = 8) -> None:
        self._window: deque[Array] = deque(maxlen=window)
        #: The state for the next rollout batch; the default before any data.
        self.state = BandState()

    def update(self, step: Responses) -> BandState:
        """Add all responses of a finished rollout batch and return the state for the next one."""
        self._window.append(np.stack([np.bincount(step.update_B, values) for values in (step.s_B, step.length_B)]))
        self.state = self._estimate()
        return self.state

    def _estimate(self) -> BandState:
        positions = max((sums.shape[1] for sums in self._window), default=0)
        total_2M = np.zeros((2, positions))
        for sums in self._window:
            total_2M[:, : sums.shape[1]] += sums
        drifts = (max(0.0, -s / length) if length else 0.0 for s, length in total_2M.T.tolist())
        return BandState(drift_by_mini_batch=tuple(drifts))

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit after a restart."""
        return {"window": [sums.copy() for sums in self._window]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` saved; a shorter window keeps the latest rollout batches."""
        self._window.clear()
        self._window.extend(sums.copy() for sums in state["window"])
        self.state = self._estimate()
