"""What a run measures of itself: its clip values, and the drift that centres the band of ``drift="kl"``. Defined here.

Both depend on whole mini-batches over all ranks, and a worker sees one micro-batch. So both are *causal*: the driver
makes them from the responses of past rollout batches and sends them before the next update. docs/architecture.md gives
the measurements behind the choices.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from fspo.clip_value import scale_for, scale_with_interval, scaled
from fspo.fairness.lre import Array
from fspo.responses import Responses
from fspo.types import BandState, SequenceLossSettings

#: A run's clip values come from so many rollout batches ...
BATCHES: Final = 5
#: ... and are fixed after so many.
FIXED_AFTER: Final = 10
#: The share outside is looked at over so many rollout batches; it is said if it is so many times too large or small.
_WATCHED, _FAR = 10, 3.0


class ClipMeasurement:
    """The clip values of a run: no clip, then from its own rollout batches, then fixed.

    After each of the first :data:`FIXED_AFTER` rollout batches that count, the values are set from the last
    :data:`BATCHES` of them; an optimizer's first steps move the policy farther than its later ones. From then on they
    are fixed: a policy that moves farther is clipped more, as a trust region should.

    Args:
        settings: The loss; its exponent and the ratio of its clip values are kept.
        accept: Share of the responses that is to lie inside the band.

    Raises:
        ValueError: If ``accept`` is no share above 0.
    """

    def __init__(self, settings: SequenceLossSettings, accept: float) -> None:
        if not 0 < accept <= 1:
            raise ValueError(f"accept={accept} must be a share, above 0 and at most 1, such as 0.85")
        self._settings, self._accept = settings, accept
        self._measures = f"{settings}, accept={accept:g}"
        self._needed: deque[Array] = deque(maxlen=BATCHES)
        self._outside: deque[float] = deque(maxlen=_WATCHED)
        self._warned = False
        #: The factor in force; infinite (no clip) before the first rollout batch that counts.
        self.scale = math.inf
        #: One entry for each time that the values were set, as run.json has it.
        self.values: list[dict[str, Any]] = []

    def add(self, needed_B: Array, step: int) -> str | None:
        """Add a rollout batch; returns a line for the person who watches when values are first set, fixed, or far off.

        ``needed_B`` is :func:`fspo.clip_value.needed_scale` of its responses of mini-batches before which a weight had
        moved.
        """
        if len(needed_B) == 0:
            return None
        self._outside.append(float((needed_B > self.scale).mean()))
        self._needed.append(needed_B)
        if len(self.values) == FIXED_AFTER:
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
        if len(self.values) == FIXED_AFTER:
            self._outside.clear()
        return self.sentence() if len(self.values) in (1, FIXED_AFTER) else None

    def sentence(self) -> str:
        """The values in force, in a line."""
        value = self.values[-1]
        shown = ", ".join(_with_interval(name, value) for name in ("c_low", "c_high"))
        if value["c_low"] == value["c_high"]:
            shown = _with_interval("c_high", value).replace("c_high", "c")
        rest = "fixed from now on" if len(self.values) == FIXED_AFTER else "set again after each rollout batch"
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

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit after a restart."""
        kept = {"needed": list(self._needed), "outside": list(self._outside), "values": list(self.values)}
        return {"measures": self._measures, "scale": self.scale, "warned": self._warned, **kept}

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
        self._needed, self._outside = deque(state["needed"], BATCHES), deque(state["outside"], _WATCHED)
        self._warned, self.scale, self.values = state["warned"], state["scale"], list(state["values"])


def _with_interval(name: str, value: Mapping[str, Any]) -> str:
    low, high = value.get(f"{name}_interval", (None, None))
    return f"{name} = {value[name]:.3g}" + ("" if low is None else f" [{low:.3g}, {high:.3g}]")


class DriftMeasurement:
    r"""Turns the responses of a finished rollout batch into the :class:`~fspo.types.BandState` of the next.

    Measured is ``max(0, -sum S / sum L)`` over the last ``window`` rollout batches, by position of the mini-batch in
    its rollout batch: 0 at the first position, where the policy has not moved. With a pooled drift, the on-policy point
    S = 0 of the first mini-batch would lie outside the band of long sequences.

    S is measured on samples of pi_old, so ``-sum S / sum L`` estimates KL(pi_old || pi) per token without bias and
    without assuming a distribution. It is not taken from the paper (arXiv 2509.09177), of which only the abstracts, the
    beginning and public reviews were available.

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
        total_2M = np.zeros((2, max((sums.shape[1] for sums in self._window), default=0)))
        for sums in self._window:
            total_2M[:, : sums.shape[1]] += sums
        drifts = (max(0.0, -s / length) if length else 0.0 for s, length in total_2M.T.tolist())
        return BandState(drift_by_mini_batch=tuple(drifts))

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit after a restart."""
        return {"window": list(self._window)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` saved; a shorter window keeps the latest rollout batches."""
        self._window = deque(state["window"], self._window.maxlen)
        self.state = self._estimate()
