"""A planted fault of a policy loss is found by its check; sound losses pass, and get the right name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fspo.check_loss import PolicyLoss, check, configured, load
from fspo.check_loss.by_length import LENGTHS, clip_by_length, normalisation, synthetic, weight_and_bound
from fspo.check_loss.call import Batch, LossError
from fspo.check_loss.checks import checks, mini_batch
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


def to_the_last(mask: torch.Tensor) -> torch.Tensor:
    """L with the tokens of tools, a fault."""
    return (torch.arange(1, mask.shape[1] + 1) * mask).amax(-1, keepdim=True).clamp(min=1)


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
    if mean != "padding too":
        loss_BT = torch.where(response_mask, loss_BT, 0.0)
    if mean == "order":
        loss_BT = loss_BT * torch.arange(1.0, len(loss_BT) + 1)[:, None]
    if mean in ("rows", "own tokens"):
        return (loss_BT / length_B1).sum(-1).mean() if mean == "rows" else loss_BT.sum() / response_mask.sum()
    if mean in ("responses", "width"):
        loss_BT = loss_BT / (length_B1 if mean == "responses" else loss_BT.shape[1])
    by = "global_batch_size" if mean in ("responses", "width", "sum") else "batch_num_tokens"
    return loss_BT.sum() / info[by] * info["dp_size"] ** {"no ranks": 0, "ranks twice": 2}.get(mean, 1)


GSPO = partial(formula, ratio=linear, band=lambda _: (1 - 3e-4, 1 + 4e-4), mean="responses")
PPO = partial(formula, band=lambda _: (0.8, 1.28))
FSPO = partial(formula, ratio=summed, band=lambda L: ((-0.03 * L**0.5).exp(), (0.04 * L**0.5).exp()), mean="responses")


def changed(name: str, change: Callable[[Any], Any], loss: Loss = PPO) -> Loss:
    """The loss with another value of one argument."""
    return lambda **given: loss(**given | {name: change(given.get(name))})


def with_advantages(change: Callable[[Any, Any], Any], loss: Loss = PPO) -> Loss:
    return lambda **given: loss(**given | {"advantages": change(given["advantages"], given["response_mask"])})


def in_float32(**given: Any) -> Any:
    return GSPO(
        **{k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in given.items()}
    )


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


CALLS = iter(range(10**9))
FIRST_COLUMN = with_advantages(lambda a, mask: a[:, :1].expand_as(a), GSPO)

#: Name, loss, the check that must fail.
FAULTS: list[tuple[str, Loss, str]] = [
    ("the padding counts", partial(PPO, mean="padding too"), "padding"),
    ("a mean over the width", partial(PPO, mean="width"), "padding"),
    ("a ratio over the width", partial(GSPO, ratio=lambda d, *_: d.mean(-1, keepdim=True).exp()), "padding"),
    ("no gradient without a token", returns_early, "padding"),
    ("0/0 without a token", partial(GSPO, count=lambda mask: mask.sum(-1, keepdim=True)), "padding"),
    ("A of the first column", FIRST_COLUMN, "padding"),
    ("A of the first column, masked", FIRST_COLUMN, "gaps"),
    ("L to the last token", partial(GSPO, count=to_the_last), "gaps"),
    ("a discount by column", with_advantages(lambda a, mask: a * 0.99 ** torch.arange(a.shape[1])), "gaps"),
    ("a weight squared", partial(GSPO, weigh=lambda v: v**2), "weights"),
    ("a weight v / (1 + v)", partial(GSPO, weigh=lambda v: v / (1 + v)), "weights"),
    ("a weight that is refused", without_weights, "weights"),
    ("a mean over the rows", partial(GSPO, mean="rows"), "micro-batches"),
    ("a mean over its own tokens", partial(PPO, mean="own tokens"), "micro-batches"),
    ("dp_size forgotten", partial(PPO, mean="no ranks"), "micro-batches"),
    ("dp_size twice", partial(PPO, mean="ranks twice"), "micro-batches"),
    ("the order of rows", partial(PPO, mean="order"), "micro-batches"),
    ("one ratio for all", partial(GSPO, ratio=of_micro_batch), "micro-batches"),
    ("A centred in the micro-batch", with_advantages(lambda a, mask: a - a[mask].mean().nan_to_num()), "micro-batches"),
    ("large A centred", with_advantages(lambda a, mask: a - (c := a[mask].mean().nan_to_num()) * (c.abs() > 10)),
     "micro-batches"),
    ("a spread of the micro-batch", spread_of_good_tokens, "micro-batches"),
    ("tokens selected in the micro-batch", selects, "micro-batches"),
    ("A halved in place", changed("advantages", lambda a: a.mul_(0.5)), "repeats"),
    ("A bounded in place", changed("advantages", lambda a: a.clamp_(-0.1, 0.1)), "repeats"),
    ("random numbers", changed("log_prob", lambda x: x * (1 + torch.rand(x.shape[0], 1))), "repeats"),
    ("a count of calls", lambda **given: PPO(**given) * (1 + next(CALLS)), "repeats"),
    ("a missing minus", lambda **given: -PPO(**given), "direction"),
    ("no gradient", lambda **given: 0 * PPO(**given), "direction"),
    ("a constant taken off A", with_advantages(lambda a, mask: a - 0.6), "direction"),
    ("not finite", lambda log_prob, **others: log_prob.sum() * float("nan"), "direction"),
    ("old and new exchanged", partial(GSPO, ratio=lambda d, *rest: linear(-d, *rest)), "direction"),
    ("GSPO's smaller one", partial(GSPO, worse=torch.min), "sides"),
    ("PPO's smaller one", partial(PPO, worse=torch.min), "sides"),
    ("FSPO's smaller one", partial(FSPO, worse=torch.min), "sides"),
    ("a mask below alone", partial(formula, ratio=lambda d, *_: d.exp() * (d > -0.1)), "sides"),
    ("a clamp above the wrong clip", partial(PPO, ratio=lambda d, *_: d.clamp(-1, 1).exp(), worse=torch.min), "sides"),
]  # fmt: skip


def with_metrics(without_gradients: Any, metric: Callable[[Any], Any], d: Any, *_: Any) -> Any:
    """A detached ratio beside a metric in a part without gradients, as in other people's losses."""
    ratio = d.clamp(-20, 20).exp()
    with without_gradients():
        metric(ratio)
    return 0.5 * ratio.detach() + ratio


