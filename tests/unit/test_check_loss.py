"""A planted fault of a policy loss is found by its check, sound losses pass, each is told by name; and the command."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fspo.check_loss import PolicyLoss, check, configured, load
from fspo.check_loss.__main__ import main
from fspo.check_loss.by_length import LENGTHS, clip_by_length, normalisation, synthetic, weight_and_bound
from fspo.check_loss.call import Batch, LossError, synthetic_batch
from fspo.check_loss.checks import checks
from fspo.check_loss.like import compare
from fspo.fairness.lre import plain_lre
from fspo.losses import ALGORITHMS, sequence_policy_loss

Loss = Callable[..., Any]
torch.set_num_threads(1)  # small tensors

# ---------------------------------------------------------------- one sound loss, of which a fault changes one thing


def by_token(d: Any, mask: Any, length: Any) -> Any:
    return d.clamp(-20, 20).exp()


def linear(d: Any, mask: Any, length: Any) -> Any:
    return (d.sum(-1, keepdim=True) / length).exp()


def summed(d: Any, mask: Any, length: Any) -> Any:
    return d.sum(-1, keepdim=True).clamp(max=20).exp()


def mean_of_exp(d: Any, mask: Any, length: Any) -> Any:
    return (d.exp() * mask).sum(-1, keepdim=True) / length


def of_micro_batch(d: Any, mask: Any, length: Any) -> Any:
    return (d.sum() / mask.sum().clamp(min=1)).exp()


def tokens(mask: torch.Tensor) -> torch.Tensor:
    return mask.sum(-1, keepdim=True).clamp(min=1)


def formula(
    old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, rollout_is_weights: Any = None,
    ratio: Loss = by_token, band: Callable[[Any], Any] = lambda length: (0.0, 9e9), worse: Loss = torch.max,
    mean: str = "tokens", count: Callable[[Any], Any] = tokens, weigh: Callable[[Any], Any] = lambda weight: weight,
    **_: Any,
) -> torch.Tensor:  # fmt: skip
    """A clipped surrogate of ``ratio(d_BT, mask_BT, length_B1)``, [B, T] or [B, 1], between two bounds."""
    info, d_BT = config.global_batch_info, torch.where(response_mask, log_prob - old_log_prob, 0.0)
    length_B1 = count(response_mask)
    r = ratio(d_BT, response_mask, length_B1)
    low, high = (torch.as_tensor(bound) for bound in band(length_B1))
    loss_BT = worse(-advantages * r, -advantages * torch.minimum(torch.maximum(r, low), high))
    loss_BT = loss_BT if rollout_is_weights is None else loss_BT * weigh(rollout_is_weights)
    loss_BT = torch.where(response_mask, loss_BT, 0.0)
    if mean == "order":
        loss_BT = loss_BT * torch.arange(1.0, len(loss_BT) + 1)[:, None]
    if mean in ("rows", "own tokens"):
        return (loss_BT / length_B1).sum(-1).mean() if mean == "rows" else loss_BT.sum() / response_mask.sum()
    if mean == "responses":
        loss_BT = loss_BT / length_B1
    by = "global_batch_size" if mean in ("responses", "sum") else "batch_num_tokens"
    return loss_BT.sum() / info[by] * info["dp_size"] ** (2 if mean == "ranks twice" else 1)


# Families of losses that have a name.
GSPO = partial(formula, ratio=linear, band=lambda _: (1 - 3e-4, 1 + 4e-4), mean="responses")
PPO = partial(formula, band=lambda _: (0.8, 1.28))
FSPO = partial(formula, ratio=summed, band=lambda L: ((-0.03 * L**0.5).exp(), (0.04 * L**0.5).exp()), mean="responses")


def changed(name: str, change: Callable[[Any], Any], loss: Loss = PPO) -> Loss:
    """The loss with another value of one argument."""
    return lambda **given: loss(**given | {name: change(given.get(name))})


def with_advantages(change: Callable[[Any, Any], Any], loss: Loss = PPO) -> Loss:
    return lambda **given: loss(**given | {"advantages": change(given["advantages"], given["response_mask"])})


def spread_of_good_tokens(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, **others: Any) -> Any:
    """The ratio to a power that falls where the log-ratios of the micro-batch's good tokens spread by more than 1.2."""
    good = (log_prob - old_log_prob).detach()[response_mask & (advantages > 0)]
    power = min(1.0, float((1.2 / good.var().clamp(min=1e-9)).sqrt())) if len(good) > 1 else 1.0
    tensors = {"advantages": advantages, "log_prob": log_prob, "old_log_prob": old_log_prob}
    return PPO(**tensors, response_mask=response_mask, ratio=lambda d, *_: (power * d).clamp(-20, 20).exp(), **others)


