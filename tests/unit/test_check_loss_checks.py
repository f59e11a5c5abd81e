"""Every planted fault of a policy loss is found by the check that is for it; sound losses pass them all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fspo.check_loss.call import Config, LossError, PolicyLoss
from fspo.check_loss.checks import checks
from fspo.losses import ALGORITHMS, sequence_log_ratio, sequence_policy_loss

Loss = Callable[..., Any]


def of_library(name: str) -> Loss:
    def loss(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, **_: Any) -> Any:
        info = config.global_batch_info
        output = sequence_policy_loss(log_prob, old_log_prob, advantages, response_mask, ALGORITHMS[name])
        return output.loss_B.sum() / info["global_batch_size"] * info["dp_size"]

    return loss


def token_loss(
    old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any,
    term: Callable[[Any, Any], Any] = lambda d, a: -a * d.clamp(-20, 20).exp(), mean: str = "tokens", **_: Any,
) -> tuple[torch.Tensor, dict[str, float]]:  # fmt: skip
    """A sound mean over the tokens of the mini-batch, of which the faults below change one thing."""
    info = config.global_batch_info
    loss_BT = term(log_prob - old_log_prob, advantages)
    if mean == "padding too":
        return loss_BT.sum() / info["batch_num_tokens"] * info["dp_size"], {}
    loss_BT = torch.where(response_mask, loss_BT, 0.0)
    if mean == "width":
        return loss_BT.sum() / loss_BT.shape[1] / info["global_batch_size"] * info["dp_size"], {}
    if mean == "rows":
        return loss_BT.sum() / len(loss_BT), {}
    if mean == "own tokens":
        return loss_BT.sum() / response_mask.sum(), {}
    if mean == "ranks":
        return loss_BT.sum() / info["batch_num_tokens"], {}
    if mean == "order":
        loss_BT = loss_BT * torch.arange(1.0, len(loss_BT) + 1)[:, None]
    return loss_BT.sum() / info["batch_num_tokens"] * info["dp_size"], {}


class HalfGradient(torch.autograd.Function):
    """exp(x) with half its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 0.5 * grads[0] * ctx.saved_tensors[0].exp()