COMPILED = torch.compile(lambda d: d.clamp(-20, 20).exp(), backend="aot_eager", dynamic=True)
SOUND: dict[str, Loss] = {
    "PPO": PPO,
    "GSPO": GSPO,
    "FSPO": FSPO,
    "float32": in_float32,
    "a sum": partial(FSPO, mean="sum"),
    "truncated weight": partial(PPO, ratio=lambda d, *_: d.exp().clamp(max=2).detach() * d),
    "bounded A": with_advantages(lambda a, mask: a.clamp(-5, 5)),
    "tanh of A": with_advantages(lambda a, mask: a.tanh()),
    "A > 0 alone": with_advantages(lambda a, mask: a.clamp(min=0)),
    "a discount by token": with_advantages(lambda a, mask: a * 0.99 ** mask.cumsum(-1)),
    "sqrt L": partial(GSPO, count=lambda mask: tokens(mask) ** 0.5),
    "a mask narrower below": partial(PPO, ratio=lambda d, *_: d.exp() * ((d > -0.1) & (d < 1.5))),
    "a view without gradients": partial(PPO, ratio=partial(with_metrics, torch.no_grad, lambda x: x.view(-1).mean())),
    "rows in inference mode": partial(
        PPO, ratio=partial(with_metrics, torch.inference_mode, lambda x: torch.stack([row.mean() for row in x]))
    ),
    "compiled": partial(PPO, ratio=lambda d, *_: COMPILED(d)),
}


