"""What the mini-batches of one step add up to: metrics, records in a folder, and the next step's band."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from omegaconf import DictConfig
from recipe.fspo.accounting.funnel import LengthFunnel
from recipe.fspo.accounting.measured import ClipValues, LossScale
from recipe.fspo.accounting.norm_clip import NormClipWatch
from recipe.fspo.accounting.outcomes import EqualRewardsWatch, Outcomes, outcome_columns, outcome_metrics
from recipe.fspo.accounting.replay_buffer import train_on
from recipe.fspo.config import GROUP_ESTIMATORS, policy_loss_settings
from recipe.fspo.recorder import MiniBatch
from recipe.fspo.reporter import Reporter
from recipe.fspo.state import Stateful
from transfer_queue import KVBatchMeta

from fspo.calibration import DriftMeasurement
from fspo.diagnostics import LengthDiagnostics, noise_floor
from fspo.records import FUNNEL_FILE
from fspo.responses import EVERY_MINI_BATCH, Responses
from fspo.table import FOLDER, Rows, TableWriter, join_rows
from fspo.types import BandState


class StepAccounts:
    """Metrics and records of one verl step, and the band of the next.

    A step has the mini-batches between two transfers of the weights to vLLM: verl's modes ``sync`` and
    ``colocate_async`` update the actor once with all of them, ``separate_async`` once for each. What lasts longer than
    a step (the window of the diagnostics, measured bands, the funnel) is kept here too.
    """

    def __init__(self, config: DictConfig, reporter: Reporter) -> None:
        self._config, self._reporter = config, reporter
        self._settings = policy_loss_settings(config.actor_rollout_ref.actor.policy_loss)
        self._every_mini_batch = config.fspo.pi_old == "rollout"
        self._band_controller: DriftMeasurement | None = None
        if self._settings is not None and self._settings.needs_state:
            self._band_controller = DriftMeasurement(window=config.fspo.calibration_rounds)
        #: What the loss is divided by.
        self.loss_scale = LossScale(config)
        self._clip_values = ClipValues(config) if config.fspo.clip_values == "measured" else None
        self._diagnostics = LengthDiagnostics(window=config.fspo.window_steps)
        self.funnel = LengthFunnel()
        self._warned_margin = math.inf
        self._warned_drift = False
        self._norm_clip = NormClipWatch(float(config.actor_rollout_ref.actor.optim.clip_grad))
        self._equal_rewards = EqualRewardsWatch(str(config.algorithm.adv_estimator) in GROUP_ESTIMATORS)
        self._mini_batches: list[MiniBatch] = []
        self._outcomes: list[Outcomes] = []
        self._table: TableWriter | None = None

    @property
    def rows(self) -> int:
        """Responses so far."""
        return sum(len(outcomes.keys) for outcomes in self._outcomes)

    @property
    def band_state(self) -> BandState | None:
        """What the updates of this step use; None where nothing of the band has been measured."""
        state = None if self._band_controller is None else self._band_controller.state
        return state if self._clip_values is None else self._clip_values.scaled(state)

    def stateful_parts(self) -> dict[str, Stateful | None]:
        """The parts whose state a checkpoint has."""
        return {
            "band_controller": self._band_controller,
            "loss_scale": self.loss_scale,
            "clip_values": self._clip_values,
            "funnel": self.funnel,
        }

    def note(self) -> None:
        """Note the measured values: those of this start, or of the checkpoint that it resumes."""
        facts: dict[str, object] = {}
        if self.loss_scale.length is not None:
            facts["loss_divided_by"] = self.loss_scale.length
        if self._clip_values is not None and self._clip_values.values:
            facts["clip_values_measured"] = self._clip_values.values
        if facts:
            self._reporter.note(**facts)

    def add(self, batch: KVBatchMeta, outcomes: Outcomes, mini_batches: Sequence[MiniBatch], step: int) -> None:
        """Take in one update of the actor."""
        self._mini_batches += mini_batches
        self._outcomes.append(outcomes)
        train_on(self.funnel, batch, outcomes, step)

    def end(self, step: int, read: Callable[[list[str]], list[str]]) -> dict[str, float]:
        """Metrics of the step; its records go to the reporter's folder, its statistics into the next step's band.

        ``read`` gives the text of responses of the last update, by their keys; verl may have removed earlier ones.
        """
        mini_batches, outcomes, last = self._mini_batches, Outcomes.join(self._outcomes), self._outcomes[-1]
        self._mini_batches, self._outcomes = [], []
        if self.loss_scale.settle():
            self._reporter.say(
                f"gradient scale: the loss is divided by {self.loss_scale.length:.4g}, the mean length of the first "
                "rollout batch (fspo.match_scale=matched)"
            )
            self.note()
        rows = join_rows([mini_batch.rows for mini_batch in mini_batches])
        responses = Responses.of_rows(rows, self._every_mini_batch)
        metrics = self._diagnostics.update(responses)
        if len(unmoved := responses.unmoved()):
            metrics |= self._noise_floor_metrics(unmoved)
        line = None
        if self._clip_values is not None:
            times = len(self._clip_values.values)
            line = self._clip_values.add(mini_batches, self.band_state, step)
            if len(self._clip_values.values) > times:
                self.note()
        if line is not None:
            self._reporter.say(line)
        drifts = None
        if self._settings is not None and not self._warned_drift:
            drifts = self._diagnostics.drift_warning(self._settings, self.band_state)
        if drifts is not None:
            self._warned_drift = True
            self._reporter.say(drifts)
        with_gradient = responses.select(responses.advantage_B != 0)
        if self._band_controller is not None and with_gradient.moved_B.any():
            self._band_controller.update(with_gradient)
        metrics |= outcome_metrics(outcomes, self._diagnostics) | _shares_of_all(rows, self._every_mini_batch)
        without_gradient = len(rows.get("A", ())) > 0 and not rows["A"].any()
        if (warning := self._equal_rewards.warning(step, outcomes, last, without_gradient, read)) is not None:
            self._reporter.say(warning)
        if norms := [part.grad_norm for part in mini_batches if part.grad_norm is not None]:
            metrics["fspo/grad_norm/max"] = max(norms)
            # The share of the mini-batches in which the norm clip binds.
            bound = sum(not norm <= self._norm_clip.clip for norm in norms)
            metrics["fspo/grad_norm/clipped_share"] = bound / len(norms)
            if (warning := self._norm_clip.warning(min(norms))) is not None:
                self._reporter.say(warning)
        self._record(step, mini_batches, rows, outcomes)
        funnel_metrics, ends = self.funnel.end_step(step)
        self._reporter.append(FUNNEL_FILE, [ends])
        return metrics | funnel_metrics

    def _noise_floor_metrics(self, unmoved: Responses) -> dict[str, float]:
        """How much of S is rounding; a warning if the band is too close to it, again only when it has doubled."""
        floor = noise_floor(unmoved, self._settings, self.band_state)
        if (warning := floor.warning()) is not None and floor.margin < self._warned_margin / 2:
            self._warned_margin = floor.margin
            self._reporter.say(f"{warning} (actor_rollout_ref.actor.shuffle=false gives the same packs)")
        return floor.metrics()

    def _record(self, step: int, mini_batches: Sequence[MiniBatch], rows: Rows, outcomes: Outcomes) -> None:
        """Append the step's responses to the table."""
        with self._reporter.writing(self._reporter.folder / FOLDER) as folder:
            if self._table is None:
                loss = str(self._config.actor_rollout_ref.actor.policy_loss.loss_mode)
                known = self._settings is not None or "inside" in rows
                meta = {"loss": loss, "rule": "known" if known else "unknown"}
                meta[EVERY_MINI_BATCH] = "yes" if self._every_mini_batch else "no"
                if self._config.fspo.skip_zero_advantage:
                    meta["without_S"] = "A = 0"
                self._table = TableWriter(folder, meta, run="run", first_step=step)
            if len(rows.get("S", ())):
                self._table.append(rows | outcome_columns(outcomes, rows["row"]))
                return
            for update, mini_batch in enumerate(mini_batches):  # a correction has rejected every response
                place = {"step": step, "update": update, "minibatch": mini_batch.number}
                self._table.append(place | {"S": np.empty(0), "L": np.empty(0)})

    def sync(self) -> None:
        """Bring the table to the disk: a checkpoint is about to stand beside it."""
        if self._table is not None:
            self._table.sync()


def _shares_of_all(rows: Rows, every_mini_batch: bool) -> dict[str, float]:
    """Shares of all responses of the mini-batches that count, those without S among them."""
    moved_B = (np.asarray(rows.get("minibatch", ())) > 0) | every_mini_batch
    values = {"fspo/advantage_zero_frac": rows.get("A", np.empty(0)) == 0, "fspo/truncated_frac": rows.get("truncated")}
    shares = {
        name: float(value_B[moved_B].mean())
        for name, value_B in values.items()
        if value_B is not None and moved_B.any()
    }
    return {name: share for name, share in shares.items() if math.isfinite(share)}
