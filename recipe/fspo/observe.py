"""Length statistics for verl's own losses too, so that references such as GRPO stand in the same tables and figures.

verl's loss registry is a plain dictionary of functions; each of verl's own is replaced by one that calls it and hands
what it has clipped to the recorder. The loss itself is unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.token_level import token_level_output
from fspo.types import SequenceLossOutput
from recipe.fspo.recorder import RECORDER

#: verl's losses whose clip acts on something else than the ratio of single tokens to their own old probability.
_NOT_A_TOKEN_CLIP = ("gspo", "geo_mean", "dro", "gpg", "bypass_mode")


def _clips(config: Any) -> tuple[float, float]:
    """verl's two clip values: where only ``clip_ratio`` is set, it holds on both sides."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return float(low), float(high)


def _describe(name: str, config: Any, arguments: tuple[torch.Tensor, ...]) -> SequenceLossOutput | None:
    low, high = _clips(config)
    if name == "gspo":
        settings = dataclasses.replace(ALGORITHMS["seq_gspo"], clip_low=low, clip_high=high)
        with torch.no_grad():
            return sequence_policy_loss(*arguments, settings)
    if name in _NOT_A_TOKEN_CLIP:
        return None
    return token_level_output(*arguments, low, high)


def _observed(name: str, loss: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loss)
    def policy_loss(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        *rest: Any,
        config: Any = None,
        **others: Any,
    ) -> Any:
        output = _describe(name, config, (log_prob.detach(), old_log_prob, advantages, response_mask))
        if output is not None:
            RECORDER.add(output)
        return loss(old_log_prob, log_prob, advantages, response_mask, *rest, config=config, **others)

    return policy_loss


@functools.cache
def observe_verl_losses() -> tuple[str, ...]:
    """Wrap verl's own losses in this process; returns their names."""
    names = tuple(name for name in POLICY_LOSS_REGISTRY if name not in ALGORITHMS)
    for name in names:
        POLICY_LOSS_REGISTRY[name] = _observed(name, POLICY_LOSS_REGISTRY[name])
    return names
