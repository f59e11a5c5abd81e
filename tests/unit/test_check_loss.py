"""The command: its report, its exit status, and one sentence for what cannot be checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fspo.check_loss import configured, load
from fspo.check_loss.__main__ import main
from fspo.check_loss.call import synthetic_batch

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
        (f"{VERLS}gspo --like gspo --loss-agg-mode token-mean", 1, "like gspo: 0.02381 L times"),
        (f"{VERLS}gspo --like gspo --loss-agg-mode token-mean", 1, "token-mean in place of seq-mean-token-mean"),
        (f"{VERLS}gspo --like gspo --config clip_ratio_low=1e-4", 1, "A < 0 below: from 0.0001 in place"),
        (f"{VERLS}vanilla --like gspo", 1, "token in place of length_normalised"),
        (f"{VERLS}vanilla --like {VERLS}vanilla", 0, "equal"),
        (f"{VERLS}sapo {VERLS}cispo", 0, "conforms"),
        (f"{VERLS}geo_mean", 1, "FAIL  micro-batches"),
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
        (":sond", "did you mean sound?"),
        (":number", "MODULE:FUNCTION"),
        (":sound --like gspoo", "seq_gspo"),
        (":sound --like :undefined", "not comparable"),
        (":sound --config clip", "KEY=VALUE"),
        (":hungry", "policy_loss.beta"),
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
