"""What the runner adds to a trainer of verl: a run folder, phases, preemption, checkpoints that resume, a shorter poll.

:class:`RunnerHooks` is mixed into verl's trainers: every method calls verl's own and adds to it. A subclass is
registered under a name of its own (``trainer.v1.trainer_mode``) and restores verl's name, because verl asks for it. All
files of a run are in ``trainer.default_local_dir``, in verl's own command, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import ray
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import agent_loop_tq, trainer_separate_async
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from recipe.runner.checkpoints import integrity
from recipe.runner.checkpoints.disk import room_for_save
from recipe.runner.faults.errors import ExplainedError
from recipe.runner.faults.phase import FIRST_SYNC, Phase, write_phase
from recipe.runner.faults.preemption import NOTHING_SAVED, UNSAVED_VARIABLE, Preempted, stop_request, time_left_s
from recipe.runner.faults.resources import wait_for_resources
from recipe.runner.launch.end_of_turn import REMEDY
from recipe.runner.progress import PROGRESS, RunLog, note
from recipe.runner.reward_manager import raise_failure
from recipe.runner.verl_patches.frames import are_signed
from recipe.runner.verl_patches.packs import rows_of_ranks
from recipe.runner.verl_patches.server_slots import give_servers_slots

#: Where verl's loggers write, by the variables that they read: into the run folder, but for one that the user has set.
_LOGGERS: Final = {
    # upstream: verl.utils.tracking "os.environ.get("TENSORBOARD_DIR""
    "TENSORBOARD_DIR": "{}/tensorboard",
    "WANDB_DIR": "{}",  # W&B makes a folder wandb in it
    # upstream: verl.utils.tracking "os.environ.get("MLFLOW_TRACKING_URI""
    "MLFLOW_TRACKING_URI": "sqlite:///{}/mlflow.db",
    # upstream: verl.utils.tracking "os.environ.get("SWANLAB_LOG_DIR""
    "SWANLAB_LOG_DIR": "{}/swanlog",
}
#: Time for the end itself, and for a save that takes longer than those before it, seconds.
_MARGIN_S: Final = 120.0
_ASK_S: Final = 10.0


class RunnerHooks(PPOTrainer):
    """What the runner adds, whatever the mode."""

    verl_mode: str  #: The name of verl's mode.

    def __init__(self, config: DictConfig) -> None:
        self.folder = Path(config.trainer.default_local_dir).absolute()  #: Where all files of the run go.
        config.trainer.default_local_dir = str(self.folder)
        config.trainer.v1.trainer_mode = self.verl_mode  # verl takes its asynchronous branches for any but sync
        PROGRESS.write_to(self.folder)
        for variable, place in _LOGGERS.items():
            os.environ.setdefault(variable, place.format(self.folder))
        if self.verl_mode != "sync":
            give_servers_slots()
        if self.verl_mode == "separate_async":
            # verl 0.9.1 hands its logger a keyword of print(): a TypeError unless the level drops it.
            # upstream: verl.trainer.ppo.v1.trainer_separate_async "flush=True"
            logging.getLogger(trainer_separate_async.__name__).setLevel(logging.WARNING)
        if not are_signed():
            PROGRESS.say(
                "note: Ray was started without a token (RAY_AUTH_MODE=token): whoever reaches its ports, or "
                "TransferQueue's, runs code as you; see Access in docs/clusters.md"
            )
        self._run_log: RunLog | None = None
        self._saved_step: int | None = None
        self._lengths: list[int] = []  # of the responses of a step
        self._cut_is_said = False
        self._phase = Phase(0, "start-up")
        self._moved_s = 0.0
        self._training = False  # there is a step in progress, or done
        self._is_to_end = False
        self._step_began: float | None = None
        self._longest_s = {"step": 0.0, "save": 0.0}
        self.global_steps = 0  # verl sets it when it looks for a checkpoint
        super().__init__(config)

    def _enter(self, phase: str) -> None:
        self._look_for_end()
        self._phase = write_phase(self.folder, Phase(self.global_steps, phase))

    def _ending(self) -> None:
        self._phase = write_phase(self.folder, replace(self._phase, step=self.global_steps, ending=True))

    def on_sample_begin(self) -> None:
        self._enter("generation")  # for every mini-batch in separate_async
        super().on_sample_begin()

    def on_sample_end(self) -> None:
        self.raise_failure()
        super().on_sample_end()
        self._enter("log-probabilities")

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._enter("update")
        return super()._update_actor(batch, metrics)

    def raise_failure(self) -> None:
        """Raise what a reward worker could not do; verl would go on without those responses."""
        # upstream: verl.experimental.reward_loop.reward_loop:RewardLoopManager.reward_loop_worker_handles
        raise_failure(self.reward_loop_manager.reward_loop_worker_handles or ())

    def _build_replay_buffer(self) -> ReplayBuffer:
        buffer = super()._build_replay_buffer()
        # verl polls every 2 s, without a setting: every generation would take a multiple. A poll moves half a megabyte.
        # upstream: verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.poll_interval
        buffer.poll_interval = 0.05 if self.config.trainer.device == "cpu" else 0.5
        # upstream: verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._wait_for_next_poll(partition_id, last_debug_time)
        wait = buffer._wait_for_next_poll

        def note_and_wait(partition_id: str, last_debug_time: float) -> float:
            self._look_for_end()
            queue = f"{len(buffer.partitions[partition_id])} responses finished"  # progress: a long one is no hang
            if queue != self._phase.queue and time.monotonic() - self._moved_s > 1:
                self._moved_s = time.monotonic()
                self._phase = write_phase(self.folder, replace(self._phase, queue=queue))
            return float(wait(partition_id, last_debug_time))

        buffer._wait_for_next_poll = note_and_wait
        return buffer

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], **options: Any) -> KVBatchMeta:
        actor, n = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout.n
        mini_batch = actor.ppo_mini_batch_size * n
        expected = self.config.data.train_batch_size // self.parameter_sync_step * n
        warn_of_missing(len({key.rpartition("_")[0] for key in batch.keys}), expected, f"step {self.global_steps}")
        self._lengths += [int(tag["response_len"]) for tag in batch.tags]
        # After verl's, which fills up the last mini-batch with rows of its own.
        place = {key: index for index, key in enumerate(batch.keys)}
        batch = super()._balance_batch(batch, metrics, **options)
        batch.reorder(sorted(range(len(batch)), key=lambda row: place.get(batch.keys[row], len(place))))
        lengths = [tag["seq_len"] for tag in batch.tags]
        # upstream: verl.single_controller.base.worker_group:WorkerGroup._dispatch_info
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        rows = rows_of_ranks(lengths, mini_batch, ranks)
        metrics.update(log_seqlen_unbalance(lengths, rows, "global_seqlen"))
        batch.reorder([row for part in rows for row in part])
        if not actor.shuffle:  # else verl's mini-batches are drawn at random
            batch.extra_info["mini_batch_size"] = mini_batch
        return batch

    def init(self) -> None:
        try:
            super().init()
        except BaseException:
            self._ending()
            raise

    def _init_dataloader(self) -> None:
        data = self.config.data
        try:
            super()._init_dataloader()
        finally:  # torch raises an error if nothing at all is left
            # What the filter of long prompts leaves is known only now; verl would divide by its number of batches.
            for kind, needed in (("train", data.train_batch_size), ("val", 1)):
                left = getattr(self, f"{kind}_dataset", None)
                if left is not None and len(left) < needed:
                    raise ExplainedError(
                        f"data.{kind}_files: {len(left)} prompts have no more than data.max_prompt_length="
                        f"{data.max_prompt_length} tokens, and {needed} are needed (data.train_batch_size, or 1): "
                        "allow longer prompts, or give more data"
                    )
        # verl ends at whichever comes first, the last step or the last epoch, but takes the former alone for the last
        # step, which it saves and validates, and for the schedule's length (verl pull request 7516).
        steps = self.steps_per_epoch * self.config.trainer.total_epochs
        self.total_training_steps = min(self.total_training_steps, steps)
        with open_dict(self.config):
            for optimizer in (self.config.actor_rollout_ref.actor.optim, self.config.critic.optim):
                optimizer.total_training_steps = self.total_training_steps * self.parameter_sync_step
        # upstream: verl.utils.dataset.rl_dataset "self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)"
        rows = getattr(self.val_dataset, "dataframe", None)  # a data class of the user's own may have none
        if rows is not None and "data_source" in rows.column_names:  # for the intervals of held-out accuracy
            note(self.folder, validation_problems=dict(Counter(rows["data_source"])))

    def _init_resource_pool_mgr(self) -> None:
        wait_for_resources(self.config, PROGRESS.say)
        super()._init_resource_pool_mgr()
        PROGRESS.say("starting the FSDP workers, then the vLLM engines")

    def on_init_end(self) -> None:
        PROGRESS.say("sending the weights to vLLM")
        if self.verl_mode == "separate_async":
            self._enter(FIRST_SYNC)  # with a limit of its own: verl makes the NCCL group of all transfers in it
        super().on_init_end()
        self._enter("start-up")

    def fit(self, agent_loop_manager: Any) -> None:
        workers: Sequence[Any] = getattr(agent_loop_manager, "agent_loop_workers", ())
        try:
            keep_failures(workers)
            self._reseed_sampling()
            super().fit(agent_loop_manager)
        except Exception as error:
            if self._phase.phase in ("generation", "validation"):  # without any response verl stops for another reason
                self.raise_failure()
                if failure := last_failure(workers):
                    raise ExplainedError(f"{error}\nthe last failure of an agent loop: {failure}") from error
            raise
        finally:
            self._ending()

    def _reseed_sampling(self) -> None:
        """Let vLLM's sampling begin from the run's seed and step, where its workers can: the runner's, on CPUs."""
        if self.config.trainer.device != "cpu":
            return
        seed = (self.config.data.seed or 0) * 1_000_003 + self.global_steps
        # upstream: verl.trainer.ppo.v1.trainer_base:PPOTrainer._rollout_server_managers
        replicas = [replica for manager in self._rollout_server_managers() for replica in manager.get_replicas()]
        servers = [server for replica in replicas for server in replica.servers]
        ray.get([server.collective_rpc.remote("reseed", args=(seed + i,)) for i, server in enumerate(servers)])

    def _open_run_log(self) -> None:
        """Add the run folder to verl's loggers, which exist from the first validation or the first step on."""
        if self._run_log is None:
            self._run_log = RunLog(self.folder, total_steps=self.total_training_steps)
            self.logger.logger["run_folder"] = self._run_log  # upstream: verl.utils.tracking:Tracking.logger

    def on_validate_begin(self) -> None:
        self._open_run_log()
        self._enter("validation")
        super().on_validate_begin()

    def on_validate_end(self) -> None:
        self.raise_failure()
        super().on_validate_end()

    def _val_metrics_update(self, data_sources: Any, sample_uids: Any, infos: Any, *rest: Any, **more: Any) -> Any:
        expected = sum((more.get("expected_acc_counts") or {}).values())
        warn_of_missing(len(sample_uids), expected, "the validation")
        return super()._val_metrics_update(data_sources, sample_uids, infos, *rest, **more)

    def on_train_begin(self) -> None:
        self._open_run_log()
        self._training = True
        super().on_train_begin()

    def _look_for_end(self) -> None:
        """Look whether the run shall save and end; raises Preempted before the first step, with nothing to wait for."""
        if self._is_to_end:
            return
        left_s, needed_s = time_left_s(), sum(self._longest_s.values()) + _MARGIN_S
        file = stop_request(self.folder)
        if file is not None and not self._training:
            raise Preempted(f"preempted {NOTHING_SAVED}")
        if file is not None or (self._training and left_s < needed_s):
            ends = f"the job ends in {left_s:.0f} s, and one more step and save may take {needed_s:.0f} s"
            self._is_to_end = True
            PROGRESS.say(f"{f'{file} is there' if file else ends}: saving after the step in progress")

    def on_step_begin(self) -> None:
        now = time.monotonic()
        self._longest_s["step"] = max(self._longest_s["step"], now - (self._step_began or now))
        self._step_began = now
        self._look_for_end()
        if self._is_to_end:
            self.global_steps -= 1  # verl has counted on. The step before is complete: trained, sent to vLLM, logged
            if self.global_steps == 0:
                raise Preempted(f"preempted {NOTHING_SAVED}")
            if self._saved_step != self.global_steps:
                self._enter("save")
                self._free_gpus()
                self._save_checkpoint()
            raise Preempted(f"preempted after step {self.global_steps}; it is saved")
        self._enter("generation")
        super().on_step_begin()

    def _free_gpus(self) -> None:
        """Put vLLM to sleep where it shares the GPUs, to which a save brings weights; verl saves while it sleeps."""
        try:
            if self.verl_mode == "separate_async":
                # Only with hybrid_engine=true, and awake from a validation on, or lent to the generation.
                # upstream: verl.trainer.ppo.v1.trainer_separate_async "self.current_mode = HybridEngineMode.ROLLOUT"
                if self.current_mode == trainer_separate_async.HybridEngineMode.ROLLOUT:
                    self.switch_to_trainer()
                return
            if self.verl_mode == "colocate_async":
                self.checkpoint_manager.abort_replicas()  # the requests under way; a resumed run issues them again
            self.checkpoint_manager.sleep_replicas()
        except Exception as error:  # whatever it is: the save may still fit
            PROGRESS.say(f"warning: vLLM does not sleep, and the save has to fit beside it: {error!r}")

    def on_step_end(self) -> None:
        self._enter("weight sync")
        # As a whole, whose shortest responses come first in separate_async.
        if not self._cut_is_said:
            self._cut_is_said = warn_of_cut(self._lengths, self.config.data.max_response_length, self.global_steps)
        self._lengths = []
        super().on_step_end()
        self._look_for_end()
        if self._is_to_end and self.global_steps < self.total_training_steps:
            # Not now: it may take longer than the time that is left. The resumed run begins with a validation.
            self.config.trainer.test_freq = -1

    def _save_checkpoint(self) -> None:
        # Before verl's save, which ends by naming this checkpoint the latest, and then runs its callback.
        self._enter("save")
        started = time.monotonic()
        if keep := self.config.trainer.max_actor_ckpt_to_keep:
            integrity.remove_old(self.folder, self.global_steps, keep)
        with room_for_save(self.folder, self.global_steps):
            super()._save_checkpoint()
        self._saved_step = self.global_steps
        with contextlib.suppress(OSError):  # without a job script, which counts the starts that have saved nothing
            os.unlink(os.environ.get(UNSAVED_VARIABLE, ""))
        seconds = time.monotonic() - started
        self._longest_s["save"] = max(self._longest_s["save"], seconds)
        PROGRESS.say(f"saved {integrity.step_folder(self.folder, self.global_steps)} in {seconds:.1f} s")

    def _check_whole(self, checkpoint: integrity.Checkpoint) -> None:
        """Raise ExplainedError if a shard, which its rank reads whole before it loads, or a file of ours is damaged."""
        groups = [("actor", self.actor_rollout_wg, self.config.actor_rollout_ref.actor)]
        groups += [("critic", self.critic_wg, self.config.critic)] if self.use_critic else []
        asked = [
            worker.__ray_call__.remote(
                integrity.damage_of_rank, checkpoint.folder / name, list(role.checkpoint.load_contents)
            )
            for name, group, role in groups
            for worker in group.workers
        ]
        damage = [sentence for of_rank in ray.get(asked) for sentence in of_rank]
        if damage := damage + integrity.unsound(sorted(checkpoint.folder.glob("*.pt")), whole=True):
            older = checkpoint.folder.parent / "global_step_N"
            raise ExplainedError(
                f"the checkpoint cannot be resumed: {'; '.join(damage)}: restore the file, or give an older checkpoint "
                f"(trainer.resume_mode=resume_path trainer.resume_from_path={older})"
            )

    def _load_checkpoint(self) -> None:
        if (resumed := integrity.resumed_from(self.config.trainer)) is not None:
            self._check_whole(resumed)
        super()._load_checkpoint()
        self._saved_step = self.global_steps  # nothing new until a step is done
        if self.global_steps > 0 and resumed is not None:
            PROGRESS.say(f"resumed from {resumed}")


