"""Every planted fault of a policy loss is found by the check that is for it; sound losses pass them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fspo.check_loss.call import Config, LossError, PolicyLoss
from fspo.check_loss.checks import _differences, _mini_batch, checks
from fspo.check_loss.robust import in_words, survived
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


def response_loss(
    old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any,
    length: Callable[[torch.Tensor], torch.Tensor] = lambda mask: mask.sum(-1).clamp(min=1),
    weigh: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight,
    clip: Callable[..., torch.Tensor] = torch.max, rollout_is_weights: Any = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """A sound GSPO, of which the faults below change one thing."""
    info = config.global_batch_info
    d_BT = torch.where(response_mask, log_prob - old_log_prob, 0.0)
    ratio_B = (d_BT.sum(-1) / length(response_mask)).clamp(-10, 10).exp()
    A_B = torch.where(response_mask, advantages, 0.0).sum(-1) / response_mask.sum(-1).clamp(min=1)
    loss_B = clip(-A_B * ratio_B, -A_B * ratio_B.clamp(1 - 3e-4, 1 + 4e-4))
    if rollout_is_weights is not None:
        v_B = torch.where(response_mask, rollout_is_weights, 0.0).sum(-1) / response_mask.sum(-1).clamp(min=1)
        loss_B = loss_B * weigh(v_B)
    return loss_B.sum() / info["global_batch_size"] * info["dp_size"]


def to_the_last(mask: torch.Tensor) -> torch.Tensor:
    """L with the tokens of tools, a fault."""
    return (torch.arange(1, mask.shape[1] + 1) * mask).amax(-1).clamp(min=1)


def first_column(advantages: torch.Tensor, **others: Any) -> Any:
    return response_loss(advantages=advantages[:, :1].expand_as(advantages), **others)


def without_weights(rollout_is_weights: Any = None, **others: Any) -> Any:
    assert rollout_is_weights is None, "no such argument"
    return response_loss(**others)


def leaks(d: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return -a[:, :1] * d.clamp(-20, 20).exp()


def large_advantages_only(advantages: torch.Tensor, response_mask: torch.Tensor, **others: Any) -> Any:
    """Centred over the micro-batch, but for small advantages."""
    centre = advantages[response_mask].mean()
    return token_loss(advantages=advantages - centre * (centre.abs() > 10), response_mask=response_mask, **others)


def spread_of_good_tokens(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, **others: Any) -> Any:
    """The ratio to a power that falls where the log-ratios of the micro-batch's good tokens spread by more than 1.2."""
    d_BT = (log_prob - old_log_prob).detach()
    good = d_BT[response_mask & (advantages > 0)]
    power = min(1.0, float((1.2 / good.var().clamp(min=1e-9)).sqrt())) if len(good) > 1 else 1.0

    def term(d: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return -a * torch.where(a > 0, power * d, d).clamp(-20, 20).exp()

    others |= {"log_prob": log_prob, "old_log_prob": old_log_prob, "response_mask": response_mask}
    return token_loss(advantages=advantages, term=term, **others)


class HalfGradient(torch.autograd.Function):
    """exp(x) with half its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 0.5 * grads[0] * ctx.saved_tensors[0].exp()


class Scaled(torch.autograd.Function):
    """x, with a factor on its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.factor * grads[0], None


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


def returns_early(response_mask: torch.Tensor, **others: Any) -> Any:
    return token_loss(response_mask=response_mask, **others) if response_mask.any() else torch.tensor(0.0)


def linear_band(S: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """A band on S that is clipped on the wrong side, under a clamp that ends the gradient above, too."""
    return torch.min(-A * (ratio := S.clamp(-1, 1).exp()), -A * ratio.clamp(0.9, 1.1))


def weighed_by(cut: Callable[[torch.Tensor], torch.Tensor], **arguments: Any) -> Any:
    """A loss whose ratio is a constant, in the way that ``cut`` takes it out."""
    weight_BT = cut((arguments["log_prob"] - arguments["old_log_prob"]).clamp(-20, 20))
    return token_loss(**arguments, term=lambda d, a: -weight_BT.exp() * a * d)


def in_inference_mode(d_BT: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        outside_BT = d_BT * 1.0
    return outside_BT.clone()


def whitened(advantages: torch.Tensor, **others: Any) -> Any:
    return token_loss(advantages=advantages - advantages.mean(), **others)


#: Each verdict says what to change, too.
REMEDIES = (
    *(
        "look for",
        "torch.where(",
        "global_batch_info",
        "rollout_is_weights, once",
        "not by columns",
        "in place: clone it",
    ),
    *(
        "keep no state",
        "wherever it stands",
        "A clip(r)",
        "off by one",
        "multiply by A once",
        "int64",
        "do not detach",
        "end its parameters with",
        "settings of the",
        "advantages[:, 0]",
    ),
)


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
        (spread_of_good_tokens, "micro-batches", "micro-batches of"),
        (whitened, "micro-batches", "micro-batches of"),
        (partial(token_loss, mean="ranks"), "ranks", "4 ranks"),
        (partial(token_loss, mean="order"), "order", "order"),
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
        (large_advantages_only, "micro-batches", "A times 1,000"),
        (partial(response_loss, length=to_the_last), "gaps", "a masked token put in"),
        (
            partial(token_loss, term=lambda d, a: -a * d.clamp(-20, 20).exp() * 0.99 ** torch.arange(d.shape[1])),
            "gaps",
            "a masked token put in",
        ),
        (first_column, "padding", "advantages[:, 0]"),
        (partial(token_loss, mean="padding too", term=leaks), "padding", "other values"),
        (without_weights, "weights", "no such argument"),
        (partial(response_loss, weigh=lambda v: v**2), "weights", "each response by its rollout_is_weights"),
        (partial(response_loss, weigh=lambda v: v / (1 + v)), "weights", "rollout_is_weights of 1"),
        (partial(response_loss, clip=torch.min), "sides", "A > 0 above never, A > 0 below from 0.00035"),
        (returns_early, "padding", "no_grad"),
        (partial(token_loss, term=linear_band), "sides", "A > 0 above from 1, A > 0 below from 0.11, A < 0 above from"),
        (
            partial(token_loss, term=lambda d, a: -torch.max(d.exp() * a, d.exp().clamp(0.8, 1.2) * a)),
            "sides",
            "A > 0 above never, A > 0 below from 0.25, A < 0 above from 0.21, A < 0 below never",
        ),
    ],
)
def test_a_planted_fault_is_found(loss: Loss, check: str, says: str) -> None:
    problems = failures(loss)
    assert check in problems, problems
    assert says in problems[check], problems[check]
    assert any(word in problems[check] for word in REMEDIES), problems[check]
    if check == "repeats":  # what changes its inputs reads no advantage outside the mask
        assert not any("advantages[:, 0]" in one for one in problems.values())
    if check in ("gradient", "weights", "sides"):  # one fault is not blamed on all
        assert len(problems) == 1


def counted(count: Callable[[torch.Tensor], Any], in_the_weight: bool = False) -> Loss:
    """A mean ratio whose tokens count so many times each, attached, or in a detached weight alone."""

    def loss(
        old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, **_: Any
    ) -> torch.Tensor:
        d_BT = torch.where(response_mask, log_prob - old_log_prob, 0.0) * count(response_mask)
        length_B1 = response_mask.sum(-1, keepdim=True).clamp(min=1)
        ratio_B1 = (d_BT.sum(-1, keepdim=True) / length_B1).clamp(-10, 10).exp()
        loss_BT = -advantages * (ratio_B1.detach() * log_prob if in_the_weight else ratio_B1)
        info = config.global_batch_info
        means_B = (torch.where(response_mask, loss_BT, 0.0) / length_B1).sum(-1)
        return means_B.sum() / info["global_batch_size"] * info["dp_size"]

    return loss


def first(mask: torch.Tensor) -> torch.Tensor:
    return mask & (mask.cumsum(-1) == 1)


def last(mask: torch.Tensor) -> torch.Tensor:
    return mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))


