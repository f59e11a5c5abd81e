"""The rows that an audit writes, in anyone's loop."""

from __future__ import annotations

import resource
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audited_loop import GSPO, MINI_BATCHES, RANKS, STEPS, micro_batch, seed_of, spoiled, train

import fspo.audit
from fspo.audit import Audit, describe, from_packed, read_audit
from fspo.losses import ALGORITHMS, acceptance_band
from fspo.table import SCHEMA, read_table


def test_an_audit_of_two_ranks_has_a_row_for_each_response(tmp_path: Path) -> None:
    train(tmp_path)
    table = read_table(tmp_path)
    assert (table.problems, table.left_out, table.ranks) == ([], 0, [0, 1])
    assert (table.meta["loss"], table.meta["rule"], table.meta["precision"]) == ("seq_gspo", "known", "fp32")
    assert table.batches.tolist() == [[step, index] for step in range(STEPS) for index in range(MINI_BATCHES)]
    of_batch = (table.columns["step"] == 1) & (table.columns["update"] == 2)
    columns = {name: values[of_batch] for name, values in table.columns.items()}
    tensors = [micro_batch(seed_of(rank, 1, 2, micro)) for rank in range(RANKS) for micro in range(2)]
    new, old, mask, a_B = (torch.cat(parts) for parts in zip(*tensors, strict=True))
    kept_B = mask.any(1)
    d_BT = ((new.double() - old) * mask)[kept_B]
    length_B, s_B, a_B = mask.sum(1)[kept_B], d_BT.sum(1), a_B[kept_B]
    ratio_B = (s_B / length_B).exp()
    low_B, high_B = acceptance_band(length_B, GSPO, None, torch.float64)
    above_B, below_B = s_B > high_B, s_B < low_B
    assert 0 < int((above_B | below_B).sum()) < len(s_B)
    expected = {
        **{"S": s_B, "L": length_B, "A": a_B, "weight": ratio_B},
        **{"inside": ~(above_B | below_B), "kept": ~((above_B & (a_B > 0)) | (below_B & (a_B < 0)))},
        **{"minibatch": torch.full_like(length_B, 2)},
    }
    for name, values in expected.items():
        np.testing.assert_allclose(columns[name], values.double(), rtol=1e-4, atol=1e-6, err_msg=name)
    assert (table.columns["S"][table.columns["update"] == 0] == 0).all()
    assert (table.columns["minibatch"] == table.columns["update"]).all()
    assert np.isnan(columns["truncated"]).all() and (columns["row"] == -1).all()


def test_without_a_rule_nothing_is_claimed_of_acceptance(tmp_path: Path) -> None:
    audit = Audit(tmp_path, loss="mine")
    for index in range(2):
        audit.add(*micro_batch(index))
        rows = audit.end_mini_batch(1).rows
        assert not {"inside", "kept", "weight"} & rows.keys()
    table = read_table(tmp_path)
    assert table.meta["rule"] == "unknown" and len(table) > 10
    for name in ("inside", "kept", "weight"):
        assert np.isnan(table.columns[name]).all()


