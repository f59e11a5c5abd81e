"""The data, reward and loss of the pages' reader, compared with GSPO: equal conditions, and nothing is run twice."""

from __future__ import annotations

import itertools
import re
import runpy
import shlex
from pathlib import Path

import pytest
from columns import all_rows
from of_the_reader import DATA, write_own_data, write_own_loss
from omegaconf import OmegaConf
from real_stack import LATER, SMALL, Starter, compare, latest_step, measured

from fspo.files import read_lines, read_object
from fspo.report.build import build_report

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3 * LATER)]
SOURCES = ("own/remainder", "own/difference")


def words_of_the_page() -> list[str]:
    """The words of the command that takes the reader's data and reward."""
    commands = re.findall(r"^python -m recipe\.fspo\.main ((?:.*\\\n)*.*)$", DATA, re.M)
    (words,) = [shlex.split(line.replace("\\\n", " ")) for line in commands if "own/reward.py" in line]
    return words


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


def test_losses_are_compared_under_equal_conditions_and_once(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_own_loss(tmp_path)
    write_own_data(tmp_path)
    runpy.run_path("own/make_data.py")
    own = {path: path.read_bytes() for path in tmp_path.glob("own/*.*")}
    losses = ["gspo", "fspo_power"]
    words = (
        "--config-dir=conf", *words_of_the_page(),
        *(word for word in SMALL if not word.startswith(("experiment=", "trainer."))),
        # They end by their epoch, after two steps.
        "data.train_max_samples=16", "trainer.total_epochs=1", "trainer.total_training_steps=9",
        "actor_rollout_ref.rollout.val_kwargs.n=1", "trainer.logger=[console,tensorboard]",
        "trainer.rollout_data_dir=${trainer.default_local_dir}/rollouts",
        "fspo.skip_zero_advantage=false",  # every mini-batch has an S
    )  # fmt: skip
    gspo, power = (tmp_path / f"grid/algo={loss}" for loss in losses)
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

    trained = [read_object(folder / "run.json")["loss"]["loss_mode"] for folder in (gspo, power)]
    assert trained == ["seq_gspo", "fspo_power"]
    for step in (1, 2):
        prompts = [lengths_by_prompt(folder, step).keys() for folder in (gspo, power)]
        assert prompts[0] == prompts[1] and len(prompts[0]) == 8, f"step {step}: other prompts"
    assert first_mini_batch(gspo) & first_mini_batch(power), "mini-batches of other prompts"
    for folder in (gspo, power):
        metrics = {line["step"]: line["metrics"] for line in read_lines(folder / "metrics.jsonl")}
        assert [*metrics] == [0, 1, 2] and latest_step(folder) == 2, "the last step of the epoch is saved"
        for source in SOURCES:
            name = f"val-core/{source}/acc/mean@1"
            assert 0 <= metrics[0][name] <= 1 and name in metrics[2], "the last step is validated"
        assert metrics[0][f"val-core/{SOURCES[0]}/acc/mean@1"] > 0.2, "the demo's model knows remainders"
        assert -0.1 <= metrics[2]["critic/rewards/mean"] <= 1
        rows = all_rows(folder)
        assert [*rows.groupby(["step", "update"]).groups] == [(1, 0), (1, 1), (2, 0), (2, 1)]
        first, second = (rows["S"][(rows["step"] == 1) & (rows["update"] == update)].abs() for update in (0, 1))
        assert first.max() < 1e-4 < second.max(), "the first mini-batch after a rollout has S = 0"
        assert list(folder.rglob("events.out.tfevents.*")), "each run has its own"
        config = OmegaConf.load(folder / "config.yaml")
        assert config.reward.custom_reward_function.path == f"{tmp_path}/own/reward.py"
        assert not (folder / "data").exists(), "the demo's own task is not written"
    # GSPO's is a mean, and a loss of one's own is not scaled.
    assert "loss_divided_by" not in measured(gspo) | measured(power)
    assert "fspo_power" in build_report([tmp_path / "grid"], tmp_path / "report")[0].read_text()
    assert {path: path.read_bytes() for path in own} == own
