"""Two values that a run measures on its first rollout batches and then keeps: the loss's divisor, and clip values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from recipe.fspo.config import policy_loss_settings
from recipe.fspo.recorder import MiniBatch

from fspo.clip_value import needed_scale
from fspo.measured import ClipMeasurement
from fspo.types import BandState

#: A learning rate counts as the full one from this share of it on.
_FULL = 1 - 1e-6


class LossScale:
    """The divisor of a loss that sums over tokens, ``fspo.match_scale=matched``: the first rollout batch's mean length.

    Defined here. Where an update takes a part of a rollout batch (``mode=separate_async``), it is the mean of the
    responses so far: the first part alone holds those that end first, which are the shortest.
    """

    def __init__(self, config: DictConfig) -> None:
        settings = policy_loss_settings(config.actor_rollout_ref.actor.policy_loss)
        self._applies = config.fspo.match_scale == "matched" and settings is not None and settings.grad_scale == "1"
        self.length: float | None = None
        self._open = self._applies
        self._lengths: list[torch.Tensor] = []

    @property
    def factor(self) -> float:
        """Factor on the loss."""
        return 1.0 if self.length is None else 1 / self.length

    def measure(self, length_B: torch.Tensor) -> None:
        """Take in responses of the first rollout batch, before the update with them."""
        if self._open:
            self._lengths.append(length_B)
            self.length = max(1.0, float(torch.cat(self._lengths).to(torch.float64).mean()))

    def settle(self) -> bool:
        """Hold the length fixed from now on, after a rollout batch; whether it was not before."""
        settled, self._open, self._lengths = self._open, False, []
        return settled

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"length": self.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.length = state["length"] if self._applies else None
        self._open &= self.length is None


class ClipValues:
    """The clip values of a run with ``fspo.clip_values=measured``, by :class:`fspo.measured.ClipMeasurement`.

    A response counts if its rollout batch began at the full learning rate and a gradient has moved the policy since
    pi_old. S != 0 does not show that: in bf16 rounding alone makes S nonzero.
    """

    def __init__(self, config: DictConfig) -> None:
        settings = policy_loss_settings(config.actor_rollout_ref.actor.policy_loss)
        assert settings is not None, "completing the settings leaves fspo.clip_values=measured to losses with a band"
        self._settings, self._lr = settings, float(config.actor_rollout_ref.actor.optim.lr)
        self._measurement = ClipMeasurement(settings, float(config.fspo.accept))
        self._warm = self._given_up = False

    @property
    def values(self) -> list[dict[str, Any]]:
        """The values set so far, for run.json."""
        return self._measurement.values

    def scaled(self, state: BandState | None) -> BandState:
        """The band's state, scaled by the measured factor."""
        return (state or BandState()).scaled(self._measurement.scale)

    def add(
        self, mini_batches: Sequence[MiniBatch], counts: Sequence[bool], state: BandState | None, step: int
    ) -> str | None:
        """Take in all mini-batches of a rollout batch; a line for the person who watches, or None.

        ``counts`` says for each whether the policy has moved before it, or pi_old is another one; ``state`` is the one
        that was in force, with the drift of each mini-batch.
        """
        full = [x.learning_rate is None or x.learning_rate >= self._lr * _FULL for x in mini_batches]
        warm, self._warm = self._warm or full[0], self._warm or any(full)
        if self._given_up or not warm:
            return None
        if len(mini_batches) == 1 and not any(counts) and not self.values:
            self._given_up, self._measurement.scale = True, 1.0
            why = "no mini-batch comes after a moved weight (one update for each rollout batch)"
            return f"clip values: the published ones are in force, because {why}"
        needed = [np.zeros(0)]
        for index, mini_batch in enumerate(mini_batches):
            if counts[index]:
                drift = (state or BandState()).at_mini_batch(index).drift_per_token
                s_B, length_B = (np.asarray(mini_batch.rows[name], dtype=np.float64) for name in ("S", "L"))
                # Responses whose A is 0 have no gradient that a clip could remove.
                whole_B = np.isfinite(s_B) & (mini_batch.rows["A"] != 0)
                needed.append(needed_scale(s_B[whole_B], length_B[whole_B], self._settings, drift))
        return self._measurement.add(np.concatenate(needed), step)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"warm": self._warm, "given_up": self._given_up, "measurement": self._measurement.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; ValueError if it was measured for another loss or share."""
        self._measurement.load_state_dict(state["measurement"])
        self._warm, self._given_up = state["warm"], state["given_up"]