def half_gradient_and_detached(d_BT: torch.Tensor, a_BT: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        weight_BT = d_BT.clamp(-1, 1).exp()
    return -a_BT * weight_BT * HalfGradient.apply(d_BT.clamp(-20, 20))


def in_place(log_prob: torch.Tensor, advantages: torch.Tensor, **others: Any) -> Any:
    advantages *= 0.5
    return token_loss(log_prob=log_prob, advantages=advantages, **others)


def in_place_once(advantages: torch.Tensor, **others: Any) -> Any:
    return token_loss(advantages=advantages.clamp_(-0.1, 0.1), **others)


def at_random(log_prob: torch.Tensor, **others: Any) -> Any:
    return token_loss(log_prob=log_prob * (1 + torch.rand(log_prob.shape[0], 1)), **others)


def whitened(advantages: torch.Tensor, **others: Any) -> Any:
    return token_loss(advantages=advantages - advantages.mean(), **others)


def failures(loss: Loss) -> dict[str, str]:
    """What is found wrong, by check."""
    config = Config(global_batch_info={})
    return {check.name: check.says for check in checks(PolicyLoss(loss, config)) if not check.passed}


@pytest.mark.parametrize(
    ("loss", "check", "says"),
    [
        (partial(token_loss, mean="padding too"), "padding", "other values"),
        (partial(token_loss, mean="width"), "padding", "5 columns"),
        (partial(token_loss, mean="rows"), "micro-batches", "micro-batches of"),
        (partial(token_loss, mean="own tokens"), "micro-batches", "micro-batches of"),
        (whitened, "micro-batches", "micro-batches of"),
        (partial(token_loss, mean="ranks"), "ranks", "4 ranks"),
        (partial(token_loss, mean="order"), "order", "order"),
        (partial(token_loss, term=lambda d, a: -a * d.exp()), "finite", "+90 over 4 tokens, A = 1, float32"),
        (
            partial(token_loss, term=lambda d, a: -a * HalfGradient.apply(d.clamp(-20, 20))),
            "gradient",
            "finite differences",
        ),
        (partial(token_loss, term=half_gradient_and_detached), "gradient", "finite differences"),
        (partial(token_loss, term=lambda d, a: a * d.clamp(-20, 20).exp()), "direction", "missing minus"),
        (partial(token_loss, term=lambda d, a: (-a * d.clamp(-20, 20).exp()) * 0), "direction", "0 everywhere"),
        (in_place, "repeats", "advantages"),
        (in_place_once, "repeats", "advantages"),
        (at_random, "repeats", "a second call"),
    ],
)
def test_a_planted_fault_is_found(loss: Loss, check: str, says: str) -> None:
    problems = failures(loss)
    assert check in problems, problems
    assert says in problems[check], problems[check]
    if check in ("finite", "gradient"):  # one fault is not blamed on all
        assert len(problems) == 1


def test_what_is_detached_counts_as_constant() -> None:
    def cispo(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, **_: Any) -> Any:
        weight_BT = (log_prob - old_log_prob).clamp(-20, 20).exp().clamp(0.8, 1.2).detach()
        return token_loss(
            old_log_prob, log_prob, advantages, response_mask, config, lambda d, a: -weight_BT * a * (d + old_log_prob)
        )

    report = {check.name: check for check in checks(PolicyLoss(cispo, Config(global_batch_info={})))}
    assert report["gradient"].passed and "held fixed" in report["gradient"].says


def test_a_block_without_gradient_is_held_too_but_no_function_of_autograd() -> None:
    def mixed(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, **_: Any) -> Any:
        with torch.no_grad():
            weight_B = (sequence_log_ratio(log_prob, old_log_prob, response_mask)).clamp(-1, 1).exp()
            weight_B.mul_(0.5)
        S_B = sequence_log_ratio(log_prob, old_log_prob, response_mask)  # a torch.autograd.Function
        A_B = (advantages * response_mask).sum(-1) / response_mask.sum(-1).clamp(min=1)
        info = config.global_batch_info
        return (-A_B * weight_B * S_B).sum() / info["global_batch_size"] * info["dp_size"]

    assert failures(mixed) == {}


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda log_prob, old_log_prob, advantages, response_mask, config: 0, r"\*\*_"),
        (lambda log_prob, **_: log_prob, r"\(12, 40\)"),
        (lambda log_prob, **_: log_prob.detach().sum(), "log_prob"),
        (lambda config, **_: config.beta, r"test_check_loss_checks.py:\d+.*--config beta=VALUE"),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_sentence(loss: Loss, says: str) -> None:
    with pytest.raises(LossError, match=says) as error:
        checks(PolicyLoss(loss, Config(global_batch_info={})))
    assert "\n" not in str(error.value)


def test_the_sizes_are_those_that_verl_hands_in() -> None:
    seen: list[dict[str, Any]] = []

    def loss(config: Any, response_mask: torch.Tensor, **others: Any) -> Any:
        seen.append(dict(config.global_batch_info) | {"here": int(response_mask.any(1).sum())})
        return token_loss(config=config, response_mask=response_mask, **others)

    config = Config(global_batch_info={}, loss_scale_factor=7)
    checks(PolicyLoss(loss, config))
    sizes_of_verl = {"dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor"}
    assert {key for sizes in seen for key in sizes} == sizes_of_verl | {"here"}
    assert any(sizes["dp_size"] == 2 and sizes["global_batch_size"] == 12 and sizes["here"] == 6 for sizes in seen)
    assert all(sizes["loss_scale_factor"] == 7 for sizes in seen)
    assert len({sizes["batch_num_tokens"] for sizes in seen if sizes["global_batch_size"] == 12}) == 1


def test_a_loss_that_computes_in_float32_passes() -> None:
    def loss(**arguments: Any) -> Any:
        arguments = {
            key: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for key, value in arguments.items()
        }
        return token_loss(**arguments)

    assert failures(loss) == {}
