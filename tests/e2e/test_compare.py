"""A comparison of GSPO with the loss of the page, in a folder of the reader's: equal conditions, nothing run twice."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from columns import all_rows
from real_stack import LATER, REPOSITORY, SMALL, Starter, compare, compared, measured, own_groups

from fspo.files import read_lines, read_object
from fspo.report.build import build_report

PAGE = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3 * LATER)]


def lengths_by_prompt(folder: Path, step: int) -> dict[str, list[int]]:
    """Lengths in tokens (characters and the end, 64 at most) of the responses to each prompt of a step."""
    lengths: dict[str, list[int]] = {}
    for row in read_lines(folder / "rollouts" / f"{step}.jsonl"):
        lengths.setdefault(row["input"], []).append(min(len(row["output"]) + 1, 64))
    return lengths


def first_mini_batch(folder: Path) -> set[frozenset[str]]:
    """The few sets of four prompts (of 70) that the first mini-batch can have been made of, by its lengths."""
    lengths, rows = lengths_by_prompt(folder, 1), all_rows(folder)
    recorded = sorted(rows["L"][(rows["step"] == 1) & (rows["update"] == 0)].tolist())
    possible = {
        frozenset(four)
        for four in itertools.combinations(sorted(lengths), 4)
        if sorted(length for prompt in four for length in lengths[prompt]) == recorded
    }
    assert 0 < len(possible) < 20
    return possible


def test_a_comparison_trains_both_losses_under_the_same_conditions_and_once(start: Starter, tmp_path: Path) -> None:
    for name, language in (("my_loss.py", "python"), ("conf/algo/fspo_power.yaml", "yaml")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (block, *_) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
        (tmp_path / name).write_text(block, encoding="utf-8")
    losses = ["gspo", "fspo_power"]
    words = (
        own_groups(Path("conf")), *SMALL, "trainer.logger=[console,tensorboard]", "trainer.save_freq=-1",
        "trainer.rollout_data_dir=${trainer.default_local_dir}/rollouts",
        "fspo.skip_zero_advantage=false",  # every mini-batch has an S
    )  # fmt: skip
    gspo, power = (compared(tmp_path, loss) for loss in losses)
    one = (f"trainer.default_local_dir='{power}'", "seed=5", "algo=fspo_power", "algorithm.adv_estimator=grpo")
    alone = start.module(tmp_path, "recipe.fspo.main", *one, *words)
    alone.ends_with(0)
    assert read_object(power / "run.json")["status"] == "finished" and not gspo.exists()
    began = read_object(power / "run.json")["starts"]
    rest = compare(tmp_path, losses, *words)
    assert rest.returncode == 0, rest.stdout[-2000:] + rest.stderr[-2000:]
    again = compare(tmp_path, losses, *words)
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-2000:]
    assert [text.stdout.count("finished before") for text in (rest, again)] == [1, 2]
    assert read_object(power / "run.json")["starts"] == began

    assert [read_object(folder / "run.json")["loss"]["loss_mode"] for folder in (gspo, power)] == [
        "seq_gspo",
        "fspo_power",
    ]
    for step in (1, 2):
        prompts = [lengths_by_prompt(folder, step).keys() for folder in (gspo, power)]
        assert prompts[0] == prompts[1] and len(prompts[0]) == 8, f"step {step}: other prompts"
    assert first_mini_batch(gspo) & first_mini_batch(power), "mini-batches of other prompts"
    for folder in (gspo, power):
        assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [1, 2]
        rows = all_rows(folder)
        assert [*rows.groupby(["step", "update"]).groups] == [(1, 0), (1, 1), (2, 0), (2, 1)]
        first, second = (rows["S"][(rows["step"] == 1) & (rows["update"] == update)].abs() for update in (0, 1))
        assert first.max() < 1e-4 < second.max(), "the first mini-batch after a rollout has S = 0"
        assert list(folder.rglob("events.out.tfevents.*")), "each run has its own"
    # GSPO's is a mean, and a loss of one's own is not scaled.
    assert "loss_divided_by" not in measured(gspo) | measured(power)
    assert "fspo_power" in build_report([tmp_path / "grid"], tmp_path / "report").page.read_text()
