"""Every loss of verl's registry under fspo.check_loss: what docs/check-loss.md says of them, and the league's table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from benchmarks import league
from benchmarks.pages import read_table
from benchmarks.relatives import POLICY_LOSSES
from fspo.check_loss.call import synthetic_batch
from fspo.check_loss.checks import checks
from fspo.check_loss.command import load, main
from fspo.check_loss.length_bias import clip_by_length, normalisation, synthetic, weight_and_bound
from recipe.fspo.check_losses import policy_loss
from recipe.fspo.job import choices
from recipe.fspo.policy_loss import UNCLIPPED_WEIGHTS

KNOWN = league.known_losses()
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
    **{"ctpo_la": "prefix", "gpg": "none", "dro": None, "vespo": None},
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
    loss = load(f"verl.trainer.ppo.core_algos:compute_policy_loss_{name}", ["clip_ratio_low=3e-4"])
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
    assert [check.name for check in checks(load("check_losses_wrapper:mine")) if not check.passed] == []


def test_aggregations() -> None:
    by_mode = {}
    for mode in league._AGGREGATIONS:
        loss = policy_loss(KNOWN["grpo"] | {"loss_agg_mode": mode})
        failed = [check.name for check in checks(loss) if not check.passed]
        by_mode[mode] = (round(normalisation(loss)[1]), failed)
    assert by_mode["seq-mean-token-mean"] == (-1, []) and by_mode["token-mean"] == (0, [])
    assert "padding" in by_mode["seq-mean-token-sum-norm"][1]


@pytest.mark.parametrize("name", [*league.LEAGUE, *league.LATEST])
def test_the_leagues_clips_can_be_scaled(name: str) -> None:
    samples = synthetic(0.1)[:1]
    weight = league.weight_of(league.at_width(KNOWN, name), name)
    assert weight != "none" or name in ("pnpo", "up_gspo")
    kept = [
        clip_by_length(league.at_width(KNOWN, name, factor), weight, samples).kept for factor in (1e-3, 0.03, 1.0, 1e3)
    ]
    assert kept == sorted(kept) and kept[1] < kept[-1] and kept[-1] > league.KEPT
    assert (kept[0] < league.KEPT) is (name != "cispo")  # which loses no token's gradient whole
    assert set(POLICY_LOSSES) <= set(league.LEAGUE)


def plain_slopes(name: str, d: list[float], old: list[float], a: float, q: float) -> list[float]:
    """Gradient of each token of one response, written out; q: 0.9 quantile of all |d|."""
    ratio, length, spent, allowed = [math.exp(x) for x in d], len(d), 0.0, 0.0
    if name == "pnpo":
        means = [math.exp(sum(d[: t + 1]) / (t + 1)) for t in range(length)]
        return [-a * mean * (1 - 3e-4 <= mean <= 1 + 4e-4) for mean in means]
    if name == "sat":
        ends = [0.2 / (1 + (x / q) ** 2) if abs(x) > q else 0.2 for x in d]
        return [-a * r * (r - 1 <= end if a > 0 else 1 - r <= end) for r, end in zip(ratio, ends, strict=True)]
    if name == "drpo":
        return [-a * r + abs(a) * math.exp(o) * (r - 1) * r / 12.5 for r, o in zip(ratio, old, strict=True)]
    if name == "up_gspo":
        mean = math.exp(sum(d) / length)
        return [-a * (1.0 if a > 0 else mean * (mean >= 1 - 3e-4))] * length
    moved, slopes = [abs(math.exp(o + x) - math.exp(o)) for o, x in zip(old, d, strict=True)], []
    budget = min(max(float(np.quantile(moved, 0.9)), 0.02), 0.04)
    for t, (r, gap) in enumerate(zip(ratio, moved, strict=True), start=1):
        w = 0.8 + 0.2 * (length - t) / (length - 1)
        removed = a * (r - 1) > 0 and w * gap > min(0.15, 0.15 + budget * allowed - spent)
        slopes.append(0.0 if removed else -a * min(r, 20.0))
        spent, allowed = spent + w * gap, allowed + w
    return slopes


@pytest.mark.parametrize("name", league.LATEST)
def test_the_latest_losses_against_plain_formulas(name: str) -> None:
    loss = league.at_width(KNOWN, name)
    fail = {"micro-batches", "ranks"} if name == "sat" else set()
    assert {check.name for check in checks(loss) if not check.passed} == fail
    batch = synthetic_batch((9, 40, 30, 40), (0.5, 1.0, 0.1, 0.9), (1.0, 0.7, -1.0, -0.6), seed=2)
    gradient_BT, _ = loss.gradient(batch)
    moved_BT = (batch.log_prob_BT - batch.old_log_prob_BT).abs()
    q, removed = float(np.quantile(moved_BT[batch.mask_BT.bool()].numpy(), 0.9)), 0
    for row, length in enumerate((9, 40, 30, 40)):
        tensors = batch.log_prob_BT - batch.old_log_prob_BT, batch.old_log_prob_BT
        d, old = (x[row, :length].tolist() for x in tensors)
        slopes = plain_slopes(name, d, old, float(batch.advantages_BT[row, 0]), q)
        removed += slopes.count(0.0)
        tokens = 4 * length if name in ("pnpo", "up_gspo") else 119
        assert (gradient_BT[row, :length] * tokens).tolist() == pytest.approx(slopes, rel=1e-4, abs=1e-6)
    assert removed > 0 or name == "drpo"


def test_the_table_has_every_loss() -> None:
    assert [name.partition(" ")[0] for name, *_ in read_table("check-losses")[1:]] == [*KNOWN, *league.LATEST]


def test_each_is_an_attribute_for_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe.fspo.check_losses:luspo"]) == 0
    assert "conforms: 10 checks" in capsys.readouterr().out
    assert main(["recipe.fspo.check_losses:lusp"]) == 2
    assert "did you mean luspo?" in capsys.readouterr().err


def test_recorded_responses_keep_their_S_L_and_A(tmp_path: Path) -> None:
    rng, rows = np.random.default_rng(1), []
    for minibatch in (0, 1, 2):
        length = rng.integers(1, 200, 32)
        s, a = 0.05 * np.sqrt(length) * rng.standard_normal(32) * minibatch, rng.choice([-1.0, 0.0, 1.5], 32)
        rows.append(pd.DataFrame({"step": 1, "minibatch": minibatch, "S": s, "L": length, "A": a}))
    pd.concat(rows).to_parquet(tmp_path / "rows.parquet")
    samples = league.recorded(tmp_path / "rows.parquet")
    for batch, row in zip(samples, rows[1:], strict=True):
        s, length, a = (row[name].to_numpy() for name in "SLA")
        kept = a != 0
        assert batch.mask_BT.sum(-1).tolist() == length[kept].tolist()
        assert batch.advantages_BT[:, 0].tolist() == a[kept].tolist()
        log_ratio_B = ((batch.log_prob_BT - batch.old_log_prob_BT) * batch.mask_BT).sum(-1)
        assert log_ratio_B.numpy() == pytest.approx(s[kept], abs=1e-4)
        assert float(batch.log_prob_BT.max()) <= 0 and float(batch.old_log_prob_BT.max()) <= 0
