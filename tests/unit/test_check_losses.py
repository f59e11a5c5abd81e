"""Every loss of verl's registry under fspo.check_loss: what docs/check-loss.md says of them, and the league's table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from benchmarks import league
from benchmarks.pages import replace_section
from fspo.check_loss.checks import checks
from fspo.check_loss.length_bias import clip_by_length, find_weight, normalisation, synthetic
from fspo.relatives import RELATIVES
from recipe.fspo.check_losses import actors, main, policy_loss
from recipe.fspo.policy_loss import UNCLIPPED_WEIGHTS
from recipe.runner.launch.compose import choices

PAGE = Path(__file__).resolve().parents[2] / "docs/check-loss.md"
KNOWN = actors()
#: verl's losses that fail, and where; a new verl that mends one fails here, and the page is to be written again.
FAIL = {
    "gmpo": {"padding", "micro-batches", "finite"},
    "clip_cov": {"repeats", "micro-batches", "ranks", "order", "finite"},
    "kl_cov": {"micro-batches", "ranks", "finite"},
}
#: By what each weighs a token; what is recorded of verl's rests on it.
WEIGHTS = {
    **dict.fromkeys(("gmpo", "gspo_verl", "gspo", "luspo"), "length_normalised"),
    **dict.fromkeys(
        ("vespo", "rloo", "unclipped", *(name for name in choices("algo") if name.startswith("fspo"))), "sequence"
    ),
    **{"ctpo_la": "prefix", "gpg": "none", "dro": None},
}


def test_every_registered_loss_is_looked_at() -> None:
    assert {actor["policy_loss"]["loss_mode"] for actor in KNOWN.values()} == set(POLICY_LOSS_REGISTRY)
    assert set(choices("algo")) <= set(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_what_the_page_says(name: str) -> None:
    loss = policy_loss(KNOWN[name])
    assert {each.name for each in checks(loss) if not each.passed} == FAIL.get(name, set())
    assert find_weight(loss) == WEIGHTS.get(name, "token")
    mode = KNOWN[name]["policy_loss"]["loss_mode"]
    assert (
        UNCLIPPED_WEIGHTS.get(mode, "token") == (WEIGHTS.get(name, "token") or "none") or mode not in UNCLIPPED_WEIGHTS
    )


def test_aggregations() -> None:
    found = {}
    for mode in league._AGGREGATIONS:
        loss = policy_loss(KNOWN["grpo"] | {"loss_agg_mode": mode})
        failed = [each.name for each in checks(loss) if not each.passed]
        found[mode] = (round(normalisation(loss).exponent), failed)
    assert found["seq-mean-token-mean"] == (-1, []) and found["token-mean"] == (0, [])
    assert "padding" in found["seq-mean-token-sum-norm"][1]


@pytest.mark.parametrize("name", league.LEAGUE)
def test_the_leagues_clips_can_be_scaled(name: str) -> None:
    samples = synthetic(0.1)[:1]
    weight = find_weight(policy_loss(KNOWN[name]))
    assert weight is not None
    kept = [
        clip_by_length(policy_loss(league.scaled(KNOWN[name], factor)), weight, samples).kept
        for factor in (1e-3, 0.03, 1.0, 1e3)
    ]
    assert kept == sorted(kept) and kept[1] < kept[-1] and kept[-1] > league.KEPT
    assert (kept[0] < league.KEPT) is (name != "cispo")  # which loses no token's gradient whole
    assert league.scaled(KNOWN[name], 1.0)["policy_loss"]["loss_mode"] == KNOWN[name]["policy_loss"]["loss_mode"]
    assert set(RELATIVES) <= set(league.LEAGUE)


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for section in ("losses", "aggregations", "league"):
        assert replace_section(page, section, "") != page
    told = page.partition("<!-- losses:")[2].partition("<!-- end of losses")[0]
    assert re.findall(r"^\| `(\w+)`", told, re.MULTILINE) == list(KNOWN)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["luspo"]) == 0
    assert "conforms: 8 checks passed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["lusp"])
    assert "lusp is no loss here" in capsys.readouterr().err
    assert main(["luspo", "--records", str(PAGE)]) == 2
    assert "no folder and no archive" in capsys.readouterr().err
    assert main(["luspo", "--records", "nowhere"]) == 2
    assert "--records nowhere does not exist" in capsys.readouterr().err


def test_a_loss_that_cannot_be_called_does_not_keep_the_others_waiting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, **_: Any) -> Any:
        raise KeyError("temperature")

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "broken", broken)
    assert main(["broken", "luspo"]) == 2
    output = capsys.readouterr()
    assert "broken: the loss raises KeyError 'temperature'" in output.err and "conforms: 8" in output.out