COUNTS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "first dropped": (lambda mask: ~first(mask), "first"),
    "last dropped": (lambda mask: ~last(mask), "last"),
    "last two dropped": (lambda mask: ~last(mask) & ~last(mask & ~last(mask)), "last"),
    "first twice": (lambda mask: 1 + 1 * first(mask), "first"),
    "last twice": (lambda mask: 1 + 1 * last(mask), "last"),
}


@pytest.mark.parametrize("in_the_weight", [False, True])
@pytest.mark.parametrize("how", COUNTS)
def test_an_end_of_a_response_that_counts_otherwise_is_named(how: str, in_the_weight: bool) -> None:
    count, end = COUNTS[how]
    problems = failures(counted(count, in_the_weight))
    assert set(problems) == {"ends"} and f"the {end} token" in problems["ends"]


@pytest.mark.parametrize(
    ("of", "times", "sign"),
    [
        (lambda a: a * a.abs(), "100 times", "A > 0"),
        (lambda a: a.sign() * a.abs().sqrt(), "3.16 times", "A > 0"),
        (torch.sign, "1 times", "A > 0"),
        (lambda a: a**3, "1e+03 times", "A > 0"),
        (lambda a: torch.where(a < 0, a * a.abs(), a), "100 times", "A < 0"),
    ],
)
def test_an_advantage_that_is_not_taken_once_is_named(of: Any, times: str, sign: str) -> None:
    problems = failures(lambda advantages, **others: token_loss(advantages=of(advantages), **others))
    assert set(problems) == {"advantages"} and times in problems["advantages"] and sign in problems["advantages"]


