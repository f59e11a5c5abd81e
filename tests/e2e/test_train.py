"""The loop on the real stack: one FSDP rank to its end, then an evaluation and an export."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from columns import all_rows, assert_in_force, assert_measured
from real_stack import (
    LATER,
    MODEL,
    PROBE,
    SMALL,
    Start,
    Starter,
    assert_vllm_follows,
    export,
    latest_step,
    measured,
    model_with_another_eos,
    probed,
    read_probe,
)

from fspo.files import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2 * LATER)]

#: The demo's, so that few responses are cut.
LONGEST = 256


@pytest.fixture(scope="module")
def trained(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Four steps with one rank, validated and saved after two, of a model that ends its turns with another token than
    its eos.
    """
    folder = tmp_path_factory.mktemp("one_rank")
    model = model_with_another_eos(tmp_path_factory.mktemp("model") / "other_eos")
    run = start(
        folder, *SMALL, PROBE, f"actor_rollout_ref.model.path={model}", f"data.max_response_length={LONGEST}",
        "trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.test_freq=2",
        "trainer.logger=[console,tensorboard]", f"trainer.rollout_data_dir={folder}/rollouts",
        **probed(folder),
    )  # fmt: skip
    run.ends_with(0)
    return run


def test_a_run_trains_to_its_end_without_a_warning(trained: Start) -> None:
    steps, output = trained.steps(), trained.output()
    assert sorted(steps) == [1, 2, 3, 4]
    for step, metrics in steps.items():
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/loss"):
            assert math.isfinite(metrics[name]), (step, name)
        # A validation measures the distance to the start, for which the reference policy is there.
        assert ("fspo/kl_to_start" in metrics) == (step % 2 == 0)
        assert f"step {step}/4 " in output
    assert steps[2]["fspo/kl_to_start"] > 0 and 0 < steps[4]["fspo/kl_to_start"] < 1
    assert len(re.findall(r"^.*\bstep [24]/4 .*KL to start 0\.\d+", output, re.M)) == 2
    assert {2, 4} == {step for step, metrics in steps.items() if "val-core/fspo/remainder/acc/mean@1" in metrics}
    assert "warning:" not in output and "UserWarning" not in output and "Traceback" not in output


def test_vllm_has_the_weights_of_each_update(trained: Start) -> None:
    assert max(metrics["training/rollout_probs_diff_mean"] for metrics in trained.steps().values()) < 1e-5
    probe = read_probe(trained.folder)
    assert sorted(probe) == [2, 4]
    for step in (2, 4):
        assert_vllm_follows(probe[step])


def test_the_table_has_every_response(trained: Start) -> None:
    rows = all_rows(trained.folder)
    batches = rows.groupby(["step", "update"])
    assert [*batches.groups] == [(step, update) for step in range(1, 5) for update in (0, 1)]
    assert (batches.size() == 32).all()  # 4 prompts x 8 responses
    first = rows[(rows["update"] == 0) & rows["S"].notna()]
    assert (first["minibatch"] == 0).all() and (first["inside"] == 1).all()
    assert first["S"].abs().max() < 1e-3  # the policy has not moved
    # Sampling is not reproducible, and a mini-batch without unequal rewards in a group leaves the policy where it is.
    assert rows["S"][rows["minibatch"] > 0].abs().max() > 1e-4


def test_clip_values_are_measured_and_then_in_force(trained: Start) -> None:
    rows, values = all_rows(trained.folder), measured(trained.folder)["clip_values_measured"]
    assert_measured(rows, values)
    assert_in_force(rows, values)
    lengths = rows["L"][rows["step"] == 1]
    assert measured(trained.folder)["loss_divided_by"] == pytest.approx(lengths.mean())


