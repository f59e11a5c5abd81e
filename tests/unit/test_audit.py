"""An audit in anyone's loop, as its readers see it. What a row holds: tests/promises/test_rows.py."""

from __future__ import annotations

import os
import resource
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from batches import random_batch

import fspo.audit
from fspo.audit import Audit, describe, from_packed, read_audit
from fspo.audit.__main__ import main
from fspo.audit.show import by_length, verdict
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.responses import EVERY_MINI_BATCH, Responses
from fspo.table import Table, read_table

GSPO = ALGORITHMS["seq_gspo"]


def micro_batch(seed: int) -> tuple[torch.Tensor, ...]:
    """log_prob, old_log_prob, mask, one advantage per sequence."""
    new, old, advantage, mask = random_batch(16, 64, seed=seed, scale=3e-3)
    return new, old, mask, advantage[:, 0]


def train(audit: Audit, *steps: int) -> None:
    """A loop as anyone writes it."""
    for step in steps:
        for update in range(2):
            audit.add(*micro_batch(10 * step + update))
            audit.end_mini_batch(step)


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
    """One update a rollout batch with the engine's log-probabilities, as in a loop that is asynchronous by default.

    One file of the table is read as its folder.
    """
    audit = Audit(tmp_path, loss="mine", meta={} if says is None else {EVERY_MINI_BATCH: says})
    for step in range(22):
        new, *others = micro_batch(step)
        new[3, 0] = torch.nan
        audit.add(new, *others)
        audit.end_mini_batch(step)
    for every in (False, True):
        counts = says == "yes" or (says is None and every)
        for path in (tmp_path, *tmp_path.iterdir()):
            records = read_audit(path, "", every)
            assert (records.problems, records.loss, records.left_out) == ([], "mine", 22)
            assert (len(records.responses.moved()) > 0) == counts
        assert main([str(tmp_path), *["--every-mini-batch"] * every]) == 0
        assert ("S spreads like" in (printed := capsys.readouterr().out)) == counts, printed
    table = read_table(tmp_path)
    unknown = [table.columns[name] for name in ("inside", "kept", "weight", "truncated")]
    assert table.meta["rule"] == "unknown" and np.isnan(unknown).all() and (table.columns["row"] == -1).all()
    if says is None:
        assert "end_mini_batch(step)" in read_audit(tmp_path).notes()[-1]


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


