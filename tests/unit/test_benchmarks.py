"""What would break a benchmark without a word: log reading, process names, resuming, the tables made of its rows."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from messages import unpadded

from benchmarks import code_bases, faults, peers, public_losses, versus_verl
from benchmarks.checkouts import Call, Source, adapted, not_run
from benchmarks.code_bases import CODE_BASES
from benchmarks.faults import KILLS, MOMENTS, PROCESSES, ROWS, verdict
from benchmarks.pages import STUDY, TABLES, Table, as_csv, read_table
from benchmarks.studies import clip_values, figures
from fspo.audit import read_audit
from fspo.check_loss import PolicyLoss, configured, load
from fspo.check_loss.by_length import normalisation
from fspo.records import complete_lines
from fspo.responses import Responses
from recipe.runner.faults.phase import PHASES

ROOT = Path(__file__).resolve().parents[2]

# ---------------------------------------------------------------- plain verl side by side


def test_start_up_and_steps_come_from_verls_log() -> None:
    entries = [{"step": i, "data": {"timing_s/step": 3.0 + i}} for i in (1, 2, 3)]
    # verl's timer of the first step: 4 s; the others from line to line
    assert versus_verl.step_times(entries, [100.0, 106.0, 113.5]) == {
        "first_step_begins_s": 96.0,
        "first_step_ends_s": 100.0,
        "step_s": 6.75,
    }


def test_the_table_has_medians_ranges_and_the_recipes_share() -> None:
    names = ("first_step_begins_s", "first_step_ends_s", "step_s", "peak_pss_mib")
    rows = [{"variant": v, **dict.fromkeys(names, s)} for v, s in (("verl", 10), ("verl", 30), ("recipe", 5))]
    assert "| step, s | 20.0 (10.0 to 30.0) | 5.0 (5.0 to 5.0) | 0.25 |" in unpadded(versus_verl.table(rows))
    assert "`not run`" in versus_verl.table(rows[:2])


# ---------------------------------------------------------------- the fault matrix

GOOD: dict[str, Any] = {
    "process": "vLLM engine",
    "moment": "update",
    "step": 4,
    "end_s": 3.2,
    "exit_code": 1,
    "left": 0,
    "message": "the vLLM engine (process 12) died during the update of step 4; its log: a.err",
    "log_exists": True,
    "steps_lost": 2,
    "resume": "step 3",
}


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({}, ""),
        ({"end_s": None, "exit_code": None}, "too late, exit code"),
        ({"end_s": 61.0}, "too late"),
        ({"exit_code": 0}, "exit code"),
        ({"left": 1}, "processes left"),
        ({"message": ""}, "message"),
        ({"log_exists": False}, "message"),
        ({"steps_lost": 3}, "lost more than since the last save"),
        ({"resume": "WRONG: step 1"}, "resume"),
        ({"process": "judge", "message": "the run goes on"}, ""),
        ({"process": "judge"}, "did not survive"),
    ],
)
def test_a_row_is_held_to_every_requirement(change: dict[str, Any], failed: str) -> None:
    assert verdict(GOOD | change) == failed


def test_a_hang_is_held_to_being_named() -> None:
    row = GOOD | {"how": "stopped", "named_s": 95.0, "end_s": 170.0, "exit_code": 1}
    row["message"] = "no progress for 92 s during the update of step 4: the vLLM engine (process 12) is stopped"
    assert verdict(row) == ""
    assert verdict(row | {"named_s": None, "end_s": 250.0}) == "named too late, ended too late"
    assert verdict(row | {"message": "no progress", "without_stack": 1}) == "message, a process without a stack"


def test_the_table_has_every_cell_and_says_what_was_not_run() -> None:
    lines = as_csv(faults.table("kills", [GOOD, GOOD | {"moment": "save", "left": 2}])).splitlines()
    assert len(lines) == 1 + len(KILLS)
    assert "vLLM engine,update,3.2 s,1,0,2,step 3,vLLM engine,as required" in lines
    assert "vLLM engine,save,3.2 s,1,2,2,step 3,vLLM engine,processes left" in lines
    assert sum("not run" in line for line in lines) == len(KILLS) - 2


def test_every_process_is_killed_and_every_moment_is_a_phase() -> None:
    assert {process for process, _, _ in KILLS} == set(PROCESSES)
    assert {moment for _, _, moment in KILLS} == set(MOMENTS) <= set(PHASES)


def test_a_process_without_a_stack_is_counted_if_it_has_python() -> None:
    text = "2026-01-01 00:00:00, 92 s without progress\n\n"
    text += "the control service of Ray (gcs_server) (process 1) is in code\n  no stack: no Python\n\n"
    text += "the trainer (process 2) is in step (a.py:1)\n  MainThread\n    step (a.py:1)\n\n"
    assert faults.without_stack(text) == 0
    assert faults.without_stack(text + "the agent loop (process 3) is stopped\n  no stack: not allowed\n") == 1


def test_rows_are_kept_and_the_last_gets_its_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(faults.ROWS, "hangs", tmp_path / "hangs.jsonl")
    row = {name: value for name, value in GOOD.items() if name != "resume"} | {"hit": True, "named_s": 90.0}

    def run_row(folder: Path, kind: str, cell: tuple[str, str, str]) -> tuple[dict[str, Any], None]:
        return row | dict(zip(("process", "how", "moment"), cell, strict=True)), None

    monkeypatch.setattr(faults, "run_row", run_row)
    monkeypatch.setattr(faults, "see_resume", lambda folder, kind: "step 3")
    for only in ([], ["GCS:stopped:update"]):
        faults.run_rows("hangs", tmp_path, only)
        rows = complete_lines(faults.ROWS["hangs"])
        assert sorted(map(faults.cell_of, rows)) == sorted(faults.HANGS)
        assert {kept["resume"] for kept in rows} == {"step 3"}


@pytest.mark.parametrize("kind", ROWS)
def test_the_committed_table_is_made_of_the_committed_rows(kind: str) -> None:
    table = faults.table(kind, complete_lines(ROWS[kind]))
    assert (TABLES / f"faults-{kind}.csv").read_text(encoding="utf-8") == as_csv(table)


# ---------------------------------------------------------------- the studies


def as_recorded(tables: Mapping[str, Table]) -> bool:
    return all((TABLES / f"{name}.csv").read_text(encoding="utf-8") == as_csv(table) for name, table in tables.items())


def test_the_table_of_batches_is_made_of_the_records() -> None:
    assert as_recorded({"clip-values-batches": clip_values.batches_table()})


def test_a_run_of_before_is_no_run_without_responses(tmp_path: Path) -> None:
    run = tmp_path / "demo/measured/fspo/seed1"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"status": "finished", "algo": "fspo", "seed": 1, "starts": []}')
    (run / "metrics.jsonl").touch()
    (run / "length_stats.jsonl").write_text('{"step": 1, "minibatch": 0, "layout": 1, "cells": []}\n')
    with pytest.raises(SystemExit, match=r"seed1/responses.*checkout that made"):
        clip_values.tables(tmp_path)


def test_the_table_of_settings_stands_in_results() -> None:
    table = read_table("settings")
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    for setting, exponent, *errors in table[1:]:
        row = f"L^{exponent.split()[0]}", *errors
        assert any(all(cell in line for cell in row) for line in text.replace("*", "").splitlines()), setting


@pytest.mark.parametrize(("exponent", "band"), [(0.0, "rloo"), (0.5, "fspo"), (1.0, "gspo")])
def test_the_line_of_the_even_band_goes_through_the_dots(exponent: float, band: str) -> None:
    """10,000 normal S: std(S) of a bin is known to 2%, and the ratio of line and dot in all bins to 14%."""
    draw = np.random.default_rng(0)
    length = np.exp(draw.uniform(np.log(8), np.log(512), 10_000)).astype(int)
    axes = Figure().subplots()
    figures.spread_by_length(axes, Responses.of_rows({"S": draw.normal(0, 1e-3 * length**exponent), "L": length}))
    lines = {line.get_label(): np.array(line.get_data()) for line in axes.lines}
    x, dots = lines.pop("std(S)")
    off = {name: np.abs(np.interp(np.log(x), np.log(at), y) / dots - 1).max() for name, (at, y) in lines.items()}
    assert off[figures.BANDS[band]] < 0.14 and sorted(off.values())[1] > 0.5


def test_the_readmes_figure_has_the_lres_of_the_readmes_audit() -> None:
    axes = Figure().subplots()
    figures.clip_by_length(axes, read_audit(STUDY / "demo.parquet").responses.moved())
    shown = [bars.get_label() for bars in axes.containers]
    (line,) = re.findall(
        r"^- with 85% of all responses inside.*", (ROOT / "README.md").read_text(encoding="utf-8"), re.M
    )
    named = dict(re.findall(r"(sqrt\(L\)|constant|linear) (\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\])", line))
    bands = ("sqrt(L)", "constant", "linear")
    assert shown == [f"{name}: LRE {named[band]}" for band, name in zip(bands, figures.BANDS.values(), strict=True)]


def test_the_figure_of_lres_has_every_row_of_the_settings() -> None:
    axes = Figure().subplots()
    figures.forest(axes)
    (*_, fspo, rloo, gspo), *rows = read_table("settings")
    assert [fspo, rloo, gspo] == [*figures.BANDS]
    for column, bars in enumerate(axes.containers, 2):
        assert [f"{x:.3f}" for x in bars.lines[0].get_xdata()] == [row[column].split()[0] for row in rows]


def test_ten_lines_of_the_card_judge_a_band_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"```python\n(.*?)```", (STUDY / "README.md").read_text(encoding="utf-8"), re.S)
    table = (TABLES / "evidence-bands.csv").read_text(encoding="utf-8")
    printed = float(re.findall(r'^demo,symmetric,fspo,[\d.]+,"([\d.]+)', table, re.M)[0])
    for power, low, high in (("0.4", 0.0, 0.03), ("0.5", printed - 0.003, printed + 0.003), ("1.0", 0.08, 0.2)):
        exec(block.replace("L**0.4", f"L**{power}"), {})
        (value,) = re.findall(r"^Interval\(value=([\d.]+), low", capsys.readouterr().out)
        assert low <= float(value) < high


# ---------------------------------------------------------------- losses of other code bases


def test_functions_of_a_checkout_run_without_their_package(tmp_path: Path) -> None:
    source = "import a_package_that_is_not_there\n\n@a_package_that_is_not_there.mark\ndef f(x: No.Such) -> Tensor:\n"
    source += (
        "    return torch.full((2,), x + more)\n\nclass A(Absent):\n    def g(self):\n        return math.exp(self)\n"
    )
    (tmp_path / "losses.py").write_text(source, encoding="utf-8")
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for arguments in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "x")):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    checkout = Source(tmp_path)
    assert checkout.holds("losses.py") and not checkout.holds("other.py") and len(checkout.version("any")[1]) == 10
    assert checkout.definitions("losses.py", ("f",), {"more": 2}).f(1).tolist() == [3, 3]
    assert checkout.definitions("losses.py", ("A.g",)).g(0) == 1
    with pytest.raises(SystemExit, match=r"losses\.py.* has no A\.f, g"):
        checkout.definitions("losses.py", ("A.g", "A.f", "g"))
    with pytest.raises(SystemExit, match="OpenRLHF"):
        public_losses.table([tmp_path])


def test_verls_release_is_read_where_it_is_installed_and_its_gspo_follows_the_averaging() -> None:
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    release = Source(Path(spec.origin).parents[1])
    assert release.holds(CODE_BASES["verl"][0]) and release.version("verl") == (metadata.version("verl"), "installed")
    gspo = next(code_bases.verl(release))
    config = configured([f"{key}={value}" for key, value in gspo.settings.items()])
    assert normalisation(PolicyLoss(gspo.loss, config))[1] == pytest.approx(0, abs=0.01)
    assert normalisation(PolicyLoss(gspo.loss, config, "seq-mean-token-mean"))[1] == pytest.approx(-1, abs=0.01)


def test_a_loss_that_cannot_run_has_a_row_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake-1.0.dist-info").mkdir()
    (tmp_path / "fake.py").touch()
    monkeypatch.setattr(
        public_losses, "CODE_BASES", {"Fake": ("fake.py", lambda source: [not_run("paired", "needs pairs")])}
    )
    heads, row = public_losses.table([tmp_path])
    assert row[:6] == ["Fake", "1.0", "installed", "paired", "-", "not run: needs pairs"] and len(row) == len(heads)


def test_masks_of_three_shapes_keep_other_lengths_at_one_clip_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_losses, "_MINI_BATCHES", 2)
    monkeypatch.setattr(public_losses, "_HALVINGS", 9)

    def mask(power: float, width: float) -> PolicyLoss:
        def loss(c: Call) -> Any:
            s_B1, length_B1 = ((x * c.mask).sum(-1, keepdim=True) for x in ((c.new - c.old).detach(), c.mask))
            kept_B1 = s_B1.abs() <= width * length_B1**power
            return -(kept_B1 * c.advantages * c.new * c.mask).sum() / c.tokens * c.ranks

        return PolicyLoss(adapted("mask", loss).loss, configured([]))

    kept = [public_losses.at_one_rate(mask(*x), "none") for x in ((0, 0.7), (0.5, 0.05), (1, 1e-3))]
    short, long = zip(*((float(x) for x in text.partition(" (")[0].split(", ")) for text in kept), strict=True)
    assert short[0] > 0.95 > 0.75 > short[2] and long[2] > 0.95 > 0.75 > long[0]
    assert abs(short[1] - long[1]) < 0.2


def test_a_row_says_which_named_loss_it_equals() -> None:
    gspo = load("gspo")
    twice = PolicyLoss(lambda **arguments: 2 * gspo.function(**arguments), gspo.config)
    assert [public_losses.equal_to(loss) for loss in (gspo, twice)] == ["GSPO", "-"]


# ---------------------------------------------------------------- verl's own tests beside the plugins

TESTS_OF_A_PEER = """
import os

def test_the_same(): pass
def test_fails_in_both(): assert False
def test_differs():
    import sys, verl.trainer.ppo.core_algos as losses
    assert os.environ.get("FSPO_AUDIT") is None and "fspo" not in losses.POLICY_LOSS_REGISTRY
"""


def test_a_test_that_only_the_plugins_break_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tmp_path / "verl").mkdir()  # of the checkout, and not what is tested
    (tests / "test_peer_on_cpu.py").write_text(TESTS_OF_A_PEER)
    (tests / "test_cannot_on_cpu.py").write_text("import no_such_package")
    assert peers.main([str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "test_differs: passed without the plugins, failed with them\ndiffer: 1" in shown
    assert "of 2 files: {'error': 1, 'passed': 1, 'failed': 1}" in shown
    with pytest.raises(SystemExit, match="2"):
        peers.main([str(tmp_path), "--files", "tests/test_gone.py"])
    assert "tests/test_gone.py" in capsys.readouterr().err
    (tests / "test_hangs.py").write_text("import time\ntime.sleep(99)")
    assert peers.run(tmp_path, "tests/test_hangs.py", True, limit_s=1.0) == {"tests/test_hangs.py": "no end"}