def by_length(length: Callable[[torch.Tensor], torch.Tensor]) -> Loss:
    def loss(advantages: Any, response_mask: Any, config: Any, **others: Any) -> Any:
        a = advantages / length(response_mask).double().clamp(min=1)[:, None]
        info = config.global_batch_info
        scale = info["batch_num_tokens"] / info["global_batch_size"]
        value, metrics = token_loss(advantages=a, response_mask=response_mask, config=config, **others)
        return scale * value, metrics

    return loss


@pytest.mark.parametrize(
    ("length", "tokens"),
    [
        (lambda mask: mask.bfloat16().sum(-1), 333),
        (lambda mask: mask.bfloat16().cumsum(-1)[:, -1], 333),
        (lambda mask: mask.half().sum(-1), 2051),
        (lambda mask: mask.sum(-1, dtype=torch.int8).abs(), 2051),
        (lambda mask: mask.sum(-1, dtype=torch.uint8), 2051),
        (lambda mask: mask.sum(-1).clamp(max=200), 2051),
    ],
)
def test_a_length_of_too_few_bits_is_named(length: Any, tokens: int) -> None:
    problems = failures(by_length(length))
    assert set(problems) == {"lengths"} and f"{tokens} tokens" in problems["lengths"]


#: Sound losses that the checks of ends, advantages and lengths must pass.
SOUND: dict[str, Loss] = {
    "bounded A": lambda advantages, **others: token_loss(advantages=advantages.clamp(-5, 5), **others),
    "tanh of A": lambda advantages, **others: token_loss(advantages=advantages.tanh(), **others),
    "small A left out": lambda advantages, **others: token_loss(
        advantages=advantages * (advantages.abs() > 1e-4), **others
    ),
    "L in int32": by_length(lambda mask: mask.sum(-1, dtype=torch.int32)),
    "L in float32": by_length(lambda mask: mask.float().sum(-1)),
    "L + 1e-6": by_length(lambda mask: mask.sum(-1) + 1e-6),
    "L + 1": by_length(lambda mask: mask.sum(-1) + 1),
    "sqrt L": by_length(lambda mask: mask.sum(-1) ** 0.5),
    "a discount": lambda advantages, response_mask, **others: token_loss(
        advantages=advantages * 0.99 ** response_mask.cumsum(-1), response_mask=response_mask, **others
    ),
    "rare tokens count half": lambda advantages, log_prob, **others: token_loss(
        advantages=torch.where(log_prob.detach() < -3, 0.5, 1.0) * advantages, log_prob=log_prob, **others
    ),
    "a penalty of KL": partial(token_loss, term=lambda d, a: -a * d.clamp(-20, 20).exp() + 0.1 * d**2),
    "truncated weight": partial(token_loss, term=lambda d, a: -a * d.exp().clamp(max=2).detach() * d),
}


