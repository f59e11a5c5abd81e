"""Policy losses as verl calls them: sound ones, and each fault that a check is for. Loaded by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Loss = Callable[..., Any]

#: Of new minus old log-probabilities [B, T], mask and length [B, 1]: a ratio, [B, T] or [B, 1].
RATIOS: dict[str, Loss] = {
    "token": lambda d, mask, length: d.clamp(-20, 20).exp(),
    "token, masked": lambda d, mask, length: d.exp() * ((d > -0.1) & (d < 1.5)),
    "mean": lambda d, mask, length: (d.sum(-1, keepdim=True) / length).exp(),
    "mean, S at most 10": lambda d, mask, length: (d.sum(-1, keepdim=True).clamp(-10, 10) / length).exp(),
    "mean and token": lambda d, mask, length: (d.sum(-1, keepdim=True) / length + d - d.detach()).exp(),
    "mean of exp": lambda d, mask, length: (d.exp() * mask).sum(-1, keepdim=True) / length,
    "sum": lambda d, mask, length: d.sum(-1, keepdim=True).clamp(max=20).exp(),
    "micro-batch": lambda d, mask, length: (d.sum() / mask.sum().clamp(min=1)).exp(),
}


def tokens(mask: torch.Tensor) -> torch.Tensor:
    return mask.sum(-1, keepdim=True).clamp(min=1)


def formula(
    old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, rollout_is_weights: Any = None,
    ratio: str = "token", band: Callable[[Any], Any] = lambda length: (0.0, 9e9), mean: str = "tokens",
    count: Callable[[Any], Any] = tokens, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """A clipped surrogate of a ratio between two bounds."""
    info, d_BT = config.global_batch_info, torch.where(response_mask, log_prob - old_log_prob, 0.0)
    length_B1 = count(response_mask)
    r = RATIOS[ratio](d_BT, response_mask, length_B1)
    low, high = (torch.as_tensor(bound) for bound in band(length_B1))
    loss_BT = torch.max(-advantages * r, -advantages * torch.minimum(torch.maximum(r, low), high))
    loss_BT = loss_BT if rollout_is_weights is None else loss_BT * rollout_is_weights
    loss_BT = torch.where(response_mask, loss_BT, 0.0)
    if mean == "own tokens":
        return loss_BT.sum() / response_mask.sum().clamp(min=1)
    if mean == "responses":
        loss_BT = loss_BT / length_B1
    by = "global_batch_size" if mean == "responses" else "batch_num_tokens"
    return loss_BT.sum() / info[by] * info["dp_size"]


# Families of losses that have a name.
GSPO = partial(formula, ratio="mean", band=lambda _: (1 - 3e-4, 1 + 4e-4), mean="responses")
PPO = partial(formula, band=lambda _: (0.8, 1.28))
FSPO = partial(formula, ratio="sum", band=lambda L: ((-0.03 * L**0.5).exp(), (0.04 * L**0.5).exp()), mean="responses")

by_response = partial(formula, mean="responses")


def gspo_half(**given: Any) -> Any:
    """Sound, and GSPO with half its gradient."""
    return GSPO(**given) / 2


def with_metrics(**given: Any) -> Any:
    """Sound, as verl's own losses return it."""
    return PPO(**given), {}


def own_mean(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any) -> Any:
    """A function of the four tensors, the mean of those that it is given."""
    ratio = (log_prob - old_log_prob).clamp(-20, 20).exp()
    return (torch.where(response_mask, -advantages * ratio, 0.0).sum(-1, keepdim=True) / tokens(response_mask)).mean()


@dataclasses.dataclass
class Settings:
    beta: float = 0.5
    name: str = dataclasses.field(default_factory=str)


def fed(config: Any, **given: Any) -> Any:
    """With settings of its own."""
    assert config.policy_loss.beta == 0.5 and config.name == "x" and config.clip_ratio == 0.2
    return by_response(config=config, **given)


def with_advantages(change: Callable[[Any, Any], Any], loss: Loss = PPO) -> Loss:
    return lambda **given: loss(**given | {"advantages": change(given["advantages"], given["response_mask"])})


# ---------------------------------------------------------------- faults: the name begins with that of the check

padding_width = partial(by_response, count=lambda mask: torch.full((len(mask), 1), mask.shape[1]))
micro_own_tokens = partial(PPO, mean="own tokens")
micro_centred = with_advantages(lambda a, mask: a - torch.where(mask, a, 0.0).sum() / mask.sum().clamp(min=1))
repeats_in_place = with_advantages(lambda a, mask: a.mul_(0.5))
#: L with the tokens of tools.
gaps_to_the_last = partial(
    GSPO, count=lambda mask: (torch.arange(1, mask.shape[1] + 1) * mask).amax(-1, keepdim=True).clamp(min=1)
)


def padding_counts(response_mask: Any, **others: Any) -> Any:
    return PPO(response_mask=torch.ones_like(response_mask), **others)


def micro_ranks_forgotten(config: Any, **others: Any) -> Any:
    return PPO(config=config, **others) / config.global_batch_info["dp_size"]


def direction_of_a_missing_minus(**given: Any) -> Any:
    return -PPO(**given)


def direction_of_nothing(**given: Any) -> Any:
    return PPO(**given) * 0


def direction_is_undefined(log_prob: Any, **_: Any) -> Any:
    return log_prob.sum() * float("nan")


def repeats_at_random(log_prob: Any, **others: Any) -> Any:
    return PPO(log_prob=log_prob * (1 + torch.rand(len(log_prob), 1)), **others)


def weights_squared(rollout_is_weights: Any = None, **others: Any) -> Any:
    return GSPO(rollout_is_weights=None if rollout_is_weights is None else rollout_is_weights**2, **others)


def sides_swapped(advantages: Any, **others: Any) -> Any:
    """The smaller of the two in place of the larger."""
    return -GSPO(advantages=-advantages, **others)


FAULTS = [name for name in dict(globals()) if name.split("_")[0] in
          ("padding", "micro", "direction", "repeats", "gaps", "weights", "sides")]  # fmt: skip
