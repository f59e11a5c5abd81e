"""verl's trainers with exact sequence-level metrics, calibrated bands, a run folder and a shorter poll.

:class:`FSPOHooks` is mixed into verl's three trainers: every method calls verl's own and adds to it. The subclasses are
registered under names of their own, ``trainer.v1.trainer_mode=fspo...`` (``mode=`` chooses one), and restore verl's
name, because verl asks for it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.replica import RolloutReplica

from recipe.fspo.accounting.cycle import Cycle
from recipe.fspo.accounting.outcomes import kl_to_start, prompt_of, read_outcomes, send_rows
from recipe.fspo.accounting.replay_buffer import clear_trained, counting, prompt_tags, tell_progress
from recipe.fspo.recorder import join_ranks
from recipe.fspo.reward_manager import raise_failure
from recipe.fspo.validation import replace_resampling
from recipe.fspo.worker import FSPODetachedWorker, FSPOWorker
from recipe.runner.checkpoints.disk import room_for_save
from recipe.runner.checkpoints.integrity import remove_old, resumed_from, step_folder
from recipe.runner.checkpoints.state import load_state, save_state
from recipe.runner.faults.errors import ExplainedError
from recipe.runner.faults.phase import Phase, write_phase
from recipe.runner.faults.preemption import NOTHING_TO_SAVE, STOP, LeadTime, Preempted
from recipe.runner.faults.resources import wait_for_resources
from recipe.runner.launch import loggers, run_folder, server_slots
from recipe.runner.launch.progress import PROGRESS
from recipe.runner.launch.run_folder import RunLog

_ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)


def give_servers_slots(slots: int) -> None:
    """Let every server that this process starts take in ``slots`` calls at once, or verl's number if that is larger."""
    verls = RolloutReplica.max_concurrency.fget
    RolloutReplica.max_concurrency = property(lambda replica: max(verls(replica), slots))


