"""The rows that an audit writes, in anyone's loop. What a row holds: tests/promises/test_rows.py."""

from __future__ import annotations

import resource
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audited_loop import GSPO, micro_batch

import fspo.audit
from fspo.audit import Audit, describe, from_packed, read_audit
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.table import Table, read_table


def one_response() -> tuple[torch.Tensor, ...]:
    old = torch.full((1, 4), -1.0)
    return old + 0.01, old, torch.ones(1, 4), torch.ones(1, 4)


def equal(rows: Any, others: Any) -> None:
    assert rows.keys() == others.keys()
    for name in rows:
        np.testing.assert_allclose(rows[name], others[name], rtol=1e-6, err_msg=name)


def places(table: Table) -> list[tuple[int, int]]:
    return sorted({*zip(table.columns["step"].tolist(), table.columns["update"].tolist(), strict=True)})


@pytest.mark.parametrize(("rule", "says"), [(GSPO, "known"), (None, "unknown")])
def test_the_table_says_what_is_known_of_the_loss(rule: Any, says: str, tmp_path: Path) -> None:
    audit = Audit(tmp_path, rule, loss="mine")
    audit.add(*micro_batch(1))
    rows, table = audit.end_mini_batch(1), read_table(tmp_path)
    assert (table.meta["loss"], table.meta["rule"]) == ("mine", says)
    assert ({"inside", "kept", "weight"} <= rows.keys()) == (rule is not None) != np.isnan(table.columns["kept"]).all()
    assert np.isnan(table.columns["truncated"]).all() and (table.columns["row"] == -1).all(), "not known"


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


def _steps(audit: Audit, *steps: int) -> None:
    for step in steps:
        for update in range(2):
            audit.add(*micro_batch(10 * step + update))
            audit.end_mini_batch(step)


def test_a_step_that_comes_again_is_said_once_and_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps, said in (((1, 2), 0), ((3,), 0), ((3, 4, 1, 2), 1)):  # as three starts of one run
        _steps(Audit(tmp_path, GSPO, run="a"), *steps)
        assert capsys.readouterr().err.count("came twice") == said
    table = read_table(tmp_path)
    assert places(table) == [(step, update) for step in (1, 2) for update in range(2)] and not table.problems


def test_two_processes_as_one_rank_end_the_record_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Audit(tmp_path, GSPO, run="a"), Audit(tmp_path, GSPO, run="a")
    for step in (1, 2):
        _steps(first, step)
        _steps(second, step)
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
