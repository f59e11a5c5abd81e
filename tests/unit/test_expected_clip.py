"""The clip fraction that a band should show: against simulation, an audit, and figures that can be checked by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from fspo.audit import Audit
from fspo.expected_clip import Measured, Normal, accepted, clip_for, main, table
from fspo.losses import ALGORITHMS, BANDS, acceptance_band, sequence_policy_loss

FSPO = ALGORITHMS["fspo"]


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize(("exponent", "drift"), [(0.5, True), (0.3, False)])
def test_shares_are_those_of_a_simulation(name: str, exponent: float, drift: bool) -> None:
    settings = ALGORITHMS[BANDS[name]]
    spread = Normal.of(0.02, [64, 1024], exponent, drift)
    draws = np.random.default_rng(0).normal(spread.mean_N, spread.std_N, (200_000, 2))
    lower, upper = (edge.numpy() for edge in acceptance_band(torch.tensor([64, 1024]), settings, None, torch.float64))
    below, above = spread.outside(settings)
    np.testing.assert_allclose(below, (draws < lower).mean(0), atol=0.005)
    np.testing.assert_allclose(above, (draws > upper).mean(0), atol=0.005)


@pytest.mark.parametrize("exponent", [0.5, 0.3])
def test_a_band_about_the_drift_has_it_at_its_centre(exponent: float) -> None:
    spread, settings = Normal.of(0.03, [64, 4096], exponent), ALGORITHMS["fspo_v1"]
    draws = np.random.default_rng(0).normal(spread.mean_N, spread.std_N, (200_000, 2))
    kl = -draws.sum() / (200_000 * spread.length_N.sum())  # as the trainer measures it
    half = settings.c_low * np.sqrt(spread.length_N)
    below, above = spread.outside(settings)
    np.testing.assert_allclose(below, (draws < -kl * spread.length_N - half).mean(0), atol=0.005)
    np.testing.assert_allclose(above, (draws > -kl * spread.length_N + half).mean(0), atol=0.005)
    without, _ = Normal.of(0.03, [64, 4096], exponent, drift=False).outside(settings)
    np.testing.assert_allclose(without, Normal.of(0.03, [64, 4096], exponent, drift=False).outside(FSPO)[0])


def test_the_lre_of_a_single_length_says_nothing() -> None:
    (*_, row) = table(Normal.of(0.03, [4000]), {"fspo": FSPO}).splitlines()
    assert row.split("|")[-2].strip() == "-"


def test_the_default_clip_value_leaves_72_percent_outside_at_4000_tokens() -> None:
    below, above = Normal.of(0.04, [4000]).outside(FSPO)
    assert (float(below[0]), float(above[0])) == pytest.approx((0.697, 0.022), abs=5e-4)  # drift -3.2, half-width 1.9


@pytest.mark.parametrize("name", BANDS)
def test_a_clip_value_for_a_wanted_acceptance(name: str) -> None:
    spread, settings = Normal.of(0.02, [100, 400]), ALGORITHMS[BANDS[name]]
    clip = clip_for(spread, settings, 0.8)
    assert clip is not None
    chosen = dataclasses.replace(settings, c_low=clip, c_high=clip)
    assert accepted(spread, chosen) == pytest.approx(0.8, abs=1e-6)


def test_the_clip_values_of_a_spread_are_one_half_width_at_one_length() -> None:
    rows = table(Normal.of(0.1, [4000]), {name: ALGORITHMS[loss] for name, loss in BANDS.items()}, 0.85).splitlines()
    assert [row.split("|")[-2].strip() for row in rows[2:]] == ["0.42", "26.6", "0.00664"]


def test_an_audit_is_measured_with_its_tails(tmp_path: Path) -> None:
    """Token log-ratios of Student's t with 2 degrees of freedom: far from normal, as in a small model's runs."""
    audit, generator = Audit(tmp_path, FSPO), torch.Generator().manual_seed(0)
    old = torch.zeros(4096, 32)
    length = torch.randint(1, 33, (4096, 1), generator=generator)
    normal, mixed = torch.randn((2, *old.shape), generator=generator)
    new = 0.01 * normal / mixed.abs().clamp(min=0.02)
    mask, advantages = torch.arange(32) < length, torch.ones_like(old)
    for mini_batch in range(2):
        audit.add(mini_batch * new, old, mask, advantages)
        audit.end_mini_batch(step=1)
    spread = Measured.audit(tmp_path)
    for loss in BANDS.values():
        settings = dataclasses.replace(ALGORITHMS[loss], c_low=0.02, c_high=0.03)
        inside = sequence_policy_loss(new, old, advantages, mask, settings).accepted_B.double().mean()
        assert accepted(spread, settings) == pytest.approx(float(inside), abs=0.01), loss
    assert main([f"audit={tmp_path}"]) == 0


def test_the_command_prints_a_row_for_each_band(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sigma=0.03", "lengths=[1000,4000]", "gspo=[1e-3,2e-3]", "accept=0.85"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["fspo", "fspo_v1", "rloo", "gspo"]
    assert "0.001, 0.002" in lines[-1] and "85%" in lines[0]
    assert table(Normal.of(0.03, [1000]), {"fspo": FSPO}).count("\n") == 2


@pytest.mark.parametrize(
    ("words", "key", "remedy"),
    [
        (["sigma=0.03"], "lengths=", "needed"),
        (["sigma=x", "lengths=[10]"], "sigma=x", "number"),
        (["sigma=0.03", "lengths=[10,-1]"], "lengths=-1", "number"),
        (["sigma=0.03", "lengths=[]"], "lengths=[]", "at least one"),
        (["sigma=0.03", "lengths=[10]", "gspo=[1e-3]"], "gspo=[0.001]", "lower and an upper"),
        (["sigam=0.03"], "sigam", "sigma"),
        (["sigma=0.03", "lengths=[10]", "drift=no"], "drift=no", "none"),
        (["audit=nowhere"], "audit=nowhere", "FSPO_AUDIT"),
        (["audit=nowhere", "sigma=1"], "sigma=1", "leave one"),
    ],
)
def test_a_wrong_call_is_named(words: list[str], key: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err.splitlines()[0]
    assert key in error and remedy in error


def test_small_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0 and "lengths=" in capsys.readouterr().out
    assert main(["sigma=0.03", "lengths=250,1000"]) == 0
    listed = capsys.readouterr().out
    assert main(["sigma=0.03", "lengths=[250,1000]"]) == 0 and capsys.readouterr().out == listed
    assert main(["sigma=0.03", "lengths=[0.5]"]) == 2 and "lengths=0.5" in capsys.readouterr().err
    assert main(["sigma=5", "lengths=[100]", "accept=0.85"]) == 0
    cells = [line.split("|")[-2].strip() for line in capsys.readouterr().out.splitlines()[2:]]
    assert cells[2] == "none" and float(cells[0]) > 1 and float(cells[3]) > 1  # a mean of -1250 nats
