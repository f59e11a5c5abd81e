"""Slips of well-known losses get the right verdict beside the loss that they are called; correct forms are equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fspo.check_loss.call import PolicyLoss
from fspo.check_loss.command import named
from fspo.check_loss.comparison import compare

Band = tuple[float, float]


def formula(
    old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, *,
    ratio: Callable[..., torch.Tensor], band: Callable[[torch.Tensor], Band | tuple[torch.Tensor, torch.Tensor]],
    mean: str = "responses", worse: Callable[..., torch.Tensor] = torch.max, rollout_is_weights: Any = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """A clipped surrogate of ``ratio(d_BT, mask_BT, length_B1)``, [B, T] or [B, 1], between two bounds."""
    info = config.global_batch_info
    d_BT = torch.where(response_mask, log_prob - old_log_prob, 0.0)
    length_B1 = response_mask.sum(-1, keepdim=True).clamp(min=1)
    r = ratio(d_BT, response_mask, length_B1)
    low, high = (torch.as_tensor(bound) for bound in band(length_B1))
    loss_BT = worse(-advantages * r, -advantages * torch.minimum(torch.maximum(r, low), high))
    loss_BT = torch.where(response_mask, loss_BT if rollout_is_weights is None else loss_BT * rollout_is_weights, 0.0)
    if mean == "tokens":
        return loss_BT.sum() / info["batch_num_tokens"] * info["dp_size"]
    if mean == "sum":
        return loss_BT.sum() / info["global_batch_size"] * info["dp_size"]
    if mean == "width":
        return loss_BT.mean(-1).sum() / info["global_batch_size"] * info["dp_size"]
    if mean == "rows":
        return (loss_BT.sum(-1) / length_B1[:, 0]).mean()
    return (loss_BT.sum(-1) / length_B1[:, 0]).sum() / info["global_batch_size"] * info["dp_size"]


def linear(d: Any, mask: Any, length: Any) -> Any:
    return (d.sum(-1, keepdim=True) / length).exp()


def summed(d: Any, mask: Any, length: Any) -> Any:
    return d.sum(-1, keepdim=True).clamp(max=20).exp()


def by_token(d: Any, mask: Any, length: Any) -> Any:
    return d.exp()


def mean_of_exp(d: Any, mask: Any, length: Any) -> Any:
    return (d.exp() * mask).sum(-1, keepdim=True) / length


def in_bfloat16(d: Any, mask: Any, length: Any) -> Any:
    """With a length that is counted in bfloat16, which has no odd numbers above 256."""
    return (d.sum(-1, keepdim=True) / mask.bfloat16().sum(-1, keepdim=True).clamp(min=1)).exp()


def last_twice(d: Any, mask: Any, length: Any) -> Any:
    return ((d.sum(-1, keepdim=True) + d.gather(1, length - 1)) / length).exp()


def of_micro_batch(d: Any, mask: Any, length: Any) -> Any:
    return (d.sum() / mask.sum()).exp()


def by_width(d: Any, mask: Any, length: Any) -> Any:
    return d.mean(-1, keepdim=True).exp()


def clamped_sum(limit: float, d: Any, mask: Any, length: Any) -> Any:
    return (d.sum(-1, keepdim=True).clamp(-limit, limit) / length).exp()


def forgotten_detach(ratio: Callable[..., Any], d: Any, mask: Any, length: Any) -> Any:
    """The token's own ratio beside that of the response, of which the second should be detached."""
    return ratio(d, mask, length) * (d - d.detach()).exp()


def upside_down(ratio: Callable[..., Any], d: Any, mask: Any, length: Any) -> Any:
    return ratio(-d, mask, length)


