"""Promises 5, 6 and 22: a row is what the loss did; the table and the records lose nothing and count nothing twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import inside
import numpy as np
import pandas as pd
import pytest
import torch
from formulas import F64, batch
from library import (
    ALGORITHMS,
    Audit,
    append_records,
    judged,
    kept_output,
    read_steps,
    read_table,
    sequence_policy_loss,
    write_steps,
)
from table_rows import numbers, rows, writer

pytestmark = pytest.mark.promise(5, 6, 15, 22)
FIXED = ("fspo", "seq_rloo", "seq_gspo", "luspo")


def by_hand(name: str, log_prob: Any, old: Any, advantages: Any, mask: Any) -> dict[str, np.ndarray]:
    """The columns of a row, from their formulas."""
    loss = ALGORITHMS[name]
    some = mask.any(-1)
    S = torch.where(mask, log_prob - old, 0.0).sum(-1)[some].numpy()
    L = mask.sum(-1)[some].numpy()
    A = (torch.where(mask, advantages, 0.0).sum(-1)[some] / mask.sum(-1)[some]).numpy()
    above, below = loss.c_high * L**loss.exponent < S, -loss.c_low * L**loss.exponent > S
    weight = np.exp(np.minimum(S / (L if loss.weight == "length_normalised" else 1), loss.s_max))
    removed = (above & (A > 0)) | (below & (A < 0))
    return {"S": S, "L": L, "A": A, "inside": ~above & ~below, "kept": ~removed, "weight": weight}


def add(audit: Audit, inputs: Any, **more: Any) -> None:
    """A micro-batch."""
    log_prob, old, advantages, mask = inputs
    audit.add(log_prob, old, mask, advantages, **more)


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("split", [[64], [1, 40, 23]])
def test_a_row_is_what_the_loss_did(name: str, split: list[int], tmp_path: Path) -> None:
    audit = Audit(tmp_path, ALGORITHMS[name], loss=name)
    inputs = [batch(seed, scale=0.06 if name != "seq_gspo" else 0.01) for seed in (1, 2)]
    for tensors in inputs:
        for part in zip(*(tensor.split(split) for tensor in tensors), strict=True):
            add(audit, part)
        audit.end_mini_batch(step=7)
    table = read_table(tmp_path)
    columns = table.columns
    assert (table.meta["loss"], table.meta["rule"]) == (name, "known")
    expected = [by_hand(name, *tensors) for tensors in inputs]
    for column, first in expected[0].items():
        both = np.concatenate([first, expected[1][column]])
        np.testing.assert_allclose(columns[column], both.astype(float), rtol=2e-6, atol=1e-7, err_msg=column)
        assert column in ("L", "A", "S", "weight") or 0 < both.mean() < 1
    sizes = [len(rows["S"]) for rows in expected]
    assert columns["step"].tolist() == [7] * sum(sizes)
    assert columns["minibatch"].tolist() == columns["update"].tolist() == [0] * sizes[0] + [1] * sizes[1]
    audit.close()
    frame = pd.read_parquet(tmp_path, columns=["S", "L"])  # by anybody's reader
    assert sorted(zip(frame["S"], frame["L"], strict=True)) == sorted(
        zip(np.float32(columns["S"]), columns["L"], strict=True)
    )


def test_what_the_loss_returned_is_recorded_as_it_is(tmp_path: Path) -> None:
    audit, tensors = Audit(tmp_path, loss="mine"), batch(4)
    output = sequence_policy_loss(*tensors, ALGORITHMS["luspo"])
    add(audit, tensors, output=output, truncated_B=output.length_B > 30)
    audit.end_mini_batch(step=1)
    columns, some = read_table(tmp_path).columns, output.valid_B
    removed = output.clipped_high_B | output.clipped_low_B
    assert columns["kept"].tolist() == (~removed)[some].double().tolist()
    assert columns["inside"].tolist() == output.accepted_B[some].double().tolist()
    assert columns["truncated"].tolist() == (output.length_B > 30)[some].double().tolist()


@pytest.mark.parametrize(
    ("moves", "numbers"),
    [
        ([True, True, True, True], [0, 1, 2, 3]),
        ([False, True, True, True], [0, 0, 2, 3]),
        ([False, False, False, True], [0, 0, 0, 0]),
        ([True, False, False, True], [0, 1, 2, 3]),
    ],
)
def test_mini_batches_count_from_the_first_moved_weight(moves: list[bool], numbers: list[int], tmp_path: Path) -> None:
    audit = Audit(tmp_path, ALGORITHMS["fspo"])
    for step in (3, 4):  # each rollout batch is counted anew
        for move in moves:
            *tensors, mask = batch(step, rows=2, width=3)
            add(audit, (*tensors, torch.ones_like(mask)))
            audit.end_mini_batch(step, moves=move)
    columns = read_table(tmp_path).columns
    assert columns["minibatch"].tolist()[::2] == numbers * 2
    assert columns["update"].tolist()[::2] == [0, 1, 2, 3] * 2


def test_a_response_that_is_not_finite_has_no_row(tmp_path: Path) -> None:
    log_prob, *tensors, mask = batch(1, rows=6, width=5)
    log_prob[2, 3] = torch.nan
    audit = Audit(tmp_path, ALGORITHMS["fspo"])
    add(audit, (log_prob, *tensors, torch.ones_like(mask)), row_B=torch.arange(6))
    audit.end_mini_batch(1)
    table = read_table(tmp_path)
    assert table.columns["row"].tolist() == [0, 1, 3, 4, 5] and table.left_out == 1


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_clip_of_tokens_keeps_the_share_of_its_weight(sign: float) -> None:
    """PPO's clip by hand: a token keeps its ratio, or nothing where the clip acts."""
    log_prob, old, _, mask = batch(3, rows=16, width=12, scale=0.2)
    advantages = torch.full_like(old, sign)

    def gradient(new: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        new = new.detach().requires_grad_()
        ratio = (new - old).exp()
        loss = torch.where(mask, torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)), 0.0).sum()
        return torch.autograd.grad(loss, new)[0]

    output = kept_output(gradient, log_prob, old, advantages, mask, "token")
    ratio = torch.where(mask, (log_prob - old).exp(), 0.0)
    high, low = ratio * (ratio <= 1.2), ratio * (ratio >= 0.8)
    some = mask.any(-1)
    share = (high if sign > 0 else low).sum(-1)[some] / ratio.sum(-1)[some]
    kept = 1 - output.clipped_high_B.double() - output.clipped_low_B.double()
    torch.testing.assert_close(kept[some], share, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        output.accepted_B.double()[some], (ratio * (ratio <= 1.2) * (ratio >= 0.8)).sum(-1)[some] / ratio.sum(-1)[some]
    )
    assert 0 < float(share.min()) < float(share.max()) == 1