def policy_loss(function: Loss) -> PolicyLoss:
    return PolicyLoss(function, configured([]))


def failures(loss: Loss) -> dict[str, str]:
    """What is found wrong, by check."""
    return {check.name: check.says for check in checks(policy_loss(loss)) if not check.passed}


@pytest.mark.parametrize(("name", "loss", "check"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_a_planted_fault_is_found(name: str, loss: Loss, check: str) -> None:
    problems = failures(loss)
    assert check in problems
    if check in ("weights", "sides"):  # one fault is not blamed on all
        assert len(problems) == 1
    blamed = {name for name, says in problems.items() if "advantages[:, 0]" in says}
    assert blamed == ({"padding", "gaps"} if "first column" in name else set())


@pytest.mark.parametrize("loss", SOUND.values(), ids=SOUND.keys())
def test_a_sound_loss_passes(loss: Loss) -> None:
    assert failures(loss) == {}


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
        (lambda config, **_: config.policy_loss.beta, r"policy_loss\.beta.*test_check_loss_checks.py:\d+.*--config"),
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


def test_the_sizes_are_those_that_verl_hands_in() -> None:
    seen: list[dict[str, Any]] = []

    def loss(config: Any, response_mask: torch.Tensor, **others: Any) -> Any:
        seen.append(dict(config.global_batch_info) | {"here": int(response_mask.any(1).sum())})
        return PPO(config=config, response_mask=response_mask, **others)

    checks(PolicyLoss(loss, configured(["loss_scale_factor=7"])))
    assert {key for sizes in seen for key in sizes} == {
        *("dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor", "here")
    }
    assert any(sizes["dp_size"] == 2 and sizes["global_batch_size"] == 12 and sizes["here"] == 6 for sizes in seen)
    assert all(sizes["loss_scale_factor"] == 7 for sizes in seen)
    assert len({sizes["batch_num_tokens"] for sizes in seen if sizes["global_batch_size"] == 12}) == 1


def test_clip_bounds_act_on_the_responses_of_the_checks() -> None:
    batch = mini_batch()
    d_BT, up_BT = batch.log_prob_BT - batch.old_log_prob_BT, batch.advantages_BT > 0
    down_BT, mask_BT = batch.advantages_BT < 0, batch.mask_BT
    assert (mask_BT & up_BT & (d_BT > 0.2)).any() and (mask_BT & down_BT & (d_BT < -0.2)).any()
    assert (mask_BT & down_BT & (d_BT > 1.1)).any()  # a dual clip's
    assert (mask_BT.any(1) & ~mask_BT[:, 0]).any()


def weighs_the_ratio(rollout_is_weights: Any = None, old_log_prob: Any = None, **given: Any) -> Any:
    """A band on the ratio to the rollout's policy: the weights, by response, are a factor inside the clip."""
    v = torch.ones_like(old_log_prob) if rollout_is_weights is None else rollout_is_weights
    first_BT = given["response_mask"] & (given["response_mask"].cumsum(-1) == 1)
    return FSPO(old_log_prob=old_log_prob - torch.where(first_BT, v, 1.0).log(), **given)


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


# ---------------------------------------------------------------- beside a named loss

LIKE: dict[str, tuple[Loss, PolicyLoss]] = {
    "GSPO": (GSPO, load("gspo")),
    "PPO": (PPO, policy_loss(PPO)),
    "FSPO": (FSPO, load("fspo", ["policy_loss.c_high=0.04"])),
}


def verdict(family: str, loss: Loss) -> str:
    like = LIKE[family][1]
    comparison = compare(PolicyLoss(loss, like.config), like)
    assert comparison.equal == (comparison.verdict == "equal")
    return comparison.text()


@pytest.mark.parametrize("family", LIKE)
def test_the_formula_itself_is_equal_and_clamps_are_seen(family: str) -> None:
    loss = LIKE[family][0]
    assert verdict(family, loss) == "equal"
    assert verdict(family, with_advantages(lambda a, mask: a.clamp(-5, 5), loss)) == (
        "equal, but not where A is 30 or -30: look for a clamp"
    )


def clamped_sum(limit: float, d: Any, mask: Any, length: Any) -> Any:
    return (d.sum(-1, keepdim=True).clamp(-limit, limit) / length).exp()


def forgotten_detach(ratio: Loss, d: Any, *rest: Any) -> Any:
    return ratio(d, *rest) * (d - d.detach()).exp()


@pytest.mark.parametrize(
    ("family", "slip", "begins", "says"),
    [
        ("GSPO", {"ratio": summed}, "L times (L", "up to log-ratio 9.6e-07"),
        ("GSPO", {"ratio": partial(forgotten_detach, linear)}, "2 times", ""),
        ("GSPO", {"ratio": mean_of_exp}, "equal up to log-ratio 0.0", "token in place of length_normalised"),
        ("GSPO", {"ratio": of_micro_batch}, "another loss: on policy cosine", "another in place of length_normalised"),
        ("GSPO", {"mean": "tokens"}, "0.02381 L times", ""),
        ("GSPO", {"count": lambda mask: tokens(mask) ** 2}, "L^-2 times", ""),
        ("GSPO", {"worse": torch.min}, "equal up to log-ratio 0.000", "A > 0 above: never in place of from 0.00041"),
        ("GSPO", {"band": lambda _: (1 - 1e-5, 1 + 1e-5)}, "equal up to log-ratio 9.2e-06", "above: from 1.1e-05"),
        ("GSPO", {"ratio": by_token}, "equal up to log-ratio 8.7e-05", "token in place of length_normalised"),
        ("GSPO", {"ratio": lambda d, *rest: linear(-d, *rest)}, "-1 times", "A > 0 above"),
        ("GSPO", {"ratio": partial(clamped_sum, 10)}, "equal, but not where |S| exceeds 8", ""),
        ("GSPO", {"ratio": partial(clamped_sum, 60)}, "equal, but not where |S| exceeds 8", ""),
        ("PPO", {"ratio": linear}, "equal up to log-ratio 0.0", "length_normalised in place of token"),
        ("PPO", {"mean": "responses"}, "42 1/L times", ""),
        ("PPO", {"band": lambda _: (0.72, 1.2)}, "equal up to log-ratio 0.0", "A > 0 above: from 0.21"),
        ("FSPO", {"ratio": linear}, "1/L times", "length_normalised in place of sequence"),
        ("FSPO", {"band": lambda L: (1 - 0.03 * L**0.5, 1 + 0.04 * L**0.5)}, "equal up to log-ratio 0.0", ""),
        ("FSPO", {"mean": "sum"}, "L times (L", ""),
    ],
)  # fmt: skip
def test_a_slip_is_told_by_its_gradient(family: str, slip: dict[str, Any], begins: str, says: str) -> None:
    text = verdict(family, partial(LIKE[family][0], **slip))
    assert text.startswith(begins) and says in text, text


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
    assert clip.error.lre == pytest.approx(float(plain_lre(kept, total)[0]), abs=1e-5)
    assert clip.error.rate == pytest.approx(float(kept_B.double().mean()), abs=1e-6)
    assert total.min() > 100 and clip.error.rate_K[0] > clip.error.rate_K[-1] + 0.1  # it rejects long responses


def test_the_report_of_a_loss_in_a_test_of_ones_own() -> None:
    report = check(policy_loss(GSPO))
    assert report.conforms and report.text().startswith("conforms: 7 checks passed\nok ")
    assert not check(policy_loss(partial(GSPO, mean="rows"))).conforms
