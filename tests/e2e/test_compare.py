"""A comparison on the real stack: a start for each algorithm, the same conditions for both, and nothing run twice."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_stack import SMALL, user_environment

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def compare(tmp_path: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "recipe.fspo.compare", f"out={tmp_path}/grid", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=user_environment())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def lengths_by_prompt(folder: Path, step: int) -> dict[str, list[int]]:
    """Lengths in tokens (characters and the end, 64 at most) of the responses to each prompt of a step."""
    lengths: dict[str, list[int]] = {}
    for row in read(folder / "rollouts", f"{step}.jsonl"):
        lengths.setdefault(row["input"], []).append(min(len(row["output"]) + 1, 64))
    return lengths


def first_mini_batch(folder: Path) -> set[frozenset[str]]:
    """The few sets of four prompts (of 70) that the first mini-batch can have been made of, by its lengths."""
    lengths = lengths_by_prompt(folder, 1)
    recorded = sorted(read(folder, "sequences.jsonl")[0]["L"])
    found = {
        frozenset(four)
        for four in itertools.combinations(sorted(lengths), 4)
        if sorted(length for prompt in four for length in lengths[prompt]) == recorded
    }
    assert 0 < len(found) < 20
    return found


def test_a_grid_trains_every_run_under_the_same_conditions(tmp_path: Path) -> None:
    arguments = (
        "algos=[fspo,gspo]",
        "seeds=[5]",
        *SMALL,
        "trainer.save_freq=-1",
        "trainer.rollout_data_dir=${run.dir}/rollouts",
    )
    output = compare(tmp_path, *arguments)
    assert output.count("starting Ray") == 2
    fspo, gspo = (tmp_path / "grid" / "default" / algo / "seed5" for algo in ("fspo", "gspo"))
    infos = [json.loads((folder / "run.json").read_text()) for folder in (fspo, gspo)]
    assert [info["status"] for info in infos] == ["finished", "finished"]
    assert [info["loss"]["loss_mode"] for info in infos] == ["fspo", "seq_gspo"]
    assert infos[0]["weights_at_start"] == infos[1]["weights_at_start"]
    for step in (1, 2):
        prompts = [lengths_by_prompt(folder, step) for folder in (fspo, gspo)]
        assert prompts[0].keys() == prompts[1].keys(), f"step {step}: other prompts"
        assert len(prompts[0]) == 8
    assert first_mini_batch(fspo) & first_mini_batch(gspo), "mini-batches of other prompts"
    for folder in (fspo, gspo):
        assert [line["step"] for line in read(folder, "metrics.jsonl")] == [1, 2]
        rows = read(folder, "sequences.jsonl")
        assert [(row["step"], row["minibatch"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
        assert max(abs(s) for s in rows[0]["S"]) < 1e-4, "the first mini-batch after a rollout has S = 0"
        assert max(abs(s) for s in rows[1]["S"]) > 1e-4
    assert (tmp_path / "grid" / "report" / "report.html").is_file()

    again = compare(tmp_path, *arguments)
    assert "starting Ray" not in again, "finished runs are not started again"
    planned = compare(tmp_path, *arguments, "algos=[fspo,gspo,rloo]", "dry_run=true")
    assert "default/rloo/seed5: not run" in planned
    assert "rloo" not in (tmp_path / "grid" / "grid.json").read_text(), "a dry run writes nothing"