def test_a_band_judges_recorded_responses_as_its_loss_did() -> None:
    for name in FIXED:
        tensors = batch(5, scale=0.03)
        output = sequence_policy_loss(*tensors, ALGORITHMS[name])
        again = judged(output.log_ratio_B, output.length_B, output.advantage_B, ALGORITHMS[name])
        for field in ("lower_B", "upper_B", "weight_B", "accepted_B", "clipped_high_B", "clipped_low_B"):
            assert torch.equal(getattr(again, field)[output.valid_B], getattr(output, field)[output.valid_B]), field
    free = judged(torch.tensor([50.0, -50.0], dtype=F64), torch.tensor([1, 9]), torch.tensor([1.0, -1.0]), None)
    assert free.accepted_B.all() and not (free.clipped_high_B | free.clipped_low_B).any()


# ---------------------------------------------------------------- 6: the table


def counts(folder: Path) -> dict[tuple[int, int], int]:
    """Rows of each (step, update)."""
    columns = read_table(folder).columns
    return dict(numbers(columns)) if columns else {}


def test_what_was_written_is_read_in_its_order(tmp_path: Path) -> None:
    table = writer(tmp_path)
    written = [(step, update) for step in (1, 2, 3) for update in (0, 1, 2)]
    for step, update in written:
        table.append(rows(step, update))
    read = read_table(tmp_path)
    assert counts(tmp_path) == dict.fromkeys(written, 3) and not read.problems and read.meta["loss"] == "fspo"
    assert [*zip(read.columns["step"][::3], read.columns["update"][::3], strict=True)] == written
    np.testing.assert_allclose(read.columns["S"][:3], [0.1, 0.2, 0.3], rtol=1e-6)
    assert np.isnan(read.columns["weight"]).all(), "nobody knew"