def test_what_is_returned_is_what_is_read(tmp_path: Path) -> None:
    audit = Audit(tmp_path, GSPO)
    new, old, mask, a = micro_batch(1)
    weights = (1 + torch.arange(16.0))[:, None].expand(mask.shape)
    audit.add(new, old, mask, a, None, mask.sum(1) > 60, torch.arange(16).flip(0), weights)
    rows = audit.end_mini_batch(7).rows
    columns = read_table(tmp_path, columns=rows).columns
    order = np.argsort(rows["row"])
    assert rows["rollout_weight"].tolist() == (16 - rows["row"]).tolist(), "one value for all tokens of a response"
    for name, values in rows.items():
        np.testing.assert_array_equal(columns[name], values[order], strict=True)
        assert name in SCHEMA.names


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rule", [None, GSPO])
@pytest.mark.parametrize("where", ["new", "old"])
def test_a_response_that_is_not_finite_has_no_S_and_is_counted(
    value: float, rule: Any, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old, mask, advantage = spoiled(value, where)
    whole, without = Audit(tmp_path, rule, run="run"), Audit(None, rule)
    for _ in range(2):
        whole.add(new, old, mask, advantage)
        rows = whole.end_mini_batch(1).rows
        kept = mask & (torch.arange(16) != mask.sum(1).argmax())[:, None]
        without.add(*(x.nan_to_num(0, 0, 0) for x in (new, old)), kept, advantage)
        expected = without.end_mini_batch(1).rows
        sound_B = ~np.isnan(rows["S"])
        assert (~sound_B).sum() == 1 and rows["L"][~sound_B] == mask.sum(1).max()
        for name in expected:
            np.testing.assert_array_equal(rows[name][sound_B], expected[name])
            if name not in ("step", "update", "minibatch", "L", "A"):
                assert np.isnan(rows[name][~sound_B]).all(), name
    assert capsys.readouterr().err.count("1 response with a log-probability that is not finite left out") == 1
    table = read_table(tmp_path)
    assert (table.left_out, table.problems) == (2, [])
    assert all(np.isfinite(table.columns[name]).all() for name in expected if "_" not in name)


def test_a_rank_that_saw_padding_alone_ends_its_mini_batch(tmp_path: Path) -> None:
    new, old, mask, a = micro_batch(1)
    audits = [Audit(tmp_path, GSPO, run="run", rank=rank, ranks=2) for rank in range(2)]
    for step in (1, 2):
        audits[0].add(new, old, mask, a)
        audits[1].add(new, old, torch.zeros_like(mask), a)
        for audit in audits:
            audit.end_mini_batch(step)
    table = read_table(tmp_path)
    assert (table.problems, table.left_out) == ([], 0) and len(table) == 2 * int(mask.any(1).sum())


@pytest.mark.parametrize(
    ("change", "key", "remedy"),
    [
        (lambda new, old, mask, a: (new, old[:1], mask, a), "old_log_prob_BT", "(16, 64)"),
        (lambda new, old, mask, a: (new, old[:, :1], mask, a), "old_log_prob_BT", "(16, 64)"),
        (lambda new, old, mask, a: (new, old, mask[:1], a), "(16, 64)", "response positions"),
        (lambda new, old, mask, a: (new, old, mask, a[:5]), "advantages_BT", "(16, 64)"),
        (lambda new, old, mask, a: (new[mask], old[mask], mask[mask], a), "(", "from_packed"),
    ],
)
@pytest.mark.parametrize("rule", [None, GSPO])
def test_shapes_are_checked(rule: Any, change: Any, key: str, remedy: str) -> None:
    audit = Audit(None, rule)
    with pytest.raises(ValueError) as error:
        audit.add(*change(*micro_batch(1)))
    assert key in str(error.value) and remedy in str(error.value)
    assert audit.micro_batches == 0


@pytest.mark.parametrize("rule", [None, GSPO])
def test_no_width_adds_nothing_and_one_advantage_a_response_may_be_a_column(rule: Any) -> None:
    audit, new, old, mask, a = Audit(None, rule), *micro_batch(1)
    audit.add(new[:, :0], old[:, :0], mask[:, :0], a)
    assert len(audit.end_mini_batch(1).rows["S"]) == 0
    audit.add(new, old, mask, a[:, None])
    column = audit.end_mini_batch(1).rows
    audit.add(new, old, mask, a[:, None].expand(mask.shape))
    for name, values in audit.end_mini_batch(2).rows.items():
        if name not in ("step", "update", "minibatch"):
            np.testing.assert_array_equal(values, column[name])


def test_packed_sequences_are_those_of_rows() -> None:
    new, old, mask, a = micro_batch(2)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), mask.sum(1).cumsum(0).int()])
    packed = [from_packed(x[mask], cu_seqlens) for x in (new, old, torch.ones_like(new))]
    rows, packs = Audit(None, GSPO), Audit(None, GSPO)
    rows.add(new, old, mask, a)
    packs.add(*packed, a)
    of_rows, of_packs = (audit.end_mini_batch(1).rows for audit in (rows, packs))
    assert len(of_rows["S"]) > 10
    for name, values in of_packs.items():
        np.testing.assert_allclose(values, of_rows[name], rtol=1e-6)
    assert torch.equal(from_packed(new[mask][None], cu_seqlens), packed[0])
    for wrong in (cu_seqlens[:-1], cu_seqlens + 1, cu_seqlens.flip(0), cu_seqlens[None]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            from_packed(new[mask], wrong)


def test_advantages_by_token_count_as_their_mean_with_a_rule_as_without_one() -> None:
    """S = 0.3 above every band at L = 4; A is positive in the mean of the first row, and negative in the second's."""
    old, mask = -torch.ones(3, 5), torch.tensor([[1, 1, 1, 1, 0]] * 3)
    advantages = torch.tensor(
        [[-1.0, 3.0, 1.0, 1.0, -90.0], [1.0, -3.0, -1.0, -1.0, 90.0], [1.0, -1.0, 0.5, -0.5, 9.0]]
    )
    parts = []
    for rule in (ALGORITHMS["fspo"], None):
        audit = Audit(rule=rule)
        audit.add(old + 0.075 * mask, old, mask, advantages)
        parts.append(audit.end_mini_batch(1).rows)
    for rows in parts:
        assert rows["A"].tolist() == [1, -1, 0] and rows["L"].tolist() == [4, 4, 4]
        assert rows["S"].tolist() == pytest.approx([0.3] * 3)
    assert parts[0]["inside"].tolist() == [0, 0, 0] and parts[0]["kept"].tolist() == [0, 1, 1]


def test_a_rule_that_is_measured_is_refused_where_nothing_measures_it() -> None:
    with pytest.raises(ValueError, match=r"add\(\.\.\., output=\)"):
        Audit(None, ALGORITHMS["fspo_v1"])


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3)])
def test_any_integer_is_a_step(tmp_path: Path, step: Any) -> None:
    audit = Audit(tmp_path)
    audit.add(*one_response())
    audit.end_mini_batch(step)
    assert read_table(tmp_path).columns["step"].tolist() == [3]