def warn_of_cut(lengths: Sequence[int], limit: int, step: int) -> bool:
    """Say that most responses of a step ended at ``data.max_response_length``, if they did; whether it was said."""
    share = sum(length >= limit for length in lengths) / max(1, len(lengths))
    if share > 0.5:
        PROGRESS.say(
            f"warning: {share:.0%} of the responses of step {step} were cut at data.max_response_length={limit}: "
            f"rewards and lengths are those of the limit. Raise it. {REMEDY}"
        )
    return share > 0.5


def warn_of_missing(found: int, expected: int, where: str) -> None:
    """Say how many responses of a step or a validation failed: verl trains without them, or counts them as wrong."""
    if found < expected:
        PROGRESS.say(
            f"warning: {where} has {found} of {expected} responses, of the others generation or reward failed; verl "
            "goes on without them. Why: Ray's logs of AgentLoopWorker"
        )


def keep_failures(workers: Sequence[Any]) -> None:
    """Let agent loop workers keep the last exception of their loops, which verl writes to a worker's log alone."""

    def keep(worker: Any) -> None:  # within: a worker gets it without an import of this module
        def look(record: logging.LogRecord) -> bool:
            worker.last_failure = record.exc_info or worker.last_failure
            return True

        worker.last_failure = None
        # upstream: verl.trainer.ppo.v1.agent_loop_tq "exc_info=(type(error), error, error.__traceback__)"
        agent_loop_tq.logger.addFilter(look)

    for worker in workers:
        worker.__ray_call__.remote(keep)


def last_failure(workers: Sequence[Any]) -> str:
    """What one of the workers has kept, with its traceback; empty if none has."""

    def kept(worker: Any) -> str:
        failure = getattr(worker, "last_failure", None)
        return "".join(traceback.format_exception(*failure)) if failure else ""

    with contextlib.suppress(ray.exceptions.RayError):  # a worker that has died has another reporter
        asked = [worker.__ray_call__.remote(kept) for worker in workers]
        return next(filter(None, ray.get(asked, timeout=_ASK_S)), "")
    return ""