class FSPOHooks(PPOTrainer):
    """What this recipe adds to a trainer of verl, whatever its mode."""

    verl_mode: str
    worker_cls: type[FSPOWorker] = FSPOWorker

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.verl_mode
            config.trainer.experiment_name = loggers.run_name(config)
        if (slots := server_slots.slots(config)) is not None:
            give_servers_slots(slots)
        loggers.point_into(config.fspo.run_dir)
        replace_resampling()
        self._run_log: RunLog | None = None
        self._cycle = Cycle(config)
        self._lead_time = LeadTime.from_environment()
        self._saved_step: int | None = None
        self._position: dict[str, int] = {}
        self._fetched = 0
        self._began_s = 0.0
        self._save_s = 0.0
        self._phase = Phase(0, "start-up")
        self._moved_s = 0.0
        self.global_steps = 0  # verl sets it when it looks for a checkpoint
        super().__init__(config)
        #: Whether the reference policy is there only to measure the distance to the start, at steps that validate.
        self._measures_kl = config.fspo.kl_to_start and not self.use_reference_policy
        self.use_reference_policy |= self._measures_kl

    # ---------------------------------------------------------------- what it is doing

    def _enter(self, phase: str) -> None:
        self._phase = Phase(self.global_steps, phase)
        write_phase(self.config.fspo.run_dir, self._phase)

    def _moved(self, queue: str) -> None:
        """Note progress within a phase, once a second at most."""
        if queue != self._phase.queue and time.monotonic() - self._moved_s > 1:
            self._moved_s = time.monotonic()
            self._phase = replace(self._phase, queue=queue)
            write_phase(self.config.fspo.run_dir, self._phase)

    def _ending(self) -> None:
        self._phase = replace(self._phase, step=self.global_steps, ending=True)
        write_phase(self.config.fspo.run_dir, self._phase)

    def on_sample_begin(self) -> None:
        self._enter("generation")  # for every mini-batch in separate_async
        super().on_sample_begin()

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

    def _init_dataloader(self) -> None:
        try:
            super()._init_dataloader()
        except ValueError:  # of torch, if nothing at all is left
            self._check_prompts()
            raise
        self._check_prompts()
        rows = getattr(self.val_dataset, "dataframe", None)  # a data class of the user's own may have none
        if rows is not None and "data_source" in rows.column_names:  # for the intervals of held-out accuracy
            run_folder.note(self.config.fspo.run_dir, validation_problems=dict(Counter(rows["data_source"])))

    def _check_prompts(self) -> None:
        # What the filter of long prompts leaves is known only now; verl would divide by its number of batches later.
        data = self.config.data
        for kind, needed in (("train", data.train_batch_size), ("val", 1)):
            left = getattr(self, f"{kind}_dataset", None)
            if left is not None and len(left) < needed:
                raise ExplainedError(
                    f"data.{kind}_files: {len(left)} prompts have no more than data.max_prompt_length="
                    f"{data.max_prompt_length} tokens, and {needed} are needed"
                    + (" (data.train_batch_size)" if kind == "train" else "")
                    + "; allow longer prompts, or give more data"
                )

    def _build_replay_buffer(self) -> Any:
        responses = self.config.actor_rollout_ref.rollout.n
        built = super()._build_replay_buffer()
        replay_buffer = counting(built, self._cycle.funnel, responses, self._position, self._cycle.drops)
        # verl polls every 2 s and offers no setting, so every generation would take a multiple of 2 s.
        replay_buffer.poll_interval = self.config.fspo.poll_interval_s
        tell_progress(replay_buffer, self._moved)
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
        sequences = fspo.record_sequences or self._cycle.needs_sequences
        self.actor_rollout_wg.record(sequences=sequences, run_dir=fspo.run_dir)
        # Runs of a comparison must begin with the same weights; this is how a reader can tell, of runs never resumed.
        run_folder.note(fspo.run_dir, weights_at_start=self.actor_rollout_wg.parameter_norm())

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            self._reseed_sampling()
            super().fit(agent_loop_manager)
        except Exception:
            if self._phase.phase in ("generation", "validation"):  # without any reward verl stops for another reason
                raise_failure(self.reward_loop_manager.reward_loop_worker_handles or ())
            raise
        finally:
            self._ending()

    def _reseed_sampling(self) -> None:
        """Let vLLM's sampling begin from the run's seed and step.

        Needs a worker extension that can (``recipe.runner.cpu.vllm_worker``): on GPUs vLLM keeps the seed of its start.
        """
        if self.config.trainer.device != "cpu":
            return
        seed = self.config.seed * 1_000_003 + self.global_steps
        replicas = [each for manager in self._rollout_server_managers() for each in manager.get_replicas()]
        servers = [server for replica in replicas for server in replica.servers]
        ray.get([server.collective_rpc.remote("reseed", args=(seed + i,)) for i, server in enumerate(servers)])

    # ---------------------------------------------------------------- order of a batch

    def _fetch_one_gen_batch(self) -> Any:
        # Several times a step where verl draws single prompts: to replace groups that it filters out, for example.
        batch = super()._fetch_one_gen_batch()
        self._position.update({uid: self._fetched + index for index, uid in enumerate(batch["uid"])})
        self._fetched += len(batch)
        self._cycle.funnel.start(len(batch) * self.config.actor_rollout_ref.rollout.n)
        return batch

    def _reissue_inflight_prompts(self, partition_id: str = "train") -> int:
        # After a resume verl stamps these prompts with the present step; how stale they are counts from their first.
        prompts = {} if self.verl_mode == "sync" else prompt_tags(partition_id)
        unfinished = [uid for uid, tag in prompts.items() if tag["status"] in ("pending", "running")]
        first = self._cycle.funnel.first_issue
        issued_again = {uid: prompts[uid]["global_steps"] for uid in unfinished}
        self._cycle.funnel.first_issue = issued_again | {uid: first[uid] for uid in prompts if uid in first}
        again = int(super()._reissue_inflight_prompts(partition_id))
        if prompts:
            PROGRESS.say(
                f"{len(prompts)} prompts were under way when the checkpoint was saved: the responses to "
                f"{len(prompts) - again} are kept, {again} are answered again"
            )
        return again

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], **options: Any) -> KVBatchMeta:
        # verl returns the groups of a rollout batch in the order of random identifiers. In the data loader's order,
        # runs with one seed form their mini-batches from the same prompts (on one rank: among several verl balances
        # the responses by their lengths).
        prompts = [prompt_of(key) for key in batch.keys]
        expected = self.config.data.train_batch_size // self.parameter_sync_step
        expected *= self.config.actor_rollout_ref.rollout.n
        missing = expected - len({key.rpartition("_")[0] for key in batch.keys})
        self._note_missing(missing, expected, f"step {self.global_steps}", "goes on without them")
        position = [self._position.get(prompt, -1) for prompt in prompts]  # first: those from before a resume
        batch.reorder(sorted(range(len(batch)), key=position.__getitem__))
        for prompt in prompts:
            self._position.pop(prompt, None)
        return super()._balance_batch(batch, metrics, **options)

    def _note_missing(self, missing: int, expected: int, where: str, verl: str) -> None:
        if missing > 0:
            PROGRESS.say(
                f"note: {missing} of {expected} responses of {where} are missing: their generation or reward failed, "
                f"verl {verl}, and Ray's logs of AgentLoopWorker say why"
            )

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

    def _val_metrics_update(self, data_sources: Any, sample_uids: Any, infos: Any, *rest: Any, **more: Any) -> Any:
        expected = sum((more.get("expected_acc_counts") or {}).values())
        self._note_missing(expected - len(sample_uids), expected, "the validation", "counts them as wrong")
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
        if self.global_steps == 0:
            raise Preempted(NOTHING_TO_SAVE)
        if self._saved_step != self.global_steps:
            self._save_checkpoint()
        raise Preempted(f"preempted after step {self.global_steps}; it is saved")

    # ---------------------------------------------------------------- distance to the start

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        every, step = self.config.trainer.test_freq, self.global_steps
        validates = every > 0 and (step % every == 0 or step == self.total_training_steps)
        if self._measures_kl and not validates:
            return batch
        batch = super()._compute_ref_log_prob(batch, metrics)  # otherwise a part of the loss or of the reward
        if self.config.fspo.kl_to_start and validates:
            metrics["fspo/kl_to_start"] = kl_to_start(batch)
        return batch

    # ---------------------------------------------------------------- pi_old

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self.config.fspo.pi_old == "actor":
            return super()._compute_old_log_prob(batch, metrics)
        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        data = tq.kv_batch_get(**where, select_fields=["rollout_log_probs"])
        data["old_log_probs"] = data.pop("rollout_log_probs")
        tq.kv_batch_put(**where, fields=data)
        return batch

    # ---------------------------------------------------------------- update

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._enter("update")
        outcomes = read_outcomes(batch, self.config.actor_rollout_ref.rollout.agent.agent_loop_config_path is not None)
        if self.config.fspo.record_sequences:
            batch = send_rows(batch, outcomes, self._cycle.rows)
        self.actor_rollout_wg.begin_update(self._cycle.band_state, self._cycle.mini_batches)
        batch = super()._update_actor(batch, metrics)
        self._cycle.add(batch, outcomes, join_ranks(self.actor_rollout_wg.pop_mini_batches()), self.global_steps)
        if self.local_trigger_step == self.parameter_sync_step - 1:
            metrics.update(self._cycle.end(self.global_steps, self._run_log))
        return batch

    # ---------------------------------------------------------------- checkpoints

    def _remove_old(self) -> None:
        root, keep = Path(self.config.trainer.default_local_dir), self.config.trainer.max_actor_ckpt_to_keep
        if keep:
            contents = self.config.actor_rollout_ref.actor.checkpoint.save_contents
            remove_old(root, self.global_steps, keep, contents)

    def _save_checkpoint(self) -> None:
        # Before verl's save, which ends by naming this checkpoint the latest: what is named must be complete. (verl's
        # checkpoint callback runs after that.)
        self._enter("save")
        started = time.monotonic()
        folder = step_folder(Path(self.config.trainer.default_local_dir), self.global_steps)
        with room_for_save(folder.parent, self.global_steps, self._remove_old):
            save_state(folder, self._cycle.stateful_parts())
            super()._save_checkpoint()
        self._remove_old()
        self._saved_step = self.global_steps
        self._save_s = time.monotonic() - started
        self._lead_time.measured(save_s=self._save_s)
        PROGRESS.say(f"saved {folder} in {self._save_s:.1f} s")

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self._saved_step = self.global_steps  # nothing new until a step is done
        if self.global_steps > 0 and (folder := resumed_from(self.config)) is not None:
            load_state(folder, self._cycle.stateful_parts())
            if self.verl_mode != "sync":
                clear_trained("train")
            PROGRESS.say(f"resumed from {folder}")


@register_trainer("fspo")
class FSPOTrainer(FSPOHooks, PPOTrainerSync):
    """``mode=sync``: rollout, then update."""

    verl_mode = "sync"


@register_trainer("fspo_colocate_async")
class FSPOColocateAsync(FSPOHooks, PPOTrainerColocateAsync):
    """``mode=colocate_async``: rollout and update take turns, and unfinished responses are continued."""

    verl_mode = "colocate_async"


@register_trainer("fspo_separate_async")
class FSPOSeparateAsync(FSPOHooks, PPOTrainerSeparateAsync):
    """``mode=separate_async``: rollout and update at the same time, on ranks of their own."""

    verl_mode = "separate_async"
    worker_cls = FSPODetachedWorker

    def _setup(self) -> None:
        # verl 0.9.1 hands its logger a keyword of print() there, an error unless the message is dropped.
        logging.getLogger(PPOTrainerSeparateAsync.__module__).setLevel(logging.WARNING)
        super()._setup()