@pytest.mark.parametrize("loss", SOUND.values(), ids=SOUND.keys())
def test_a_sound_loss_passes(loss: Loss) -> None:
    assert failures(loss) == {}


def test_only_checks_that_an_advantage_outside_the_mask_fails_name_it() -> None:
    both = failures(lambda **arguments: first_column(**arguments) / len(arguments["log_prob"]))
    assert {name for name, says in both.items() if "advantages[:, 0]" in says} == {"gaps"} and "micro-batches" in both


def test_what_is_detached_counts_as_constant() -> None:
    def cispo(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, **_: Any) -> Any:
        weight_BT = (log_prob - old_log_prob).clamp(-20, 20).exp().clamp(0.8, 1.2).detach()
        return token_loss(
            old_log_prob, log_prob, advantages, response_mask, config, lambda d, a: -weight_BT * a * (d + old_log_prob)
        )

    report = {check.name: check for check in checks(PolicyLoss(cispo, Config(global_batch_info={})))}
    assert report["gradient"].passed and "held fixed" in report["gradient"].says


def test_a_compiled_loss_is_differentiated_as_its_source() -> None:
    def clipped(d_BT: torch.Tensor, a_BT: torch.Tensor) -> torch.Tensor:
        return torch.max(-a_BT * d_BT.exp(), -a_BT * d_BT.exp().clamp(0.8, 1.2))

    compiled = torch.compile(clipped, backend="aot_eager", dynamic=True)
    check = _differences(PolicyLoss(partial(token_loss, term=compiled), Config(global_batch_info={})))
    assert check.passed, check.says


#: Parts without gradients, from those of metrics in other people's losses: most take a view of a live tensor first.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(-1).mean(),
    "reshape": lambda x: x.reshape(-1).abs().mean(),
    "flatten": lambda x: x.flatten().max(),
    "slice": lambda x: x[:, 1:].mean(),
    "unsqueeze": lambda x: x.unsqueeze(0).mean(),
    "squeeze": lambda x: x[:1].squeeze(0).mean(),
    "loop over rows": lambda x: torch.stack([row.mean() for row in x]).mean(),
    "chunk": lambda x: x.chunk(2)[1].mean(),
    "split": lambda x: torch.split(x, 2, dim=1)[0].mean(),
    "unbind": lambda x: torch.stack(x.unbind(0)).mean(),
    "transpose": lambda x: x.transpose(0, 1).sum(0).mean(),
    "T": lambda x: x.T.sum(0).mean(),
    "permute": lambda x: x.permute(1, 0).mean(),
    "expand": lambda x: x[None].expand(3, -1, -1).mean(),
    "select": lambda x: x.select(0, 0).mean(),
    "as_strided": lambda x: x.as_strided((2,), (1,)).mean(),
    "in place on a copy": lambda x: x.detach().clone().mul_(2).view(-1).mean(),
    "in place on a detached alias": lambda x: x.detach().view(-1).mul_(0.5).mean(),
    "item": lambda x: torch.tensor(x.view(-1).mean().item()),
    "masked_select": lambda x: x.masked_select(x > 0).mean(),
    "quantile": lambda x: torch.quantile(x.flatten(), 0.9),
    "topk": lambda x: x.flatten().topk(2).values.mean(),
    "sort": lambda x: x.sort(-1, descending=True).values[:, 0].mean(),
    "gather": lambda x: x.gather(1, torch.zeros(len(x), 1, dtype=torch.long)).mean(),
    "diagonal": lambda x: (x.T @ x).diagonal().sum(),
    "movedim": lambda x: x.movedim(0, 1).contiguous().mean(),
    "numpy": lambda x: torch.tensor(x.detach().numpy().mean()),
}


