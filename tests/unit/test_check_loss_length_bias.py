"""What a loss does by length, told from its gradient: normalisation, weight, what it keeps of drawn responses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_check_loss_checks import of_library, token_loss

from fspo.acceptance import acceptance_counts
from fspo.check_loss.call import Config, PolicyLoss
from fspo.check_loss.length_bias import LENGTHS, clip_by_length, find_weight, normalisation, synthetic
from fspo.fairness import merge_bins, plain_lre
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.sums import FINE_LENGTH_EDGES, SequenceSums


def policy_loss(function: Any) -> PolicyLoss:
    return PolicyLoss(function, Config(global_batch_info={}))


@pytest.mark.parametrize(("name", "exponent"), [("fspo", 0.0), ("seq_gspo", -1.0), ("luspo", 0.0)])
def test_normalisation(name: str, exponent: float) -> None:
    per_token, fitted = normalisation(policy_loss(of_library(name)))
    assert fitted == pytest.approx(exponent, abs=1e-9)
    assert per_token == pytest.approx([length**exponent for length in LENGTHS])


def prefix(log_prob: Any, old_log_prob: Any, **others: Any) -> Any:
    d_BT = (log_prob - old_log_prob) * others["response_mask"]
    weight_BT = d_BT.cumsum(-1).exp().detach()
    others["advantages"] = others["advantages"] * weight_BT
    return token_loss(log_prob=log_prob, old_log_prob=old_log_prob, term=lambda d, a: -a * d, **others)


def pairs(log_prob: Any, old_log_prob: Any, **others: Any) -> Any:
    d_BT = (log_prob - old_log_prob).detach()
    others["advantages"] = others["advantages"] * (d_BT + d_BT.roll(1, -1)).exp()
    return token_loss(log_prob=log_prob, old_log_prob=old_log_prob, term=lambda d, a: -a * d, **others)


def reinforce(**arguments: Any) -> Any:
    return token_loss(term=lambda d, a: -a * d, **arguments)


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
    clip = clip_by_length(policy_loss(of_library("seq_rloo")), "sequence", samples)
    sums = SequenceSums.zeros()
    for batch in samples:
        sums.add_(
            sequence_policy_loss(
                batch.log_prob_BT, batch.old_log_prob_BT, batch.advantages_BT, batch.mask_BT, ALGORITHMS["seq_rloo"]
            )
        )
    starts = np.searchsorted(FINE_LENGTH_EDGES.numpy(), clip.starts)
    for view in ("symmetric", "active", "mass"):
        counts = acceptance_counts(sums.sums_KF.numpy()[None], view)
        accepted, total = (merge_bins(fine, starts)[0] for fine in (counts.accepted, counts.total))
        assert clip.errors[view].lre == pytest.approx(float(plain_lre(accepted, total)[0]), abs=1e-5)
    assert clip.kept == pytest.approx(1 - (sums.total("clipped_high") + sums.total("clipped_low")) / 1280, abs=1e-6)
    assert clip.kept_J[0] > clip.kept_J[-1] + 0.1  # a constant band rejects long responses
