"""The length audit as its readers see it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from audited_loop import GSPO, micro_batch, train

from fspo.audit import Audit, describe, read_audit
from fspo.audit.__main__ import main
from fspo.audit.show import by_length, verdict
from fspo.losses import ALGORITHMS
from fspo.responses import EVERY_MINI_BATCH, Responses


def shares(cells: list[str]) -> list[float]:
    """Numbers of a column, without its last row."""
    return [float(cell.rstrip("%")) for cell in cells[:-1]]


def test_the_table_says_what_loss_and_bands_do_by_length(tmp_path: Path) -> None:
    """S = sqrt(L) sigma: GSPO's band leaves out most of the short ones, RLOO's of the long ones."""
    draw = np.random.default_rng(0)
    length = np.exp(draw.uniform(np.log(8), np.log(800), 8000)).astype(int)
    s, a = 0.04 * np.sqrt(length) * draw.standard_normal(8000), draw.choice([-1.0, 0.0, 1.0], 8000)
    rows = {"S": s, "L": length, "A": a, "minibatch": np.arange(8000) // 200 + 1}
    responses = Responses.of_rows(rows).judged_by(GSPO)
    band = ALGORITHMS["fspo"]
    table = by_length(responses, 0.8, "outside", [band])
    bins, count = responses.bin_B, responses.by_bin()
    mean = s / length
    outside = (mean < -GSPO.c_low) | (mean > GSPO.c_high)
    removed = ((mean > GSPO.c_high) & (a > 0), (mean < -GSPO.c_low) & (a < 0))
    own = {"outside": outside, "removed, A > 0": removed[0], "removed, A < 0": removed[1]}
    own["sqrt(L), -0.03 to 0.03"] = np.abs(s) > 0.03 * np.sqrt(length)
    for head, values in own.items():
        np.testing.assert_allclose(shares(table[head]), 100 * np.bincount(bins, values) / count, atol=0.051)
    for name, (first, last) in {"fspo": (20, 20), "rloo": (0, 60), "gspo": (60, 0)}.items():
        column = shares(table[f"{name} 20%"])
        assert column @ count / 8000 == pytest.approx(20, abs=0.3), "one common share"
        assert (column[0], column[-1]) == pytest.approx((first, last), abs=12)
    assert [table[head][-1] != "" for head in ("mean S", "outside", "fspo 20%")] == [False, True, True]
    counted = [float(cell) for cell in by_length(responses, 0.8, "removed")["responses"][:-1]]
    assert sum(counted) == np.count_nonzero(a), "the other view is about responses with an advantage"
    uneven = verdict(responses)
    assert uneven.startswith("uneven") and table["outside"][-1] in uneven
    even = responses.judged_by(ALGORITHMS["fspo"])
    assert verdict(even).startswith("not shown to be uneven")


@pytest.mark.parametrize(
    ("off", "says", "wrong"),
    [
        (lambda old, g: old, "", False),
        (lambda old, g: old + 1e-6 * torch.randn(old.shape, generator=g), "", False),
        (lambda old, g: old + 0.002 * torch.randn(old.shape, generator=g), "bf16", False),
        (lambda old, g: old + 0.03 * torch.randn(old.shape, generator=g), "--every-mini-batch", False),
        (lambda old, g: old / 0.7, "temperature", True),
        (lambda old, g: old - 0.001, "top_p", True),  # below what rounds in bf16, but all one way
    ],
)
def test_the_first_mini_batch_is_judged(off: Any, says: str, wrong: bool, tmp_path: Path) -> None:
    audit, generator = Audit(tmp_path, loss="mine"), torch.Generator().manual_seed(0)
    for index in range(6):
        _, old, mask, a = micro_batch(index)
        audit.add(off(old, generator), old, mask, a)
        if index % 3 == 2:
            audit.end_mini_batch(1)
    records = read_audit(tmp_path)
    assert [says in note for note in records.notes()] == [True] * bool(says)
    assert records.wrong() == wrong and len(records.responses.unmoved()) > 0
    assert ("no clip value" in describe(records)) == wrong
    assert read_audit(tmp_path, every_mini_batch=True).notes() == []


@pytest.mark.parametrize("says", ["yes", "no", None])
def test_the_table_says_whether_first_ones_count_or_the_reader(
    says: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One update a rollout batch with the engine's log-probabilities, as in a loop that is asynchronous by default."""
    audit = Audit(tmp_path, meta={} if says is None else {EVERY_MINI_BATCH: says})
    for step in range(22):
        audit.add(*micro_batch(step))
        audit.end_mini_batch(step)
    for every in (False, True):
        counts = says == "yes" or (says is None and every)
        assert len(read_audit(tmp_path, "", every).responses.moved()) > 0 if counts else True
        assert main([str(tmp_path), *["--every-mini-batch"] * every]) == 0
        assert ("S spreads like" in (printed := capsys.readouterr().out)) == counts, printed
    if says is None:
        assert "end_mini_batch(step)" in read_audit(tmp_path).notes()[0]