#: Appends until it is killed, and says what it has appended.
CHILD = """
import sys
from table_rows import rows, writer
folder, first = sys.argv[1], int(sys.argv[2])
table = writer(folder, first_step=first)
for step in range(first, first + 100_000):
    for update in range(2):
        table.append(rows(step, update, 1 + (step + update) % 4))
        print(step, update, flush=True)
"""


def killed(folder: Path, first: int, appends: int) -> tuple[int, int]:
    """The last (step, update) that a process said it had appended, killed while it writes."""
    here = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, "-c", CHILD, str(folder), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": here}) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(appends)]
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
    step, update = [line for line in lines if line.endswith("\n")][-1].split()
    return int(step), int(update)


def test_a_kill_costs_no_row_and_a_resume_counts_none_twice(tmp_path: Path) -> None:
    kept: dict[tuple[int, int], int] = {}
    first = 1
    for appends, back in ((7, 0), (40, 2), (333, 1)):
        last = killed(tmp_path, first, appends)
        done = kept | {(s, u): 1 + (s + u) % 4 for s in range(first, last[0] + 1) for u in range(2) if (s, u) <= last}
        now = counts(tmp_path)
        assert done.items() <= now.items() and len(now) <= len(done) + 1, "one more may be written and not said"
        first = max(1, last[0] - back)
        kept = {key: number for key, number in now.items() if key[0] < first}
    table = writer(tmp_path, first_step=first)
    assert counts(tmp_path) == kept, "steps that will be done again are gone"
    table.append(rows(first))
    assert counts(tmp_path) == kept | {(first, 0): 3}


@pytest.mark.parametrize("steps", [1, 30])
@pytest.mark.parametrize("first", [0, 1, 2, 17, 30, 31])
def test_a_resume_replaces_its_first_step_and_later_ones(tmp_path: Path, steps: int, first: int) -> None:
    table = writer(tmp_path)
    for step in range(1, steps + 1):
        table.append(rows(step, 0))
        table.append(rows(step, 1))
    table = writer(tmp_path, first_step=first)
    kept = {(step, update): 3 for step in range(1, min(first, steps + 1)) for update in (0, 1)}
    assert counts(tmp_path) == kept
    table.append(rows(first, 0, count=5))
    assert counts(tmp_path) == kept | {(first, 0): 5}


def test_ranks_are_joined_and_a_lagging_one_holds_back(tmp_path: Path) -> None:
    tables = [writer(tmp_path, rank=rank, ranks=3) for rank in range(3)]
    for step in (1, 2):
        for rank in (2, 0, 1):
            tables[rank].append(rows(step, rank=rank))
    for step in (3, 4):
        for table in tables[:2]:
            table.append(rows(step))
    read = read_table(tmp_path)
    assert counts(tmp_path) == {(1, 0): 9, (2, 0): 9}, "the third rank has not ended step 3"
    assert "rank 2 ends at step 2" in read.problems[0]
    assert sorted(read.columns["row"][:9].tolist()) == list(range(9))
    tables[2].append({"step": 3, "update": 0, "minibatch": 0, "S": np.empty(0), "L": np.empty(0)})
    assert counts(tmp_path)[3, 0] == 6, "a rank may have no response"


def test_a_rank_that_starts_leaves_the_append_of_another_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, replace = writer(tmp_path, ranks=2), os.replace

    def beside_a_start(*names: Path) -> None:
        writer(tmp_path, rank=1, ranks=2, first_step=1)
        replace(*names)

    monkeypatch.setattr(os, "replace", beside_a_start)
    first.append(rows(1))
    monkeypatch.undo()
    writer(tmp_path, rank=1, ranks=2).append(rows(1, rank=1))
    assert counts(tmp_path) == {(1, 0): 6}


