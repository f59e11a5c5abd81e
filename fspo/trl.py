"""FSPO's losses, and the length audit, in TRL. Nothing of this package imports this module; it needs ``trl``.

:class:`FSPOTrainer` is TRL's ``GRPOTrainer`` with two arguments more::

    FSPOTrainer(model, reward, args=GRPOConfig(num_iterations=2), train_dataset=data, rule=ALGORITHMS["fspo"])
    FSPOTrainer(model, reward, args=GRPOConfig(num_iterations=2), train_dataset=data, audit="audit")

The first trains with a loss of this package, the second audits TRL's own. With one update per generation S is 0, and no
clip acts: give ``num_iterations``, or ``steps_per_generation`` above ``gradient_accumulation_steps``.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

try:
    from accelerate.utils import broadcast_object_list
    from transformers import TrainerCallback
    from trl import GRPOTrainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: fspo.trl needs TRL, pip install 'fspo[trl]'", name=error.name) from None

from fspo.audit import Audit
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.types import SequenceLossSettings, c_of_eps, shape

#: TRL's losses whose clip bounds exp(S / L), where ``importance_sampling_level="sequence"``.
_BOUNDED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


class FSPOTrainer(GRPOTrainer):
    """TRL's ``GRPOTrainer`` with a sequence-level loss of this package, and with the audit of any loss.

    Args:
        rule: A loss with a fixed band, such as ``ALGORITHMS["fspo"]``; None: TRL's own loss.
        audit: Folder of the audit's files (:mod:`fspo.audit`); None: no audit. Of TRL's own losses acceptance is known
            with ``importance_sampling_level="sequence"``, otherwise S, L and A. Its errors do not end the training.

    Raises:
        ValueError: If a setting would add to the loss what ``rule`` does not have.
    """

    def __init__(
        self, *args: Any, rule: SequenceLossSettings | None = None, audit: str | Path | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._check(rule)
        self._rule, self._log_prob_BT = rule, None
        more = self.args.delta is not None or self.off_policy_mask_threshold is not None  # removes gradients besides
        known = self.importance_sampling_level == "sequence" and self.loss_type in _BOUNDED and not more
        own = None
        if known and self.epsilon_low < 1:
            c_low, c_high = c_of_eps(self.epsilon_low, self.epsilon_high)
            own = dataclasses.replace(ALGORITHMS["seq_gspo"], c_low=c_low, c_high=c_high)
        name = f"trl {self.importance_sampling_level} {self.loss_type}"
        if rule is not None:
            name = next((key for key, known in ALGORITHMS.items() if known == rule), f"{shape(rule.exponent)} band")
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        run = broadcast_object_list([uuid.uuid4().hex[:12]])[0]
        self._audit = None if audit is None else Audit(audit, rule or own, loss=name, rank=rank, ranks=ranks, run=run)
        self.add_callback(_EndsMiniBatch(self))

    def _check(self, rule: SequenceLossSettings | None) -> None:
        weighs = self.use_vllm and self.vllm_importance_sampling_correction
        by_token = weighs and not self.vllm_importance_sampling_mode.startswith("sequence")
        for key, wrong, remedy in (
            ("rule", rule is not None and rule.needs_state, "a loss with a fixed band: nothing here measures one"),
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

    def audited(self, act: Callable[[Audit], Any]) -> None:
        """Let the audit do something; its first error is printed, and ends it."""
        try:
            if self._audit is not None:
                act(self._audit)
        except Exception as error:
            print(f"fspo.trl: {type(error).__name__}: {error}; this process audits nothing more", flush=True)
            self._audit = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._log_prob_BT = result[0]
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        log_prob_BT, self._log_prob_BT = self._log_prob_BT, None
        output = None
        if self._rule is not None and self.model.training:
            weight = inputs.get("importance_sampling_ratio")
            weight = None if weight is None else weight.expand(log_prob_BT.shape)
            new_BT, old_BT, mask_BT, advantages_BT = _tensors(log_prob_BT, inputs)
            output = sequence_policy_loss(new_BT, old_BT, advantages_BT, mask_BT, self._rule, None, weight)
            loss = output.loss_B.mean() / self.current_gradient_accumulation_steps
        if self.model.training:
            self.audited(lambda audit: audit.add(*_tensors(log_prob_BT, inputs), output))
        return loss


def _tensors(log_prob_BT: torch.Tensor, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    mask_BT = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    old_BT = inputs.get("old_per_token_logps")
    old_BT = log_prob_BT.detach() if old_BT is None else old_BT
    return log_prob_BT, old_BT, mask_BT, inputs["advantages"].view(len(mask_BT), -1).expand(mask_BT.shape)


class _EndsMiniBatch(TrainerCallback):
    def __init__(self, trainer: FSPOTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        step = (trainer._step - 1) // (args.steps_per_generation * trainer.num_iterations) + 1
        trainer.audited(lambda audit: audit.end_mini_batch(step, trainer.optimizer.param_groups[0]["lr"] != 0))
