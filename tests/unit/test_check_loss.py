"""The command: its report, its exit status, and one sentence for what cannot be checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fspo.check_loss.call import synthetic_batch
from fspo.check_loss.command import configured, load, main

SOURCE = """
import dataclasses, torch

def sound(old_log_prob, log_prob, advantages, response_mask, config, **_):
    info = config.global_batch_info
    loss_BT = torch.where(response_mask, -advantages * (log_prob - old_log_prob).clamp(-20, 20).exp(), 0.0)
    length_B1 = response_mask.sum(-1, keepdim=True).clamp(min=1)
    return (loss_BT / length_B1).sum() / info["global_batch_size"] * info["dp_size"], {}

def mean(old_log_prob, log_prob, advantages, response_mask, config, **_):
    return -(advantages * (log_prob - old_log_prob).clamp(-20, 20).exp()).mean()

@dataclasses.dataclass
class Settings:
    beta: float = 0.5
    name: str = dataclasses.field(default_factory=str)

def fed(config, **given):
    assert config.policy_loss.beta == 0.5 and config.name == "x" and config.clip_ratio == 0.2
    return sound(config=config, **given)

def undefined(log_prob, **_):
    return log_prob.sum() * float("nan")

@dataclasses.dataclass
class ActorSettings:
    strategy: str
    clip_ratio: float = 0.2
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.3
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: "int | None" = None
    policy_loss: Settings = dataclasses.field(default_factory=Settings)

def annotated(old_log_prob, log_prob, advantages, response_mask, config: "ActorSettings | None" = None, **_):
    assert isinstance(config, ActorSettings) and config.clip_ratio_high == 0.3
    assert config.policy_loss.beta == 0.5 and config.clip_ratio_c == 4
    return sound(old_log_prob, log_prob, advantages, response_mask, config)

def asserts(config=None, **others):
    assert isinstance(config, ActorSettings), "give ActorSettings"
    config.policy_loss.gamma
    return sound(config=config, **others)

def wraps(*args, **others):
    return asserts(*args, **others)

def shapes(log_prob, advantages, **_):
    return (log_prob.sum(-1) * advantages).sum()

def in_place(log_prob, advantages, response_mask, **_):
    loss = -((log_prob.exp() * advantages) * response_mask).sum()
    advantages.zero_()
    return loss, {}

number = 3

