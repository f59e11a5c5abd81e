"""verl's trainers with FSPO: a row for each response, measured clip values and bands, metrics by length.

``trainer.v1.trainer_mode=fspo``, ``fspo_colocate_async`` or ``fspo_separate_async`` names them, in a command of
``verl.trainer.main_ppo``, too. :class:`FSPOHooks` is mixed into verl's trainers below the runner's hooks, whose checks,
saves and limits so cover what FSPO adds: every method calls verl's own and adds to it.
"""

from __future__ import annotations

import uuid
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from recipe.fspo.checkpoint import STATE_FILE, load_state, save_state
from recipe.fspo.config import GROUP_ESTIMATORS, FspoSettings, complete, facts_of
from recipe.fspo.replay_buffer import ENDS_FILE, clear_trained, ordered
from recipe.fspo.rollout_batch import for_workers, kl_to_start, number_rows, read_outcomes
from recipe.fspo.step_records import StepRecords, join_ranks
from recipe.fspo.worker import FSPODetachedWorker, FSPOWorker
from recipe.fspo.zero_advantage import Padding, equal_rewards
from recipe.runner.hooks import RunnerHooks
from recipe.runner.progress import PROGRESS, STEP_COLUMNS, Columns, note
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from fspo.fairness.lre import lre_in_words
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu

_ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)
#: The numbers of a step's line.
COLUMNS: Final[Columns] = (
    STEP_COLUMNS[0],
    ("length", "fspo/length_trained", "{:.0f}".format, ""),  # verl's own counts a tool's tokens, too
    ("clipped", "fspo/clip_frac", "{:.1%}".format, "-"),
    ("LRE", "fspo/lre_debiased fspo/lre_ci_low fspo/lre_ci_high", lre_in_words, "-"),
    ("KL to start", "fspo/kl_to_start", "{:.4f}".format, ""),
    *STEP_COLUMNS[2:],
)


