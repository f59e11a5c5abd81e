"""Measures gradient alignment: rollouts of a checkpoint, a few updates, then gradients instead of further updates.

One round: a batch of prompts is answered by the checkpoint's policy; its first part is trained on with the run's own
loss, so that the policy moves away from the one that sampled, as it does within every training step; of the rest the
gradients are measured, by objective, fold and length bin. Then the moved policy answers fresh prompts, whose plain
policy gradient is the held-out one. Every round begins at the checkpoint. Nothing is saved but the measurements.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from scipy.linalg import block_diag  # type: ignore[import-untyped]
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.skip import SkipManager
from verl.workers.utils.padding import response_from_nested

from benchmarks.alignment.gradients import (
    VIEWS,
    GradientPlan,
    assign_bins,
    gradient_coefficients,
    in_columns,
    without_clip,
)
from benchmarks.alignment.worker import WEIGHTS_FIELD, AlignmentWorker
from fspo.files import atomic_path
from fspo.losses import ALGORITHMS
from fspo.matching import Sequences, match_clip
from fspo.types import SequenceLossSettings
from recipe.fspo.accounting.outcomes import prompt_of
from recipe.fspo.trainer import FSPOTrainer
from recipe.runner.launch.progress import PROGRESS

_TENSORS = ("old_log_probs", "advantages", "response_mask")
#: The plain policy gradient, where S = 0: -A sum_t grad log pi(y_t).
_PLAIN = without_clip(ALGORITHMS["fspo"])


@register_trainer("alignment")
class AlignmentTrainer(FSPOTrainer):
    """Measures; its settings are the group ``alignment``."""

    worker_cls = AlignmentWorker

    def __init__(self, config: DictConfig) -> None:
        self._request = config.alignment
        self._settings = {algo: SequenceLossSettings(**values) for algo, values in self._request.settings.items()}
        super().__init__(config)

    def fit(self, agent_loop_manager: Any) -> None:
        self.agent_loop_manager = agent_loop_manager
        SkipManager.init(self.config)
        self.curr_step_profile, self.timing_raw = False, {}
        self._reseed_sampling()
        for index in range(self._request.rounds):
            if index:
                checkpoint = str(Path(self._request.checkpoint) / "actor")
                self.actor_rollout_wg.load_checkpoint(local_path=checkpoint)
                self.checkpoint_manager.update_weights(self.global_steps)
            self._round(index)
        self._shutdown_dump_executor()

    # ---------------------------------------------------------------- rollouts

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], **options: Any) -> KVBatchMeta:
        # The parts of a batch, too, come in the data loader's order.
        prompt_B = self._prompt_of(batch)
        batch.reorder(sorted(range(len(batch)), key=prompt_B.__getitem__))
        return PPOTrainerSync._balance_batch(self, batch, metrics, **options)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return batch  # the last part of verl's step, which is wanted for rollouts and advantages only

    def _rollouts(self) -> KVBatchMeta:
        """A batch of fresh prompts with responses, rewards, log-probabilities and advantages."""
        self._position.clear()
        self._fetched = 0
        batch = self.step({}, self.timing_raw)
        # Without gaps, where verl has replaced groups that it filters out or that failed.
        order = sorted(self._position.keys() & map(prompt_of, batch.keys), key=self._position.__getitem__)
        self._position.clear()
        self._position.update((uid, index) for index, uid in enumerate(order))
        batch.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        return batch

    def _prompt_of(self, batch: KVBatchMeta) -> np.ndarray:
        """Position of each row's prompt among those of the batch; -1 for a row that verl added as padding."""
        return np.array([self._position.get(prompt_of(key), -1) for key in batch.keys])

    def _token_tensors(self, batch: KVBatchMeta, *more: str) -> list[torch.Tensor]:
        """Padded [B, T] tensors of the response tokens: ``more`` and _TENSORS."""
        names = [*more, *_TENSORS]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        if "log_probs" in names:
            data["log_probs"] = response_from_nested(data["log_probs"], data["response_mask"])
        padded = data.to_padded_tensor()
        return [padded[name] for name in names]

    # ---------------------------------------------------------------- one round

    def _round(self, index: int) -> None:
        rollouts = self._rollouts()
        prompt_B = self._prompt_of(rollouts)
        first_measured = self._request.updates * self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        keys = np.array(rollouts.keys, dtype=object)
        self._train_on(rollouts.select_keys(keys[(prompt_B >= 0) & (prompt_B < first_measured)].tolist()))
        measured = rollouts.select_keys(keys[prompt_B >= first_measured].tolist())
        measured, plan = self._add_measured(measured)
        tq.kv_clear(keys=rollouts.keys, partition_id=rollouts.partition_id)

        PROGRESS.say(f"round {index + 1}/{self._request.rounds}: fresh prompts for the held-out gradient")
        self.checkpoint_manager.update_weights(self.global_steps)
        held_out = self._rollouts()
        measured["held_out_sequences"] = self._add_held_out(held_out, plan)
        tq.kv_clear(keys=held_out.keys, partition_id=held_out.partition_id)

        weights = block_diag(measured.pop("weights"), np.eye(plan.folds))
        measured["gram_VV"] = weights.T @ self.actor_rollout_wg.pop_gram()[0] @ weights
        path = Path(self.config.run.dir) / f"round_{index}.npz"
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **measured)
        PROGRESS.say(f"round {index + 1}/{self._request.rounds}: measured, saved {path}")

    def _train_on(self, batch: KVBatchMeta) -> None:
        """Updates with the run's own loss; the learning-rate schedule and everything else as in training."""
        self.actor_rollout_wg.begin_update(self._cycle.band_state)
        PPOTrainerSync._update_actor(self, self._balance_batch(batch, {}), {})
        self.actor_rollout_wg.pop_mini_batches()

    def _add_measured(self, batch: KVBatchMeta) -> tuple[dict[str, Any], GradientPlan]:
        """Measure the gradients of the measured sequences; returns what the analysis needs besides inner products."""
        batch = self._balance_batch(batch, {})
        batch.extra_info.update(
            calculate_entropy=False, compute_loss=False, temperature=self.config.actor_rollout_ref.rollout.temperature
        )
        self.actor_rollout_wg.compute_log_prob(batch)
        tensors = self._token_tensors(batch, "log_probs")
        fold_B = self._prompt_of(batch) % self._request.folds
        _, plain = gradient_coefficients(*tensors, _PLAIN)
        valid_B = plain.valid_B.numpy()
        log_ratio_B, length_B = plain.log_ratio_B.numpy(), plain.length_B.numpy()
        bin_B = np.zeros(len(batch), dtype=np.int64)
        bin_B[valid_B] = assign_bins(length_B[valid_B], self._request.bins)

        objectives = self._objectives(log_ratio_B[valid_B], length_B[valid_B], plain.advantage_B.numpy()[valid_B])
        unclipped = list(dict.fromkeys(without_clip(settings) for _, _, settings in objectives))
        plan = GradientPlan(
            folds=self._request.folds,
            bins=self._request.bins,  # in every round, also where equal lengths fill fewer
            family_O=tuple(unclipped.index(without_clip(settings)) for _, _, settings in objectives),
        )
        clipped = [gradient_coefficients(*tensors, settings) for _, _, settings in objectives]
        coefficients = [gradient_coefficients(*tensors, settings)[0] for settings in unclipped]
        weights_BV = plan.weights([*coefficients, *(each_B for each_B, _ in clipped)], fold_B, bin_B)
        # Every vector is a sum over sequences. Where these are fewer, their own gradients are measured, once each.
        single = len(weights_BV) < plan.measured
        PROGRESS.say(f"measuring {min(weights_BV.shape)} gradients of {int(valid_B.sum())} sequences")
        self._add_gradients(batch, np.eye(len(weights_BV)) if single else weights_BV)
        accepted_OVB = [
            np.stack([out.accepted_B.numpy(), valid_B & ~(out.clipped_high_B | out.clipped_low_B).numpy()])
            for _, out in clipped
        ]
        described = [
            {"algo": algo, "clips": clips, "clip_low": settings.clip_low, "clip_high": settings.clip_high}
            for algo, clips, settings in objectives
        ]
        return {
            "objectives": json.dumps(described),
            "plan": json.dumps({"folds": plan.folds, "bins": plan.bins}),
            "family_O": np.array(plan.family_O),
            "weights": weights_BV if single else np.eye(plan.measured),
            "fold_B": fold_B[valid_B],
            "bin_B": bin_B[valid_B],
            "length_B": length_B[valid_B],
            "log_ratio_B": log_ratio_B[valid_B],
            "accepted_OVB": np.stack(accepted_OVB)[..., valid_B].reshape(len(objectives), len(VIEWS), -1),
        }, plan

    def _objectives(
        self, log_ratio_B: np.ndarray, length_B: np.ndarray, advantage_B: np.ndarray
    ) -> list[tuple[str, str, SequenceLossSettings]]:
        """Each algorithm with its default clips and with those that clip the target share of these sequences."""
        matched = {
            "matched": Sequences.from_pairs(log_ratio_B, length_B),
            "matched_active": Sequences.from_pairs(log_ratio_B, length_B, advantage_B),
        }
        objectives = []
        for algo, settings in self._settings.items():
            objectives.append((algo, "default", settings))
            for clips, sequences in matched.items():
                settings_there = match_clip(sequences, settings, self._request.target_clip_rate).settings
                objectives.append((algo, clips, settings_there))
        return objectives

    def _add_held_out(self, batch: KVBatchMeta, plan: GradientPlan) -> int:
        """Measure the plain policy gradient of sequences that the present policy has sampled; returns their number."""
        old, *others = self._token_tensors(batch)  # of the present policy: nothing has been trained since
        coefficient_B, output = gradient_coefficients(old, old, *others, _PLAIN)
        self._add_gradients(batch, in_columns(coefficient_B, self._prompt_of(batch) % plan.folds, plan.folds))
        return int(output.valid_B.sum())

    def _add_gradients(self, batch: KVBatchMeta, weights_BV: np.ndarray) -> None:
        fields = TensorDict({WEIGHTS_FIELD: torch.from_numpy(weights_BV).to(torch.float32)}, batch_size=len(batch))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        self.actor_rollout_wg.add_gradients(batch)