def selects(log_prob: torch.Tensor, response_mask: torch.Tensor, **others: Any) -> Any:
    largest = log_prob.detach().masked_fill(~response_mask, -9e9).flatten().topk(8).indices
    return PPO(log_prob=log_prob, response_mask=response_mask, **others) - log_prob.flatten()[largest].mean()


def without_weights(rollout_is_weights: Any = None, **others: Any) -> Any:
    assert rollout_is_weights is None, "no such argument"
    return GSPO(**others)


def returns_early(response_mask: torch.Tensor, **others: Any) -> Any:
    return PPO(response_mask=response_mask, **others) if response_mask.any() else torch.tensor(0.0)


def clamped_sum(limit: float, d: Any, mask: Any, length: Any) -> Any:
    return (d.sum(-1, keepdim=True).clamp(-limit, limit) / length).exp()


def forgotten_detach(d: Any, *rest: Any) -> Any:
    return linear(d, *rest) * (d - d.detach()).exp()


def with_metrics(without_gradients: Any, metric: Callable[[Any], Any], d: Any, *_: Any) -> Any:
    """A detached ratio beside a metric in a part without gradients, as in other people's losses."""
    ratio = d.clamp(-20, 20).exp()
    with without_gradients():
        metric(ratio)
    return 0.5 * ratio.detach() + ratio


def weighs_the_ratio(rollout_is_weights: Any = None, old_log_prob: Any = None, **given: Any) -> Any:
    """A band on the ratio to the rollout's policy: the weights, by response, are a factor inside the clip."""
    v = torch.ones_like(old_log_prob) if rollout_is_weights is None else rollout_is_weights
    first_BT = given["response_mask"] & (given["response_mask"].cumsum(-1) == 1)
    return FSPO(old_log_prob=old_log_prob - torch.where(first_BT, v, 1.0).log(), **given)


CALLS = iter(range(10**9))
COMPILED = torch.compile(lambda d: d.clamp(-20, 20).exp(), backend="aot_eager", dynamic=True)
FIRST_COLUMN = with_advantages(lambda a, mask: a[:, :1].expand_as(a), GSPO)
ANOTHER, NEAR = "another loss: on policy cosine", "equal up to log-ratio 0."

#: Name, loss, the check that must fail; then the loss whose name it has, and how ``--like`` of that begins.
#: The plainest fault of each check: tests/promises/some_losses.py.
FAULTS: list[tuple[str, Loss, str, Loss, str]] = [
    ("a ratio over the width", partial(GSPO, ratio=lambda d, *_: d.mean(-1, keepdim=True).exp()), "padding", GSPO,
     "0.002941 L times"),
    ("no gradient without a token", returns_early, "padding", PPO, "equal"),
    ("0/0 without a token", partial(GSPO, count=lambda mask: mask.sum(-1, keepdim=True)), "padding", GSPO, "equal"),
    ("A of the first column", FIRST_COLUMN, "padding", GSPO, "equal"),
    ("A of the first column, masked", FIRST_COLUMN, "gaps", GSPO, "equal"),
    ("a discount by column", with_advantages(lambda a, mask: a * 0.99 ** torch.arange(a.shape[1])), "gaps", PPO,
     ANOTHER),
    ("a weight v / (1 + v)", partial(GSPO, weigh=lambda v: v / (1 + v)), "weights", GSPO, "equal"),
    ("a weight that is refused", without_weights, "weights", GSPO, "equal"),
    ("a mean over the rows", partial(GSPO, mean="rows"), "micro-batches", GSPO, "equal"),
    ("dp_size twice", partial(PPO, mean="ranks twice"), "micro-batches", PPO, "equal"),
    ("the order of rows", partial(PPO, mean="order"), "micro-batches", PPO, ANOTHER),
    ("one ratio for all", partial(GSPO, ratio=of_micro_batch), "micro-batches", GSPO, ANOTHER),
    ("large A centred", with_advantages(lambda a, mask: a - (c := a[mask].mean().nan_to_num()) * (c.abs() > 10)),
     "micro-batches", PPO, "equal"),
    ("a spread of the micro-batch", spread_of_good_tokens, "micro-batches", PPO, "equal"),
    ("tokens selected in the micro-batch", selects, "micro-batches", PPO, ANOTHER),
    ("A bounded in place", changed("advantages", lambda a: a.clamp_(-0.1, 0.1)), "repeats", PPO, ANOTHER),
    ("a count of calls", lambda **given: PPO(**given) * (1 + next(CALLS)), "repeats", PPO, ""),
    ("a constant taken off A", with_advantages(lambda a, mask: a - 0.6), "direction", PPO, ANOTHER),
    ("not finite", lambda log_prob, **others: log_prob.sum() * float("nan"), "direction", PPO, "not comparable"),
    ("old and new exchanged", partial(GSPO, ratio=lambda d, *rest: linear(-d, *rest)), "direction", GSPO, "-1 times"),
    ("PPO's smaller one", partial(PPO, worse=torch.min), "sides", PPO, NEAR),
    ("FSPO's smaller one", partial(FSPO, worse=torch.min), "sides", FSPO, NEAR),
    ("a mask below alone", partial(formula, ratio=lambda d, *_: d.exp() * (d > -0.1)), "sides", PPO, NEAR),
    ("a clamp above the wrong clip", partial(PPO, ratio=lambda d, *_: d.clamp(-1, 1).exp(), worse=torch.min), "sides",
     PPO, NEAR),
]  # fmt: skip

