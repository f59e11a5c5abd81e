"""What a loss does by length, told from its gradient: normalisation, weight, what it keeps of drawn responses."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_check_loss_checks import of_library, token_loss

from fspo.acceptance import acceptance_counts
from fspo.check_loss.call import Config, LossError, PolicyLoss
from fspo.check_loss.length_bias import LENGTHS, clip_by_length, find_weight, normalisation, recorded, synthetic
from fspo.fairness import merge_bins, plain_lre
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.sums import FINE_LENGTH_EDGES, SequenceSums


def policy_loss(function: Any) -> PolicyLoss:
    return PolicyLoss(function, Config(global_batch_info={}))


@pytest.mark.parametrize(("name", "exponent"), [("fspo", 0.0), ("seq_gspo", -1.0), ("luspo", 0.0)])
def test_normalisation(name: str, exponent: float) -> None:
    found = normalisation(policy_loss(of_library(name)))
    assert found.exponent == pytest.approx(exponent, abs=1e-9)
    expected = [length ** (1 + exponent) for length in LENGTHS]
    assert found.per_response == pytest.approx(expected)
    assert found.per_token == pytest.approx([length**exponent for length in LENGTHS])


def prefix(log_prob: Any, old_log_prob: Any, **others: Any) -> Any:
    d_BT = (log_prob - old_log_prob) * others["response_mask"]
    weight_BT = d_BT.cumsum(-1).exp().detach()
    others["advantages"] = others["advantages"] * weight_BT
    return token_loss(log_prob=log_prob, old_log_prob=old_log_prob, term=lambda d, a: -a * d, **others)


def pairs(log_prob: Any, old_log_prob: Any, **others: Any) -> Any:
    d_BT = (log_prob - old_log_prob).detach()
    others["advantages"] = others["advantages"] * (d_BT + d_BT.roll(1, -1)).exp()
    return token_loss(log_prob=log_prob, old_log_prob=old_log_prob, term=lambda d, a: -a * d, **others)


def reinforce(**given: Any) -> Any:
    return token_loss(term=lambda d, a: -a * d, **given)


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (of_library("fspo"), "sequence"),
        (of_library("seq_gspo"), "length_normalised"),
        (token_loss, "token"),
        (prefix, "prefix"),
        (reinforce, "none"),
        (pairs, None),
    ],
)
def test_the_weight_is_found_by_probing(loss: Any, weight: str | None) -> None:
    assert find_weight(policy_loss(loss)) == weight


def test_what_a_band_keeps_is_its_acceptance() -> None:
    samples = synthetic(0.03)[:10]
    found = clip_by_length(policy_loss(of_library("seq_rloo")), "sequence", samples)
    sums = SequenceSums.zeros()
    for batch in samples:
        sums.add_(
            sequence_policy_loss(
                batch.log_prob_BT, batch.old_log_prob_BT, batch.advantages_BT, batch.mask_BT, ALGORITHMS["seq_rloo"]
            )
        )
    starts = np.searchsorted(FINE_LENGTH_EDGES.numpy(), found.starts)
    for view in ("symmetric", "active", "mass"):
        counts = acceptance_counts(sums.sums_KF.numpy()[None], view)
        accepted, total = (merge_bins(each, starts)[0] for each in (counts.accepted, counts.total))
        assert found.errors[view].lre == pytest.approx(float(plain_lre(accepted, total)[0]), abs=1e-5)
    assert found.kept == pytest.approx(1 - (sums.total("clipped_high") + sums.total("clipped_low")) / 1280, abs=1e-6)
    assert found.kept_J[0] > found.kept_J[-1] + 0.1  # a constant band rejects long responses


def write_run(folder: Path) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True)
    rows = []
    for step in (1, 2):
        for minibatch in (0, 1, 2):
            length = rng.integers(1, 200, 32)
            s = 0.05 * np.sqrt(length) * rng.standard_normal(32) * (minibatch > 0)
            row = {"step": step, "minibatch": minibatch, "S": s.tolist(), "L": length.tolist()}
            rows.append(row | {"A": rng.choice([-1.0, 0.0, 1.5], 32).tolist()})
    lines = [json.dumps(row) for row in rows]
    text = "\n".join([*lines[:3], lines[4][:50], *lines[3:], ""])  # one that a kill has cut, and a resumed run ended
    (folder / "sequences.jsonl").write_text(text + '{"step": 3, "minibatch": 1, "S": [0.', encoding="utf-8")
    return rows


def test_recorded_responses_keep_their_S_L_and_A(tmp_path: Path) -> None:
    rows = [row for row in write_run(tmp_path / "grid/seed1") if row["minibatch"] > 0]
    samples = recorded(tmp_path / "grid")
    assert len(samples) == len(rows) == 4
    for batch, row in zip(samples, rows, strict=True):
        s, length, a = (np.array(row[name]) for name in "SLA")
        kept = a != 0
        assert batch.mask_BT.sum(-1).tolist() == length[kept].tolist()
        assert batch.advantages_BT[:, 0].tolist() == a[kept].tolist()
        found = ((batch.log_prob_BT - batch.old_log_prob_BT) * batch.mask_BT).sum(-1)
        assert found.numpy() == pytest.approx(s[kept], abs=1e-4)
        assert float(batch.log_prob_BT.max()) <= 0 and float(batch.old_log_prob_BT.max()) <= 0
        assert torch.isfinite(batch.log_prob_BT).all()
    with tarfile.open(tmp_path / "grid.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "grid", "grid")
    again = recorded(tmp_path / "grid.tar.xz")
    assert all(torch.equal(a.log_prob_BT, b.log_prob_BT) for a, b in zip(samples, again, strict=True))


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LossError, match=r"no sequences\.jsonl .* fspo\.record_sequences=true"):
        recorded(tmp_path)
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(LossError, match=r"x\.txt is no folder and no archive"):
        recorded(tmp_path / "x.txt")