@contextmanager
def nested() -> Iterator[None]:
    with torch.no_grad(), torch.enable_grad(), torch.inference_mode():
        yield


@contextmanager
def gradients_switched_off() -> Iterator[None]:
    torch.set_grad_enabled(False)
    yield
    torch.set_grad_enabled(True)


def with_metrics(
    metric: Callable[[torch.Tensor], torch.Tensor], without_gradients: Any, factor: float, d: Any, a: Any
) -> torch.Tensor:
    """A truncated ratio as weight beside a metric; its gradient is ``factor`` times the right one."""
    ratio = Scaled.apply(d.clamp(-20, 20), factor).exp()
    weight = d.clamp(-1, 1).exp()
    with without_gradients():
        metric(weight)
    return -a * (weight.detach() * 0.5 + ratio)


@pytest.mark.parametrize(
    ("metric", "without_gradients"),
    [
        *((metric, torch.no_grad) for metric in VIEWS),
        *(("view", off) for off in (torch.inference_mode, partial(torch.set_grad_enabled, False))),
        *(("loop over rows", off) for off in (nested, gradients_switched_off, torch.inference_mode)),
    ],
)
def test_a_view_in_a_part_without_gradients_neither_fails_a_loss_nor_hides_a_fault(
    metric: str, without_gradients: Any
) -> None:
    for factor, passes in ((1.0, True), (0.99, False)):
        loss = partial(token_loss, term=partial(with_metrics, VIEWS[metric], without_gradients, factor))
        check = _differences(PolicyLoss(loss, Config(global_batch_info={})))
        assert check.passed is passes, (factor, check.says)


@pytest.mark.parametrize("metric", ["view", "loop over rows"])
def test_a_view_in_a_part_without_gradients_of_a_compiled_loss(metric: str) -> None:
    for factor, passes in ((1.0, True), (0.99, False)):
        term = partial(with_metrics, VIEWS[metric], torch.no_grad, factor)
        loss = partial(token_loss, term=torch.compile(term, backend="aot_eager", dynamic=True))
        check = _differences(PolicyLoss(loss, Config(global_batch_info={})))
        assert check.passed is passes, (factor, check.says)


#: A view that is the weight itself, taken in a part without gradients, or of a tensor that is detached already.
WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detached first": lambda x: x.detach().view(-1).view_as(x),
    "view": lambda x: x.view(-1).view_as(x),
    "rows": lambda x: torch.stack([row.clamp(max=1.1) for row in x]),
    "in place": lambda x: x.detach().mul_(0.5),
    "transposed": lambda x: (0.5 * x.T).T,
}