#: Name, loss; the loss whose name it has, how ``--like`` of that begins, and what stands in it.
SOUND: list[tuple[str, Loss, Loss, str, str]] = [
    ("PPO", PPO, PPO, "equal", ""),
    ("GSPO", GSPO, GSPO, "equal", ""),
    ("FSPO", FSPO, FSPO, "equal", ""),
    ("compiled", partial(PPO, ratio=lambda d, *_: COMPILED(d)), PPO, "equal", ""),
    ("weights in the ratio", weighs_the_ratio, FSPO, "equal", ""),
    ("truncated weight", partial(PPO, ratio=lambda d, *_: d.exp().clamp(max=2).detach() * d), PPO, ANOTHER, ""),
    *((f"bounded A of {name}", with_advantages(lambda a, mask: a.clamp(-5, 5), loss), loss,
       "equal, but not where A is 30 or -30", "") for name, loss in (("PPO", PPO), ("GSPO", GSPO), ("FSPO", FSPO))),
    ("tanh of A", with_advantages(lambda a, mask: a.tanh()), PPO, ANOTHER, ""),
    ("A > 0 alone", with_advantages(lambda a, mask: a.clamp(min=0)), PPO, ANOTHER, ""),
    ("a discount by token", with_advantages(lambda a, mask: a * 0.99 ** mask.cumsum(-1)), PPO, ANOTHER, ""),
    ("sqrt L", partial(GSPO, count=lambda mask: tokens(mask) ** 0.5), GSPO, "L times", ""),
    ("a mask narrower below", partial(PPO, ratio=lambda d, *_: d.exp() * ((d > -0.1) & (d < 1.5))), PPO, NEAR, ""),
    ("a view without gradients", partial(PPO, ratio=partial(with_metrics, torch.no_grad, lambda x: x.view(-1).mean())),
     PPO, ANOTHER, ""),
    ("rows in inference mode", partial(PPO, ratio=partial(with_metrics, torch.inference_mode,
     lambda x: torch.stack([row.mean() for row in x]))), PPO, ANOTHER, ""),
    ("exp of the sum", partial(GSPO, ratio=summed), GSPO, "L times (L", "up to log-ratio 9.6e-07"),
    ("a forgotten detach", partial(GSPO, ratio=forgotten_detach), GSPO, "2 times", ""),
    ("mean of exp", partial(GSPO, ratio=mean_of_exp), GSPO, NEAR, "token in place of length_normalised"),
    ("GSPO by token", partial(GSPO, mean="tokens"), GSPO, "0.02381 L times", ""),
    ("L twice", partial(GSPO, count=lambda mask: tokens(mask) ** 2), GSPO, "L^-2 times", ""),
    ("a narrow clip", partial(GSPO, band=lambda _: (1 - 1e-5, 1 + 1e-5)), GSPO, "equal up to log-ratio 9.2e-06",
     "above: from 1.1e-05"),
    ("ratios of tokens", partial(GSPO, ratio=by_token), GSPO, "equal up to log-ratio 8.7e-05", "token in place of"),
    ("S at most 10", partial(GSPO, ratio=partial(clamped_sum, 10)), GSPO, "equal, but not where |S| exceeds 8", ""),
    ("S at most 60", partial(GSPO, ratio=partial(clamped_sum, 60)), GSPO, "equal, but not where |S| exceeds 8", ""),
    ("PPO of the mean", partial(PPO, ratio=linear), PPO, NEAR, "length_normalised in place of token"),
    ("PPO by response", partial(PPO, mean="responses"), PPO, "42 1/L times", ""),
    ("another clip", partial(PPO, band=lambda _: (0.72, 1.2)), PPO, NEAR, "A > 0 above: from 0.21"),
    ("FSPO's band, GSPO's weight", partial(FSPO, ratio=linear), FSPO, "1/L times", "length_normalised in place of"),
    ("FSPO's band on the ratio", partial(FSPO, band=lambda L: (1 - 0.03 * L**0.5, 1 + 0.04 * L**0.5)), FSPO, NEAR, ""),
    ("a sum", partial(FSPO, mean="sum"), FSPO, "L times (L", ""),
]  # fmt: skip