def test_rows_join_with_the_dumped_responses(trained: Start) -> None:
    for step, of_step in all_rows(trained.folder).groupby("step"):
        dump = {row["uid"]: row for row in read_lines(trained.folder / f"rollouts/{step}.jsonl")}
        assert len(dump) == 64 and set(of_step["row"]) == set(range(64))
        for row in of_step.itertuples():
            line = dump[row.id]
            a, b = map(int, re.fullmatch(r"(\d+)%(\d+)=", line["input"][-7:]).groups())  # type: ignore[union-attr]
            assert_ends_or_is_cut(line["output"], row.L)
            assert bool(row.truncated) == (row.L == LONGEST) and row.reward == line["score"]
            if not row.truncated:  # otherwise it may have been cut at the right digits
                answer = line["output"].rpartition("=")[2].strip()
                assert (answer.isdecimal() and int(answer) == a % b) == (row.reward > 0)


def assert_ends_or_is_cut(response: str, length: int) -> None:
    """Of ``length`` tokens in the response mask: a character a token, and the one that ends it; or cut at the limit."""
    assert len(response) == length - 1 or len(response) == length == LONGEST, (response, length)


def test_responses_end_with_the_chat_template_s_token(trained: Start) -> None:
    assert json.loads((trained.folder / "generation_config.json").read_text()) == {"eos_token_id": [0, 1]}
    # Without the stop token all of them would go on to the limit.
    assert all(metrics["response_length/clip_ratio"] < 1 for metrics in trained.steps().values())


def test_the_run_folder_tells_what_was_run(trained: Start) -> None:
    from fspo.report.build import build_report

    info = trained.info()
    assert (info["algo"], info["seed"], info["status"]) == ("fspo", 1, "finished")
    assert info["versions"]["verl"] == "0.9.1"
    assert (trained.folder / "config.yaml").is_file()
    assert list(trained.folder.rglob("events.out.tfevents.*"))
    assert latest_step(trained.folder) == 4
    assert build_report([trained.folder], trained.folder / "report")[0].is_file()


def test_an_export_has_the_trained_weights(trained: Start, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export(trained.folder, tmp_path / "exported")
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")("150%44=")["input_ids"]
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()  # verl's merger writes bf16
        for path in (MODEL, tmp_path / "exported")
    )
    assert before.keys() == after.keys()
    assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) / 2
    largest = max((before[name].float() - after[name].float()).abs().max() for name in before)
    assert largest < 0.02, "four steps of a rate of 1e-4, and bf16"


def test_an_evaluation_scores_the_checkpoint_and_leaves_the_run_alone(
    start: Starter, trained: Start, tmp_path: Path
) -> None:
    kept = {path: path.read_bytes() for path in trained.folder.glob("*") if path.is_file() and path != trained.log}
    values = "actor_rollout_ref.rollout.val_kwargs"
    words = ("evaluate=true", f"{values}.n=2", f"{values}.do_sample=true")
    # The run's settings are restored from its folder.
    run = start.module(tmp_path, "recipe.fspo.main", f"resume={trained.folder}", *words, **probed(tmp_path))
    run.ends_with(0)
    folder = trained.folder / "evaluation"
    result = json.loads((folder / "evaluation.json").read_text())["fspo/remainder"]
    assert (result["problems"], result["responses"]) == (8, 16)
    (dump,) = folder.rglob("4.jsonl")
    responses = [(row["output"], row["response_length"]) for row in read_lines(dump)]
    assert len(responses) == 16
    for response, length in responses:
        assert_ends_or_is_cut(response, length)
    assert sum(length < LONGEST for _, length in responses) > 1  # stopped in a validation, too
    assert 0.0 <= result["avg"]["low"] <= result["avg"]["value"] <= result["avg"]["high"] <= 1.0
    assert result["pass"]["2"]["value"] >= result["pass"]["1"]["value"] == pytest.approx(result["avg"]["value"])
    assert "fspo/remainder" in run.output()
    now = {path: path.read_bytes() for path in kept}
    assert [path.name for path in kept if kept[path] != now[path]] == []
