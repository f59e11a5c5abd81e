"""Every loss of verl's registry under fspo.check_loss: what docs/check-loss.md and its tables say of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from benchmarks.losses import AGGREGATIONS
from benchmarks.pages import read_table
from fspo.check_loss.call import LossError, synthetic_batch
from fspo.check_loss.checks import checks
from fspo.check_loss.command import load, main, named
from fspo.check_loss.length_bias import normalisation, weight_and_bound
from recipe.fspo.check_losses import actors, policy_loss
from recipe.fspo.job import choices
from recipe.fspo.policy_loss import UNCLIPPED_WEIGHTS

KNOWN = actors()
ACTOR = "verl.workers.config:ActorConfig"
#: verl's losses that fail, and where; a new verl that mends one fails here, and the page is to be written again.
FAIL = {
    "gmpo": {"padding", "micro-batches"},
    "clip_cov": {"repeats", "micro-batches", "ranks", "order"},
    "kl_cov": {"micro-batches", "ranks"},
    "bypass_mode": {"padding"},  # raises in a micro-batch without a token
}
#: By what each weighs a token; what is recorded of verl's rests on it.
WEIGHTS = {
    **dict.fromkeys(("gmpo", "gspo_verl", "gspo", "luspo"), "length_normalised"),
    **dict.fromkeys(("rloo", "unclipped", *(name for name in choices("algo") if name.startswith("fspo"))), "sequence"),
    **{"gpg": "none", "dro": None},
}


def test_every_registered_loss_is_looked_at() -> None:
    assert {actor["policy_loss"]["loss_mode"] for actor in KNOWN.values()} == set(POLICY_LOSS_REGISTRY)
    assert set(choices("algo")) <= set(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_what_the_page_says(name: str) -> None:
    loss = policy_loss(KNOWN[name])
    assert {check.name for check in checks(loss) if not check.passed} == FAIL.get(name, set())
    assert weight_and_bound(loss)[0] == WEIGHTS.get(name, "token")
    mode = KNOWN[name]["policy_loss"]["loss_mode"]
    assert (
        UNCLIPPED_WEIGHTS.get(mode, "token") == (WEIGHTS.get(name, "token") or "none") or mode not in UNCLIPPED_WEIGHTS
    )


@pytest.mark.parametrize("name", ["gspo", "sapo", "cispo", "vanilla"])
def test_verls_losses_are_called_by_their_own_names(name: str) -> None:
    loss = load(f"verl.trainer.ppo.core_algos:compute_policy_loss_{name}", ["clip_ratio_low=3e-4"], actor=ACTOR)
    assert [check.name for check in checks(loss) if not check.passed] == []
    (row,) = policy_loss(KNOWN["gspo_verl"]).gradient(batch := synthetic_batch([5], [0.01], [1.0]).on_policy())[:1]
    assert name != "gspo" or torch.allclose(loss.gradient(batch)[0], row)


def test_a_loss_that_calls_verls_gets_the_settings_that_these_ask_for(tmp_path: Path, monkeypatch: Any) -> None:
    wrapper = """
from verl.trainer.ppo.core_algos import get_policy_loss_fn

def mine(old_log_prob, log_prob, advantages, response_mask, **others):
    return get_policy_loss_fn("gspo")(old_log_prob, log_prob, 2 * advantages, response_mask, **others)
"""
    (tmp_path / "check_losses_wrapper.py").write_text(wrapper, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [check.name for check in checks(load("check_losses_wrapper:mine", actor=ACTOR)) if not check.passed] == []


def test_aggregations() -> None:
    by_mode = {}
    for mode in AGGREGATIONS:
        loss = policy_loss(KNOWN["grpo"] | {"loss_agg_mode": mode})
        failed = [check.name for check in checks(loss) if not check.passed]
        by_mode[mode] = (round(normalisation(loss)[1]), failed)
    assert by_mode["seq-mean-token-mean"] == (-1, []) and by_mode["token-mean"] == (0, [])
    assert "padding" in by_mode["seq-mean-token-sum-norm"][1]


def test_the_table_has_every_loss() -> None:
    assert [name.partition(" ")[0] for name, *_ in read_table("check-losses")[1:]] == [*KNOWN]


def test_each_is_an_attribute_for_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe.fspo.check_losses:luspo"]) == 0
    assert "conforms: 13 checks" in capsys.readouterr().out
    assert main(["recipe.fspo.check_losses:lusp"]) == 2
    assert "did you mean luspo?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loss", "like", "status", "says"),
    [
        ("verl.trainer.ppo.core_algos:compute_policy_loss_gspo", "gspo", 0, "like gspo: equal"),
        ("recipe.fspo.check_losses:gspo", "gspo", 0, "like gspo: equal"),
        ("recipe.fspo.check_losses:gspo_verl", "seq_gspo", 0, "like seq_gspo: equal"),
        ("recipe.fspo.check_losses:luspo", "gspo", 1, "like gspo: L times"),
        ("verl.trainer.ppo.core_algos:compute_policy_loss_vanilla", "vanilla", 0, "like vanilla: equal"),
        ("verl.trainer.ppo.core_algos:compute_policy_loss_vanilla", "gspo", 1, "token in place of length_normalised"),
        ("recipe.fspo.check_losses:gspo", "gspoo", 2, "did you mean gspo?"),
    ],
)
def test_a_loss_is_compared_with_one_of_the_registry(
    loss: str, like: str, status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([loss, "--like", like]) == status
    assert says in "".join(capsys.readouterr())


VERLS_GSPO = "verl.trainer.ppo.core_algos:compute_policy_loss_gspo"


@pytest.mark.parametrize("like", [("gspo",), ("seq_gspo", "--actor", "verl.workers.config:ActorConfig")])
def test_an_averaging_is_that_of_the_loss_which_is_compared_not_of_the_name(
    like: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """verl 0.9.1 trains with token-mean by default, with which its GSPO is not the paper's."""
    assert main([VERLS_GSPO, "--loss-agg-mode", "token-mean", "--like", *like]) == 1
    assert " L times" in capsys.readouterr().out
    assert main([VERLS_GSPO, "--loss-agg-mode", "seq-mean-token-mean", "--like", *like]) == 0
    assert main(["recipe.fspo.check_losses:gspo", "--loss-agg-mode", "token-mean", "--like", *like]) == 2
    assert "--loss-agg-mode token-mean" in capsys.readouterr().err


def test_without_verl_a_name_of_the_tables_is_the_library_s_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "recipe.fspo.check_losses", None)
    assert named("gspo").config.policy_loss.loss_mode == "seq_gspo"
    with pytest.raises(LossError, match=r"--like dro needs verl.*seq_gspo.*MODULE:FUNCTION"):
        named("dro")


def test_settings_reach_both_sides_of_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    narrow = ["--config", "clip_ratio_low=1e-4", "--config", "clip_ratio_high=1e-4"]
    assert main(["verl.trainer.ppo.core_algos:compute_policy_loss_gspo", "--like", "gspo", *narrow]) == 0
    assert main(["recipe.fspo.check_losses:gspo_verl", "--like", "gspo", *narrow]) == 1
    assert "A > 0 above: from 0.00041 in place of from 0.00025" in capsys.readouterr().out
