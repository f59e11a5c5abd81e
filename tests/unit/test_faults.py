"""The fault matrix: what a row is held to, and the table that is made of the rows."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.faults import PAGE, cells, read_rows, table, verdict
from benchmarks.faults_run import MOMENTS, PROCESSES
from recipe.fspo.faults.phase import PHASES

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


def test_the_table_has_every_cell_and_says_what_was_not_run() -> None:
    lines = table([GOOD, GOOD | {"moment": "save", "left": 2}]).splitlines()
    assert len(lines) == 2 + len(cells()) + 2
    assert "| vLLM engine | update | 3.2 s | 1 | 0 | 2 | step 3 | vLLM engine |" in lines
    assert "| vLLM engine | save | 3.2 s | 1 | 2 | 2 | step 3 | vLLM engine **processes left** |" in lines
    assert sum("not run" in line for line in lines) == len(cells()) - 2
    assert lines[-1].startswith(f"1 of the 2 rows that were run, of {len(cells())}, meet every requirement.")


def test_every_process_is_killed_and_every_moment_is_a_phase() -> None:
    assert {process for process, _ in cells()} == set(PROCESSES)
    assert set(MOMENTS) <= set(PHASES)
    assert {moment for _, moment in cells()} == set(MOMENTS)


def test_the_committed_table_is_made_of_the_committed_rows() -> None:
    assert table(read_rows()) in PAGE.read_text(encoding="utf-8")