def root(low: float, high: float, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (-low * length**0.5).exp(), (high * length**0.5).exp()


def root_of_ratio(length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return 1 - 0.03 * length**0.5, 1 + 0.04 * length**0.5


def line(length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (-0.03 * length).exp(), (0.04 * length).exp()


GSPO = partial(formula, ratio=linear, band=lambda _: (1 - 3e-4, 1 + 4e-4))
PPO = partial(formula, ratio=by_token, band=lambda _: (0.8, 1.28), mean="tokens")
FSPO = partial(formula, ratio=summed, band=partial(root, 0.03, 0.04))
LIKE = {
    "GSPO": (GSPO, "seq_gspo", ()),
    "PPO": (PPO, "vanilla", ("clip_ratio_high=0.28", "clip_ratio_c=1e9")),
    "FSPO": (FSPO, "fspo", ("policy_loss.c_high=0.04",)),
}


def verdict(loss: Callable[..., Any], family: str) -> str:
    _, name, settings = LIKE[family]
    like = named(name, settings)
    comparison = compare(PolicyLoss(loss, like.config, like.loss_agg_mode), like)
    assert comparison.equal == (comparison.verdict == "equal")
    return comparison.text()


@pytest.mark.parametrize("family", LIKE)
def test_the_formula_itself_is_equal(family: str) -> None:
    loss = LIKE[family][0]

    def measured(log_prob: Any, old_log_prob: Any, **others: Any) -> Any:
        with torch.no_grad():
            clip_fraction = ((log_prob - old_log_prob).view(-1).abs() > 0.2).float().mean()
        return loss(log_prob=log_prob, old_log_prob=old_log_prob, **others), {"clip_fraction": clip_fraction.item()}

    def in_float32(**arguments: Any) -> Any:
        tensors = ("log_prob", "old_log_prob", "advantages")
        return loss(**arguments | {name: arguments[name].float() for name in tensors})

    assert [verdict(form, family) for form in (loss, measured, in_float32)] == ["equal"] * 3


@pytest.mark.parametrize("family", LIKE)
def test_large_advantages_and_rollout_weights_are_compared(family: str) -> None:
    loss = LIKE[family][0]

    def bounded(advantages: Any, **others: Any) -> Any:
        return loss(advantages=advantages.clamp(-5, 5), **others)

    def squared(rollout_is_weights: Any = None, **others: Any) -> Any:
        return loss(rollout_is_weights=None if rollout_is_weights is None else rollout_is_weights**2, **others)

    def ignored(rollout_is_weights: Any = None, **others: Any) -> Any:
        return loss(**others)

    assert verdict(bounded, family) == "equal, but not where one A is 30 and one is -30"
    assert verdict(squared, family) == "equal, but not with rollout_is_weights by response"
    assert verdict(ignored, family).startswith("equal\n") and "rollout_is_weights: ignored" in verdict(ignored, family)


def test_weights_by_token_are_compared_where_the_named_loss_takes_them() -> None:
    def averaged(rollout_is_weights: Any = None, response_mask: Any = None, **others: Any) -> Any:
        if rollout_is_weights is not None:
            rollout_is_weights = (rollout_is_weights * response_mask).sum(-1, keepdim=True) / response_mask.sum(
                -1, keepdim=True
            ).clamp(min=1)
        return PPO(rollout_is_weights=rollout_is_weights, response_mask=response_mask, **others)

    assert verdict(averaged, "PPO") == "equal, but not with rollout_is_weights by token"


@pytest.mark.parametrize(
    ("family", "slip", "begins", "says"),
    [
        ("GSPO", {"ratio": summed}, "L times (by length", "on policy only"),
        ("GSPO", {"ratio": partial(forgotten_detach, linear)}, "2 times", ""),
        ("GSPO", {"ratio": mean_of_exp}, "equal up to log-ratio 0.0", "token in place of length_normalised"),
        ("GSPO", {"ratio": of_micro_batch}, "another loss: on policy cosine", "another in place of length_normalised"),
        ("GSPO", {"mean": "tokens"}, "0.02381 L times", ""),
        ("GSPO", {"worse": torch.min}, "equal up to log-ratio 0.000", "A > 0 above: never in place of from 0.00041"),
        ("GSPO", {"band": lambda _: (1 - 4e-4, 1 + 3e-4)}, "equal up to log-ratio 0.000", "A > 0 above: from 0.00035"),
        ("GSPO", {"mean": "width"}, "0.002941 L times", ""),
        ("GSPO", {"ratio": by_token}, "equal up to log-ratio 8.7e-05", "token in place of length_normalised"),
        ("GSPO", {"ratio": by_width}, "0.002941 L times", "L^0.00 in place of L^-1.00"),
        ("GSPO", {"mean": "rows"}, "equal, but not in a micro-batch", ""),
        ("GSPO", {"ratio": partial(upside_down, linear)}, "-1 times", "A > 0 above"),
        ("GSPO", {"ratio": in_bfloat16}, "another loss: on policy cosine", ""),
        ("GSPO", {"ratio": partial(clamped_sum, 10)}, "equal, but not where |S| exceeds 8", ""),
        ("GSPO", {"ratio": partial(clamped_sum, 60)}, "equal, but not where |S| exceeds 8", ""),
        ("GSPO", {"ratio": last_twice}, "another loss: on policy cosine", ""),
        ("PPO", {"ratio": summed}, "L times (by length", "sequence in place of token"),
        ("PPO", {"ratio": partial(forgotten_detach, by_token)}, "2 times", ""),
        ("PPO", {"ratio": linear}, "equal up to log-ratio 0.0004", "length_normalised in place of token"),
        ("PPO", {"ratio": of_micro_batch}, "another loss", "another in place of token"),
        ("PPO", {"mean": "responses"}, "42 1/L times", ""),
        ("PPO", {"mean": "width"}, "0.1235 times", "where it is 0.15"),
        ("PPO", {"worse": torch.min}, "equal up to log-ratio 0.0", "A > 0 below: from 0.25 in place of never"),
        ("PPO", {"band": lambda _: (0.72, 1.2)}, "equal up to log-ratio 0.0", "A > 0 above: from 0.21"),
        ("PPO", {"band": lambda _: (0.0, 9e9)}, "equal up to log-ratio 0.0", "A > 0 above: never"),
        ("FSPO", {"ratio": partial(forgotten_detach, summed)}, "another loss", ""),
        ("FSPO", {"ratio": linear}, "1/L times", "length_normalised in place of sequence"),
        ("FSPO", {"ratio": mean_of_exp}, "1/L times", "token in place of sequence"),
        ("FSPO", {"ratio": of_micro_batch}, "another loss", ""),
        ("FSPO", {"mean": "sum"}, "L times (by length", ""),
        ("FSPO", {"mean": "tokens"}, "0.02381 L times", ""),
        ("FSPO", {"worse": torch.min}, "equal up to log-ratio 0.00", "A > 0 above: never"),
        ("FSPO", {"band": partial(root, 0.04, 0.03)}, "equal up to log-ratio 0.0", "A > 0 above"),
        ("FSPO", {"band": root_of_ratio}, "equal up to log-ratio 0.0", ""),
        ("FSPO", {"band": line}, "equal up to log-ratio 0.0", "A > 0 above"),
    ],
)  # fmt: skip
def test_a_slip_is_told_by_its_gradient(family: str, slip: dict[str, Any], begins: str, says: str) -> None:
    text = verdict(partial(LIKE[family][0], **slip), family)
    assert text.startswith(begins) and says in text, text
