"""verl's synchronous trainer with exact sequence-level metrics, calibrated bands, a run folder and a shorter poll.

A thin subclass: every method here calls verl's own and adds to it. It is registered as ``trainer_mode=fspo`` but runs
verl's logic for ``sync``: any other mode takes verl's asynchronous branches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from fspo.attributes import Attribute, attribute_metrics
from fspo.calibration import BandController
from fspo.diagnostics import LengthDiagnostics
from fspo.fairness import equal_mass_starts
from fspo.noise_floor import noise_floor
from fspo.records import to_record
from fspo.samples import validation_samples
from fspo.sums import SequenceSums
from fspo.types import BandState
from recipe.fspo.checkpoints.disk import room_for_save
from recipe.fspo.checkpoints.integrity import remove_old, step_folder
from recipe.fspo.checkpoints.state import Stateful, load_state, save_state
from recipe.fspo.config import policy_loss_settings
from recipe.fspo.faults.phase import write_phase
from recipe.fspo.faults.preemption import STOP, LeadTime, Preempted
from recipe.fspo.faults.resources import wait_for_resources
from recipe.fspo.launch import loggers, run_folder
from recipe.fspo.launch.progress import PROGRESS
from recipe.fspo.launch.run_folder import RunLog
from recipe.fspo.outcomes import (
    SAMPLES_FILE,
    Outcomes,
    grad_norm_metrics,
    kl_to_start,
    outcome_metrics,
    prompt_of,
    read_outcomes,
    send_rows,
    training_samples,
)
from recipe.fspo.recorder import MiniBatch, count_unmoved, join_ranks, sequence_record
from recipe.fspo.reward_manager import raise_failure
from recipe.fspo.worker import FSPOWorker

_ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)


@register_trainer("fspo")
class FSPOTrainer(PPOTrainerSync):
    """The trainer of this recipe."""

    worker_cls: type[FSPOWorker] = FSPOWorker

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"
            config.trainer.experiment_name = loggers.run_name(config)
        loggers.point_into(config.fspo.run_dir)
        self._run_log: RunLog | None = None
        self._loss_settings = policy_loss_settings(config.actor_rollout_ref.actor.policy_loss)
        self._band_controller: BandController | None = None
        if self._loss_settings is not None and self._loss_settings.needs_state:
            self._band_controller = BandController(self._loss_settings, window=config.fspo.calibration_rounds)
        self._warned_margin = math.inf
        self._diagnostics = LengthDiagnostics(bins=config.fspo.lre_bins, window=config.fspo.window_steps)
        self._grad_clip = float(config.actor_rollout_ref.actor.grad_clip)
        self._lead_time = LeadTime.from_environment()
        self._saved_step: int | None = None
        self._position: dict[str, int] = {}
        self._generations: tuple[Sequence[str], Sequence[str], Sequence[float]] = ((), (), ())
        self._began_s = 0.0
        self._save_s = 0.0
        self._phase = "start-up"
        self.global_steps = 0  # verl sets it when it looks for a checkpoint
        super().__init__(config)
        #: Whether the reference policy is there only to measure the distance to the start, at steps that validate.
        self._measures_kl = config.fspo.kl_to_start and not self.use_reference_policy
        self.use_reference_policy |= self._measures_kl

    # ---------------------------------------------------------------- what it is doing

    def _enter(self, phase: str) -> None:
        self._phase = phase
        write_phase(self.config.fspo.run_dir, self.global_steps, phase)

    def _ending(self) -> None:
        write_phase(self.config.fspo.run_dir, self.global_steps, self._phase, ending=True)

    def on_sample_end(self) -> None:
        raise_failure(self.reward_loop_manager.reward_loop_worker_handles or ())
        super().on_sample_end()
        self._enter("log-probabilities")

    # ---------------------------------------------------------------- start-up

    def init(self) -> None:
        try:
            super().init()
        except BaseException:
            self._ending()
            raise

    def _build_replay_buffer(self) -> Any:
        replay_buffer = super()._build_replay_buffer()
        # verl polls every 2 s and offers no setting, so every generation would take a multiple of 2 s.
        replay_buffer.poll_interval = self.config.fspo.poll_interval_s
        return replay_buffer

    def _init_resource_pool_mgr(self) -> None:
        wait_for_resources(self.config, PROGRESS.say)
        actor = self.config.actor_rollout_ref.actor
        penalised, actor.use_kl_loss = actor.use_kl_loss, self.use_reference_policy  # verl asks the configuration here
        super()._init_resource_pool_mgr()
        actor.use_kl_loss = penalised
        for role in _ACTOR_ROLES:
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.worker_cls)
        PROGRESS.say("starting the FSDP workers, then the vLLM engines")

    def on_init_end(self) -> None:
        PROGRESS.say("sending the weights to vLLM")
        super().on_init_end()
        fspo = self.config.fspo
        self.actor_rollout_wg.record(sequences=fspo.record_sequences or fspo.samples > 0, run_dir=fspo.run_dir)
        # Runs of a comparison must begin with the same weights; this is how a reader can tell.
        run_folder.note(fspo.run_dir, weights_at_start=self.actor_rollout_wg.parameter_norm())

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            self._reseed_sampling()
            super().fit(agent_loop_manager)
        except Exception:
            if self._phase in ("generation", "validation"):  # without any reward verl stops for another reason
                raise_failure(self.reward_loop_manager.reward_loop_worker_handles or ())
            raise
        finally:
            self._ending()

    def _reseed_sampling(self) -> None:
        """Let vLLM's sampling begin from the run's seed and step.

        Needs a worker extension that can (``recipe.fspo.cpu.vllm_worker``): on GPUs vLLM keeps the seed of its start.
        """
        if self.config.trainer.device != "cpu":
            return
        seed = self.config.seed * 1_000_003 + self.global_steps
        servers = [server for replica in self.llm_server_manager.get_replicas() for server in replica.servers]
        ray.get([server.collective_rpc.remote("reseed", args=(seed + i,)) for i, server in enumerate(servers)])

    # ---------------------------------------------------------------- order of a batch

    def prepare_step(self) -> dict[str, Any]:
        self._position = {}
        return super().prepare_step()

    def _fetch_one_gen_batch(self) -> Any:
        # Several times a step where verl draws single prompts: to replace groups that it filters out, for example.
        batch = super()._fetch_one_gen_batch()
        self._position |= {uid: index for index, uid in enumerate(batch["uid"], start=len(self._position))}
        return batch

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], **options: Any) -> KVBatchMeta:
        # verl returns the groups of a rollout batch in the order of random identifiers. In the data loader's order,
        # runs with one seed form their mini-batches from the same prompts.
        prompt = [self._position.get(prompt_of(key), len(self._position)) for key in batch.keys]
        expected = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        if (missing := expected - len({key.rpartition("_")[0] for key in batch.keys})) > 0:
            PROGRESS.say(
                f"note: {missing} of {expected} responses of step {self.global_steps} are missing: their generation or "
                "reward failed, verl goes on without them, and Ray's logs of AgentLoopWorker say why"
            )
        batch.reorder(sorted(range(len(batch)), key=prompt.__getitem__))
        return super()._balance_batch(batch, metrics, **options)

    # ---------------------------------------------------------------- logging

    def _open_run_log(self) -> None:
        """Add the run folder to verl's loggers, which exist from the first validation or the first step on."""
        if self._run_log is None:
            patterns, given = loggers.chosen(self.config), self.logger.logger
            self.logger.logger = {name: loggers.Chosen(logger, patterns) for name, logger in given.items()}
            self._run_log = RunLog(self.config, total_steps=self.total_training_steps)
            self.logger.logger["run_folder"] = self._run_log

    def on_validate_begin(self) -> None:
        self._open_run_log()
        self._enter("validation")
        self._began_s = time.monotonic()
        super().on_validate_begin()

    def on_validate_end(self) -> None:
        raise_failure(self.reward_loop_manager.reward_loop_worker_handles or ())
        super().on_validate_end()
        self._lead_time.measured(validation_s=time.monotonic() - self._began_s)

    def _maybe_log_val_generations(self, inputs: Any, outputs: Any, scores: Any) -> None:
        # In the order of what the reward told of them, which verl collects for _val_metrics_update.
        self._generations = (inputs, outputs, scores)
        super()._maybe_log_val_generations(inputs=inputs, outputs=outputs, scores=scores)

    def _val_metrics_update(self, data_sources: Any, sample_uids: Any, infos: Any, *rest: Any, **more: Any) -> Any:
        if n := self.config.fspo.samples:
            samples = validation_samples(self._generations, infos, n, self.config.seed, self.global_steps)
            self._run_log.append(SAMPLES_FILE, list(samples))
        self._generations = ((), (), ())
        return super()._val_metrics_update(data_sources, sample_uids, infos, *rest, **more)

    def on_train_begin(self) -> None:
        self._open_run_log()
        STOP.training = True
        super().on_train_begin()

    # ---------------------------------------------------------------- preemption

    def on_step_begin(self) -> None:
        # verl has counted on by now. Here the step before is complete: trained, sent to vLLM and logged.
        if STOP.requested:
            self._save_and_leave()
        self._began_s, self._save_s = time.monotonic(), 0.0
        self._enter("generation")
        super().on_step_begin()

    def on_step_end(self) -> None:
        self._enter("weight sync")
        super().on_step_end()
        self._lead_time.measured(step_s=time.monotonic() - self._began_s - self._save_s)
        if (shortfall := self._lead_time.shortfall()) is not None:
            PROGRESS.say(shortfall)
        if STOP.requested and self.global_steps < self.total_training_steps:
            # Not now: it may take longer than the time that is left. The resumed run begins with a validation.
            with open_dict(self.config):
                self.config.trainer.test_freq = -1

    def _save_and_leave(self) -> None:
        """Save the step before this one, unless that has been done, and end the run."""
        self.global_steps -= 1
        if self.global_steps > 0 and self._saved_step != self.global_steps:
            self._save_checkpoint()
        raise Preempted(f"preempted after step {self.global_steps}; it is saved")

    # ---------------------------------------------------------------- distance to the start

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if not self._measures_kl:
            return super()._compute_ref_log_prob(batch, metrics)  # a part of the loss or of the reward
        every, step = self.config.trainer.test_freq, self.global_steps
        if every > 0 and (step % every == 0 or step == self.total_training_steps):
            batch = super()._compute_ref_log_prob(batch, metrics)
            metrics["fspo/kl_to_start"] = kl_to_start(batch)
        return batch

    # ---------------------------------------------------------------- update

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._enter("update")
        outcomes = read_outcomes(batch)
        attributes: tuple[Attribute, ...] = ()
        if (names := self.config.fspo.attributes) or self.config.fspo.samples:
            batch, attributes = send_rows(batch, outcomes, names, self.config.data.max_response_length)
        self.actor_rollout_wg.begin_update(self._band_state(), attributes)
        batch = super()._update_actor(batch, metrics)
        mini_batches = join_ranks(self.actor_rollout_wg.pop_mini_batches())
        unmoved = count_unmoved(mini_batches)  # there S is 0, but for rounding
        sums = [mini_batch.sums for mini_batch in mini_batches]
        metrics.update(self._diagnostics.update(sums[:1] + sums[unmoved:]))
        metrics.update(self._noise_floor_metrics(sums[:unmoved]))
        if self._band_controller is not None and unmoved < len(sums):
            self._band_controller.update(sums)
        metrics.update(outcome_metrics(outcomes, self._diagnostics))
        for by_attribute in zip(*(mini_batch.attribute_sums for mini_batch in mini_batches[unmoved:]), strict=True):
            metrics.update(attribute_metrics(by_attribute))
        metrics.update(grad_norm_metrics([each.grad_norm for each in mini_batches], self._grad_clip))
        self._record(mini_batches, unmoved)
        self._keep_samples(batch, outcomes, mini_batches, unmoved)
        return batch

    def _noise_floor_metrics(self, unmoved: Sequence[SequenceSums]) -> dict[str, float]:
        """How much of S is rounding; a warning if the band is too close to it, again only when it has doubled."""
        count_K = sum(unmoved, SequenceSums.zeros()).column("count").numpy()
        starts = equal_mass_starts(count_K, self._diagnostics.bins)
        floor = noise_floor(unmoved, starts, self._loss_settings, self._band_state())
        if (warning := floor.warning()) is not None and floor.margin < self._warned_margin / 2:
            self._warned_margin = floor.margin
            PROGRESS.say(warning)
        return floor.metrics()

    def _band_state(self) -> BandState | None:
        return None if self._band_controller is None else self._band_controller.state

    def _record(self, mini_batches: Sequence[MiniBatch], unmoved: int) -> None:
        """Append the step's exact sums, and its sequences if they are asked for, to the run folder.

        Mini-batch 0 is what readers leave out, so all that were computed before a weight had moved have this number.
        """
        step = self.global_steps
        each = [(0 if index < unmoved else index, part) for index, part in enumerate(mini_batches)]
        self._run_log.append("length_stats.jsonl", [to_record(part.sums, step=step, minibatch=i) for i, part in each])
        if self.config.fspo.record_sequences:
            self._run_log.append("sequences.jsonl", [sequence_record(step, i, part) for i, part in each])

    def _keep_samples(
        self, batch: KVBatchMeta, outcomes: Outcomes, mini_batches: Sequence[MiniBatch], unmoved: int
    ) -> None:
        """Append a few of the step's responses to the run folder, for reading."""

        def decode(ids: Any) -> str:
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))  # as verl logs generations

        if n := self.config.fspo.samples:
            seed, step = self.config.seed, self.global_steps
            samples = training_samples(batch, outcomes, mini_batches, unmoved, n, seed, step, decode)
            self._run_log.append(SAMPLES_FILE, list(samples))

    # ---------------------------------------------------------------- checkpoints

    def _stateful_parts(self) -> dict[str, Stateful | None]:
        return {"diagnostics": self._diagnostics, "band_controller": self._band_controller}

    def _save_checkpoint(self) -> None:
        # Before verl's save, which ends by naming this checkpoint the latest: what is named must be complete. (verl's
        # checkpoint callback runs after that.)
        self._enter("save")
        started = time.monotonic()
        folder = step_folder(Path(self.config.trainer.default_local_dir), self.global_steps)
        keep = self.config.trainer.max_actor_ckpt_to_keep
        with room_for_save(folder.parent, self.global_steps, keep):
            save_state(folder, self._stateful_parts())
            super()._save_checkpoint()
        if keep:
            remove_old(folder.parent, step=self.global_steps, keep=keep)
        self._saved_step = self.global_steps
        self._save_s = time.monotonic() - started
        self._lead_time.measured(save_s=self._save_s)
        PROGRESS.say(f"saved {folder} in {self._save_s:.1f} s")

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self._saved_step = self.global_steps  # nothing new until a step is done
        if self.global_steps > 0:
            if self.config.trainer.resume_mode == "resume_path":
                folder = Path(self.config.trainer.resume_from_path)
            else:
                folder = step_folder(Path(self.config.trainer.default_local_dir), self.global_steps)
            load_state(folder, self._stateful_parts())
            PROGRESS.say(f"resumed from {folder}")