def test_a_folder_that_cannot_be_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file.*give another"):
        Audit(tmp_path / "file" / "audit")


@pytest.mark.parametrize("when", ["the folder is made", "the disk is full"])
def test_an_error_of_the_disk_ends_the_record_and_not_the_training(
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
        for step in (1, 2):
            audit.add(*one_response())
            assert audit.end_mini_batch(step).rows["L"].tolist() == [4]
        audit.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert said.count("fspo.audit: ") == 1 and f"{tmp_path / 'audit'}" in said and "make room" in said
    assert audit.writes  # whoever collects what is not written must not begin to
    if when == "the disk is full":
        assert read_table(tmp_path / "audit").columns["step"].tolist() == [0]


def test_the_example_of_the_docstring_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = textwrap.dedent((fspo.audit.__doc__ or "").split("::\n")[1].split("\n``")[0])
    log_prob, old_log_prob, mask, advantages = one_response()
    monkeypatch.chdir(tmp_path)
    exec(example, dict(log_prob=log_prob, old_log_prob=old_log_prob, mask=mask, advantages=advantages, step=1))
    assert read_table(tmp_path / "audit").columns["L"].tolist() == [4]


def _steps(audit: Audit, *steps: int) -> None:
    for step in steps:
        for update in range(2):
            audit.add(*micro_batch(seed_of(0, step, update, 0)))
            audit.end_mini_batch(step)


def test_a_step_that_comes_again_is_said_once_and_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that goes back in one process, and a restart as the same run."""
    for name, starts, said in (
        ("once", [(1, 2), (3,)], 0),
        ("back", [(1, 2, 3, 1, 2)], 1),
        ("restart", [(1, 2, 3), (3, 4)], 1),
    ):
        for steps in starts:
            _steps(Audit(tmp_path / name, GSPO, run="a"), *steps)
        assert capsys.readouterr().err.count("came twice") == said
        table, last = read_table(tmp_path / name), starts[-1][-1]
        once = [[step, update] for step in range(1, last + 1) for update in range(2)]
        assert table.batches.tolist() == once and not table.problems


def test_two_processes_as_one_rank_end_the_record_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Audit(tmp_path, GSPO, run="a"), Audit(tmp_path, GSPO, run="a")
    for step in (1, 2):
        _steps(first, step)
        _steps(second, step)
    assert "run=" in (said := capsys.readouterr().err) and f"from here on nothing goes to {tmp_path}" in said


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
    text = describe(read_audit(tmp_path, every_mini_batch=True))
    assert "accepted 50.0%" in text and "100.0%" in text
    head, _, short = text.split("\n\n")[1].splitlines()[:3]
    by_head = dict(zip(head.split("|"), short.split("|"), strict=True))
    assert [float(cell) for name, cell in by_head.items() if name.strip() == "mean weight"] == [1.08]


def test_a_mask_of_ones_own_gets_clip_values_and_no_loss_to_train_with(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for folder, arguments in ((tmp_path / "mask", {"kept": torch.ones(64)}), (tmp_path / "loss", {})):
        audit, length_B = Audit(folder), torch.randint(4, 64, (64, 1), generator=generator)
        for step in range(24):
            old = torch.full((64, 64), -1.0)
            d = 0.02 * torch.randn(old.shape, generator=generator)
            audit.add(old + d, old, torch.arange(64) < length_B, torch.ones(64), **arguments)
            audit.end_mini_batch(step)
    records = [read_audit(tmp_path / name, every_mini_batch=True) for name in ("mask", "loss")]
    texts = [describe(one, None, lambda *_: "OVERRIDE") for one in records]
    assert all("fspo's band with c = " in text for text in texts)
    assert ["OVERRIDE" in text for text in texts] == [False, True]


@pytest.mark.parametrize(
    ("rule", "arguments", "says"),
    [
        (GSPO, {"kept": torch.ones(1)}, "leave one out"),
        (None, {"kept": torch.full((1,), 1.5)}, r"1.5: must be in \[0, 1\]"),
        (None, {"kept": torch.ones(2)}, r"kept= .*\(2,\)"),
        (None, {"weight": torch.ones(1)}, "kept=torch.ones"),
    ],
)
def test_what_a_mask_keeps_is_checked(rule: Any, arguments: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Audit(None, rule).add(*one_response(), **arguments)


def one_response() -> tuple[torch.Tensor, ...]:
    old = torch.full((1, 4), -1.0)
    return old + 0.01, old, torch.ones(1, 4), torch.ones(1, 4)
