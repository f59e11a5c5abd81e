"""The instruments of the studies, on log-ratios whose answer is known."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.studies import evidence, masks
from fspo.fairness import Array
from fspo.losses import ALGORITHMS, acceptance_band
from fspo.positions import OCTAVES, PositionSums
from fspo.sums import length_bin
from fspo.types import BandState

Rms = Callable[[Array], Array]


def responses(rms: Rms, mini_batches: int = 60, size: int = 24, shift: float = 0.0) -> evidence.Responses:
    """Independent normal token log-ratios with this rms by position, and a shift of each response; lengths 4 to 512."""
    rng = np.random.default_rng(0)
    rows = []
    for mini in range(mini_batches):
        scale = np.exp(0.3 * rng.normal())
        for length in np.exp(rng.uniform(np.log(4), np.log(512), size)).astype(int):
            rms_T = scale * rms(np.arange(1.0, length + 1))
            d_T = rms_T * rng.normal(size=length) - rms_T**2 / 2 + scale * shift * rng.normal()
            sums = d_T.cumsum(), (d_T**2).cumsum()
            at = [[part[2**k - 1] if 2**k <= length else np.nan for k in range(18)] for part in sums]
            advantage, batch = rng.choice([-1.0, 1.0]), mini // 2
            ids = mini // 20, batch % 10, mini % 2 + 1, batch, mini  # seed, step, place, ...
            rows.append((*ids, sums[0][-1], length, advantage, sums[1][-1], *at, 2 * sums[0][-1]))
    return evidence.Responses(*(np.array(column) for column in zip(*rows, strict=True)))


def value(statistic: evidence.Statistic, of: evidence.Responses) -> float:
    return float(statistic(np.ones((1, of.batch.max() + 1)))[0])


@pytest.mark.parametrize(("rms", "exponent"), [(lambda t: 0.02 + 0 * t, 0.5), (lambda t: 0.1 * t**-0.3, 0.25)])
def test_exponents_and_clocks_of_known_tokens(rms: Rms, exponent: float) -> None:
    known = evidence.even(responses(rms))
    for statistic in (evidence.by_position, evidence.within_bins, evidence.by_length):
        assert value(statistic(known, 4), known) == pytest.approx(exponent, abs=0.06)
    over_v = evidence.by_position(known, 4, evidence.accumulated(known), evidence.sides(known))
    assert value(over_v, known) == pytest.approx(0, abs=0.05)


def test_a_clock_of_all_positions_does_not_see_which_responses_go_on() -> None:
    """Tokens of long responses move less: S spreads by position less than V(t) says."""
    known = evidence.even(responses(lambda t: 0.04 * (1 + 0 * t) / (1 + 4 * (t.size > 40))))
    over_v = evidence.by_position(known, 4, evidence.accumulated(known), evidence.sides(known))
    assert value(over_v, known) < -0.05


def test_a_clock_is_measured_on_the_other_side() -> None:
    flat, steep = responses(lambda t: 0.02 + 0 * t), responses(lambda t: 0.1 * t**-0.3)
    steep = dataclasses.replace(steep, batch=steep.batch + 30, mini=steep.mini + 60)
    fields = [field.name for field in dataclasses.fields(flat)]
    both = evidence.Responses(*(np.concatenate([getattr(part, name) for part in (flat, steep)]) for name in fields))
    statistic = evidence.by_position(both, 4, evidence.accumulated(both), [np.arange(60) < 30])
    assert value(statistic, both) == pytest.approx(0.5 - 0.25, abs=0.06)


def test_a_shift_of_responses_is_separated_from_token_variance() -> None:
    for shift in (0.0, 0.004):
        rows = evidence.split({"demo": responses(lambda t: 0.04 + 0 * t, shift=shift)})
        cells = {row[1]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}["128 to 255"]
        expected = np.square(shift / 0.04) * 190
        assert float(cells["shift of responses / Q"].split()[0]) == pytest.approx(expected, abs=0.35)
        assert float(cells["correlation / Q"].split()[0]) == pytest.approx(0, abs=0.25)
        assert float(cells["Var(S) / Q"].split()[0]) == pytest.approx(1 + expected, abs=0.35)


def test_the_band_of_the_token_variance_is_even_where_the_others_are_not() -> None:
    table = evidence.bands({"demo": responses(lambda t: 0.1 * t**-0.3)})
    for matched, view in (("symmetric", 4), ("active", 5)):
        rows = {row[2]: row[view] for row in table if row[1] == matched}
        lre = {band: float(rows[band].split()[0]) for band in ("fspo", "rloo", "gspo", "fspo_v1", "fspo_variance")}
        assert lre.pop("fspo_variance") < 0.03 < min(lre.values())
        assert rows["fspo_variance - fspo"].startswith("-")
    assert float(rows["fspo_active"].split()[0]) < 0.03


def test_an_octave_that_does_not_move_has_a_band() -> None:
    known = responses(lambda t: 0.05 * (t > 8))
    _, half_B = evidence.placed(known)["fspo_variance"]
    assert (half_B[known.step > 0] > 0).all() and np.isnan(half_B[known.step == 0]).all()


def octaves(*values: float) -> Array:
    return np.array([*values, *[0.0] * (OCTAVES - len(values))])


def test_the_accumulated_variance_is_that_of_the_tokens_up_to_a_length() -> None:
    rate_P = octaves(4.0, 1.0, 0.5)  # of position 1, of 2 and 3, of 4 to 7
    V = evidence.accumulated_variance(rate_P, [1, 2, 3, 4, 7, 100, 1.5])
    np.testing.assert_allclose(V, [4.0, 5.0, 6.0, 6.5, 8.0, 8.0, 4.5], rtol=1e-15)
    widths = evidence.variance_half_widths(octaves(300, 600), octaves(3.0, 0.0), 3)
    first, second = (3 + 100 / 300) / 400, (100 / 300) / 700  # shrunk towards 3 / 900 by 100 tokens
    reference = (first + 2 * second) / 3
    for L, V in ((1, first), (2, first + second), (3, 3 * reference), (7, first + 6 * second)):
        width = widths[int(length_bin(torch.tensor([L])))]
        assert width == pytest.approx(np.sqrt(V / L / reference), rel=1e-12)


def test_equal_token_variances_give_the_band_of_fspo() -> None:
    sums = PositionSums.zeros()
    tokens_P = torch.tensor(octaves(100, 200, 7, 0, 5000, 3))
    sums.prefix_LPF[0, 0, 0], sums.token_LPF[0, :, 0], sums.token_LPF[0, :, 2] = 100, tokens_P, 0.0123 * tokens_P
    lengths = torch.tensor([1, 2, 3, 16, 17, 100, 5000, 131_072, 10**7])
    bands = [("fspo_quantile", evidence.variance_state([sums, sums])), ("fspo", BandState())]
    edges, expected = (acceptance_band(lengths, ALGORITHMS[name], state, torch.float64) for name, state in bands)
    torch.testing.assert_close(edges, expected, rtol=1e-12, atol=0)
    sums.token_LPF[0, 0, 2] += 100.0  # early tokens move more: the band is still that of fspo at the mean length, 3
    sums.prefix_LPF[0, 0, 0] = tokens_P.sum() / 3
    _, upper_B = acceptance_band(
        torch.tensor([1, 3, 100]), ALGORITHMS["fspo_quantile"], evidence.variance_state([sums])
    )
    assert upper_B[1].item() == pytest.approx(0.03 * 3**0.5) and upper_B[0] > 0.03 and upper_B[2] < 0.3
    sums.token_LPF[..., 2] = 0.0
    for past in ([], [sums]):  # nothing moved
        assert evidence.variance_state(past) == BandState()


def test_sums_by_position_of_recorded_prefixes() -> None:
    known = responses(lambda t: 0.1 * t**-0.3, 400)
    sums, length = evidence.position_sums(known), known.length[:, None]
    tokens, _, squares = sums.token_LPF.sum(0).numpy().T
    assert tokens[:10].tolist() == [np.clip(length - 2**p + 1, 0, 2**p).sum() for p in range(10)]
    assert squares.sum() == pytest.approx(known.q.sum()) and sums.prefix_LPF[0, 0, 0] == len(known.s)
    expected = np.array([np.mean(np.arange(2.0**p, 2.0 ** (p + 1)) ** -0.6) for p in range(9)])
    rates = squares[:9] / tokens[:9]
    assert rates / rates.sum() == pytest.approx(expected / expected.sum(), rel=0.1)


def test_runs_are_gathered_and_read_again(tmp_path: Path) -> None:
    lines = []
    for mini in range(3):
        columns = {"S": [0.5 * mini, -0.01 * mini], "L": [5.0, 1.0], "A": [1.0, 0.0], "Q": [0.3, 0.1]}
        columns |= {"S_t": [[0.1, 0.2, 0.3], [-0.01]], "Q_t": [[0.1, 0.2, 0.25], [0.1]], "reward": [1.0, 0.0]}
        lines.append({"step": 1, "minibatch": mini, "uid": ["a_0_0", "a_1_0"], "truncated": [True, False], **columns})
    (tmp_path / "demo/seed4").mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "demo/seed4/sequences.jsonl").write_text(text, encoding="utf-8")
    evidence.gather(tmp_path, tmp_path)
    rows = pq.read_table(tmp_path / "demo.parquet").to_pydict()
    assert rows["minibatch"] == [1, 1, 2, 2] and rows["prompt"] == [0] * 4 and rows["truncated"] == [True, False] * 2
    assert rows["fspo"] == [False, True, False, True] and rows["gspo"] == [False] * 4
    read = evidence.read(tmp_path / "demo.parquet")
    assert read.place.tolist() == [1, 1, 2, 2] and read.mini.tolist() == [0, 0, 1, 1] and set(read.seed) == {4}
    assert read.s_NP[0, :4] == pytest.approx([0.1, 0.2, 0.3, np.nan], nan_ok=True)
    (row,) = evidence.exponents({"demo": read})[1:]
    assert row == ["demo", "4", "1", *[""] * 7]  # too few for an exponent


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
    table = (root / "docs/tables/evidence-bands.csv").read_text(encoding="utf-8")
    printed = float(re.findall(r'^demo,symmetric,fspo,[\d.]+,"([\d.]+)', table, re.M)[0])
    for power, low, high in (("0.4", 0.0, 0.03), ("0.5", printed - 0.003, printed + 0.003), ("1.0", 0.08, 0.2)):
        exec(block.replace("L**0.4", f"L**{power}"), {})
        (value,) = re.findall(r"^Interval\(value=([\d.]+), low", capsys.readouterr().out)
        assert low <= float(value) < high


def test_rounds_are_read_as_responses_of_one_update_and_of_several(tmp_path: Path) -> None:
    (tmp_path / "long/seed5").mkdir(parents=True)
    for number in (10, 2, 5):
        tokens = {"stale": np.array([0.5, -0.25, 0.25, 1.0], np.float16) * number, "later": np.float16([3, 1, -1])}
        tokens |= {"bf16": np.full(3, 0.25, np.float16)} if number > 2 else {}
        flat = {"advantage": [1.0, -1.0], "reward": [1.0, 0.0], "truncated": [False, True], "prompt": [0, 1]}
        np.savez(tmp_path / f"long/seed5/round-{number}.npz", length=[3, 1], **tokens, **flat)
    evidence.gather(tmp_path, tmp_path)
    sample = evidence.read(tmp_path / "long.parquet")
    assert sample.step.tolist() == [3, 3, 6, 6, 11, 11] and sample.length.tolist() == [3, 1] * 3
    np.testing.assert_allclose(sample.s, [1.0, 2.0, 2.5, 5.0, 5.0, 10.0])
    np.testing.assert_allclose(sample.q[[0, 1, 4, 5]], [1.5, 4.0, 37.5, 100.0])
    np.testing.assert_allclose(sample.s_NP[4, :2], [5.0, 2.5])
    in_bf16 = evidence.read(tmp_path / "long_in_bf16.parquet")
    assert (in_bf16.s.tolist(), in_bf16.fp32.tolist()) == ([0.75] * 2, [2.5, 5.0])
    later = evidence.read(tmp_path / "long_in_later.parquet")  # the first response of round 2, after round 5
    assert (later.step.tolist(), later.s.tolist(), later.q.tolist()) == ([3], [3.0], [11.0])
    rows = evidence.bf16({"long": responses(lambda t: 0.1 * t**-0.3)})
    assert [float(cell.split()[0]) for cell in rows[1][3:]] == [0.5, 1.0, 0.5]