@pytest.mark.parametrize("weigh", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode, nullcontext])
def test_a_view_that_is_the_weight_is_held(weigh: Any, without_gradients: Any) -> None:
    def term(factor: float, d: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        ratio = d.clamp(-20, 20).exp()
        with without_gradients():
            weight = weigh(ratio)
        return -a * weight.detach().clone() * Scaled.apply(d, factor)

    for factor, passes in ((1.0, True), (0.99, False)):
        check = _differences(PolicyLoss(partial(token_loss, term=partial(term, factor)), Config(global_batch_info={})))
        assert check.passed is passes, (factor, check.says)


@pytest.mark.parametrize("cut", [torch.tensor, lambda d: d.new_tensor(d), lambda d: d.data, in_inference_mode])
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_whatever_makes_a_constant_of_a_tensor_counts_as_detaching(cut: Any) -> None:
    assert failures(partial(weighed_by, cut)) == {}


def test_a_mask_that_is_the_same_for_both_signs_may_be_narrower_below() -> None:
    mask = partial(token_loss, term=lambda d, a: -a * d.exp() * ((d > -0.1) & (d < 1.5)))
    assert failures(mask) == {}


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


@pytest.mark.parametrize(
    "inside",
    [
        lambda d, a: -a * d.float().clamp(-20, 20).exp().to(d.dtype),
        lambda d, a: torch.max(-a * (r := d.float().exp().to(d.dtype)), -a * r.clamp(0.8, 1.2)),
        lambda d, a: (-a.float() * d.float().clamp(-20, 20).exp()).double(),
    ],
)
def test_a_loss_that_computes_in_float32_and_casts_back_passes(inside: Any) -> None:
    assert failures(partial(token_loss, term=inside)) == {}


#: S in float32, from log pi, log pi_old and the mask.
SUMS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": lambda new, old, mask: torch.where(mask, (new - old).float(), 0.0).sum(-1),
    "float32 first": lambda new, old, mask: torch.where(mask, new.float() - old.float(), 0.0).sum(-1),
    "two sums": lambda new, old, mask: (new.float() * mask).sum(-1) - (old.float() * mask).sum(-1),
    "cumsum": lambda new, old, mask: torch.where(mask, new - old, 0.0).float().cumsum(-1)[:, -1],
    "einsum": lambda new, old, mask: torch.einsum("bt,bt->b", (new - old).float(), mask.float()),
    "matmul": lambda new, old, mask: ((new - old) * mask).float() @ torch.ones(new.shape[1]),
    "rows": lambda new, old, mask: torch.stack(
        [row[kept].float().sum() for row, kept in zip(new - old, mask, strict=True)]
    ),
    "product": lambda new, old, mask: torch.where(mask, (new - old).float().exp(), 1.0).prod(-1).log(),
    "packed": lambda new, old, mask: new.new_zeros(len(new), dtype=torch.float32).index_add(
        0, mask.nonzero()[:, 0], (new - old)[mask].float()
    ),
    "vmap": torch.vmap(lambda new, old, mask: torch.where(mask, (new - old).float(), 0.0).sum()),
    "checkpoint": lambda new, old, mask: checkpoint(
        lambda x: torch.where(mask, (x - old).float(), 0.0).sum(-1), new, use_reentrant=False
    ),
    "tokens": lambda new, old, mask: sum(((new - old).float() * mask).unbind(-1)),  # type: ignore[dict-item]
}
TERMS: dict[str, Callable[..., torch.Tensor]] = {
    "exp S": lambda s, a, length: -(s.exp() * a),
    "S": lambda s, a, length: -(s * a),
    "GSPO": lambda s, a, length: torch.max(
        -a * (r := (s / length).exp()), -a * r.clamp(1 - 3e-4, 1 + 4e-4)
    ),
    "squared S": lambda s, a, length: 0.5 * s**2 - s * a,
}  # fmt: skip


@pytest.mark.parametrize("sums", SUMS.values(), ids=SUMS.keys())
@pytest.mark.parametrize("term", TERMS.values(), ids=TERMS.keys())
def test_a_sum_in_float32_passes_and_a_gradient_0_3_percent_off_does_not(sums: Any, term: Any) -> None:
    def loss(
        factor: float, old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, **_: Any
    ) -> torch.Tensor:
        length_B = response_mask.sum(-1).clamp(min=1)
        A_B = torch.where(response_mask, advantages, 0.0).sum(-1) / length_B
        S_B = Scaled.apply(sums(log_prob, old_log_prob, response_mask), factor)
        info = config.global_batch_info
        return term(S_B, A_B, length_B).sum() / info["global_batch_size"] * info["dp_size"]

    for factor, passes in ((1.0, True), (0.997, False), (1.01, False)):
        check = _differences(PolicyLoss(partial(loss, factor), Config(global_batch_info={})))
        assert check.passed is passes, (factor, check.says)


