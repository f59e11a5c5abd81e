"""Matched clip values, checked by running the real loss with them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.matching import Sequences, match_clip, needed_factor
from fspo.sums import SequenceSums
from fspo.types import BandState, SequenceLossOutput, SequenceLossSettings

FIXED = {name: s for name, s in ALGORITHMS.items() if not s.needs_state}


def run(algo: SequenceLossSettings, seed: int = 0, batch: int = 2000, drift: float = 0.0) -> SequenceLossOutput:
    generator = torch.Generator().manual_seed(seed)
    length_B = (torch.rand(batch, generator=generator) ** 2 * 150).long() + 1
    mask_BT = torch.arange(150)[None] < length_B[:, None]
    log_prob_BT = torch.randn(batch, 150, generator=generator, dtype=torch.float64) * 0.03 - 5e-4
    ones = torch.ones_like(log_prob_BT)
    return sequence_policy_loss(
        log_prob_BT, torch.zeros_like(ones), ones, mask_BT, algo, BandState(drift_per_token=drift)
    )


def pairs(output: SequenceLossOutput) -> Sequences:
    return Sequences.from_pairs(output.log_ratio_B.numpy(), output.length_B.numpy())


@pytest.mark.parametrize("name", FIXED)
@settings(max_examples=8)
@given(target=st.floats(0.02, 0.9))
def test_matched_clip_gives_the_target_rate_in_the_loss(name: str, target: float) -> None:
    output = run(FIXED[name])
    matched = match_clip(pairs(output), FIXED[name], target)
    measured = 1 - run(matched.settings).accepted_B.double().mean().item()
    assert measured == pytest.approx(target, abs=1 / 2000 + 1e-9)
    assert matched.clip_rate == pytest.approx(measured, abs=1e-12)
    ratio = FIXED[name].c_low / FIXED[name].c_high
    assert matched.settings.c_low / matched.settings.c_high == pytest.approx(ratio)


def test_histograms_give_nearly_the_same_clips_as_pairs() -> None:
    output = run(FIXED["fspo"])
    sums = SequenceSums.zeros().add_(output)
    length_K = (sums.column("length") / sums.column("count").clamp(min=1)).numpy()
    cells, bins = Sequences.from_cells(sums.cells().numpy(), length_K)
    assert cells.count_B.sum() == pytest.approx(2000) and bins.shape == cells.count_B.shape
    for algo in FIXED.values():
        exact = match_clip(pairs(output), algo, 0.15).factor
        assert match_clip(cells, algo, 0.15).factor == pytest.approx(exact, rel=0.03)


def test_drift_is_followed_where_the_band_follows_it() -> None:
    v1 = ALGORITHMS["fspo_v1"]
    output = run(v1)
    matched = match_clip(pairs(output), v1, 0.2, drift_per_token=5e-4)
    assert 1 - run(matched.settings, drift=5e-4).accepted_B.double().mean().item() == pytest.approx(0.2, abs=1e-3)
    ignored = needed_factor(pairs(output), ALGORITHMS["fspo"], drift_per_token=5e-4)
    np.testing.assert_allclose(ignored, needed_factor(pairs(output), ALGORITHMS["fspo"]))


def test_measured_bands_get_the_target_and_a_constant_band_may_be_wide() -> None:
    matched = match_clip(pairs(run(FIXED["fspo"])), ALGORITHMS["fspo_quantile"], 0.15)
    assert matched.settings.target_acceptance == pytest.approx(0.85)
    wide = match_clip(Sequences.from_pairs([5.0, -1.0, 2.0, 4.0], [1, 1, 1, 1]), ALGORITHMS["seq_rloo"], 0.25)
    assert 4 < wide.settings.c_high < wide.settings.c_low
    assert wide.clip_rate == 0.25


def test_ties_keep_the_rate_at_or_below_the_target() -> None:
    tied = Sequences.from_pairs([0.1] * 5 + [0.5] * 5, [4] * 10)
    assert [match_clip(tied, ALGORITHMS["fspo"], target).clip_rate for target in (0.3, 0.5)] == [0.0, 0.5]


def test_bad_input_is_refused() -> None:
    good = Sequences.from_pairs([0.1, -0.2], [3, 4])
    unmoved = Sequences.from_pairs([0.0] * 9 + [1.0], [3] * 10)
    for sequences, loss, target, names in (
        (good, ALGORITHMS["fspo"], 1.0, "target_clip_rate=1.0"),
        (good, dataclasses.replace(ALGORITHMS["fspo"], c_low=0.0), 0.1, "c_low=0.0"),
        (unmoved, ALGORITHMS["fspo"], 0.5, "0.5"),
    ):
        with pytest.raises(ValueError, match=names):
            match_clip(sequences, loss, target)
    with pytest.raises(ValueError):
        Sequences.from_pairs([], [])
