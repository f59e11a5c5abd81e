"""What the mini-batches of one step add up to: metrics, records in the run folder, and the next step's band."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from omegaconf import DictConfig
from recipe.fspo.accounting.measured import ClipValues, LossScale
from recipe.fspo.accounting.outcomes import EqualRewardsWatch, Outcomes, outcome_columns, outcome_metrics
from recipe.fspo.accounting.replay_buffer import train_on
from recipe.fspo.config import GROUP_ESTIMATORS, policy_loss_settings
from recipe.fspo.recorder import MiniBatch, sequence_record
from recipe.runner.checkpoints.state import Stateful
from recipe.runner.launch import run_folder
from recipe.runner.launch.progress import PROGRESS
from recipe.runner.launch.run_folder import RunLog
from transfer_queue import KVBatchMeta

from fspo.calibration import BandController
from fspo.diagnostics import LengthDiagnostics, NormClipWatch, noise_floor
from fspo.drops import EvenDrops
from fspo.fairness.lre import equal_mass_starts
from fspo.funnel import LengthFunnel
from fspo.records import FUNNEL_FILE, LENGTH_STATS_FILE, SEQUENCES_FILE, to_record
from fspo.sums import SequenceSums
from fspo.types import BandState


class Cycle:
    """The mini-batches between two transfers of the weights to vLLM: what verl counts as one step.

    ``mode=sync`` and ``colocate_async`` update the actor once in a cycle, with all of them; ``separate_async`` once for
    each. What lasts longer than a cycle (the window of the diagnostics, measured bands, the funnel) is kept here too.
    """

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self._settings = policy_loss_settings(config.actor_rollout_ref.actor.policy_loss)
        self._band_controller: BandController | None = None
        if self._settings is not None and self._settings.needs_state:
            self._band_controller = BandController(self._settings, window=config.fspo.calibration_rounds)
        #: What the loss is divided by.
        self.loss_scale = LossScale(config)
        self._clip_values = ClipValues(config) if config.fspo.clip_values == "measured" else None
        self._diagnostics = LengthDiagnostics(window=config.fspo.window_steps)
        self.funnel = LengthFunnel()
        groups = config.fspo.window_steps * config.data.train_batch_size
        #: Which groups to drop in place of the stale ones; None with ``fspo.drop=stale``, verl's own rule.
        self.drops = EvenDrops(self._diagnostics.bins, groups) if config.fspo.drop == "evenly" else None
        self._warned_margin = math.inf
        self._warned_drift = False
        self._norm_clip = NormClipWatch(float(config.actor_rollout_ref.actor.optim.clip_grad))
        self._equal_rewards = EqualRewardsWatch(str(config.algorithm.adv_estimator) in GROUP_ESTIMATORS)
        self._mini_batches: list[MiniBatch] = []
        self._outcomes: list[Outcomes] = []

    @property
    def rows(self) -> int:
        """Responses so far."""
        return sum(len(outcomes.keys) for outcomes in self._outcomes)

    @property
    def needs_sequences(self) -> bool:
        """Whether this cycle needs S, L and A of every sequence, not only sums: for records or clip values."""
        return self._config.fspo.record_sequences or (self._clip_values is not None and self._clip_values.open)

    @property
    def band_state(self) -> BandState | None:
        """What the updates of this cycle use; None where nothing of the band has been measured."""
        state = None if self._band_controller is None else self._band_controller.state
        return state if self._clip_values is None else self._clip_values.placed(state)

    def stateful_parts(self) -> dict[str, Stateful | None]:
        """The parts whose state a checkpoint has."""
        return {
            "diagnostics": self._diagnostics,
            "band_controller": self._band_controller,
            "loss_scale": self.loss_scale,
            "clip_values": self._clip_values,
            "funnel": self.funnel,
            "drops": self.drops,
        }

    def note(self) -> None:
        """Write the measured values into run.json: those of this start, or of the checkpoint that it resumes."""
        facts: dict[str, object] = {}
        if self.loss_scale.length is not None:
            facts["loss_divided_by"] = self.loss_scale.length
        if self._clip_values is not None and self._clip_values.values:
            facts["clip_values_measured"] = self._clip_values.values
        if facts:
            run_folder.note(self._config.run.dir, **facts)

    def add(self, batch: KVBatchMeta, outcomes: Outcomes, mini_batches: Sequence[MiniBatch], step: int) -> None:
        """Take in one update of the actor."""
        self._mini_batches += mini_batches
        self._outcomes.append(outcomes)
        train_on(self.funnel, batch, outcomes, step)

    def end(self, step: int, log: RunLog, read: Callable[[list[str]], list[str]]) -> dict[str, float]:
        """Metrics of the cycle; its records go to the run folder, its statistics into the next cycle's band.

        ``read`` gives the text of responses of the last update, by their keys; verl may have removed earlier ones.
        """
        mini_batches, outcomes, last = self._mini_batches, Outcomes.join(self._outcomes), self._outcomes[-1]
        self._mini_batches, self._outcomes = [], []
        if self.loss_scale.settle():
            PROGRESS.say(
                f"gradient scale: the loss is divided by {self.loss_scale.length:.4g}, the mean length of the first "
                "rollout batch (match_scale=matched)"
            )
            self.note()
        unmoved = sum(mini_batch.number == 0 for mini_batch in mini_batches)
        sums = [mini_batch.sums for mini_batch in mini_batches]
        metrics = self._diagnostics.update(sums[:1] + sums[unmoved:])
        if unmoved:
            metrics |= self._noise_floor_metrics(sums[:unmoved])
        line = None
        if self._clip_values is not None:
            line = self._clip_values.add(mini_batches, outcomes, self.band_state, step)
        if line is not None:
            PROGRESS.say(line)
            self.note()
        drifts = None
        if self._settings is not None and not self._warned_drift:
            drifts = self._diagnostics.drift_warning(self._settings, self.band_state)
        if drifts is not None:
            self._warned_drift = True
            PROGRESS.say(drifts)
        if self._band_controller is not None and unmoved < len(sums):
            self._band_controller.update(sums, unmoved)
        metrics |= outcome_metrics(outcomes, self._diagnostics)
        whole = sum(sums, SequenceSums.zeros())
        without_gradient = 0 < whole.total("count") == whole.total("advantage_zero")
        if (warning := self._equal_rewards.warning(step, outcomes, last, without_gradient, read)) is not None:
            PROGRESS.say(warning)
        if norms := [part.grad_norm for part in mini_batches if part.grad_norm is not None]:
            metrics["fspo/grad_norm/max"] = max(norms)
            # The share of the mini-batches in which the norm clip binds.
            bound = sum(not norm <= self._norm_clip.clip for norm in norms)
            metrics["fspo/grad_norm/clipped_share"] = bound / len(norms)
            if (warning := self._norm_clip.warning(min(norms))) is not None:
                PROGRESS.say(warning)
        self._record(step, mini_batches, outcomes, log)
        funnel_metrics, ends = self.funnel.end_step(step)
        log.append(FUNNEL_FILE, [ends])
        return metrics | funnel_metrics

    def _noise_floor_metrics(self, unmoved: Sequence[SequenceSums]) -> dict[str, float]:
        """How much of S is rounding; a warning if the band is too close to it, again only when it has doubled."""
        count_K = sum(unmoved, SequenceSums.zeros()).column("count").numpy()
        starts = equal_mass_starts(count_K, self._diagnostics.bins)
        floor = noise_floor(unmoved, starts, self._settings, self.band_state)
        if (warning := floor.warning()) is not None and floor.margin < self._warned_margin / 2:
            self._warned_margin = floor.margin
            PROGRESS.say(f"{warning} (actor_rollout_ref.actor.shuffle=false gives the same packs)")
        return floor.metrics()

    def _record(self, step: int, mini_batches: Sequence[MiniBatch], outcomes: Outcomes, log: RunLog) -> None:
        """Append the cycle's exact sums, and its sequences if they are asked for, to the run folder."""
        parts = [to_record(x.sums, x.positions, step=step, minibatch=x.number) for x in mini_batches]
        log.append(LENGTH_STATS_FILE, parts)
        if self._config.fspo.record_sequences:
            longest = self._config.data.max_response_length
            lines = [sequence_record(step, mini_batch) for mini_batch in mini_batches]
            log.append(SEQUENCES_FILE, [line | outcome_columns(outcomes, line["row"], longest) for line in lines])
