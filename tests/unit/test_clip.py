"""Clip values: the share inside, its interval, and when a run sets, fixes and questions its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest
import torch
from messages import unpadded

from fspo.audit import Audit, describe, read_audit
from fspo.audit.expected import expected
from fspo.clip import (
    BATCHES,
    FEWEST_GROUPS,
    FIXED_AFTER,
    ClipMeasurement,
    needed_scale,
    scale_for,
    scale_with_interval,
    scaled,
)
from fspo.conclusion import conclude
from fspo.losses import ALGORITHMS, LOSSES, judged
from fspo.report.build import build_report
from fspo.responses import Responses
from fspo.types import BandState, SequenceLossSettings
from recipe.fspo.overrides import override

MEASURED = ("fspo", "fspo_v1", "seq_gspo", "seq_rloo", "luspo")


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
    measured = scale_with_interval(needed, group, 0.85)
    assert measured.low < measured.value < measured.high and measured.value == scale_for(needed, 0.85)
    in_force = BandState(drift_per_token=kl, clip_scale=measured.value)
    assert share_inside(s, length, loss, in_force) == pytest.approx(0.85, abs=2 / len(s))
    # As clip values, for a reader or another run.
    as_values = scaled(loss, measured.value)
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
    with pytest.raises(ValueError, match=r"needed_B.*record responses"):
        scale_for(np.zeros(0))


def test_an_estimate_depends_neither_on_the_order_nor_on_the_names_of_groups() -> None:
    s, length, group = responses(60)
    needed = needed_scale(s, length, ALGORITHMS["fspo"])
    order = np.random.default_rng(1).permutation(len(s))
    other_names = np.random.default_rng(2).permutation(60)[group]
    assert scale_with_interval(needed[order], other_names[order]) == scale_with_interval(needed, group)


def test_the_interval_is_that_of_groups_not_of_responses() -> None:
    """With eight copies of one response a group, 60 groups know no more than 60 responses do."""
    s, length, group = responses(60)
    needed = needed_scale(s, length, ALGORITHMS["fspo"])[::8]
    copies, once = scale_with_interval(np.repeat(needed, 8), group), scale_with_interval(needed, group[::8])
    assert copies.high - copies.low == pytest.approx(once.high - once.low, rel=0.1)
    assert copies.high / copies.low > 1.4


def test_a_resampled_quantile_is_that_of_the_resampled_responses() -> None:
    """Against drawing whole clusters and taking the quantile of what was drawn; both have 400 resamples."""
    s, length, group = responses(200, seed=3)
    needed, rng = needed_scale(s, length, ALGORITHMS["fspo"]), np.random.default_rng(1)
    drawn = [
        scale_for(np.concatenate([needed[8 * g : 8 * g + 8] for g in rng.integers(0, 200, 200)])) for _ in range(400)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    interval = scale_with_interval(needed, group)
    # An end of 400 draws has a standard error of about a sixth of the half-width.
    assert interval.low == pytest.approx(low, abs=0.7 * (high - low) / 2)
    assert interval.high == pytest.approx(high, abs=0.7 * (high - low) / 2)


def fed(measurement: ClipMeasurement, first: int, last: int, sigma: float = 0.04, groups: int = 100) -> list[int]:
    """Feed rollout batches of so many groups; the steps after which a line was printed."""
    steps = []
    for step in range(first, last + 1):
        s, length, _ = responses(groups, seed=step, sigma=sigma)
        if measurement.add(needed_scale(s, length, ALGORITHMS["fspo"]), step) is not None:
            steps.append(step)
    return steps


def test_a_run_begins_without_a_clip_and_its_values_are_those_of_the_last_five_batches_until_the_tenth() -> None:
    measurement = ClipMeasurement(ALGORITHMS["fspo"], 0.85)
    assert measurement.scale == float("inf") and measurement.open
    assert fed(measurement, 1, FIXED_AFTER + 3) == [1, FIXED_AFTER], "lines of the first and of the fixed value"
    assert [value["after_step"] for value in measurement.values] == list(range(1, FIXED_AFTER + 1))
    assert [value["batches"] for value in measurement.values] == [*range(1, BATCHES), *[BATCHES] * 6]
    assert "c_low_interval" not in measurement.values[0], "one rollout batch says nothing of others"
    needed = [
        needed_scale(*responses(100, seed=step)[:2], ALGORITHMS["fspo"])
        for step in range(FIXED_AFTER - 4, FIXED_AFTER + 1)
    ]
    assert measurement.scale == scale_for(np.concatenate(needed), 0.85) and not measurement.open
    value, line = measurement.values[-1], measurement.sentence()
    assert value["c_low"] == value["c_high"] == pytest.approx(0.03 * measurement.scale)
    low, high = value["c_high_interval"]
    assert low < value["c_high"] < high
    assert f"{value['c_high']:.3g}" in line and f"from step {FIXED_AFTER + 1} on" in line and "85%" in line


def test_a_fixed_value_that_no_longer_fits_is_questioned_once_and_kept() -> None:
    measurement = ClipMeasurement(ALGORITHMS["fspo"], 0.85)
    fed(measurement, 1, FIXED_AFTER)
    last = measurement.scale
    s, length, _ = responses(100, seed=99, sigma=0.4)
    lines = [measurement.add(needed_scale(s, length, ALGORITHMS["fspo"]), step) for step in range(11, 41)]
    (line,) = [line for line in lines if line is not None]
    fitting = scaled(ALGORITHMS["fspo"], scale_for(needed_scale(s, length, ALGORITHMS["fspo"]), 0.85))
    assert lines.index(line) == 9 and f"c_high={fitting.c_high:.3g}" in line and "warning" in line
    assert measurement.scale == last, "a policy that moves farther is clipped more"
    quiet = ClipMeasurement(ALGORITHMS["fspo"], 0.85)
    fed(quiet, 1, FIXED_AFTER)
    assert fed(quiet, 11, 40, sigma=0.05) == []
    small = [quiet.add(np.full(50, 1e-9), step) for step in range(41, 61)]
    assert sum(line is not None for line in small) == 1, "nothing outside any more"


def test_batches_in_which_nothing_moved_set_no_value() -> None:
    measurement = ClipMeasurement(ALGORITHMS["fspo"], 0.85)
    assert measurement.add(np.zeros(0), 1) is measurement.add(np.zeros(50), 2) is None
    assert measurement.scale == float("inf") and measurement.values == []


def test_it_goes_on_from_a_checkpoint_in_the_middle_and_refuses_one_of_another_share() -> None:
    whole, halves = (ClipMeasurement(ALGORITHMS["fspo"], 0.85) for _ in range(2))
    fed(whole, 1, 12)
    for first, last in ((1, 3), (4, 7), (8, 12)):
        state = halves.state_dict()
        halves = ClipMeasurement(ALGORITHMS["fspo"], 0.85)
        halves.load_state_dict(state)
        fed(halves, first, last)
    assert halves.state_dict()["values"] == whole.values and halves.scale == whole.scale
    with pytest.raises(ValueError, match=r"accept=0\.85.*accept=0\.9"):
        ClipMeasurement(ALGORITHMS["fspo"], 0.9).load_state_dict(whole.state_dict())


@pytest.mark.parametrize("name", ["fspo", "seq_rloo", "seq_gspo"])
def test_a_run_an_audit_a_report_and_the_model_print_one_number(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same responses: those of the model, 2,000 of each of four lengths."""
    lengths = [50, 100, 200, 400]
    model = Responses.normal(0.04, lengths)
    measurement = ClipMeasurement(ALGORITHMS[name], 0.85)
    measurement.add(needed_scale(model.s_B, model.length_B, ALGORITHMS[name]), 1)
    value = measurement.values[-1]
    shown = f"{value['c_low']:.3g}, {value['c_high']:.3g}"
    algo = LOSSES[name].algo
    (row,) = [
        line
        for line in unpadded(expected(["sigma=0.04", f"lengths={lengths}", "accept=0.85"])).splitlines()
        if line.startswith(f"| {algo} ")
    ]
    assert row.split("|")[-2].strip() == shown
    columns = {"S": model.s_B, "L": model.length_B.astype(int), "minibatch": 1 + np.arange(len(model)) % 25}
    pd.DataFrame(columns).to_parquet(tmp_path / "own.parquet")
    lines = conclude(read_audit(tmp_path / "own.parquet").responses, name)
    (line,) = [line for line in lines if f"inside {name}'s band" in line]
    for side in ("c_low", "c_high"):
        assert f"{value[side]:.3g} [" in line
    page = build_report([tmp_path / "own.parquet"], tmp_path / "report").page
    follows = json.loads((page.parent / "summary.json").read_text())["follows"]
    (own,) = [line for line in follows if "inside fspo's band" in line]
    assert name != "fspo" or own == line


