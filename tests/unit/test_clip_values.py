"""Clip values measured on a run's own responses: the share inside, its interval, and when a value is set."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from fspo.audit import Audit, describe, read_audit
from fspo.clip_values import BATCHES, FEWEST_GROUPS, ClipMeasurement, estimate, needed_scale, scaled
from fspo.losses import ALGORITHMS, LOSSES, judged
from fspo.types import BandState, SequenceLossSettings, c_of_eps
from recipe.fspo.overrides import override

MEASURED = [name for name, loss in LOSSES.items() if loss.measurable]


def responses(groups: int, seed: int = 0, sigma: float = 0.04) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """S, L and group of eight responses to each prompt: S spreads like sigma sqrt(L), half of it with the prompt."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(groups), 8)
    length = rng.integers(1, 400, group.size)
    s = sigma * np.sqrt(length / 2) * (rng.standard_normal(groups)[group] + rng.standard_normal(group.size))
    return s, length, group


def share_inside(
    s: np.ndarray, length: np.ndarray, loss: SequenceLossSettings, state: BandState | None = None
) -> float:
    """By the loss itself, of which this module knows only the band's edges."""
    A = torch.ones(len(s), dtype=torch.float64)
    output = judged(torch.tensor(s), torch.tensor(length), A, loss, state)
    return float(output.accepted_B.to(torch.float64).mean())


@pytest.mark.parametrize("name", MEASURED)
def test_the_wanted_share_lies_inside_the_loss_s_own_band(name: str) -> None:
    s, length, group = responses(100)
    loss, kl = ALGORITHMS[name], 2e-4
    needed = needed_scale(s, length, loss, kl)
    measured = estimate(needed, group, 0.85)
    assert measured is not None and measured.low < measured.scale < measured.high
    in_force = BandState(drift_per_token=kl, clip_scale=measured.scale)
    assert share_inside(s, length, loss, in_force) == pytest.approx(0.85, abs=2 / len(s))
    # As clip values, for a reader or another run.
    as_values = scaled(loss, measured.scale)
    assert share_inside(s, length, as_values, BandState(drift_per_token=kl)) == pytest.approx(0.85, abs=2 / len(s))
    assert as_values.c_low / as_values.c_high == pytest.approx(loss.c_low / loss.c_high)


@pytest.mark.parametrize("name", MEASURED)
def test_a_scaled_loss_has_bounds_that_many_times_as_wide(name: str) -> None:
    length = torch.tensor([1, 50, 3000])
    one = judged(torch.zeros(3), length, torch.ones(3), ALGORITHMS[name], BandState())
    for scale in (0.2, 7.0):
        wide = judged(torch.zeros(3), length, torch.ones(3), scaled(ALGORITHMS[name], scale), BandState())
        for edge in ("lower_B", "upper_B"):
            torch.testing.assert_close(getattr(wide, edge), scale * getattr(one, edge), rtol=1e-4, atol=1e-6)


def test_clip_values_that_no_factor_scales_are_refused() -> None:
    s, length, _ = responses(2)
    for loss in (dataclasses.replace(ALGORITHMS["fspo"], c_low=0.0), ALGORITHMS["fspo_quantile"]):
        with pytest.raises(ValueError, match=rf"band='{loss.band}'.*c_low={loss.c_low}"):
            needed_scale(s, length, loss)


def test_an_estimate_depends_neither_on_the_order_nor_on_the_names_of_groups() -> None:
    s, length, group = responses(60)
    needed = needed_scale(s, length, ALGORITHMS["fspo"])
    order = np.random.default_rng(1).permutation(len(s))
    other_names = np.random.default_rng(2).permutation(1000)[group]
    assert estimate(needed[order], other_names[order], 0.85) == estimate(needed, group, 0.85)


def test_the_interval_is_that_of_groups_not_of_responses() -> None:
    """With eight copies of one response a group, 60 groups know no more than 60 responses do."""
    s, length, group = responses(60)
    needed = needed_scale(s, length, ALGORITHMS["fspo"])[::8]
    copies = estimate(np.repeat(needed, 8), group, 0.85)
    once = estimate(needed, group[::8], 0.85)
    assert copies is not None and once is not None
    assert copies.error == pytest.approx(once.error, rel=0.05)
    assert copies.error > 0.1


def test_too_few_groups_and_a_policy_that_has_not_moved_give_no_value() -> None:
    s, length, group = responses(FEWEST_GROUPS - 1)
    assert estimate(needed_scale(s, length, ALGORITHMS["fspo"]), group, 0.85) is None
    assert estimate(np.zeros(400), np.repeat(np.arange(50), 8), 0.85) is None


def fed(measurement: ClipMeasurement, groups: int, first: int, last: int, sigma: float = 0.04) -> list[int]:
    """Feed rollout batches of so many groups; the steps after which a value was set."""
    steps = []
    for step in range(first, last + 1):
        s, length, group = responses(groups, seed=step, sigma=sigma)
        if measurement.add([needed_scale(s, length, ALGORITHMS["fspo"])], [group], step) is not None:
            steps.append(step)
    return steps