def test_one_file_of_a_table_is_read_as_its_folder(tmp_path: Path) -> None:
    """Its metadata counts, and rows without S are left out."""
    audit = Audit(tmp_path, loss="seq_gspo", meta={EVERY_MINI_BATCH: "yes"})
    for step in range(2):
        new, *others = micro_batch(step)
        new[3, 0] = float("nan")
        audit.add(new, *others)
        audit.end_mini_batch(step)
    (file,) = tmp_path.glob("responses-*.parquet")
    one, whole = read_audit(file), read_audit(tmp_path)
    assert (one.problems, one.loss, one.left_out) == ([], "seq_gspo", whole.left_out)
    assert whole.left_out > 0 and len(one.responses.moved()) == len(whole.responses.moved()) > 0


def test_what_is_not_there_is_said_in_words(tmp_path: Path) -> None:
    new, old, mask, a = micro_batch(1)
    cases = {
        "empty": ((new, old, mask & False, a), "holds no response"),
        "lost": ((old - 9, old, mask, a), "nothing was accepted"),
        "kept": ((old + 1e-7, old, mask, a), "nothing was clipped"),
        "still": ((old, old, mask, a), "nothing was clipped"),
    }
    for name, (tensors, says) in cases.items():
        audit = Audit(tmp_path / name, GSPO)
        for _ in range(2):
            audit.add(*tensors)
            audit.end_mini_batch(1)
        text = describe(read_audit(tmp_path / name))
        assert "nan" not in text and says in text


@pytest.mark.parametrize("word", ["1,0,2", "1,2", "one,1,1", "9,1,1", "0.5,nan,1"])
def test_a_band_that_is_none_is_named(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nowhere", "--band", word])
    assert f"--band: {word}" in capsys.readouterr().err


def test_a_rank_or_file_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "rank", ranks=range(1))
    train(tmp_path / "cut")
    (path,) = (tmp_path / "cut").glob("responses-run-00000-*")
    path.write_bytes(path.read_bytes()[:-50])
    for name, expected in (("rank", "of 2 ranks, 1"), ("cut", str(path))):
        assert main([str(tmp_path / name)]) == 1 and expected in capsys.readouterr().err


@pytest.mark.parametrize("name", ["wandb_export.csv", "run", "absent"])
def test_what_is_no_table_is_named_with_what_is_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text("{}")
    (tmp_path / "wandb_export.csv").write_text("S,L,A\n0.1,3,1\n")
    assert main([str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / name}: ") and "parquet" in said and "expected removed=" in said


def test_columns_of_other_types_are_read_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eight = np.arange(8)
    rows = pd.DataFrame({"S": [0.1] * 8, "L": [3] * 8, "A": [1] * 8, "prompt": 2e9 + eight // 2, "id": [[1]] * 8})
    file, row = tmp_path / "rows.parquet", np.where(eight < 4, np.nan, eight % 2)
    for prompt in (rows["prompt"], eight // 2 - 2):  # identifiers that pandas made floats, or a hash
        rows.assign(prompt=prompt, row=row, update=eight // 6).to_parquet(file)
        responses = read_audit(file).responses
        assert len(set(responses.prompt_B)) == 4 and responses.again_B.tolist() == [False] * 6 + [True] * 2
    for name, values in {"S": pd.Timestamp(0), "inside": "yes", "step": eight / 8, "L": 0, "minibatch": np.nan}.items():
        rows.assign(**{name: values}).to_parquet(file)
        assert main([str(file)]) == 2 and f"error: {file}: column {name} " in capsys.readouterr().err
    rows[:0].to_parquet(file)
    assert main([str(file)]) == 2 and "holds no response" in capsys.readouterr().err


def test_a_response_whose_advantage_is_not_known_is_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = Audit(tmp_path, GSPO, loss="seq_gspo")
    for index in range(60):
        new, old, mask, a = micro_batch(index)
        audit.add(new if index % 2 else old, old, mask, torch.where(torch.arange(len(a)) % 2 == 1, a, torch.nan))
        audit.end_mini_batch(index // 2)
    moved = read_audit(tmp_path).responses.moved()
    unknown_B = np.isnan(moved.advantage_B)
    known = moved.select(~unknown_B)
    assert 0 < len(known) < len(moved) and np.isnan(moved.kept_B[unknown_B]).all()
    assert verdict(moved, "removed") == verdict(known, "removed") and "nothing" not in verdict(known, "removed")
    for view in ("outside", "removed"):
        assert main([str(tmp_path), "--view", view]) == 0 and "nan" not in capsys.readouterr().out
    both = [by_length(one)["removed, A > 0"] for one in (moved, known)]
    assert np.mean(shares(both[0])) == pytest.approx(np.mean(shares(both[1])), rel=0.2), "of those that are known"


def test_of_several_runs_the_newest_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path)
    for file in tmp_path.iterdir():
        os.utime(file, (1, 1))  # two files may have been written within a tick of the clock
    train(tmp_path, run="run2")
    again, first = read_audit(tmp_path), read_audit(tmp_path, "run")
    assert (again.run, again.others, first.others) == ("run2", ["run"], ["run2"])
    assert main([str(tmp_path), "--run", "run"]) == 0 and "run2" in capsys.readouterr().err
    assert "run3" in read_audit(tmp_path, "run3").problems[0]