from fspo.check_loss.call import Config, PolicyLoss
bound = PolicyLoss(sound, Config(global_batch_info={}))
"""


ACTOR = ["--actor", "check_loss_example:ActorSettings"]


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "check_loss_example.py").write_text(SOURCE, encoding="utf-8")
    hungry = "def hungry(config, **_):\n    return config.policy_loss.beta * 1.0\n"
    (tmp_path / "check_loss_hungry.py").write_text(hungry, encoding="utf-8")
    (tmp_path / "check_loss_quits.py").write_text("raise SystemExit(3)", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("fspo.check_loss.command.DISPERSIONS", (0.03,))
    monkeypatch.setattr("fspo.check_loss.length_bias._MINI_BATCHES", 5)


@pytest.mark.parametrize(
    ("arguments", "status", "lines"),
    [
        (["check_loss_hungry:hungry", "check_loss_example:sound"], 2, [
            "check_loss_hungry:hungry", "conforms: 13 checks", "per token ~ L^-1.00", "the old policy: token",
            "keeps 100.0%", "LRE symmetric  -\n",
        ]),
        (["check_loss_example:mean"], 1, ["FAIL  micro-batches", "does not conform: padding, micro-batches"]),
        (["check_loss_example:undefined"], 1, ["FAIL  direction", "division by 0", "keeps 0.0% of", "no power of L"]),
    ],
)  # fmt: skip
def test_the_report_and_the_exit_status(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, lines: list[str]
) -> None:
    assert main([*arguments, "--full"]) == status
    output = "".join(capsys.readouterr())
    assert not re.search(r"\b(nan|inf)\b", output)
    assert all(line in output for line in lines) and ("FAIL" in output) == (status == 1), output


def test_verdict_and_failures_come_first_and_the_rest_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check_loss_example:mean"]) == 1
    short = capsys.readouterr().out
    assert main(["check_loss_example:mean", "--full"]) == 1
    assert capsys.readouterr().out.startswith(short.rstrip())
    assert short.splitlines()[2] == "does not conform: padding, micro-batches"
    assert "\nok " not in short and "weight near" not in short


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["check_loss_example:sound", "--like", "fspo", *ACTOR], 1, "token in place of sequence"),
        (["check_loss_example:sound", "--like", "gspo", *ACTOR], 2, "--actor check_loss_example:ActorSettings"),
        (["check_loss_example:sound", "--like", "check_loss_example:sound"], 0, "equal"),
        (["check_loss_example:sound", "--like", "seq_rloo"], 1, "token in place of sequence"),
        (["check_loss_example:sound", "--like", "check_loss_example:mean"], 1, "times"),
        (["check_loss_example:mean", "--like", "check_loss_example:mean"], 1, "equal to check_loss_example:mean; does"),
        (["check_loss_example:bound", "--like", "check_loss_example:sound"], 0, "equal"),
        (["check_loss_example:mean", "--like", "check_loss_example:undefined"], 2, "not comparable"),
        (["check_loss_example:undefined", "--like", "check_loss_example:mean"], 2, "not comparable"),
        (["check_loss_example:sound", "--like", "check_loss_example:hungry"], 2, "MODULE:FUNCTION"),
        (["check_loss_example:sound", "check_loss_example:number", "--like", "fspo"], 2, "MODULE:FUNCTION"),
        (["check_loss_example:sound", "--like", "fspo", "--config", "policy_loss.loss_mode=x"], 2, "loss_mode=x"),
    ],
)  # fmt: skip
def test_a_loss_beside_a_named_one(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, says: str
) -> None:
    assert main(arguments) == status
    output = capsys.readouterr()
    assert says in (output.err if status == 2 else output.out.splitlines()[2] + output.out), output
    if status != 2:
        last = output.out.split("\n\n")[-2].splitlines()[-1]
        assert (status == 0) == ("conforms: " in output.out) == (last.startswith("equal") and "conforms: " in last), (
            last
        )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check_loss_example"], "MODULE:FUNCTION"),
        (["no_such_module:f"], "install its package"),
        (["check_loss_example:sond"], "did you mean sound?"),
        (["check_loss_example:number"], "MODULE:FUNCTION"),
        (["check_loss_quits:sound"], "SystemExit"),
        (["check_loss_example:in_place"], "change no tensor in place"),
        (["check_loss_hungry:hungry"], "--config policy_loss.beta=VALUE"),
        (["check_loss_example:sound", "--config", "clip"], "KEY=VALUE"),
        (["check_loss_example:bound", "--config", "clip_ratio=1"], "--config"),
        (["check_loss_example:asserts"], "--actor MODULE:CLASS"),
        (
            ["check_loss_example:asserts", *ACTOR],
            "--config policy_loss.gamma=VALUE",
        ),
        (
            ["check_loss_example:asserts", "--actor", "check_loss_example:sound"],
            "--actor verl.workers.config:ActorConfig",
        ),
        (["check_loss_example:asserts", "--actor", "check_loss_example:Sound"], "check_loss_example:Sound"),
        (["check_loss_example:shapes"], "[responses, tokens]"),
    ],
)
def test_what_cannot_be_checked_ends_with_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert says in captured.err and arguments[0] in captured.err and ("=VALUE" in captured.err) == ("=VALUE" in says)
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_settings_are_read_as_values() -> None:
    config = configured(["clip_ratio_high=0.28", "policy_loss.vespo.k_pos=2", "loss_agg_mode=token-sum"])
    assert (config.clip_ratio_high, config.policy_loss.vespo.k_pos, config.loss_agg_mode) == (0.28, 2, "token-sum")
    assert config.get("clip_ratio_c", 20.0) == 3.0
    batch = synthetic_batch([3, 2], [0.1, 0.1], [1.0, -1.0])
    for settings in (["policy_loss.beta=0.5"], ["policy_loss._target_=check_loss_example.Settings"]):
        assert load("check_loss_example:fed", [*settings, "name=x"]).value(batch).numel() == 1


def test_a_loss_gets_the_class_of_settings_that_is_named() -> None:
    batch = synthetic_batch([3, 2], [0.1, 0.1], [1.0, -1.0])
    actor = "check_loss_example:ActorSettings"
    assert load("check_loss_example:annotated", ["clip_ratio_c=4"], actor=actor).value(batch).numel() == 1
    for name in ("asserts", "wraps"):
        assert load(f"check_loss_example:{name}", ["policy_loss.gamma=1"], actor=actor).value(batch).numel() == 1