@pytest.mark.parametrize(
    ("loss", "band", "keys"),
    [
        ("fspo", "fspo", ("policy_loss.exponent", "policy_loss.c_low", "policy_loss.c_high")),
        ("seq_gspo", "seq_gspo", ("policy_loss.exponent", "policy_loss.c_low", "policy_loss.c_high")),
        ("seq_rloo", "seq_rloo", ("policy_loss.exponent", "policy_loss.c_low", "policy_loss.c_high")),
        ("luspo", "luspo", ("policy_loss.exponent", "policy_loss.c_low", "policy_loss.c_high")),
        ("gspo", "seq_gspo", ("clip_ratio_low", "clip_ratio_high")),  # verl's
        (
            "vanilla",
            "fspo",
            (
                *("policy_loss.loss_mode", "policy_loss.exponent", "policy_loss.c_low", "policy_loss.c_high"),
                "policy_loss.grad_multiplier",
            ),
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
    at = {
        name: index
        for index, line in enumerate(lines)
        for name in ALGORITHMS
        if line.startswith("- 85% of these") and f"inside {name}'s band" in line
    }

    def settings_at(index: int) -> dict[str, str]:
        words = (word.lstrip("+").removeprefix("actor_rollout_ref.actor.") for word in lines[index + 1].split())
        return dict(word.split("=") for word in words)

    settings = settings_at(at[band])
    assert set(settings) - {"policy_loss._target_"} == set(keys)
    low, high = (float(value) for key, value in settings.items() if key.endswith(("_low", "_high")))
    values = dataclasses.replace(ALGORITHMS[band], c_low=low, c_high=high)
    assert share_inside(s, length, values) == pytest.approx(0.85, abs=0.01), "three digits"
    assert set(at) == {band, "fspo"}
    if loss != "fspo":
        instead = settings_at(at["fspo"])
        # FSPO's loss in place of the audited one: the factor makes up for a sum over tokens in place of means.
        assert instead["policy_loss.loss_mode"] == "fspo"
        factor = float(instead.get("policy_loss.grad_multiplier", 1))
        assert factor == pytest.approx(1 if loss in ("seq_rloo", "luspo") else 1 / np.mean(length), rel=0.05)


def cell(text: str, band: str) -> float:
    line = next(line for line in unpadded(text).splitlines() if line.startswith(f"| {band} |"))
    return float(line.split("|")[-2])


@pytest.mark.parametrize("band", ["fspo", "gspo", "rloo"])
@pytest.mark.parametrize("drift", ["kl", "none"])
def test_a_removed_share_is_solved_for_the_sigma_that_gives_it(band: str, drift: str) -> None:
    """With Phi, removed is (1 - Phi(h/s + s/2) + Phi(s/2 - h/s)) / 2 for a drift of -s^2/2 and bounds of +-h."""
    c, exponent = {"fspo": (0.03, 0.5), "gspo": (4e-4, 1.0), "rloo": (0.2, 0.0)}[band]
    words = ["removed=0.12", "minibatches=3", "lengths=[900]", f"drift={drift}", f"{band}={c}"]
    spread, half_width = cell(expected(words), band) * 30, c * 900**exponent
    mean = -(spread**2) / 2 if drift == "kl" else 0.0
    normal = NormalDist(mean, spread)
    outside = 1 - normal.cdf(half_width) + normal.cdf(-half_width)
    assert outside / 2 * 2 / 3 == pytest.approx(0.12, rel=0.06)  # two digits of sigma are printed


def test_reports_of_clip_fractions() -> None:
    paper = expected(["removed=0.15", "minibatches=4", "lengths=[4000]"])
    assert cell(paper, "gspo") == 0.02 and "20.0% of those after the first" in paper
    assert cell(expected(["removed=0.2", "lengths=[4000]"]), "gspo") == 0.02  # where every mini-batch counts


def test_a_removed_share_that_no_sigma_explains_says_so() -> None:
    """A clip on one side removes at most a quarter. With a drift it removes most at a moderate spread."""

    def of_gspo(*words: str) -> str:
        lines = unpadded(expected(["lengths=[4000]", *words])).splitlines()
        return next(line for line in lines if line.startswith("| gspo |")).split("|")[-2].strip()

    above = "gspo=[900,1e-3]"
    assert of_gspo("removed=0.3", above, "drift=none") == "none up to 10: at most 24.9%, at 10"
    assert of_gspo("removed=0.01", above).startswith("none up to 10: at most 0.1%, at 0.0")
    sigma = float(of_gspo("removed=0.0005", above))
    normal = NormalDist(-4000 * sigma**2 / 2, sigma * 4000**0.5)
    assert (1 - normal.cdf(1e-3 * 4000)) / 2 == pytest.approx(0.0005, rel=0.5)  # shares are right to 1 / 2000
    assert of_gspo("removed=0.05", "gspo=1e-9") == "under 1e-07"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["removed=0.1", "minibatches=1", "lengths=[9]"], "minibatches=1"),
        (["removed=0.1", "minibatches=2.5", "lengths=[9]"], "minibatches=2.5"),
        (["sigma=0.1", "minibatches=2", "lengths=[9]"], "minibatches=2: .*removed="),
        (["removed=0.1", "accept=0.8", "lengths=[9]"], "accept=0.8: .*sigma="),
        (["removed=0.1", "sigma=0.8", "lengths=[9]"], "one of sigma= and removed="),
        (["removed=1.1", "lengths=[9]"], "removed=1.1"),
        (["removed=0.63", "minibatches=2", "lengths=[256]"], "removed=0.63: .*at most 25.0%.*S follows A.*audit"),
        (["removed=0.5", "lengths=[256]"], "removed=0.5: .*at most 50.0%"),
        (["removed=0.1", "tis=2", "lengths=[9]"], "tis=2: .*sigma="),
        (["sigma=0.1", "tis=0", "lengths=[9]"], "tis=0: "),
    ],
)
def test_what_cannot_be_solved_is_said(words: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        expected(words)


@pytest.mark.parametrize("drift", ["kl", "none"])
def test_what_truncation_leaves_of_the_weight_by_length(drift: str) -> None:
    """Against the definition, integrated numerically; three digits are printed."""
    words = ["sigma=0.05", "lengths=[100,8000]", f"drift={drift}", "tis=1.5"]
    cells = [line.split("|")[1:-1] for line in expected(words).split("\n\n")[-1].splitlines()[2:]]
    for length, (shown, mean, weight, above) in zip((100, 8000), cells, strict=True):
        spread = 0.05 * length**0.5
        s_X = np.linspace(-12, 12, 200_001) * spread + (center := -(spread**2) / 2 * (drift == "kl"))
        density_X = np.exp(-(((s_X - center) / spread) ** 2) / 2) / (spread * np.sqrt(2 * np.pi))
        step = s_X[1] - s_X[0]
        assert int(shown) == length and float(mean) == pytest.approx(center, rel=0.01)
        assert float(weight) == pytest.approx((np.minimum(np.exp(s_X), 1.5) * density_X).sum() * step, rel=0.01)
        share = density_X[s_X > np.log(1.5)].sum() * step
        assert float(above.strip("% ")) == pytest.approx(100 * share, abs=0.06)


def test_a_weight_that_nothing_truncates_has_the_mean_1() -> None:
    """E[exp S] = 1 where the responses were sampled from what S is measured against, and exp overflows nowhere."""
    last = expected(["sigma=0.01", "lengths=[100]", "tis=1000"]).splitlines()[-1]
    assert [cell.strip() for cell in last.split("|")[3:5]] == ["1", "0.0%"]
    far = expected(["sigma=9", "lengths=[1e6]", "tis=2", "drift=none"]).splitlines()[-1]
    assert [cell.strip() for cell in far.split("|")[3:5]] == ["1", "50.0%"]