class FSPOHooks(PPOTrainer):
    """What FSPO adds to a trainer of verl, whatever its mode."""

    verl_mode: str  #: Of :class:`recipe.runner.hooks.RunnerHooks`, as the next.
    folder: Path
    worker_cls: type[FSPOWorker] = FSPOWorker

    def __init__(self, config: DictConfig) -> None:
        PROGRESS.columns = COLUMNS
        if any(OmegaConf.select(config, f"fspo.{field.name}") is None for field in fields(FspoSettings)):
            complete(config)  # of a script that has started Ray itself: verl's driver asked no plugin
        if "dry_run" not in config:  # recipe.fspo.main has this setting, and has written more
            note(self.folder, **facts_of(config))
        self._records = StepRecords(config, self.folder)
        self._fetched = 0
        super().__init__(config)
        #: Rows whose A is 0, because all responses to their prompt earn the same reward; and what stands in for them.
        self._tokens_of_zeros, self._padding = dict[str, int](), Padding()
        #: Whether the reference policy is there only to measure the distance to the start, at steps that validate.
        self._measures_kl = config.fspo.kl_to_start and not self.use_reference_policy
        self.use_reference_policy |= self._measures_kl

    def _build_replay_buffer(self) -> ReplayBuffer:
        return ordered(super()._build_replay_buffer(), self.folder / ENDS_FILE, self.config.actor_rollout_ref.rollout.n)

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
        self.actor_rollout_wg.begin_run(str(self.folder))

    def _save_checkpoint(self) -> None:
        # Before verl's save, which ends by naming this checkpoint the latest: what is named must be complete.
        save_state(self.folder / f"global_step_{self.global_steps}", self._records.stateful_parts())
        self._records.sync()
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        trainer = self.config.trainer
        if self.global_steps > 0 and self.verl_mode != "sync":
            clear_trained()
        if trainer.get("val_only"):
            return  # an evaluation goes on with nothing but the weights
        if self.global_steps > 0:
            folder = self.folder / f"global_step_{self.global_steps}"
            folder = Path(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else folder
            # recipe.fspo.main, which has this setting, has refused the changes of settings that nobody allowed.
            for name in load_state(folder, self._records.stateful_parts(), may_differ="dry_run" in self.config):
                PROGRESS.say(f"note: {folder}/{STATE_FILE} has no {name} of these settings, which begins afresh")
        self._records.note()

    def _fetch_one_gen_batch(self) -> Any:
        # Several times a step where verl draws single prompts: to replace groups that it filters out, for example.
        # Sorted names are the data loader's order, over resumes too.
        batch = super()._fetch_one_gen_batch()
        places = range(self._fetched, self._fetched + len(batch))
        names = [f"{self.global_steps:06d}-{place:07d}-{uuid.uuid4().hex[:8]}" for place in places]
        tu.assign_non_tensor_stack(batch, "uid", names)
        self._fetched += len(batch)
        return batch

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], **options: Any) -> KVBatchMeta:
        self._outcomes, algorithm = read_outcomes(batch), self.config.algorithm
        compares = str(algorithm.adv_estimator) in GROUP_ESTIMATORS and not algorithm.use_kl_in_reward
        equal = equal_rewards(self._outcomes) if compares else {}
        tokens = {key: tag["response_len"] for key, tag in zip(batch.keys, batch.tags, strict=True)}
        self._tokens_of_zeros = {key: tokens[key] for key in equal}
        # The distance to the start is measured on all responses.
        if self.config.fspo.skip_zero_advantage and not (self.config.fspo.kl_to_start and self._validates):
            self._padding.put(batch, equal, self._outcomes, self.tokenizer.eos_token_id)
            self._tokens_of_zeros |= dict.fromkeys(self._padding.stand_ins.values(), 1)  # OPO divides by its tokens
        return super()._balance_batch(batch, metrics, **options)

    def _step_once(self, *args: Any, **kwargs: Any) -> KVBatchMeta:
        return self._padding.removed(super()._step_once(*args, **kwargs))

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

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return super()._compute_old_log_prob(for_workers(self._padding.in_place(batch)), metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics)
        if tokens := self._tokens_of_zeros.values():
            zeros = torch.nested.as_nested_tensor([torch.zeros(count) for count in tokens], layout=torch.jagged)
            columns = TensorDict({"advantages": zeros, "returns": zeros}, [len(tokens)])
            tq.kv_batch_put(keys=[*self._tokens_of_zeros], partition_id=batch.partition_id, fields=columns)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        records, outcomes = self._records, self._outcomes
        records.loss_scale.measure(outcomes.length_B)
        row_of = {key: records.responses_so_far + index for index, key in enumerate(outcomes.keys)}
        row_of |= {key: row_of[stood_for] for stood_for, key in self._padding.stand_ins.items()}
        self.actor_rollout_wg.begin_update(records.band_state, self.global_steps, records.loss_scale.factor)
        batch = number_rows(batch, row_of)
        super()._update_actor(for_workers(batch), metrics)
        mini_batches = join_ranks(self.actor_rollout_wg.pop_mini_batches())
        records.add(outcomes, mini_batches, self._padding.stand_ins.keys(), self.global_steps)
        if self.local_trigger_step == self.parameter_sync_step - 1:
            metrics.update(records.end(self.global_steps))
        return batch


@register_trainer("fspo")
class FSPOTrainer(RunnerHooks, FSPOHooks, PPOTrainerSync):
    """``sync``: rollout, then update."""

    verl_mode = "sync"


@register_trainer("fspo_colocate_async")
class FSPOColocateAsync(RunnerHooks, FSPOHooks, PPOTrainerColocateAsync):
    """``colocate_async``: rollout and update take turns, and unfinished responses are continued."""

    verl_mode = "colocate_async"


@register_trainer("fspo_separate_async")
class FSPOSeparateAsync(RunnerHooks, FSPOHooks, PPOTrainerSeparateAsync):
    """``separate_async``: rollout and update at the same time, on ranks of their own."""

    verl_mode = "separate_async"
    worker_cls = FSPODetachedWorker
