"""Clip values as overrides of verl's command line."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from fspo.audit.__main__ import installed_override, main
from fspo.conclusion import ClipValue, Responses, conclude
from fspo.losses import ALGORITHMS
from fspo.types import c_of_eps
from recipe.fspo import overrides
from recipe.fspo.overrides import override

ROOT = Path(__file__).resolve().parents[2]
ACTOR = "actor_rollout_ref.actor"
FOR_BOTH = "for verl's own trainers, and for this recipe's, where grad_multiplier replaces fspo.match_scale"


def value_of(loss: str, audited: str | None, **changes: float) -> ClipValue:
    return ClipValue(loss, dataclasses.replace(ALGORITHMS[loss], **changes), audited, mean_length=80.0)


def test_the_audit_s_command_finds_them_by_the_entry_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert installed_override() is override
    assert main([str(ROOT / "benchmarks/study/demo.parquet")]) == 0
    assert f"+{ACTOR}.policy_loss.exponent=0.5 +{ACTOR}.policy_loss.c_low=0.0247 " in capsys.readouterr().out


def test_verls_gspo_takes_eps_and_every_other_loss_nats() -> None:
    c_low, c_high = c_of_eps(0.2, 0.3)
    own = str(override(value_of("seq_gspo", "gspo", c_low=c_low, c_high=c_high)))
    assert own.splitlines()[1:] == [f"  {ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.3"]
    ours = override(value_of("seq_gspo", "seq_gspo", c_low=c_low, c_high=c_high))
    assert ours is not None and "loss_mode" not in ours and "policy_loss.exponent=1 " in ours, (
        "the run may have had another"
    )
    assert f"+{ACTOR}.policy_loss.c_low=0.223 +{ACTOR}.policy_loss.c_high=0.262" in ours


def test_another_exponent_and_another_gradient_scale_are_set_too() -> None:
    words = override(value_of("fspo", "gspo", exponent=0.43, c_low=0.031))
    assert words is not None and f"{ACTOR}.policy_loss.loss_mode=fspo " in words
    assert f"+{ACTOR}.policy_loss.exponent=0.43 " in words and words.endswith("grad_multiplier=0.013")
    assert "grad_multiplier" not in str(override(value_of("fspo", "seq_rloo")))


def test_the_audit_says_for_which_trainers_an_override_is(capsys: pytest.CaptureFixture[str]) -> None:
    for audited, scaled in (("gspo", True), ("seq_rloo", False)):
        trainers, _ = str(override(value_of("fspo", audited))).splitlines()
        assert "verl's own trainers" in trainers and "this recipe's" in trainers
        assert ("fspo.match_scale" in trainers) is scaled, "which the factor on the gradient replaces"
    assert main([str(ROOT / "benchmarks/study/demo.parquet")]) == 0
    lines = capsys.readouterr().out.splitlines()
    above = [line for line, words in itertools.pairwise(lines) if words.startswith(f"  {ACTOR}.policy_loss")]
    assert above and all(line.startswith("- 85%") and line.endswith(f", {FOR_BOTH}:") for line in above)


def test_without_verl_there_are_none_and_the_library_alone_prints_values(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    length = rng.integers(4, 300, 4000)
    responses = Responses.of_rows(
        {"S": 0.03 * np.sqrt(length) * rng.standard_normal(4000), "L": length, "minibatch": 1 + np.arange(4000) // 100}
    )
    alone = "\n".join(conclude(responses, "gspo"))
    assert "actor_rollout_ref" not in alone and "recipe" not in alone
    assert "inside fspo's band" in alone and "nats per sqrt(token)" in alone
    assert "inside seq_gspo's band" in alone and "nats per token (eps " in alone
    monkeypatch.setattr(overrides, "find_spec", lambda name: None)
    assert "\n".join(conclude(responses, "gspo", override=override)) == alone
