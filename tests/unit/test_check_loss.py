"""A planted fault of a policy loss is found by its check, sound losses pass, each is told by name; and the command."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from some_losses import FSPO, GSPO, PPO, Loss, own_mean, tokens, with_advantages

from fspo.check_loss import PolicyLoss, configured, load
from fspo.check_loss.__main__ import main
from fspo.check_loss.by_length import clip_by_length, synthetic, weight_and_bound
from fspo.check_loss.call import LossError, synthetic_batch
from fspo.check_loss.checks import checks
from fspo.check_loss.like import compare
from fspo.losses import ALGORITHMS, sequence_policy_loss

torch.set_num_threads(1)  # small tensors


def weighs_the_ratio(rollout_is_weights: Any = None, old_log_prob: Any = None, **given: Any) -> Any:
    """A band on the ratio to the rollout's policy: the weights, by response, are a factor inside the clip."""
    v = torch.ones_like(old_log_prob) if rollout_is_weights is None else rollout_is_weights
    first_BT = given["response_mask"] & (given["response_mask"].cumsum(-1) == 1)
    return FSPO(old_log_prob=old_log_prob - torch.where(first_BT, v, 1.0).log(), **given)


def without_weights(rollout_is_weights: Any = None, **others: Any) -> Any:
    assert rollout_is_weights is None, "no such argument"
    return GSPO(**others)


ANOTHER, NEAR = "another loss: on policy cosine", "equal up to log-ratio 0."

#: Name, loss, the checks that fail; the loss whose name it has, how ``--like`` of that begins, and what stands in it.
#: The plainest fault of each check: tests/promises/some_losses.py.
LOSSES: list[tuple[str, Loss, str, Loss, str, str]] = [
    ("0/0 without a token", partial(GSPO, count=lambda mask: mask.sum(-1, keepdim=True)), "padding", GSPO, "equal", ""),
    ("A of the first column", with_advantages(lambda a, mask: a[:, :1].expand_as(a), GSPO), "padding, gaps", GSPO,
     "equal", ""),
    ("a discount by column", with_advantages(lambda a, mask: a * 0.99 ** torch.arange(a.shape[1])), "gaps", PPO,
     ANOTHER, ""),
    ("a weight that is refused", without_weights, "weights", GSPO, "equal", ""),
    ("one ratio for all", partial(GSPO, ratio="micro-batch"), "micro-batches", GSPO, ANOTHER, ""),
    ("large A centred", with_advantages(lambda a, mask: a - (c := a[mask].mean().nan_to_num()) * (c.abs() > 10)),
     "micro-batches", PPO, "equal", ""),
    *((name, loss, "", loss, "equal", "") for name, loss in (("PPO", PPO), ("GSPO", GSPO), ("FSPO", FSPO))),
    ("PPO by response", partial(PPO, mean="responses"), "", PPO, "42 1/L times", ""),
    ("weights in the ratio", weighs_the_ratio, "", FSPO, "equal", ""),
    ("bounded A", with_advantages(lambda a, mask: a.clamp(-5, 5)), "", PPO, "equal, but not where A is 30 or -30", ""),
    ("A > 0 alone", with_advantages(lambda a, mask: a.clamp(min=0)), "", PPO, ANOTHER, ""),
    ("a mask narrower below", partial(PPO, ratio="token, masked"), "", PPO, NEAR, ""),
    ("exp of the sum", partial(GSPO, ratio="sum"), "", GSPO, "L times (L", "up to log-ratio 9.6e-07"),
    ("a forgotten detach", partial(GSPO, ratio="mean and token"), "", GSPO, "2 times", ""),
    ("mean of exp", partial(GSPO, ratio="mean of exp"), "", GSPO, NEAR, "token in place of length_normalised"),
    ("a narrow clip", partial(GSPO, band=lambda _: (1 - 1e-5, 1 + 1e-5)), "", GSPO, "equal up to log-ratio 9.2e-06",
     "above: from 1.1e-05"),
    ("lengths in int16", partial(GSPO, count=lambda mask: tokens(mask).short()), "", GSPO, "equal, but not with",
     "40,001"),
    ("S at most 10", partial(GSPO, ratio="mean, S at most 10"), "", GSPO, "equal, but not where |S| exceeds 8", ""),
]  # fmt: skip

#: The families by name: ours have our own implementation.
NAMED: dict[Loss, PolicyLoss] = {
    GSPO: load("gspo"),
    PPO: PolicyLoss(PPO, configured([])),
    FSPO: load("fspo", ["policy_loss.c_high=0.04"]),
}


def failures(loss: Loss, caller_averages: bool = False) -> set[str]:
    """The checks that fail."""
    tried = checks(PolicyLoss(loss, configured([]), caller_averages=caller_averages))
    return {check.name for check in tried if not check.passed}


def beside(name: Loss, loss: Loss) -> str:
    """What ``--like`` says."""
    comparison = compare(PolicyLoss(loss, NAMED[name].config), NAMED[name])
    assert comparison.equal == (comparison.verdict == "equal")
    return "\n".join([comparison.verdict, *comparison.differences])


@pytest.mark.parametrize(("name", "loss", "fails", "like", "begins", "says"), LOSSES, ids=[name for name, *_ in LOSSES])
def test_a_fault_is_found_and_a_loss_told_by_its_name(
    name: str, loss: Loss, fails: str, like: Loss, begins: str, says: str
) -> None:
    failed = failures(loss)
    assert {*fails.split(", ")} <= failed if fails else not failed
    text = beside(like, loss)
    assert text.startswith(begins) and says in text and (begins != "equal" or text == "equal"), text


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
        (lambda config, **_: config.policy_loss.beta, r"no beta .*test_check_loss.py:\d+.*--config"),
        (in_place_too_late, "change no tensor in place"),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_sentence(loss: Loss, says: str) -> None:
    with pytest.raises(LossError, match=says) as error:
        failures(loss)
    assert "\n" not in str(error.value)