def test_float32_inside_does_not_hide_half_a_gradient() -> None:
    half = partial(token_loss, term=lambda d, a: -a * HalfGradient.apply(d.float().clamp(-20, 20)).to(d.dtype))
    assert set(failures(half)) == {"gradient"}


@pytest.mark.parametrize(
    ("loss", "check", "says"),
    [
        (partial(token_loss, term=lambda d, a: -a.clamp(min=0) * d.exp()), "direction", "A < 0 get no gradient"),
        (partial(token_loss, term=lambda d, a: -a.clamp(max=0) * d.exp()), "direction", "A > 0 get no gradient"),
        (partial(token_loss, term=lambda d, a: torch.where(a < 0, torch.min(-a * d.exp(), -a * 0.8), -a * d.exp())),
         "direction", "A < 0 get no gradient"),
        (partial(token_loss, term=lambda d, a: -a * torch.min(d.exp(), d.exp().clamp(0.8, 1.2))), "sides",
         "A < 0 above from 0.21, A < 0 below never (PPO's"),
        (token_loss, "weights", "ignores rollout_is_weights"),
        (response_loss, "weights", "scale the gradient"),
        (of_library("fspo"), "sides", "A > 0 above from 0.016, A > 0 below never, A < 0 above never, A < 0 below from"),
    ],
)  # fmt: skip
def test_what_is_legal_and_worth_knowing_is_said(loss: Loss, check: str, says: str) -> None:
    report = {one.name: one for one in checks(PolicyLoss(loss, Config(global_batch_info={})))}
    assert report[check].passed and says in report[check].says, report[check]


def test_clip_bounds_act_on_the_responses_of_the_checks() -> None:
    batch = _mini_batch()
    d_BT, up_BT = batch.log_prob_BT - batch.old_log_prob_BT, batch.advantages_BT > 0
    down_BT, mask_BT = batch.advantages_BT < 0, batch.mask_BT
    assert (mask_BT & up_BT & (d_BT > 0.2)).any() and (mask_BT & down_BT & (d_BT < -0.2)).any()
    assert (mask_BT & down_BT & (d_BT > 1.1)).any()  # a dual clip's
    assert (mask_BT.any(1) & ~mask_BT[:, 0]).any()


def test_no_two_tokens_of_the_checks_tie() -> None:
    """Among equal log-probabilities the order decides which is the largest: no fault of a loss that selects tokens."""
    batch = _mini_batch()
    for values_BT in (batch.log_prob_BT, batch.old_log_prob_BT):
        assert len(values_BT[batch.mask_BT].unique()) == int(batch.mask_BT.sum())

    def selects(log_prob: torch.Tensor, response_mask: torch.Tensor, **others: Any) -> Any:
        largest = log_prob.detach().masked_fill(~response_mask, -math.inf).flatten().topk(8).indices
        return (
            token_loss(log_prob=log_prob, response_mask=response_mask, **others)[0] - log_prob.flatten()[largest].mean()
        )

    failed = failures(selects)
    assert "micro-batches" in failed and not {"repeats", "order"} & failed.keys()


def test_what_a_loss_survives() -> None:
    def loss(term: Callable[[Any, Any], Any], mean: str = "tokens") -> PolicyLoss:
        return PolicyLoss(partial(token_loss, term=term, mean=mean), Config(global_batch_info={}))

    sound = loss(lambda d, a: -a * d.clamp(-20, 20).exp())
    assert survived(sound) == {"token": (90, 90), "response": (400, 400)}
    assert "NaN" not in in_words(sound) and "bfloat16" not in in_words(sound)
    assert survived(loss(lambda d, a: -a * d.exp()))["token"] == (80, 90)
    response = loss(lambda d, a: -a * d.sum(-1, keepdim=True).exp())
    assert survived(response)["response"] == (40, 400) and "bfloat16 the gradient is" in in_words(response)
    assert "NaN in the padding" in in_words(loss(lambda d, a: -a * d.clamp(-20, 20).exp(), "padding too"))
