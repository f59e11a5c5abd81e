"""A comparison on the real stack: a start for each algorithm, the same conditions for both, and nothing run twice.

One of the two is the loss of docs/extending.md, in a folder of the reader's.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from columns import all_rows
from real_stack import SMALL, user_environment

from fspo.records import complete_lines
from fspo.table import read_table

PAGE = (Path(__file__).resolve().parents[2] / "docs/extending.md").read_text(encoding="utf-8")
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def compare(tmp_path: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "recipe.fspo.compare", f"out={tmp_path}/grid", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=user_environment())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def lengths_by_prompt(folder: Path, step: int) -> dict[str, list[int]]:
    """Lengths in tokens (characters and the end, 64 at most) of the responses to each prompt of a step."""
    lengths: dict[str, list[int]] = {}
    for row in complete_lines(folder / "rollouts" / f"{step}.jsonl"):
        lengths.setdefault(row["input"], []).append(min(len(row["output"]) + 1, 64))
    return lengths


def first_mini_batch(folder: Path) -> set[frozenset[str]]:
    """The few sets of four prompts (of 70) that the first mini-batch can have been made of, by its lengths."""
    lengths = lengths_by_prompt(folder, 1)
    rows = all_rows(folder)
    recorded = sorted(rows["L"][(rows["step"] == 1) & (rows["update"] == 0)].tolist())
    possible = {
        frozenset(four)
        for four in itertools.combinations(sorted(lengths), 4)
        if sorted(length for prompt in four for length in lengths[prompt]) == recorded
    }
    assert 0 < len(possible) < 20
    return possible


def test_a_grid_trains_every_run_under_the_same_conditions(tmp_path: Path) -> None:
    for name, language in (("my_loss.py", "python"), ("conf/algo/fspo_power.yaml", "yaml")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (block, *_) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
        (tmp_path / name).write_text(block, encoding="utf-8")
    arguments = (
        "hydra.searchpath=[conf]",
        "algos=[gspo,fspo_power]",
        "seeds=[5]",
        *SMALL,
        "trainer.logger=[console,tensorboard]",
        "trainer.save_freq=-1",
        "trainer.rollout_data_dir=${run.dir}/rollouts",
        "fspo.skip_zero_advantage=false",  # every mini-batch has an S
    )
    output = compare(tmp_path, *arguments)
    assert output.count("starting Ray") == 2
    gspo, power = (tmp_path / "grid" / "measured" / algo / "seed5" for algo in ("gspo", "fspo_power"))
    infos = [json.loads((folder / "run.json").read_text()) for folder in (gspo, power)]
    assert [info["status"] for info in infos] == ["finished", "finished"]
    assert [info["loss"]["loss_mode"] for info in infos] == ["seq_gspo", "fspo_power"]
    assert infos[0]["weights_at_start"] == infos[1]["weights_at_start"]
    for step in (1, 2):
        prompts = [lengths_by_prompt(folder, step) for folder in (gspo, power)]
        assert prompts[0].keys() == prompts[1].keys(), f"step {step}: other prompts"
        assert len(prompts[0]) == 8
    assert first_mini_batch(gspo) & first_mini_batch(power), "mini-batches of other prompts"
    for folder in (gspo, power):
        assert [line["step"] for line in complete_lines(folder / "metrics.jsonl")] == [1, 2]
        table = read_table(folder)
        assert table.batches.tolist() == [[1, 0], [1, 1], [2, 0], [2, 1]]
        first, second = (
            table.columns["S"][(table.columns["step"] == 1) & (table.columns["update"] == i)] for i in (0, 1)
        )
        assert abs(first).max() < 1e-4, "the first mini-batch after a rollout has S = 0"
        assert abs(second).max() > 1e-4
        assert list((folder / "tensorboard").glob("events.*")), "each run has its own"
    # Not its LRE: in two steps perhaps nothing is clipped, and then there is none.
    assert any("fspo/window_sequences" in line["metrics"] for line in complete_lines(power / "metrics.jsonl"))
    first = next(line["metrics"]["response_length/mean"] for line in complete_lines(power / "metrics.jsonl"))
    assert infos[1]["loss_divided_by"] == pytest.approx(first), "matched, as FSPO's"
    assert "loss_divided_by" not in infos[0], "GSPO's is a mean"
    assert [info["clip_values"] for info in infos] == ["measured", "published"]
    assert "fspo_power" in (tmp_path / "grid" / "report" / "report.html").read_text()

    again = compare(tmp_path, *arguments)
    assert "starting Ray" not in again, "finished runs are not started again"
    planned = compare(tmp_path, *arguments, "algos=[gspo,fspo_power,rloo]", "dry_run=true")
    assert "measured/rloo/seed5: not run" in planned
    assert "rloo" not in (tmp_path / "grid" / "grid.json").read_text(), "a dry run writes nothing"
