"""The length audit as its readers see it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from audited_loop import GSPO, MINI_BATCHES, RANKS, STEPS, micro_batch, spoiled, train
from messages import holds, unpadded

from fspo.audit import Audit, describe, live_metrics, read_audit
from fspo.audit.__main__ import main
from fspo.losses import ALGORITHMS
from fspo.report.runs import load_runs
from fspo.responses import Responses
from fspo.table import FOLDER, TableWriter

ROOT = Path(__file__).parents[2]


def test_an_audit_of_two_ranks_adds_up(tmp_path: Path) -> None:
    train(tmp_path)
    records = read_audit(tmp_path)
    assert records.problems == [] and records.loss == "seq_gspo" and records.responses.rule_known
    responses = records.responses
    assert responses.batches == STEPS * MINI_BATCHES
    tensors = [micro_batch(1000 * rank + 100 + 20 + micro) for rank in range(RANKS) for micro in range(2)]
    last = responses.select(responses.batch_B == STEPS * MINI_BATCHES - 1)
    length = torch.cat([mask.sum(1) for _, _, mask, _ in tensors])
    s = torch.cat([((new - old) * mask).sum(1) for new, old, mask, _ in tensors])[length > 0]
    mean = s / length[length > 0]
    assert len(last) == int((length > 0).sum()) and last.s_B.sum() == pytest.approx(float(s.sum()), rel=1e-5)
    inside = (mean >= -GSPO.c_low) & (mean <= GSPO.c_high)
    assert last.inside_B.sum() == int(inside.sum())
    assert not responses.unmoved().s_B.any()
    table = describe(records)
    assert f"{len(responses.moved())} sequences" in table and "LRE" in table
    assert main([str(tmp_path)]) == 0


def test_a_response_that_is_not_finite_is_named_in_all_readers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = Audit(tmp_path, GSPO)
    for _ in range(2):
        audit.add(*spoiled(float("nan"), "new"))
        audit.end_mini_batch(1)
    assert capsys.readouterr().err.count("1 response with a log-probability that is not finite left out") == 1
    records = read_audit(tmp_path)
    assert (records.left_out, records.problems) == (2, [])
    assert main([str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert "2 responses with a log-probability that is not finite left out" in output.out and "nan" not in output.out
    (run,) = load_runs(tmp_path)
    assert any("2 responses" in problem for problem in run.problems)


def first_mini_batch(tmp_path: Path, off: Any, every: bool = False) -> list[str]:
    audit = Audit(tmp_path, loss="mine")
    generator = torch.Generator().manual_seed(0)
    for index in range(6):
        _, old, mask, a = micro_batch(index)
        audit.add(off(old, generator), old, mask, a)
        if index % 3 == 2:
            audit.end_mini_batch(1)
    return read_audit(tmp_path, every_mini_batch=every).notes()


@pytest.mark.parametrize(
    ("off", "says"),
    [
        (lambda old, g: old, ""),
        (lambda old, g: old + 1e-6 * torch.randn(old.shape, generator=g), ""),
        (lambda old, g: old + 0.002 * torch.randn(old.shape, generator=g), "bf16"),
        (lambda old, g: old + 0.03 * torch.randn(old.shape, generator=g), "rollout engine are"),
        (lambda old, g: old / 0.7, "temperature"),
        (lambda old, g: old - 0.1, "top_p"),
        (lambda old, g: old - 0.001, "top_p"),  # below what rounds in bf16, but all one way
        (lambda old, g: old.roll(1, 1), "shifted mask"),
    ],
)
def test_the_first_mini_batch_is_judged(off: Any, says: str, tmp_path: Path) -> None:
    notes = first_mini_batch(tmp_path / "on", off)
    assert [says in note and "first mini-batch" in note for note in notes] == [True] * bool(says)
    assert ("note: first mini-batch" in describe(read_audit(tmp_path / "on"))) == bool(says)
    assert first_mini_batch(tmp_path / "off", off, every=True) == [], "pi_old is the rollout engine's by option"


def test_whoever_numbers_optimizer_steps_is_told(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    for step in range(4):
        audit.add(*micro_batch(step, moved=step > 0))
        audit.end_mini_batch(step)
    (note,) = read_audit(tmp_path).notes()
    assert "end_mini_batch(step)" in note


def test_what_is_not_there_is_said_in_words(tmp_path: Path) -> None:
    new, old, mask, a = micro_batch(1)
    cases = {
        "empty": ((new, old, mask & False, a), "no mini-batch in which a weight had moved", False),
        "lost": ((old - 9, old, mask, a), "nothing was accepted", True),
        "kept": ((old + 1e-7, old, mask, a), "nothing was clipped", True),
        "still": ((old, old, mask, a), "nothing was clipped", False),
    }
    for name, (tensors, says, could_clip) in cases.items():
        audit = Audit(tmp_path / name, GSPO)
        for _ in range(2):
            audit.add(*tensors)
            live = live_metrics(Responses.of_rows(audit.end_mini_batch(1).rows))
        assert "lre" not in live and not any(map(np.isnan, live.values()))
        assert ("accept_rate" in live) == could_clip
        text = describe(read_audit(tmp_path / name))
        assert "nan" not in text and says in text


@pytest.mark.parametrize("word", ["1,0,2", "1,2", "one,1,1", "9,1,1", "0.5,-1,1", "0.5,nan,1"])
def test_a_band_that_is_none_is_named(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nowhere", "--band", word])
    assert holds(capsys.readouterr().err, f"--band: {word}")


def test_the_page_on_masks_shows_what_bands_keep_of_recorded_responses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/masks.md").read_text()
    ((command, table),) = re.findall(r"^python -m fspo\.audit (.*?)```\n\n(.*?)\n\n", page, re.M | re.S)[:1]
    words = command.replace("\\\n", " ").split()
    bands = [[float(part) for part in word.split(",")] for word in words[2::2]]
    assert main(words) == 0
    printed = unpadded(capsys.readouterr().out)
    rows = pq.read_table(words[0])
    s_B, length_B = (rows[name].to_numpy() for name in "SL")
    shown = re.findall(r"^\| [^|]+ \| [^|]+ \| (.+) \|$", table, re.M)[2:]
    assert len(shown) == len(bands)
    # The second row of each length is that of the bands' table.
    by_length = [re.findall(rf"^\| {length} \| (.*%) \|$", printed, re.M)[0].split(" | ") for length in (18, 83, 1024)]
    for (exponent, low, high), cells, *shares in zip(bands, shown, *by_length, strict=True):
        x_B = s_B / length_B**exponent
        inside_B = (x_B >= -low) & (x_B <= high)
        (line,) = re.findall(rf"^.*, -{low:.4g} to {high:.4g} nats.*$", printed, re.M)
        assert f"{inside_B.mean():.1%} inside" in line
        percent = [f"{float(share.rstrip('%')):.0f}%" for share in shares]
        assert cells.split(" | ") == [*percent, f"{inside_B.mean():.0%}", *re.findall(r"LRE ([^;]+)", line)]


def test_a_reader_that_goes_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    train(tmp_path, ranks=range(1))
    command = f"{sys.executable} -m fspo.audit {tmp_path} | head -c 10"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert ended.returncode in (1, 141) and "Traceback" not in ended.stderr and "Broken" not in ended.stderr


def broken(folder: Path, how: str) -> str:
    """Spoils what two ranks have written; says what is to be named."""
    train(folder, ranks=range(1) if how == "a rank is missing" else range(RANKS))
    if how == "a rank is missing":
        return "of 2 ranks, 1"
    (path,) = folder.glob("responses-run-00000-*")
    if how == "a file is cut":
        path.write_bytes(path.read_bytes()[:-50])
        return str(path)
    path.unlink()
    audit = Audit(folder, GSPO, loss="seq_gspo", rank=0, ranks=RANKS, run="run")
    for step in range(4):
        audit.add(*micro_batch(0, moved=False))
        audit.end_mini_batch(step)
    return "rank 1 ends at step 1"


@pytest.mark.parametrize("how", ["a rank is missing", "a file is cut", "a rank stopped early", "empty"])
def test_what_is_wrong_with_a_folder_is_named(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = broken(tmp_path, how) if how != "empty" else str(tmp_path)
    assert any(expected in problem for problem in read_audit(tmp_path).problems)
    assert main([str(tmp_path)]) == (2 if how == "empty" else 1) and expected in capsys.readouterr().err


def test_the_folder_of_a_run_is_read_as_an_audit_of_its_last_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that went back to step 2 and did step 3 again: the first step 3 does not count."""
    generator, audit = torch.Generator().manual_seed(3), Audit(tmp_path / "audit", ALGORITHMS["fspo"], loss="fspo")
    run, own = tmp_path / "run", Audit(None, ALGORITHMS["fspo"])
    for step, counts in ((1, True), (2, True), (3, False), (3, True)):
        writer = TableWriter(run / FOLDER, {"loss": "fspo"}, run="run", first_step=step)
        for index in range(12):
            old, length = -torch.rand(64, 40, generator=generator), torch.randint(1, 41, (64, 1), generator=generator)
            new, mask = old + 0.02 * index * torch.randn(64, 40, generator=generator), torch.arange(40) < length
            for one in (own, audit):
                one.add(new, old, mask, torch.ones(64), truncated_B=None if one is audit else length[:, 0] == 40)
            audit.end_mini_batch(step) if counts else audit.clear()
            writer.append(own.end_mini_batch(step).rows)
        own = Audit(None, ALGORITHMS["fspo"])
    (run / "run.json").write_text(json.dumps({"algo": "mine", "loss": {"loss_mode": "fspo"}}))
    audit.close()
    assert main([str(tmp_path / "audit")]) == 0
    audited = capsys.readouterr().out
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == audited and "S spreads like L^" in audited
    known = [bool(np.isnan(read_audit(path).responses.truncated_B).all()) for path in (run, tmp_path / "audit")]
    assert known == [False, True]
    (run / FOLDER / "responses-run-00000-000000009.parquet").write_bytes(b"begun")
    assert main([str(run)]) == 1 and "responses-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        ("nowhere", ("nowhere", "does not exist", "FSPO_AUDIT")),
        ("run/run.json", ("run.json", "is a file", "FSPO_AUDIT")),
        ("run", ("run", FOLDER)),
        ("old", ("old/length_stats.jsonl", "older version")),
        ("grid", ("grid", "grid/fspo/seed1")),
        ("above", ("above", "above/audit")),
    ],
)
def test_a_folder_of_another_kind_is_named_with_what_reads_it(
    tmp_path: Path, folder: str, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run/run.json", "grid/grid.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    train(tmp_path / "above/audit")
    shutil.copytree(tmp_path / "above/audit", tmp_path / "grid/fspo/seed1" / FOLDER)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/length_stats.jsonl").touch()
    assert main([str(tmp_path / folder)]) == 2
    assert re.search(holds("error: ", *names), capsys.readouterr().err)
    assert re.search(holds(*names), describe(read_audit(tmp_path / folder)))


def test_of_several_runs_in_a_folder_the_newest_is_read_and_the_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path)
    once = read_audit(tmp_path)
    train(tmp_path, run="run2")
    again, first = read_audit(tmp_path), read_audit(tmp_path, "run")
    assert (again.run, again.others, first.others) == ("run2", ["run"], ["run2"])
    for records in (again, first):
        assert records.problems == []
        np.testing.assert_array_equal(records.responses.s_B, once.responses.s_B)
    assert main([str(tmp_path), "--run", "run"]) == 0 and "run2" in capsys.readouterr().err
    assert "run3" in read_audit(tmp_path, "run3").problems[0]
    pq.write_table(pa.table({"S": [0.1], "L": [3]}), tmp_path / "one.parquet")
    assert "run=run3" in read_audit(tmp_path / "one.parquet", "run3").problems[0]


def test_what_a_running_training_is_writing_is_no_problem(tmp_path: Path) -> None:
    """One rank has ended a mini-batch that the other one is still in."""
    audits = [Audit(tmp_path, GSPO, rank=rank, ranks=RANKS, run="run") for rank in range(RANKS)]
    for index in range(3):
        for audit in audits[: 1 if index == 2 else RANKS]:
            audit.add(*micro_batch(index, index > 0))
            audit.end_mini_batch(1)
    records = read_audit(tmp_path)
    assert records.problems == [] and records.responses.batches == 2