def test_a_rank_file_or_start_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(Audit(tmp_path / "rank", ranks=2), 1)
    for rank in (0, 1):
        train(Audit(tmp_path / "cut", rank=rank, ranks=2, run="a"), 1)
    (path,) = (tmp_path / "cut").glob("responses-a-00000-*")
    path.write_bytes(path.read_bytes()[:-50])
    for name, expected in (("rank", "of 2 ranks, 1"), ("cut", str(path))):
        assert main([str(tmp_path / name)]) == 1 and expected in capsys.readouterr().err
    for run in ("run1", "run2"):
        train(Audit(tmp_path, run=run), 1)
        os.utime(*tmp_path.glob(f"*-{run}-*"), (1, int(run[3:])))  # both may be written within a tick of the clock
    assert read_audit(tmp_path).run == "run2"
    assert main([str(tmp_path), "--run", "run1"]) == 0 and "run2" in capsys.readouterr().err
    assert "run3" in read_audit(tmp_path, "run3").problems[0]


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
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text("{}")
    (tmp_path / "wandb_export.csv").write_text("S,L,A\n0.1,3,1\n")
    for place in (tmp_path / "run", tmp_path / "wandb_export.csv"):
        assert main([str(place)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {place}: ") and "parquet" in said


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


def one_response() -> tuple[torch.Tensor, ...]:
    old = torch.full((1, 4), -1.0)
    return old + 0.01, old, torch.ones(1, 4), torch.ones(1, 4)


def equal(rows: Any, others: Any) -> None:
    assert rows.keys() == others.keys()
    for name in rows:
        np.testing.assert_allclose(rows[name], others[name], rtol=1e-6, err_msg=name)


def places(table: Table) -> list[tuple[int, int]]:
    return sorted({*zip(table.columns["step"].tolist(), table.columns["update"].tolist(), strict=True)})


#: How other loops hold what a tensor of [B, T] holds here; the second argument says which tokens there are.
FORMS: dict[str, Any] = {
    "list of tensors": lambda x, there: [row[kept] for row, kept in zip(x, there, strict=True)],
    "list of arrays": lambda x, there: tuple(row[kept].numpy() for row, kept in zip(x, there, strict=True)),
    "lists": lambda x, there: [row[kept].tolist() for row, kept in zip(x, there, strict=True)],
    "array": lambda x, there: x.numpy(),
    "jagged": lambda x, there: torch.nested.nested_tensor(
        [row[kept] for row, kept in zip(x, there, strict=True)], layout=torch.jagged
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_other_loops_hold_is_what_a_tensor_says(form: str) -> None:
    new, old, mask, a = micro_batch(2)
    there = mask.any(1)
    new, old, mask, a = new[there], old[there], mask[there], a[there]
    of_form = FORMS[form]
    tensors, others = Audit(None, GSPO), Audit(None, GSPO)
    tensors.add(new, old, mask, a, None, None, torch.arange(len(a)))
    others.add(*(of_form(x, mask) for x in (new, old, mask)), a.numpy(), None, None, list(range(len(a))))
    equal(others.end_mini_batch(1), tensors.end_mini_batch(1))


def test_a_response_that_the_loss_left_out_has_no_s() -> None:
    new, old, mask, a = micro_batch(2)
    of_the_loss = mask & (torch.arange(len(mask)) != 3)[:, None]
    output = sequence_policy_loss(new, old, a[:, None].expand_as(new), of_the_loss, GSPO)
    audit = Audit(None)
    audit.add(new, old, mask, a, output=output, row_B=torch.arange(len(mask)))
    rows = audit.end_mini_batch(1)
    assert rows["row"][np.isnan(rows["S"])].tolist() == [3] and mask[3].any()


def test_of_advantages_by_token_the_mean_counts() -> None:
    """S = 0.3 above every band at L = 4; A is positive in the mean of the first row, and negative in the second's."""
    old, mask = -torch.ones(3, 5), torch.tensor([[1, 1, 1, 1, 0]] * 3)
    a = torch.tensor([[-1.0, 3.0, 1.0, 1.0, -90.0], [1.0, -3.0, -1.0, -1.0, 90.0], [1.0, -1.0, 0.5, -0.5, 9.0]])
    audit = Audit(rule=ALGORITHMS["fspo"])
    audit.add(old + 0.075 * mask, old, mask, a)
    rows = audit.end_mini_batch(1)
    assert rows["A"].tolist() == [1, -1, 0]
    assert rows["inside"].tolist() == [0, 0, 0] and rows["kept"].tolist() == [0, 1, 1]


def test_packed_sequences_are_those_of_rows() -> None:
    new, old, mask, a = micro_batch(2)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), mask.sum(1).cumsum(0).int()])
    packed = [from_packed(x[mask], cu_seqlens) for x in (new, old, torch.ones_like(new))]
    rows, packs = Audit(None, GSPO), Audit(None, GSPO)
    rows.add(new, old, mask, a)
    packs.add(*packed, a)
    equal(packs.end_mini_batch(1), rows.end_mini_batch(1))
    assert torch.equal(from_packed(new[mask][None], cu_seqlens), packed[0])
    falling = cu_seqlens[[0, 2, 1, *range(3, len(cu_seqlens))]]
    for wrong in (cu_seqlens[:-1], cu_seqlens + 1, cu_seqlens.flip(0), cu_seqlens[None], falling):
        with pytest.raises(ValueError, match="cu_seqlens"):
            from_packed(new[mask], wrong)


def test_an_interrupted_mini_batch_is_dropped_by_another_step(tmp_path: Path) -> None:
    audit = Audit(tmp_path, GSPO)
    for step, micro_batches in ((1, 2), (2, 1)):
        audit.begin_step(step)
        for micro in range(micro_batches):
            audit.add(*micro_batch(micro))
    rows = audit.end_mini_batch(2)  # step 1 has never ended
    assert len(rows["S"]) == int(micro_batch(0)[2].any(1).sum())
    assert places(read_table(tmp_path)) == [(2, 0)]


def test_what_cannot_be_audited_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"add\(\.\.\., output=\)"):
        Audit(None, ALGORITHMS["fspo_v1"])
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file.*give another"):
        Audit(tmp_path / "file" / "audit")


