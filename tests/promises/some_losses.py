"""Policy losses as verl calls them: sound ones, and each fault that a check is for. Loaded by name."""

from __future__ import annotations

from typing import Any

import torch


def _tokens(old_log_prob: Any, log_prob: Any, advantages: Any, mask: Any) -> Any:
    return torch.where(mask, -advantages * (log_prob - old_log_prob).clamp(-20, 20).exp(), 0.0)


def tokens(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, **_: Any) -> Any:
    """Sound: the mean over the tokens of the whole mini-batch."""
    info, loss = config.global_batch_info, _tokens(old_log_prob, log_prob, advantages, response_mask)
    return loss.sum() / info["batch_num_tokens"] * info["dp_size"], {}


def responses(
    old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, rollout_is_weights: Any = None,
    least: Any = torch.max, length: Any = None, power: int = 1, **_: Any,
) -> Any:  # fmt: skip
    """Sound: GSPO, of which the faults below change one thing."""
    info = config.global_batch_info
    L = response_mask.sum(-1).clamp(min=1)
    d = torch.where(response_mask, log_prob - old_log_prob, 0.0)
    ratio = (d.sum(-1) / (L if length is None else length(response_mask))).clamp(-10, 10).exp()
    A = torch.where(response_mask, advantages, 0.0).sum(-1) / L
    loss = least(-A * ratio, -A * ratio.clamp(1 - 3e-4, 1 + 4e-4))
    if rollout_is_weights is not None:
        loss = loss * (torch.where(response_mask, rollout_is_weights, 0.0).sum(-1) / L) ** power
    return loss.sum() / info["global_batch_size"] * info["dp_size"]


def gspo_half(**given: Any) -> Any:
    """Sound, and GSPO with half its gradient."""
    return responses(**given) / 2


# ---------------------------------------------------------------- faults: the name begins with that of the check


def padding_counts(response_mask: Any, **others: Any) -> Any:
    return tokens(response_mask=torch.ones_like(response_mask), **others)


def padding_width(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, **_: Any) -> Any:
    info, loss = config.global_batch_info, _tokens(old_log_prob, log_prob, advantages, response_mask)
    return loss.sum() / loss.shape[1] / info["global_batch_size"] * info["dp_size"]


def micro_own_tokens(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, **_: Any) -> Any:
    return _tokens(old_log_prob, log_prob, advantages, response_mask).sum() / response_mask.sum().clamp(min=1)


def micro_centred(advantages: Any, response_mask: Any, **others: Any) -> Any:
    centre = torch.where(response_mask, advantages, 0.0).sum() / response_mask.sum().clamp(min=1)
    return tokens(advantages=advantages - centre, response_mask=response_mask, **others)


def micro_ranks_forgotten(config: Any, **others: Any) -> Any:
    return tokens(config=config, **others)[0] / config.global_batch_info["dp_size"]


def direction_of_a_missing_minus(**given: Any) -> Any:
    return -tokens(**given)[0]


def direction_of_nothing(**given: Any) -> Any:
    return tokens(**given)[0] * 0


def repeats_in_place(advantages: Any, **others: Any) -> Any:
    advantages *= 0.5
    return tokens(advantages=advantages, **others)


def repeats_at_random(log_prob: Any, **others: Any) -> Any:
    return tokens(log_prob=log_prob * (1 + torch.rand(len(log_prob), 1)), **others)


def gaps_to_the_last(**given: Any) -> Any:
    """L with the tokens of tools."""
    return responses(**given, length=lambda mask: (torch.arange(1, mask.shape[1] + 1) * mask).amax(-1).clamp(min=1))


def weights_squared(**given: Any) -> Any:
    return responses(**given, power=2)


def sides_swapped(**given: Any) -> Any:
    return responses(**given, least=torch.min)


FAULTS = [name for name in dict(globals()) if name.split("_")[0] in
          ("padding", "micro", "direction", "repeats", "gaps", "weights", "sides")]  # fmt: skip
