"""Promises 7 and 8: the Length Reweighting Error by hand, and what an audit concludes where the answer is known."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from commands import run
from library import (
    ALGORITHMS,
    Responses,
    even_band,
    exponent_of,
    length_reweighting_error,
    needed_scale,
    rounding_share,
    scale_for,
)
from recorded_runs import drawn

pytestmark = pytest.mark.promise(7, 8)
STUDY = Path(__file__).parents[2] / "benchmarks/study"


@pytest.mark.parametrize("clusters", [1, 10])
def test_the_error_by_hand(clusters: int) -> None:
    """Shares 1/4 and 3/4, rates 0.4 and 0.8: overall 0.7, deviations 3/7 and 1/7, and (3/7 + 3/7) / 4."""
    accepted, total = np.tile([40, 240], (clusters, 1)), np.tile([100, 300], (clusters, 1))
    error = length_reweighting_error(accepted, total)
    assert error.lre == pytest.approx(3 / 14) and error.rate == pytest.approx(0.7)
    assert error.rate_K.tolist() == pytest.approx([0.4, 0.8])
    assert length_reweighting_error([0, 40, 0, 240], [0, 100, 0, 300]).lre == pytest.approx(3 / 14), "empty bins"
    assert error.debiased.value <= error.lre


@pytest.mark.parametrize("rate", [0.01, 0.5, 1.0])
def test_flat_rates_have_no_error(rate: float) -> None:
    total = np.array([[100, 300, 700]] * 12)
    error = length_reweighting_error(total * rate, total)
    assert (error.lre, error.debiased.value) == pytest.approx((0, 0), abs=1e-12)
    assert np.isnan(length_reweighting_error(total * 0, total).lre), "where nothing is accepted there is none"


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.1])
def test_the_interval_covers_the_error(spread: float) -> None:
    """Of 60 sets of mini-batches that lean to short or long responses the interval of at least 50 covers."""
    draw, total = np.random.default_rng(2), np.full((24, 8), 20)
    rates = 0.8 * (1 + spread * np.linspace(-1, 1, 8))
    true = float(np.mean(np.abs(rates / rates.mean() - 1)))
    covered = []
    for _ in range(60):
        shift = 1 + 0.3 * draw.standard_normal((24, 1)) * np.linspace(-1, 1, 8)
        error = length_reweighting_error(draw.binomial(total, np.clip(rates * shift, 0, 1)), total, resamples=200)
        covered.append(error.debiased.low - 1e-9 <= true <= error.debiased.high)
    assert sum(covered) >= 50


def recording(name: str) -> Responses:
    frame = pd.read_parquet(STUDY / f"{name}.parquet")
    return Responses.of_rows({column: frame[column].to_numpy() for column in frame}).moved()


#: Of recorded runs: exponent of the spread, FSPO's c for 85%, share of rounding, and for some the most even exponents:
#: of all responses, and of the gradients that a clip removes.
RECORDED = {
    "demo": (0.4375, 0.024689, 0.02, 0.37, 0.18),
    "fast": (0.6066, 0.10112, 0.062),
    "words": (0.3426, 0.031073, 0.021),
    "two_words": (0.2976, 0.032468, -0.015, 0.32, 0.33),
    "long_in_bf16": (0.4942, 0.072753, 1.027, 0.51, 0.49),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_runs_have_the_answers_that_they_had(name: str) -> None:
    exponent, c, rounding, *even = RECORDED[name]
    responses = recording(name)
    spread, share = exponent_of(responses), rounding_share(responses)
    assert spread.value == pytest.approx(exponent, abs=0.03) and spread.low < exponent < spread.high
    assert share.value == pytest.approx(rounding, abs=0.03)
    factor = scale_for(needed_scale(responses.s_B, responses.length_B, ALGORITHMS["fspo"]))
    assert 0.03 * factor == pytest.approx(c, rel=0.01)
    for view, exponent in zip(("outside", "removed"), even, strict=False):
        band = even_band(responses, view=view)
        assert band is not None and band.exponent.value == pytest.approx(exponent, abs=0.03)
        assert band.exponent.low - 0.01 <= exponent <= band.exponent.high + 0.01
        assert min(band.errors, key=lambda e: band.errors[e].debiased.value) == band.exponent.value


#: LRE of the published bands on recorded runs, over eight bins of equally many responses, by all and by removed ones.
ERRORS = {
    ("demo", "fspo"): (0.0231, 0.0283),
    ("demo", "seq_gspo"): (0.1545, 0.0683),
    ("demo", "seq_rloo"): (0.0627, 0.0285),
    ("fast", "fspo"): (0.1485, 0.0225),
    ("fast", "seq_rloo"): (0.2859, 0.0689),
}


@pytest.mark.parametrize(("name", "loss"), ERRORS)
def test_what_a_band_does_by_length_on_recorded_runs(name: str, loss: str) -> None:
    responses = recording(name)
    judged = responses.judged_by(ALGORITHMS[loss])
    bins = (np.argsort(np.argsort(responses.length_B, kind="stable"), kind="stable") * 8) // len(responses)

    cells, shape = responses.batch_B * 8 + bins, (responses.batches, 8)

    def error(accepted: np.ndarray) -> float:
        counts = [np.bincount(cells, w, np.prod(shape)).reshape(shape) for w in (accepted, np.ones(len(bins)))]
        return float(length_reweighting_error(*counts).debiased.value)

    assert (error(judged.inside_B), error(judged.kept_B)) == pytest.approx(ERRORS[name, loss], abs=0.003)


@pytest.mark.parametrize(("exponent", "sigma"), [(0.0, 0.04), (0.5, 0.04), (0.75, 0.01), (1.0, 0.001), (0.5, 1e-5)])
def test_the_spread_and_the_even_band_have_the_drawn_exponent(exponent: float, sigma: float) -> None:
    """Four standard errors of the spread, 0.007, and of the most even band, 0.03 to 0.04."""
    responses = Responses.of_rows(drawn(exponent, sigma))
    spread = exponent_of(responses)
    assert spread.value == pytest.approx(exponent, abs=0.03) and 0.015 < spread.high - spread.low < 0.05
    for view in ("outside", "removed"):
        band = even_band(responses, view=view)
        assert band is not None and band.exponent.value == pytest.approx(exponent, abs=0.16)


@pytest.mark.parametrize("sigma", [0.02, 0.04])
def test_movement_is_told_from_rounding(sigma: float) -> None:
    moved, rounded = (rounding_share(Responses.of_rows(drawn(0.5, sigma, drift))) for drift in (True, False))
    assert moved.value == pytest.approx(0, abs=0.4) and moved.high < 1
    assert rounded.value == pytest.approx(1, abs=0.4) and rounded.low > 0


def test_half_the_batches_moving_farther_changes_no_exponent() -> None:
    near, far = drawn(0.5, 0.02), drawn(0.5, 0.08)
    near["S"] = np.where(near["minibatch"] % 2 == 0, far["S"], near["S"])
    assert exponent_of(Responses.of_rows(near)).value == pytest.approx(0.5, abs=0.03)


def test_responses_before_a_moved_weight_are_left_out() -> None:
    rows = drawn(0.5, 0.04)
    still = rows["minibatch"] % 2 == 0
    rows["minibatch"] = np.where(still, 0, rows["minibatch"])
    responses = Responses.of_rows(rows | {"update": rows["minibatch"]})
    assert len(responses.moved()) == (~still).sum() and (responses.moved().s_B == rows["S"][~still]).all()


def numbers(text: str) -> set[float]:
    return {float(number) for number in re.findall(r"\d+\.\d+(?:e-\d+)?", text)}


def test_the_command_prints_exponent_clip_value_and_evenness(tmp_path: Path) -> None:
    ended = run("fspo.audit", STUDY / "demo.parquet", folder=tmp_path)
    assert ended.status == 0 and {0.44, 0.37, 0.18, 0.0247} <= numbers(ended.out)
    wider = run("fspo.audit", STUDY / "demo.parquet", "--accept", "0.95", folder=tmp_path)
    assert wider.status == 0 and 0.0247 not in numbers(wider.out)


def test_the_command_takes_anybodys_parquet_and_names_what_is_wrong(tmp_path: Path) -> None:
    columns = {"S": [0.1, -0.2], "L": [3, 4]}
    bad = {"nan": columns | {"S": [np.nan, 1.0]}, "text": columns | {"L": ["a", "b"]}, "none": {"L": [3, 4]}}
    for name, values in {"good": columns, **bad}.items():
        pd.DataFrame(values).to_parquet(tmp_path / f"{name}.parquet")
    assert run("fspo.audit", "good.parquet", folder=tmp_path).status == 0, "too few for a conclusion"
    for name, column in (("nan", "S"), ("text", "L"), ("none", "S")):
        ended = run("fspo.audit", f"{name}.parquet", folder=tmp_path)
        assert ended.status == 2 and f"{name}.parquet" in ended.error and re.search(rf"\b{column}\b", ended.error)
    assert run("fspo.audit", "absent.parquet", folder=tmp_path).status == 2


def test_shares_outside_are_foretold_for_a_sigma(tmp_path: Path) -> None:
    """S is normal with deviation sigma sqrt(L) about -deviation^2 / 2."""
    ended = run("fspo.audit", "expected", "sigma=0.04", "lengths=[700,8192]", folder=tmp_path)
    assert ended.status == 0
    (fspo,) = re.findall(r"^\|\s*fspo\s*\|(.*)$", ended.out, re.M)
    assert [float(share) for share in re.findall(r"([\d.]+)%", fspo)] == pytest.approx(
        [51.3, 25.7, 86.1, 43.0], abs=0.1
    )
