"""Tests of recipe.runner.checkpoints.requeues: how many starts of a job in a row have saved nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipe.runner.checkpoints import requeues

HOUR = 3600.0


def write(path: Path, text: str, hour: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (hour * HOUR, hour * HOUR))


def start(folder: Path, number: int, reason: str | None = "warned") -> None:
    """A start of job 7 of half an hour, in the hour of its number."""
    logs = folder / f"7-restart-{number}"
    write(logs / "nodes", "node1\n", number)
    write(logs / "command.log", f"run folder: {folder.parent}\n", number + 0.4)
    if reason is not None:
        write(logs / "requeue", reason + "\n", number + 0.5)


def save(run: Path, step: int, hour: float) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / f"global_step_{step}").mkdir(parents=True)
    os.utime(checkpoints / f"global_step_{step}", (hour * HOUR, hour * HOUR))
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(step))  # its time is now


@pytest.mark.parametrize(
    ("saved", "starts", "refused"),
    [
        ([], 3, False),
        ([], 4, True),
        ([0.2], 4, False),  # the first start has saved
        ([0.2], 5, True),
        ([0.2, 3.2], 7, False),
        ([0.2, 3.2], 8, True),
        ([7.3], 8, False),  # the last one
    ],
)
def test_a_checkpoint_since_the_start_began_counts(
    tmp_path: Path, saved: list[float], starts: int, refused: bool
) -> None:
    logs = tmp_path / "slurm"
    for number in range(starts):
        start(logs, number)
    start(logs.with_name("other"), 9)  # of another job's folder
    for step, hour in enumerate(saved):
        save(tmp_path, step, hour)
    assert (requeues.refusal("7", logs) is not None) == refused


def test_every_start_is_named_with_its_time_and_its_end(tmp_path: Path) -> None:
    logs = tmp_path / "slurm"
    save(tmp_path, 5, 0.2)
    start(logs, 0)
    for number in (2, 9, 10):
        start(logs, number, "warned before the command was started")
    start(logs, 11, None)
    (logs / "7-restart-12").mkdir()  # has just begun
    text = requeues.refusal("7", logs) or ""
    lines = [f"  restart {number}: 30.0 min, warned before the command was started" for number in (2, 9, 10)]
    lines += ["  restart 11: 24.0 min, ended by SLURM without a warning"]
    assert text.splitlines()[1:5] == lines
    assert "job 7" in text and str(tmp_path / "checkpoints" / "global_step_5") in text
    assert all(remedy in text for remedy in ("--time", "--signal", "trainer.save_freq", "FSPO_RUN_DIR"))


def test_the_start_that_ends_is_counted_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "slurm"
    for number in range(4):
        start(logs, number, None)
        monkeypatch.setattr("sys.argv", ["requeues", str(logs / f"7-restart-{number}"), f"node{number} is gone"])
        assert requeues.main() == (requeues.REFUSED if number == 3 else 0)
    assert "node3 is gone" in capsys.readouterr().out
