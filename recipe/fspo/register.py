"""Adds the sequence-level losses to verl's registry: ``import recipe.fspo.register``.

Each name of :data:`fspo.losses.ALGORITHMS` becomes a value of ``actor_rollout_ref.actor.policy_loss.loss_mode``. With
plain verl, where ``policy_loss`` has no clip values of ours, the documented defaults apply; verl's ``clip_ratio*`` keys
are never read, because a token-level ratio bound means nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.types import SequenceLossOutput, SequenceLossSettings
from recipe.fspo.config import SequencePolicyLossConfig
from recipe.fspo.recorder import RECORDER

#: What a registered loss returns: the scalar to differentiate, and verl's metrics of one micro-batch.
LossAndMetrics = tuple[torch.Tensor, dict[str, float]]


def _settings(config: Any, loss_mode: str) -> SequenceLossSettings:
    policy_loss = config.policy_loss
    if isinstance(policy_loss, SequencePolicyLossConfig):
        return policy_loss.settings()
    return ALGORITHMS[loss_mode]


def _mean_over_mini_batch(loss_B: torch.Tensor, valid_B: torch.Tensor, global_batch_info: Any) -> torch.Tensor:
    """Sum over this micro-batch, over the sequences of the whole mini-batch on all ranks.

    verl averages gradients over ranks, hence the factor ``dp_size``. The engine passes the mini-batch's size, so the
    gradient depends neither on the micro-batch split nor on the number of ranks.
    """
    global_batch_size = global_batch_info.get("global_batch_size")
    dp_size = global_batch_info.get("dp_size", 1)
    if global_batch_size is None:
        if dp_size > 1:
            raise ValueError(
                f"global_batch_info has dp_size={dp_size} but no global_batch_size: the mean over the mini-batch "
                "cannot be formed from one rank; use verl's ppo_loss, which passes both"
            )
        global_batch_size = valid_B.sum().clamp(min=1)
    return loss_B.sum() / global_batch_size * dp_size


def _metrics(output: SequenceLossOutput) -> dict[str, float]:
    """verl's usual names, for this micro-batch. verl averages them unweighted; exact figures are ``fspo/*``."""
    count = output.valid_B.sum().clamp(min=1)
    clipped = output.clipped_high_B | output.clipped_low_B
    length = output.length_B.sum().clamp(min=1)
    figures = torch.stack(
        [
            clipped.sum() / count,
            output.dual_clipped_B.sum() / count,
            -output.statistic_B.sum() / length,
            (~output.accepted_B & output.valid_B).sum() / count,
        ]
    ).tolist()
    names = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/seq_outside_band")
    return dict(zip(names, figures, strict=True))


def _make_policy_loss(name: str) -> Callable[..., LossAndMetrics]:
    def policy_loss(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "seq-mean-token-mean",
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
        **_: Any,  # verl once broke every custom loss by adding a keyword argument
    ) -> LossAndMetrics:
        output = sequence_policy_loss(
            log_prob,
            old_log_prob,
            advantages,
            response_mask,
            _settings(config, name),
            band_state=RECORDER.current_band_state(),
            rollout_is_weights_BT=rollout_is_weights,
        )
        RECORDER.add(output)
        loss = _mean_over_mini_batch(output.loss_B, output.valid_B, config.global_batch_info)
        return loss, _metrics(output)

    policy_loss.__name__ = f"policy_loss_{name}"
    policy_loss.__doc__ = f"{name}: mean over sequences of :func:`fspo.losses.sequence_policy_loss`."
    return policy_loss


@cache  # once per process, however often this module is imported or reloaded by name
def register_losses() -> tuple[str, ...]:
    """Register every loss of the family.

    Raises:
        RuntimeError: if verl's registry already holds one of the names.
    """
    taken = sorted(set(ALGORITHMS) & set(POLICY_LOSS_REGISTRY))
    if taken:
        raise RuntimeError(
            f"verl's loss registry already holds {', '.join(taken)}: another package registered them. Uninstall it, or "
            "limit the plugins with VERL_USE_EXTERNAL_PLUGINS=fspo"
        )
    for name in ALGORITHMS:
        register_policy_loss(name)(_make_policy_loss(name))
    return tuple(ALGORITHMS)


register_losses()
