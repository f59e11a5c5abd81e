"""FSPO's losses, and the length audit, in TRL. Nothing of this package imports this module; it needs ``trl``.

:class:`FSPOTrainer` is TRL's ``GRPOTrainer`` with two arguments more::

    FSPOTrainer(model, reward, args=GRPOConfig(num_iterations=2), train_dataset=data, rule=ALGORITHMS["fspo"])
    FSPOTrainer(model, reward, args=GRPOConfig(num_iterations=2), train_dataset=data, audit="audit")

The first trains with a loss of this package, the second with TRL's own loss and writes the audit; both together train
and write. S is 0 in every mini-batch, and no clip acts, where TRL makes one update per generation: give
``num_iterations``, or ``steps_per_generation`` above ``gradient_accumulation_steps``.
"""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback
from trl import GRPOTrainer

from fspo.audit import Audit
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.types import SequenceLossSettings

#: TRL's losses whose clip bounds exp(S / L), where ``importance_sampling_level="sequence"``.
_BOUNDED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


class FSPOTrainer(GRPOTrainer):
    """TRL's ``GRPOTrainer`` with a sequence-level loss of this package, and with the audit of any loss.

    Args:
        rule: A loss with a fixed band, such as ``ALGORITHMS["fspo"]``; None: TRL's own loss.
        audit: Folder of the audit's files (:mod:`fspo.audit`); None writes none. Of TRL's own losses acceptance is
            known with ``importance_sampling_level="sequence"``, otherwise only S, L and A are summed.

    Raises:
        ValueError: If a setting would add to the loss what ``rule`` does not have.
    """

    def __init__(
        self, *args: Any, rule: SequenceLossSettings | None = None, audit: str | Path | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._check(rule)
        self._rule, self._log_prob_BT = rule, None
        own = None
        more = self.args.delta is not None or self.off_policy_mask_threshold is not None  # removes gradients besides
        if self.importance_sampling_level == "sequence" and self.loss_type in _BOUNDED and not more:
            clips = {"clip_low": self.epsilon_low, "clip_high": self.epsilon_high}
            own = dataclasses.replace(ALGORITHMS["seq_gspo"], **clips)
        self._audit = Audit(
            audit,
            rule or own,
            loss=f"{rule.band} band" if rule else f"trl {self.importance_sampling_level} {self.loss_type}",
            rank=self.accelerator.process_index,
            ranks=self.accelerator.num_processes,
            run=broadcast_object_list([uuid.uuid4().hex[:12]])[0],
        )
        self.add_callback(_EndsMiniBatch(self))

    def _check(self, rule: SequenceLossSettings | None) -> None:
        weighs = self.use_vllm and self.vllm_importance_sampling_correction
        by_token = weighs and not self.vllm_importance_sampling_mode.startswith("sequence")
        for key, wrong, remedy in (
            ("rule", rule is not None and rule.band in ("quantile", "active"), "a loss with a fixed band"),
            ("beta", rule is not None and self.beta != 0, "0"),
            ("entropy_coef", rule is not None and self._entropy_bonus_enabled, "0"),
            ("router_aux_loss_coef", rule is not None and self.aux_loss_enabled, "0"),
            ("top_entropy_quantile", rule is not None and self.top_entropy_quantile < 1, "1.0"),
            ("off_policy_mask_threshold", rule is not None and self.off_policy_mask_threshold is not None, "None"),
            ("vllm_importance_sampling_mode", rule is not None and by_token, "sequence_truncate or sequence_mask"),
        ):
            if wrong:
                value = getattr(self, key, getattr(self.args, key, rule))
                raise ValueError(f"{key}={value}: {type(self).__name__} cannot use it; set it to {remedy}")

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._log_prob_BT = result[0]
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        log_prob_BT, self._log_prob_BT = self._log_prob_BT, None
        if not self.model.training:
            return loss
        mask_BT = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        old_log_prob_BT = inputs.get("old_per_token_logps")
        old_log_prob_BT = log_prob_BT.detach() if old_log_prob_BT is None else old_log_prob_BT
        advantages_BT = inputs["advantages"].view(len(mask_BT), -1).expand(mask_BT.shape)
        output = None
        if self._rule is not None:
            weight = inputs.get("importance_sampling_ratio")
            weight = None if weight is None else weight.expand(mask_BT.shape)
            tensors = (log_prob_BT, old_log_prob_BT, advantages_BT, mask_BT)
            output = sequence_policy_loss(*tensors, self._rule, rollout_is_weights_BT=weight)
            loss = output.loss_B.mean() / self.current_gradient_accumulation_steps
        self._audit.add(log_prob_BT, old_log_prob_BT, mask_BT, advantages_BT, output)
        return loss


class _EndsMiniBatch(TrainerCallback):
    def __init__(self, trainer: FSPOTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        per_generation = args.steps_per_generation * trainer.num_iterations
        moves = trainer.optimizer.param_groups[0]["lr"] != 0
        trainer._audit.end_mini_batch(step=(trainer._step - 1) // per_generation + 1, moves=moves)