def test_large_batches_settle_the_first_value_at_once_and_small_ones_after_five() -> None:
    assert fed(ClipMeasurement(ALGORITHMS["fspo"], 0.85), 400, 1, 20) == [1, 1 + BATCHES]
    assert fed(ClipMeasurement(ALGORITHMS["fspo"], 0.85), 24, 1, 20) == [BATCHES, 2 * BATCHES]
    # Ten batches of two groups are as few as have 20 of them.
    assert fed(ClipMeasurement(ALGORITHMS["fspo"], 0.85), 2, 1, 12) == [10]


def test_the_second_value_is_that_of_the_batches_after_the_first_and_then_fixed() -> None:
    measurement = ClipMeasurement(ALGORITHMS["fspo"], 0.85)
    fed(measurement, 400, 1, 1, sigma=0.08)
    early = measurement.scale
    fed(measurement, 400, 2, 6, sigma=0.04)
    assert measurement.scale == pytest.approx(early / 2, rel=0.15)
    assert not measurement.open and [value["after_step"] for value in measurement.values] == [1, 6]
    last, line = measurement.scale, measurement.sentence()
    fed(measurement, 400, 7, 9, sigma=0.2)
    assert measurement.scale == last, "a policy that moves farther is clipped more"
    value = measurement.values[-1]
    assert value["c_low"] == value["c_high"] == pytest.approx(0.03 * last)
    low, high = value["c_high_interval"]
    assert low < value["c_high"] < high
    assert f"{value['c_high']:.3g}" in line and "from step 7 on" in line and "85%" in line


def test_it_goes_on_from_a_checkpoint_in_the_middle_and_refuses_one_of_another_share() -> None:
    whole, halves = (ClipMeasurement(ALGORITHMS["fspo"], 0.85) for _ in range(2))
    steps = fed(whole, 24, 1, 12)
    for first, last in ((1, 3), (4, 7), (8, 12)):
        state = halves.state_dict()
        halves = ClipMeasurement(ALGORITHMS["fspo"], 0.85)
        halves.load_state_dict(state)
        fed(halves, 24, first, last)
    assert halves.values == whole.values and len(steps) == 2
    with pytest.raises(ValueError, match=r"accept=0\.85.*accept=0\.9"):
        ClipMeasurement(ALGORITHMS["fspo"], 0.9).load_state_dict(whole.state_dict())


@pytest.mark.parametrize(
    ("loss", "band", "keys"),
    [
        ("fspo", "fspo", ("policy_loss.c_low", "policy_loss.c_high")),
        ("seq_gspo", "seq_gspo", ("policy_loss.c_low", "policy_loss.c_high")),
        ("seq_rloo", "seq_rloo", ("policy_loss.c_low", "policy_loss.c_high")),
        ("luspo", "luspo", ("policy_loss.c_low", "policy_loss.c_high")),
        ("gspo", "seq_gspo", ("clip_ratio_low", "clip_ratio_high")),  # verl's
        (
            "vanilla",
            "fspo",
            ("policy_loss.loss_mode", "policy_loss.c_low", "policy_loss.c_high", "policy_loss.grad_multiplier"),
        ),
    ],
)
def test_an_audit_prints_the_override_with_the_values(
    tmp_path: Path, loss: str, band: str, keys: tuple[str, ...]
) -> None:
    s, length, _ = responses(400)
    new = torch.zeros(len(s), 400, dtype=torch.float64)
    mask = torch.arange(400) < torch.tensor(length)[:, None]
    new[mask] = torch.tensor(s / length).repeat_interleave(torch.tensor(length))
    audit = Audit(tmp_path, loss=loss)
    for mini_batch in range(1 + FEWEST_GROUPS):
        rows = slice(max(0, mini_batch - 1), None, FEWEST_GROUPS)
        audit.add(new[rows] * (mini_batch > 0), 0 * new[rows], mask[rows], torch.ones_like(new[rows]))
        audit.end_mini_batch(1)
    lines = describe(read_audit(tmp_path), override=override).splitlines()
    index, *others = [index for index, line in enumerate(lines) if line.startswith("- 85% of these")]

    def settings_at(index: int) -> dict[str, str]:
        words = (word.lstrip("+").removeprefix("actor_rollout_ref.actor.") for word in lines[index + 1].split())
        return dict(word.split("=") for word in words)

    settings = settings_at(index)
    assert set(settings) - {"policy_loss._target_"} == set(keys)
    low, high = (float(value) for key, value in settings.items() if key.endswith(("_low", "_high")))
    if loss == "gspo":
        low, high = c_of_eps(low, high)
    values = dataclasses.replace(ALGORITHMS[band], c_low=low, c_high=high)
    assert share_inside(s, length, values) == pytest.approx(0.85, abs=0.01), "from histograms"
    assert len(others) == (band != "fspo")
    for instead in map(settings_at, others if others else [index] * (loss == "vanilla")):
        # FSPO's loss in place of the audited one: the factor makes up for a sum over tokens in place of means.
        assert instead["policy_loss.loss_mode"] == "fspo"
        factor = float(instead.get("policy_loss.grad_multiplier", 1))
        assert factor == pytest.approx(1 if loss in ("seq_rloo", "luspo") else 1 / np.mean(length), rel=0.05)