#: Rows that fill a file, so that the next append begins another one.
FULL = 2**14


def test_a_step_in_two_files_is_read_after_any_update_and_replaced(tmp_path: Path) -> None:
    table = writer(tmp_path)
    for step, update, count in ((1, 0, 3), (2, 0, 3), (2, 1, FULL), (2, 2, 3)):
        table.append(rows(step, update, count))
    assert len([*tmp_path.glob("*.parquet")]) == 2
    read = read_table(tmp_path, after=(2, 0)).columns
    assert np.bincount(read["update"]).tolist() == [0, FULL, 3]
    table.append(rows(2))
    assert counts(tmp_path) == {(1, 0): 3, (2, 0): 3}
    table.append(rows(1))
    table.sync()
    assert counts(tmp_path) == {(1, 0): 3}


def test_another_start_is_another_table(tmp_path: Path) -> None:
    for run, count in (("older", 2), ("newer", 4)):
        table = writer(tmp_path, run=run)
        table.append(rows(1, count=count))
        for path in tmp_path.glob("*older*"):
            os.utime(path, (1, 1))
    read = read_table(tmp_path)
    assert (read.run, list(read.others), len(read.columns["S"])) == ("newer", ["older"], 4)
    assert len(read_table(tmp_path, run="older").columns["S"]) == 2


def test_a_damaged_file_is_named_and_costs_no_row_of_an_earlier_one(tmp_path: Path) -> None:
    table = writer(tmp_path)
    for step, count in ((1, 3), (2, FULL), (3, 3)):
        table.append(rows(step, count=count))
    newest = max(tmp_path.glob("*.parquet"))
    newest.write_bytes(newest.read_bytes()[:300])
    assert any(newest.name in problem for problem in read_table(tmp_path).problems) and counts(tmp_path)[1, 0] == 3
    table = writer(tmp_path)  # a start that is not told where it goes on
    table.append(rows(2))
    assert counts(tmp_path) == {(1, 0): 3, (2, 0): 3}
    assert newest.with_name(f"{newest.name}.damaged").exists() and not read_table(tmp_path).problems


# ---------------------------------------------------------------- 22: metrics


def test_steps_of_a_run_resumed_twice_are_there_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 0, 1, 2, 3, 4, 5, 6, start=1)
    write_steps(path, 3, 4, 5, start=2)  # from the checkpoint of step 2
    write_steps(path, 5, start=3)
    kept, problems = read_steps(path)
    starts = {line["step"]: line["metrics"]["start"] for line in kept}
    assert starts == {0: 1, 1: 1, 2: 1, 3: 2, 4: 2, 5: 3} and not problems
    write_steps(path, 5, accuracy=0.5)  # a validation has a line of its own
    of_five = [line["metrics"] for line in read_steps(path)[0] if line["step"] == 5]
    assert of_five[-2:] == [{"start": 3}, {"accuracy": 0.5}]
    write_steps(path, 1, start=4)  # all begins again
    assert {line["step"]: line["metrics"]["start"] for line in read_steps(path)[0]} == {0: 1, 1: 4}


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_line_cut_by_a_kill_is_named_and_costs_no_other(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2)
    append_records(path, [{"step": 3, "metrics": {"x": 3.0}}])
    path.write_bytes(path.read_bytes()[:-cut])
    write_steps(path, 3, 4)
    kept, problems = read_steps(path)
    steps = [line["step"] for line in kept]
    assert steps in ([1, 2, 3, 4], [1, 2, 3, 3, 4]) and (cut == 1 or any(path.name in line for line in problems))


# ---------------------------------------------------------------- 15: what is never trained on


def test_every_evicted_response_is_counted_once() -> None:
    """A group that is stale and failed counts once, one that was more than a batch needed too."""
    ended = inside.evicted({"a": 2, "b": 2, "c": 2, "d": 2}, stale={"a", "b"}, failed={"b"}, surplus={"c"})
    assert ended == {"stale": 2, "failed": 2, "surplus": 2}
