"""What FSPO adds to verl's trainers: a row for each response, calibrated bands, the data loader's order in a batch.

:class:`FSPOHooks` extends :class:`recipe.runner.hooks.RunnerHooks` and is mixed into verl's three trainers. ``mode=``
chooses one of them by the name that it is registered under, ``trainer.v1.trainer_mode=fspo...``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig
from recipe.fspo.accounting.cycle import Cycle
from recipe.fspo.accounting.outcomes import kl_to_start, prompt_of, read_outcomes, read_responses, send_rows
from recipe.fspo.accounting.replay_buffer import clear_trained, counting, training_prompts
from recipe.fspo.recorder import join_ranks
from recipe.fspo.worker import FSPODetachedWorker, FSPOWorker
from recipe.runner.checkpoints.state import Stateful
from recipe.runner.hooks import RunnerHooks
from recipe.runner.launch import run_folder
from recipe.runner.launch.progress import PROGRESS
from recipe.runner.reward_manager import raise_failure
from transfer_queue import KVBatchMeta

from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

_ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)


class FSPOHooks(RunnerHooks):
    """What this recipe adds to a trainer of verl, whatever its mode."""

    worker_cls: type[FSPOWorker] = FSPOWorker

    def __init__(self, config: DictConfig) -> None:
        self._cycle = Cycle(config)
        self._position: dict[str, int] = {}
        self._fetched = 0
        super().__init__(config)
        #: Whether the reference policy is there only to measure the distance to the start, at steps that validate.
        self._measures_kl = config.fspo.kl_to_start and not self.use_reference_policy
        self.use_reference_policy |= self._measures_kl

    def stateful_parts(self) -> Mapping[str, Stateful | None]:
        return self._cycle.stateful_parts()

    def raise_failure(self) -> None:
        raise_failure(self.reward_loop_manager.reward_loop_worker_handles or ())

    # ---------------------------------------------------------------- start-up

    def replay_buffer_for(self, buffer: ReplayBuffer) -> ReplayBuffer:
        responses = self.config.actor_rollout_ref.rollout.n
        return counting(buffer, self._cycle.funnel, responses, self._position)

    def _init_resource_pool_mgr(self) -> None:
        actor = self.config.actor_rollout_ref.actor
        penalised, actor.use_kl_loss = actor.use_kl_loss, self.use_reference_policy  # verl asks the configuration here
        super()._init_resource_pool_mgr()
        actor.use_kl_loss = penalised
        for role in _ACTOR_ROLES:
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.worker_cls)

    def on_init_end(self) -> None:
        super().on_init_end()
        run_dir = self.config.run.dir
        self.actor_rollout_wg.record(run_dir=run_dir, on_policy=self.config.fspo.pi_old != "rollout")
        # Runs of a comparison must begin with the same weights; this is how a reader can tell, of runs never resumed.
        run_folder.note(run_dir, weights_at_start=self.actor_rollout_wg.parameter_norm())

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)
        finally:
            self._cycle.close()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self._cycle.note()
        if self.global_steps > 0 and self.verl_mode != "sync":
            clear_trained()

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
        prompts = {} if self.verl_mode == "sync" else training_prompts()
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
        # runs with one seed form their mini-batches from the same prompts.
        prompts = [prompt_of(key) for key in batch.keys]
        expected = self.config.data.train_batch_size // self.parameter_sync_step
        expected *= self.config.actor_rollout_ref.rollout.n
        missing = expected - len({key.rpartition("_")[0] for key in batch.keys})
        self._note_missing(missing, expected, f"step {self.global_steps}", "goes on without them")
        position = [self._position.get(prompt, -1) for prompt in prompts]  # first: those from before a resume
        batch.reorder(sorted(range(len(batch)), key=position.__getitem__))
        for prompt in prompts:
            self._position.pop(prompt, None)
        batch = super()._balance_batch(batch, metrics, **options)
        self._outcomes = read_outcomes(batch)  # before verl's rollout correction, which empties masks
        return batch

    # ---------------------------------------------------------------- distance to the start

    @property
    def _validates(self) -> bool:
        every, step = self.config.trainer.test_freq, self.global_steps
        return bool(every > 0 and (step % every == 0 or step == self.total_training_steps))

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self._measures_kl and not self._validates:
            return batch
        batch = super()._compute_ref_log_prob(batch, metrics)  # otherwise a part of the loss or of the reward
        if self.config.fspo.kl_to_start and self._validates:
            metrics["fspo/kl_to_start"] = kl_to_start(batch)
        return batch

    # ---------------------------------------------------------------- pi_old

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self.config.fspo.pi_old == "actor":
            if not self.config.actor_rollout_ref.actor.shuffle:  # with it, verl's mini-batches are drawn at random
                batch.extra_info["mini_batch_size"] = self.mini_batch
            return super()._compute_old_log_prob(batch, metrics)
        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        data = tq.kv_batch_get(**where, select_fields=["rollout_log_probs"])
        data["old_log_probs"] = data.pop("rollout_log_probs")
        tq.kv_batch_put(**where, fields=data)
        return batch

    # ---------------------------------------------------------------- update

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._enter("update")
        cycle, outcomes = self._cycle, self._outcomes
        cycle.loss_scale.measure(outcomes.length_B)
        batch = send_rows(batch, outcomes, cycle.rows)
        self.actor_rollout_wg.begin_update(cycle.band_state, self.global_steps, loss_scale=cycle.loss_scale.factor)
        batch = super()._update_actor(batch, metrics)
        cycle.add(batch, outcomes, join_ranks(self.actor_rollout_wg.pop_mini_batches()), self.global_steps)
        if self.local_trigger_step == self.parameter_sync_step - 1:
            read = functools.partial(read_responses, batch.partition_id, self.tokenizer)
            metrics.update(cycle.end(self.global_steps, self._run_log, read))
        return batch


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