#: The families by name: ours have our own implementation.
NAMED: dict[Loss, PolicyLoss] = {
    GSPO: load("gspo"),
    PPO: PolicyLoss(PPO, configured([])),
    FSPO: load("fspo", ["policy_loss.c_high=0.04"]),
}


def policy_loss(function: Loss) -> PolicyLoss:
    return PolicyLoss(function, configured([]))


def failures(loss: Loss) -> dict[str, str]:
    """What is found wrong, by check."""
    return {check.name: check.says for check in checks(policy_loss(loss)) if not check.passed}


def beside(name: Loss, loss: Loss) -> str:
    """What ``--like`` says."""
    try:
        comparison = compare(PolicyLoss(loss, NAMED[name].config), NAMED[name])
    except LossError as error:
        return str(error)
    assert comparison.equal == (comparison.verdict == "equal")
    return "\n".join([comparison.verdict, *comparison.differences])


@pytest.mark.parametrize(("name", "loss", "check", "like", "begins"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_a_planted_fault_is_found(name: str, loss: Loss, check: str, like: Loss, begins: str) -> None:
    problems = failures(loss)
    assert check in problems
    if check in ("weights", "sides"):  # one fault is not blamed on all
        assert len(problems) == 1
    blamed = {name for name, says in problems.items() if "advantages[:, 0]" in says}
    assert blamed == ({"padding", "gaps"} if "first column" in name else set())
    text = beside(like, loss)
    assert text.startswith(begins) and (begins != "equal" or text == "equal"), text


@pytest.mark.parametrize(("name", "loss", "like", "begins", "says"), SOUND, ids=[name for name, *_ in SOUND])
def test_a_sound_loss_passes_and_is_told_from_another(
    name: str, loss: Loss, like: Loss, begins: str, says: str
) -> None:
    assert failures(loss) == {}
    text = beside(like, loss)
    assert text.startswith(begins) and says in text and (begins != "equal" or text == "equal"), text


def test_only_checks_that_an_advantage_outside_the_mask_fails_name_it() -> None:
    both = failures(lambda **given: FIRST_COLUMN(**given) / len(given["log_prob"]))
    assert {name for name, says in both.items() if "advantages[:, 0]" in says} == {"gaps"} and "micro-batches" in both


def in_place_too_late(log_prob: Any, advantages: Any, **_: Any) -> Any:
    loss = (log_prob * advantages).sum()
    advantages.zero_()
    return loss


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda log_prob, old_log_prob, advantages, response_mask, config: 0, r"\*\*_"),
        (lambda log_prob, old_log_prob, advantages, mask: 0, "response_mask"),
        (lambda log_prob, **_: log_prob, r"\(12, 40\)"),
        (lambda log_prob, **_: log_prob.detach().sum(), "detach"),
        (lambda config, **_: config.policy_loss.beta, r"no beta .*test_check_loss.py:\d+.*--config"),
        (in_place_too_late, "change no tensor in place"),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_sentence(loss: Loss, says: str) -> None:
    with pytest.raises(LossError, match=says) as error:
        checks(policy_loss(loss))
    assert "\n" not in str(error.value)


def test_a_function_of_the_four_tensors_whose_caller_averages() -> None:
    def loss(log_prob: Any, old_log_prob: Any, advantages: Any, response_mask: Any) -> Any:
        length_B = response_mask.sum(-1).clamp(min=1)
        return -(((log_prob - old_log_prob).exp() * advantages * response_mask).sum(-1) / length_B).mean()

    assert {"micro-batches"} <= failures(loss).keys()
    assert [x.name for x in checks(PolicyLoss(loss, configured([]), caller_averages=True)) if not x.passed] == []
    own = PolicyLoss(lambda **given: PPO(mean="own tokens", **given), configured([]), caller_averages=True)
    assert "micro-batches" in {x.name for x in checks(own) if not x.passed}


@pytest.mark.parametrize(
    ("loss", "check", "says"),
    [
        (with_advantages(lambda a, mask: a.clamp(min=0)), "direction", "those with A < 0 get no gradient"),
        (lambda **given: -PPO(**given), "direction", "missing minus"),
        (with_advantages(lambda a, mask: a - 0.6), "direction", "a mean that is taken off"),
        (PPO, "weights", "scale the gradient"),
        (lambda rollout_is_weights=None, **given: PPO(**given), "weights", "ignores rollout_is_weights"),
        (weighs_the_ratio, "weights", "a factor of the ratio"),
        (GSPO, "sides", "A > 0 above from 0.00041, A > 0 below never, A < 0 above never, A < 0 below from 0.00035"),
        (partial(GSPO, band=lambda _: (1 - 1e-5, 1 + 1e-4)), "sides", "A > 0 above from 0.0001, A"),
        (partial(GSPO, band=lambda _: (1 - 1e-5, 1 + 1e-4)), "sides", "A < 0 below from 1.1e-05"),
        (partial(GSPO, band=lambda _: (1 - 1e-9, 1 + 1e-9)), "sides", "A > 0 above from under 9.6e-07"),
    ],
)
def test_what_is_worth_knowing_is_said(loss: Loss, check: str, says: str) -> None:
    report = {one.name: one for one in checks(policy_loss(loss))}
    assert says in report[check].says, report[check]


# ---------------------------------------------------------------- what it does by length


@pytest.mark.parametrize(("name", "exponent"), [("fspo", 0.0), ("seq_gspo", -1.0), ("luspo", 0.0)])
def test_normalisation(name: str, exponent: float) -> None:
    per_token, fitted = normalisation(load(name))
    assert fitted == pytest.approx(exponent, abs=1e-9)
    assert per_token == pytest.approx([length**exponent for length in LENGTHS])


@pytest.mark.parametrize(
    ("weigh", "weight"),
    [
        (lambda d, mask: d.exp(), ("token", "")),
        (lambda d, mask: d.exp().clamp(max=1), ("token", ", at most 1")),
        (lambda d, mask: d.exp().clamp(min=1), ("token", ", at least 1")),
        (lambda d, mask: d.sum(-1, keepdim=True).exp().clamp(max=1), ("sequence", ", at most 1")),
        (lambda d, mask: (-d).sum(-1, keepdim=True).exp(), (None, "")),
        (lambda d, mask: d.mul(0.5).exp(), (None, "")),
        (lambda d, mask: torch.ones_like(d), ("none", "")),
        (lambda d, mask: d.exp().amax(-1, keepdim=True), (None, "")),
        (lambda d, mask: d.cumsum(-1).exp(), ("prefix", "")),
        (lambda d, mask: d.exp() * (d.mean(-1, keepdim=True).abs() < 1e-4), ("token", "")),  # as narrow as masks in use
        (lambda d, mask: (d.sum() / mask.sum()).exp(), (None, "")),
        (lambda d, mask: torch.cat([b.mean(-1)[:, None].expand_as(b) for b in d.split(8, -1)], -1).exp(), (None, "")),
    ],
)  # fmt: skip
def test_a_weight_is_named_rightly_or_not_at_all(weigh: Any, weight: tuple[str | None, str]) -> None:
    def loss(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, **_: Any) -> Any:
        d_BT = (log_prob - old_log_prob).masked_fill(~response_mask, 0.0)
        return -(advantages * weigh(d_BT, response_mask).detach() * log_prob * response_mask).sum()

    assert weight_and_bound(policy_loss(loss)) == weight


def test_what_a_band_keeps_is_its_acceptance() -> None:
    samples = synthetic(0.03)[:10]
    clip = clip_by_length(load("rloo"), "sequence", samples)

    def removed(b: Batch) -> torch.Tensor:
        tensors = b.log_prob_BT, b.old_log_prob_BT, b.advantages_BT, b.mask_BT
        output = sequence_policy_loss(*tensors, ALGORITHMS["seq_rloo"])
        return output.clipped_high_B | output.clipped_low_B

    kept_B = ~torch.cat([removed(batch) for batch in samples])
    length_B = torch.cat([batch.mask_BT.sum(-1) for batch in samples])
    bin_B = torch.bucketize(length_B, torch.tensor(clip.starts), right=True) - 1
    total, kept = (torch.bincount(x, minlength=8).numpy() for x in (bin_B, bin_B[kept_B]))
    assert clip.error.lre == pytest.approx(float(plain_lre(kept, total)), abs=1e-5)
    assert clip.error.rate == pytest.approx(float(kept_B.double().mean()), abs=1e-6)
    assert total.min() > 100 and clip.error.rate_K[0] > clip.error.rate_K[-1] + 0.1  # it rejects long responses


def test_the_report_of_a_loss_in_a_test_of_ones_own() -> None:
    report = check(policy_loss(GSPO))
    assert report.conforms and report.text().startswith("conforms: 7 checks passed\nok ")
    assert not check(policy_loss(partial(GSPO, mean="rows"))).conforms


# ---------------------------------------------------------------- the command

SOURCE = """
import dataclasses, torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn

def sound(old_log_prob, log_prob, advantages, response_mask, config, **_):
    info = config.global_batch_info
    loss_BT = torch.where(response_mask, -advantages * (log_prob - old_log_prob).clamp(-20, 20).exp(), 0.0)
    length_B1 = response_mask.sum(-1, keepdim=True).clamp(min=1)
    return (loss_BT / length_B1).sum() / info["global_batch_size"] * info["dp_size"], {}

def mean(old_log_prob, log_prob, advantages, response_mask):
    loss_BT = torch.where(response_mask, -advantages * (log_prob - old_log_prob).clamp(-20, 20).exp(), 0.0)
    return (loss_BT.sum(-1) / response_mask.sum(-1).clamp(min=1)).mean()

def undefined(log_prob, **_):
    return log_prob.sum() * float("nan")

@dataclasses.dataclass
class Settings:
    beta: float = 0.5
    name: str = dataclasses.field(default_factory=str)

@dataclasses.dataclass
class ActorSettings:
    strategy: str
    clip_ratio_high: float = 0.3
    policy_loss: Settings = dataclasses.field(default_factory=Settings)

def fed(config, **given):
    assert config.policy_loss.beta == 0.5 and config.name == "x" and config.clip_ratio == 0.2
    return sound(config=config, **given)

def asserts(config=None, **others):
    assert isinstance(config, ActorSettings), "give ActorSettings"
    assert config.clip_ratio_high == 0.3 and config.policy_loss.beta == 0.5
    config.policy_loss.gamma
    return sound(config=config, **others)

def hungry(config, **_):
    return config.policy_loss.beta * 1.0

def of_verl(old_log_prob, log_prob, advantages, response_mask, **others):
    return get_policy_loss_fn("gspo")(old_log_prob, log_prob, 2 * advantages, response_mask, **others)

number = 3
"""
VERLS = "verl.trainer.ppo.core_algos:compute_policy_loss_"
ACTOR = ["--actor", "verl.workers.config:ActorConfig"]


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "check_loss_example.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("fspo.check_loss.DISPERSIONS", (0.03,))
    monkeypatch.setattr("fspo.check_loss.by_length._MINI_BATCHES", 5)


def words(line: str) -> list[str]:
    """Of a command, in which a colon begins a name of the example."""
    return [f"check_loss_example{word}" if word.startswith(":") else word for word in line.split()]


@pytest.mark.parametrize(
    ("line", "status", "last"),
    [
        (":sound", 0, "conforms: 7 checks passed (is it the loss that it is called? --like NAME compares)"),
        (":mean", 1, "does not conform: padding, micro-batches (is it"),
        (":mean --average caller", 0, "conforms"),
        (":mean --average caller --like :sound", 0, "equal to check_loss_example:sound; conforms: 7 checks passed"),
        (":mean --like :sound", 1, "equal to check_loss_example:sound; does not conform: padding, micro-batches"),
        (":sound --like gspo", 1, "not equal to gspo; 7 checks passed"),
        (":undefined", 1, "does not conform: direction"),
        ("luspo", 0, "conforms"),
        ("rloo --like seq_rloo --config policy_loss.c_low=1", 0, "equal"),
    ],
)
def test_the_last_line_says_the_reason_of_the_exit_status(
    capsys: pytest.CaptureFixture[str], line: str, status: int, last: str
) -> None:
    assert main(words(line)) == status
    shown = capsys.readouterr().out
    assert shown.rstrip().splitlines()[-1].startswith(last) and ("FAIL" in shown) == ("does not conform" in shown), (
        shown
    )


@pytest.mark.parametrize(
    ("line", "status", "says"),
    [
        (f"{VERLS}gspo --like gspo", 0, "like gspo: equal\n"),
        (f"{VERLS}gspo --like gspo --loss-agg-mode token-mean", 1, "token-mean in place of seq-mean-token-mean"),
        (f"{VERLS}gspo --like gspo --config clip_ratio_low=1e-4", 1, "A < 0 below: from 0.0001 in place"),
        (f"{VERLS}clip_cov", 1, "FAIL  repeats"),
        (":of_verl --like gspo", 1, "like gspo: 2 times"),
    ],
)  # fmt: skip
def test_losses_of_verl_by_their_own_names(
    capsys: pytest.CaptureFixture[str], line: str, status: int, says: str
) -> None:
    assert main([*words(line), *ACTOR]) == status
    shown = capsys.readouterr().out
    assert says in shown, shown


@pytest.mark.parametrize(
    ("line", "status", "lines"),
    [
        (":hungry :sound", 2, ["example:hungry", "per token ~ L^-1.00", "old policy: token", "keeps 100.0%"]),
        (":undefined", 1, ["FAIL  direction", "division by 0", "no power of L"]),
    ],
)  # fmt: skip
def test_the_full_report(capsys: pytest.CaptureFixture[str], line: str, status: int, lines: list[str]) -> None:
    assert main([*words(line), "--full"]) == status
    shown = "".join(capsys.readouterr())
    assert not re.search(r"\b(nan|inf)\b", shown) and all(one in shown for one in lines), shown


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("check_loss_example", "MODULE:FUNCTION"),
        ("no_such_module:f", "install its package"),
        (":number", "MODULE:FUNCTION"),
        (":sound --like gspoo", "seq_gspo"),
        (":sound --like :undefined", "not comparable"),
        (":sound --config clip", "KEY=VALUE"),
        (":hungry", "no beta "),
        (":asserts", "--actor MODULE:CLASS"),
        (":asserts --actor check_loss_example:ActorSettings", "--config KEY=VALUE"),
    ],
)
def test_what_cannot_be_checked_ends_with_a_sentence(capsys: pytest.CaptureFixture[str], line: str, says: str) -> None:
    assert main(words(line)) == 2
    shown = capsys.readouterr()
    assert says in shown.err and shown.err.startswith(words(line)[0]) and shown.err.count("\n") == 1 and shown.out == ""


def test_settings_are_read_as_values() -> None:
    config = configured(["clip_ratio_high=0.28", "policy_loss.vespo.k_pos=2", "loss_agg_mode=token-sum"])
    assert (config.clip_ratio_high, config.policy_loss.vespo.k_pos, config.loss_agg_mode) == (0.28, 2, "token-sum")
    assert config.get("clip_ratio_c", 20.0) == 3.0
    batch = synthetic_batch([3, 2], [0.1, 0.1], [1.0, -1.0])
    for settings in (["policy_loss.beta=0.5"], ["policy_loss._target_=check_loss_example.Settings"]):
        assert load("check_loss_example:fed", [*settings, "name=x"]).value(batch).numel() == 1
    actor = "check_loss_example:ActorSettings"
    assert load("check_loss_example:asserts", ["policy_loss.gamma=1"], actor=actor).value(batch).numel() == 1