def test_a_function_of_the_four_tensors_whose_caller_averages() -> None:
    assert "micro-batches" in failures(own_mean) and failures(own_mean, True) == set()
    assert "micro-batches" in failures(partial(PPO, mean="own tokens"), True)


@pytest.mark.parametrize(
    ("weigh", "weight"),
    [
        (lambda d, mask: d.exp(), ("token", "")),
        (lambda d, mask: d.exp().clamp(max=1), ("token", ", at most 1")),
        (lambda d, mask: d.sum(-1, keepdim=True).exp().clamp(max=1), ("sequence", ", at most 1")),
        (lambda d, mask: torch.ones_like(d), ("none", "")),
        (lambda d, mask: d.cumsum(-1).exp(), ("prefix", "")),
        (lambda d, mask: d.exp() * (d.mean(-1, keepdim=True).abs() < 1e-4), ("token", "")),  # as narrow as masks in use
        (lambda d, mask: (d.sum() / mask.sum()).exp(), (None, "")),
    ],
)  # fmt: skip
def test_a_weight_is_named_rightly_or_not_at_all(weigh: Any, weight: tuple[str | None, str]) -> None:
    def loss(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, **_: Any) -> Any:
        d_BT = (log_prob - old_log_prob).masked_fill(~response_mask, 0.0)
        return -(advantages * weigh(d_BT, response_mask).detach() * log_prob * response_mask).sum()

    assert weight_and_bound(PolicyLoss(loss, configured([]))) == weight


def test_what_a_band_keeps_is_its_acceptance() -> None:
    samples, kept = synthetic(0.03)[:10], []
    for b in samples:
        tensors = b.log_prob_BT, b.old_log_prob_BT, b.advantages_BT, b.mask_BT
        output = sequence_policy_loss(*tensors, ALGORITHMS["seq_rloo"])
        kept += (~(output.clipped_high_B | output.clipped_low_B)).tolist()
    error, _ = clip_by_length(load("rloo"), "sequence", samples)
    assert error.rate == pytest.approx(sum(kept) / len(kept), abs=1e-6)
    assert error.rate_K[0] > error.rate_K[-1] + 0.1, "it rejects long responses"


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fspo.check_loss.DISPERSIONS", (0.03,))
    monkeypatch.setattr("fspo.check_loss.by_length._MINI_BATCHES", 5)


def words(line: str) -> list[str]:
    """Of a command, in which a colon begins a name of the example, and ``verl:`` that of a loss of verl's."""
    places = {"": "some_losses:", "verl": "verl.trainer.ppo.core_algos:compute_policy_loss_"}
    split = [word.partition(":") for word in line.split()]
    given = [places[place] + name if colon else place for place, colon, name in split]
    return [*given, "--actor", "verl.workers.config:ActorConfig"] if "verl:" in line else given


@pytest.mark.parametrize(
    ("line", "status", "last", "says"),
    [
        (":by_response", 0, "conforms: 7 checks passed (is it the loss that it is called? --like NAME compares)", []),
        (":own_mean --average caller --like :by_response", 0, "equal to some_losses:by_response; conforms: 7", []),
        (":own_mean --like :by_response", 1, "equal to some_losses:by_response; does not conform: padding,", []),
        ("rloo --like seq_rloo --config policy_loss.c_low=1", 0, "equal", []),
        ("verl:gspo --like gspo", 0, "equal to gspo", ["like gspo: equal\n"]),
        ("verl:gspo --like gspo --loss-agg-mode token-mean", 1, "not equal to gspo", [
            "token-mean in place of seq-mean-token-mean"]),
        ("verl:clip_cov", 1, "does not conform: repeats", ["FAIL  repeats"]),
        (":fed :by_response :direction_is_undefined --full", 2, "does not conform: direction", [
            "losses:fed", "per token ~ L^-1.00", "old policy: token", "keeps 100.0%", "by 0", "no power of L"]),
    ],
)  # fmt: skip
def test_a_report_says_what_a_loss_does_and_why_it_ends_so(
    capsys: pytest.CaptureFixture[str], line: str, status: int, last: str, says: list[str]
) -> None:
    assert main(words(line)) == status
    out, error = capsys.readouterr()
    assert out.rstrip().splitlines()[-1].startswith(last), out
    assert all(one in out + error for one in says) and not re.search(r"\b(nan|inf)\b", out), out


def test_settings_are_read_as_values() -> None:
    config = configured(["clip_ratio_high=0.28", "policy_loss.vespo.k_pos=2", "loss_agg_mode=token-sum"])
    assert (config.clip_ratio_high, config.policy_loss.vespo.k_pos, config.loss_agg_mode) == (0.28, 2, "token-sum")
    assert config.get("clip_ratio_c", 20.0) == 3.0
    batch = synthetic_batch([3, 2], [0.1, 0.1], [1.0, -1.0])
    for settings in (["policy_loss.beta=0.5"], ["policy_loss._target_=some_losses.Settings"]):
        assert load("some_losses:fed", [*settings, "name=x"]).value(batch).numel() == 1
    for wrong in ("clip_ratio.high=1", "policy_loss=3", "policy_loss._target_=some_losses:fed"):
        with pytest.raises(LossError):
            configured([wrong])
