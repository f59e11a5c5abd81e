"""The instruments of the studies, on log-ratios whose answer is known."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies import evidence, masks
from fspo.fairness import Array

Rms = Callable[[Array], Array]


def responses(rms: Rms, mini_batches: int = 60, size: int = 24) -> evidence.Responses:
    """Independent normal token log-ratios with this rms by position; lengths 4 to 512."""
    rng = np.random.default_rng(0)
    rows = []
    for mini in range(mini_batches):
        scale = np.exp(0.3 * rng.normal())
        for length in np.exp(rng.uniform(np.log(4), np.log(512), size)).astype(int):
            rms_T = scale * rms(np.arange(1.0, length + 1))
            d_T = rms_T * rng.normal(size=length) - rms_T**2 / 2
            sums = d_T.cumsum(), (d_T**2).cumsum()
            at = [[part[2**k - 1] if 2**k <= length else np.nan for k in range(18)] for part in sums]
            rows.append(
                (
                    mini // 20,
                    mini // 2,
                    mini // 2 % 10,
                    mini,
                    sums[0][-1],
                    length,
                    rng.choice([-1.0, 1.0]),
                    sums[1][-1],
                    *at,
                )
            )
    return evidence.Responses(*(np.array(column) for column in zip(*rows, strict=True)))


@pytest.mark.parametrize(("rms", "exponent"), [(lambda t: 0.02 + 0 * t, 0.5), (lambda t: 0.1 * t**-0.3, 0.25)])
def test_exponents_and_clocks_of_known_tokens(rms: Rms, exponent: float) -> None:
    known = responses(rms)
    assert evidence.by_position(known, 4) == pytest.approx(exponent, abs=0.05)
    assert evidence.within_bins(known, 4) == pytest.approx(exponent, abs=0.05)
    assert evidence.by_length(known, 4) == pytest.approx(exponent, abs=0.05)
    clock = np.sqrt(evidence.accumulated(known))
    assert evidence.by_position(known, 4, clock_N=clock) == pytest.approx(0, abs=0.04)


def test_the_band_of_the_token_variance_is_even_where_the_others_are_not() -> None:
    rows = {row[1]: row[3] for row in evidence.bands({"demo": responses(lambda t: 0.1 * t**-0.3)})[1:]}
    lre = {band: float(rows[band].split()[0]) for band in ("fspo", "rloo", "gspo", "V(L)")}
    assert lre["V(L)"] < 0.03 < 0.06 < min(lre["fspo"], lre["rloo"], lre["gspo"])
    assert rows["V(L) - fspo"].startswith("-")


def test_masks_by_length_of_independent_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    length = np.repeat([8, 32, 128, 512], 300)
    d = (0.02 * rng.normal(size=length.sum())).astype(np.float16)
    columns = {"length": length, "step": np.arange(len(length)) % 10, "advantage": np.ones(len(length))}
    np.savez(tmp_path / "demo.npz", **columns, old=np.full(len(d), -1.0), mismatch=d, stale=d)
    table = masks.tables(tmp_path)["by-length"]
    first, last = (table[0].index(f"kept, bin {i}") for i in (1, 4))
    kept = {row[2].split(":")[0]: [float(row[i]) for i in (first, last)] for row in table[2:]}
    assert kept["sqrt (seq_sqrt_k1)"] == pytest.approx([0.85, 0.85], abs=0.05)
    assert kept["constant (seq_sum_k1)"][0] > 0.99 and kept["constant (seq_sum_k1)"][1] < 0.6
    assert kept["Geo-RS, seq-mask-tis (seq_mean_k1)"][0] < 0.6
    assert kept["IcePop, tokens"] == pytest.approx([0.85, 0.85], abs=0.02)


def test_ten_lines_of_the_card_judge_a_band_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(root)
    (block,) = re.findall(r"```python\n(.*?)```", (root / "benchmarks/study/README.md").read_text(), re.S)
    exec(block, {})
    assert capsys.readouterr().out.startswith("Interval(value=0.0")
