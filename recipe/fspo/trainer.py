"""verl's trainers with FSPO: a row for each response, measured clip values and bands, metrics by length.

``trainer.v1.trainer_mode=fspo``, ``fspo_colocate_async`` or ``fspo_separate_async`` names them, in a command of
``verl.trainer.main_ppo``, too. :class:`FSPOHooks` is mixed into verl's trainers: every method calls verl's own and adds
to it. Nothing here imports the runner, whose trainers have the same names (:mod:`recipe.fspo.in_runner.trainer`).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from recipe.fspo.accounting.outcomes import for_workers, kl_to_start, read_outcomes, read_responses, send_rows
from recipe.fspo.accounting.replay_buffer import clear_trained, counting, training_prompts
from recipe.fspo.accounting.steps import StepAccounts
from recipe.fspo.config import GROUP_ESTIMATORS, complete_settings
from recipe.fspo.recorder import join_ranks
from recipe.fspo.reporter import Reporter
from recipe.fspo.state import STATE_FILE, load_state, save_state
from recipe.fspo.worker import FSPODetachedWorker, FSPOWorker
from recipe.fspo.zero_advantage import Padding, equal_rewards, to_be_left_out, with_rows_left_out, write_zeros
from transfer_queue import KVBatchMeta

from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

_ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)


class FSPOHooks(PPOTrainer):
    """What FSPO adds to a trainer of verl, whatever its mode."""

    #: The name of verl's mode.
    verl_mode: str
    worker_cls: type[FSPOWorker] = FSPOWorker
    reporter_cls: type[Reporter] = Reporter

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.verl_mode  # verl takes its asynchronous branches for any but sync
            complete_settings(config)
        self.reporter = self.reporter_cls(config)
        self._accounts = StepAccounts(config, self.reporter)
        self._position: dict[str, int] = {}
        self._fetched = 0
        super().__init__(config)
        algorithm = config.algorithm
        #: Whether A is 0 where all responses to a prompt earn the same reward.
        self._compares = str(algorithm.adv_estimator) in GROUP_ESTIMATORS and not algorithm.use_kl_in_reward
        self._compares |= bool(config.fspo.skip_zero_advantage)
        self._equal: dict[str, float] = {}
        self._left_out: list[str] = []
        self._padding = Padding()
        #: Whether the reference policy is there only to measure the distance to the start, at steps that validate.
        self._measures_kl = config.fspo.kl_to_start and not self.use_reference_policy
        self.use_reference_policy |= self._measures_kl

    # ---------------------------------------------------------------- start-up

    def _build_replay_buffer(self) -> ReplayBuffer:
        responses = self.config.actor_rollout_ref.rollout.n
        return counting(super()._build_replay_buffer(), self._accounts.funnel, responses, self._position)

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
        self.actor_rollout_wg.record()

    # ---------------------------------------------------------------- checkpoints

    def _save_checkpoint(self) -> None:
        # Before verl's save, which ends by naming this checkpoint the latest: what is named must be complete.
        root = Path(self.config.trainer.default_local_dir)
        save_state(root / f"global_step_{self.global_steps}", self._accounts.stateful_parts())
        self._accounts.sync()
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        trainer = self.config.trainer
        if self.global_steps > 0:
            folder = Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"
            folder = Path(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else folder
            # An evaluation goes on with nothing but the weights.
            if not self.config.get("evaluate") and not load_state(folder, self._accounts.stateful_parts()):
                self.reporter.say(f"note: {folder} has no {STATE_FILE}: clip values and statistics begin afresh")
            if self.verl_mode != "sync":
                clear_trained()
        self._accounts.note()

    # ---------------------------------------------------------------- order of a batch

    def _fetch_one_gen_batch(self) -> Any:
        # Several times a step where verl draws single prompts: to replace groups that it filters out, for example.
        batch = super()._fetch_one_gen_batch()
        self._position.update({uid: self._fetched + index for index, uid in enumerate(batch["uid"])})
        self._fetched += len(batch)
        self._accounts.funnel.start(len(batch) * self.config.actor_rollout_ref.rollout.n)
        return batch

    def _reissue_inflight_prompts(self, partition_id: str = "train") -> int:
        # After a resume verl stamps these prompts with the present step; how stale they are counts from their first.
        prompts = {} if self.verl_mode == "sync" else training_prompts()
        unfinished = [uid for uid, tag in prompts.items() if tag["status"] in ("pending", "running")]
        first = self._accounts.funnel.first_issue
        issued_again = {uid: prompts[uid]["global_steps"] for uid in unfinished}
        self._accounts.funnel.first_issue = issued_again | {uid: first[uid] for uid in prompts if uid in first}
        again = int(super()._reissue_inflight_prompts(partition_id))
        if prompts:
            self.reporter.say(
                f"{len(prompts)} prompts were under way when the checkpoint was saved: the responses to "
                f"{len(prompts) - again} are kept, {again} are answered again"
            )
        return again

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], **options: Any) -> KVBatchMeta:
        self._equal = equal_rewards(batch) if self._compares else {}
        # The distance to the start is measured on all responses.
        skips = self.config.fspo.skip_zero_advantage and not (self.config.fspo.kl_to_start and self._validates)
        self._left_out = to_be_left_out(batch, self._equal) if skips else []
        return super()._balance_batch(batch, metrics, **options)

    def _step_once(self, *args: Any, **kwargs: Any) -> KVBatchMeta:
        batch = super()._step_once(*args, **kwargs)
        self._padding.clear()
        return batch

    # ---------------------------------------------------------------- distance to the start

    @property
    def _validates(self) -> bool:
        every, step = self.config.trainer.test_freq, self.global_steps
        return bool(every > 0 and (step % every == 0 or step == self.total_training_steps))

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self._measures_kl and not self._validates:
            return batch
        super()._compute_ref_log_prob(for_workers(batch), metrics)  # otherwise a part of the loss or of the reward
        if self.config.fspo.kl_to_start and self._validates:
            metrics["fspo/kl_to_start"] = kl_to_start(batch)
        return batch

    # ---------------------------------------------------------------- pi_old

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._outcomes = read_outcomes(batch)  # before verl's rollout correction, which empties masks
        if self._left_out:
            rewards = {key: self._equal[key] for key in self._left_out}
            lengths = dict(zip(self._outcomes.keys, self._outcomes.length_B.tolist(), strict=True))
            self._padding.put(batch, rewards, lengths, self.tokenizer.eos_token_id)
        reduced = self._padding.in_place(batch)
        if self.config.fspo.pi_old == "actor":
            computed = super()._compute_old_log_prob(for_workers(reduced), metrics)
            return computed if reduced is batch else batch
        where = {"keys": reduced.keys, "partition_id": reduced.partition_id}
        data = tq.kv_batch_get(**where, select_fields=["rollout_log_probs"])
        data["old_log_probs"] = data.pop("rollout_log_probs")
        tq.kv_batch_put(**where, fields=data)
        return batch

    # ---------------------------------------------------------------- advantage

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        reduced = self._padding.in_place(batch)
        computed = super()._compute_advantage(reduced, metrics)
        length = {key: tag["response_len"] for key, tag in zip(batch.keys, batch.tags, strict=True)}
        length = {key: length[key] for key in self._equal} | dict.fromkeys(self._padding.keys, 1)
        if length:  # padding, too: OPO divides by its tokens
            write_zeros(str(batch.partition_id), length)
        return computed if reduced is batch else batch

    # ---------------------------------------------------------------- update

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        accounts, outcomes = self._accounts, self._outcomes
        accounts.loss_scale.measure(outcomes.length_B)
        sent = send_rows(self._padding.in_place(batch), outcomes, accounts.rows)
        scale = accounts.loss_scale.factor
        self.actor_rollout_wg.begin_update(accounts.band_state, self.global_steps, loss_scale=scale)
        super()._update_actor(for_workers(sent), metrics)
        per_rank = self.actor_rollout_wg.pop_mini_batches()
        mini_batches = with_rows_left_out(
            join_ranks(per_rank),
            batch,
            self._left_out,
            outcomes,
            first_row=accounts.rows,
            step=self.global_steps,
            ranks=sum(recorded is not None for recorded in per_rank),
            epochs=self.config.actor_rollout_ref.actor.ppo_epochs,
            longest=self.config.data.max_response_length,
        )
        batch = batch if self._left_out else sent
        accounts.add(batch, outcomes, mini_batches, self.global_steps)
        if self.local_trigger_step == self.parameter_sync_step - 1:
            read = functools.partial(read_responses, batch.partition_id, self.tokenizer)
            metrics.update(accounts.end(self.global_steps, read))
        return batch


@register_trainer("fspo")
class FSPOTrainer(FSPOHooks, PPOTrainerSync):
    """``sync``: rollout, then update."""

    verl_mode = "sync"


@register_trainer("fspo_colocate_async")
class FSPOColocateAsync(FSPOHooks, PPOTrainerColocateAsync):
    """``colocate_async``: rollout and update take turns, and unfinished responses are continued."""

    verl_mode = "colocate_async"


@register_trainer("fspo_separate_async")
class FSPOSeparateAsync(FSPOHooks, PPOTrainerSeparateAsync):
    """``separate_async``: rollout and update at the same time, on ranks of their own."""

    verl_mode = "separate_async"
    worker_cls = FSPODetachedWorker