@pytest.mark.parametrize("when", ["the folder is made", "the disk is full"])
def test_an_error_of_the_disk_ends_the_record_alone(
    tmp_path: Path, when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    audit, limits = Audit(tmp_path / "audit"), resource.getrlimit(resource.RLIMIT_FSIZE)
    if when == "the folder is made":
        (tmp_path / "audit").touch()
    else:
        audit.add(*one_response())
        audit.end_mini_batch(0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        for step in (np.int64(1), torch.tensor(2)):
            audit.add(*one_response())
            assert audit.end_mini_batch(step)["L"].tolist() == [4]
        audit.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert said.count("fspo.audit: ") == 1 and f"{tmp_path / 'audit'}" in said
    if when == "the disk is full":
        assert places(read_table(tmp_path / "audit")) == [(0, 0)] and len([*(tmp_path / "audit").iterdir()]) == 1


def test_the_example_of_the_docstring_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = textwrap.dedent((fspo.audit.__doc__ or "").split("::\n")[1].split("\n``")[0])
    log_prob, old_log_prob, mask, advantages = one_response()
    monkeypatch.chdir(tmp_path)
    exec(example, dict(log_prob=log_prob, old_log_prob=old_log_prob, mask=mask, advantages=advantages, step=1))
    assert read_table(tmp_path / "audit").columns["L"].tolist() == [4]


def test_a_step_that_comes_again_is_said_once_and_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps, said in (((1, 2), 0), ((3,), 0), ((3, 4, 1, 2), 1)):  # as three starts of one run
        train(Audit(tmp_path, GSPO, run="a"), *steps)
        assert capsys.readouterr().err.count("came twice") == said
    table = read_table(tmp_path)
    assert places(table) == [(step, update) for step in (1, 2) for update in range(2)] and not table.problems


def test_two_processes_as_one_rank_end_the_record_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Audit(tmp_path, GSPO, run="a"), Audit(tmp_path, GSPO, run="a")
    for step in (1, 2):
        train(first, step)
        train(second, step)
    assert "run=" in (said := capsys.readouterr().err) and f"nothing more goes to {tmp_path}" in said


@pytest.mark.parametrize("by_token", [False, True])
def test_what_a_mask_of_ones_own_keeps_is_audited_by_length(tmp_path: Path, by_token: bool) -> None:
    """A mask on |S| that keeps short responses only: 64 of 8 tokens are kept whole, and none of 64 of 200."""
    length_B = torch.tensor([8, 200] * 32)
    mask = torch.arange(200) < length_B[:, None]
    old, d = torch.full(mask.shape, -1.0), 0.01 * mask
    kept_B = d.sum(-1) < 0.5
    kept = kept_B[:, None] & mask if by_token else kept_B
    audit = Audit(tmp_path)
    for step in range(2):
        audit.add(old + d, old, mask, torch.ones(64), kept=kept, weight=d.sum(-1).exp().clamp(max=2))
        audit.end_mini_batch(step)
    columns = read_table(tmp_path).columns
    for name in ("kept", "inside"):
        assert columns[name].tolist() == [1.0, 0.0] * 64
    np.testing.assert_allclose(columns["weight"], [np.exp(0.08), 2.0] * 64, rtol=1e-5)
    records = read_audit(tmp_path, every_mini_batch=True)
    assert records.own_mask and "mean weight" in describe(records)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"old_log_prob_BT": "text"}, TypeError, r"old_log_prob_BT is a .*\[B, T\].*list"),
        ({"old_log_prob_BT": [["a"]]}, TypeError, r"old_log_prob_BT is a .*\[B, T\].*list"),
        ({"old_log_prob_BT": torch.ones(16, 1)}, ValueError, "16, 64"),
        ({"mask_BT": torch.ones(1, 64)}, ValueError, "16, 64"),
        ({"advantages_BT": torch.ones(5)}, ValueError, "16, 64"),
        ({"log_prob_BT": torch.ones(99)}, ValueError, "from_packed"),
        ({"truncated_B": False}, ValueError, r"truncated= .*\(\)"),
        ({"kept": torch.ones(16), "rule": GSPO}, ValueError, "leave one out"),
        ({"kept": torch.full((16,), 1.5)}, ValueError, r"1.5: must be in \[0, 1\]"),
        ({"kept": torch.ones(2)}, ValueError, r"kept= .*\(2,\)"),
        ({"weight": torch.ones(16)}, ValueError, "kept=torch.ones"),
    ],
)
def test_what_is_no_micro_batch_is_refused(change: dict[str, Any], error: type[Exception], says: str) -> None:
    names = ("log_prob_BT", "old_log_prob_BT", "mask_BT", "advantages_BT")
    given = dict(zip(names, micro_batch(1), strict=True)) | change
    with pytest.raises(error, match=says):
        Audit(None, given.pop("rule", None)).add(**given)
