"""The real stack with one and two FSDP ranks; resume, evaluation, and an export that transformers and vLLM load.

Two of these starts also show how a run ends: by the death of a worker, and by Ctrl-C.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from columns import all_rows
from real_stack import SMALL, Start, Starter, model_with_another_eos

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def probe_environment(folder: Path) -> dict[str, str]:
    # What was there stays in front of the installed package: in a second checkout it names the code to be tested.
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "FSPO_PROBE_FILE": str(folder / "probe.jsonl")}


#: With a reference policy in every step, whose log-probs the probe compares.
PROBE = ("trainer.checkpoint_callback_class=log_prob_probe.LogProbProbe", "actor_rollout_ref.actor.use_kl_loss=true")


@pytest.fixture(scope="module")
def trained(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Two steps with one rank, a checkpoint after each, of a model whose turns end with another token than its eos."""
    folder = tmp_path_factory.mktemp("one_rank")
    recorded = (f"trainer.rollout_data_dir={folder}/rollouts",)
    model = f"actor_rollout_ref.model.path={model_with_another_eos(tmp_path_factory.mktemp('model') / 'other_eos')}"
    run = start(folder, *SMALL, model, "trainer.save_freq=1", *recorded, *PROBE, **probe_environment(folder))
    assert run.wait(400) == 0, run.output()[-4000:]
    return run


def read_probe(run: Start) -> dict[int, dict[str, Any]]:
    lines = (run.run_dir / "probe.jsonl").read_text().splitlines()
    return {
        entry["step"]: {k: np.array(v) for k, v in entry.items() if k != "step"} for entry in map(json.loads, lines)
    }


def assert_finite_and_synchronised(run: Start) -> None:
    steps = run.steps()
    for metrics in (steps[1], steps[2]):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "actor/loss"):
            assert math.isfinite(metrics[name]), (name, metrics[name])
        assert metrics["training/rollout_probs_diff_mean"] < 1e-5
    assert steps[2]["actor/kl_loss"] > 0  # the reference still is the start
    after_update = read_probe(run)[2]
    # vLLM has the actor's weights of this moment ...
    assert np.abs(after_update["rollout"] - after_update["actor"]).max() < 1e-4
    # ... and these are no longer the weights of the start.
    assert np.abs(after_update["rollout"] - after_update["reference"]).max() > 1e-3


def test_one_rank_trains_and_vllm_follows(trained: Start) -> None:
    assert sorted(trained.steps()) == [1, 2]
    assert_finite_and_synchronised(trained)


def test_the_table_has_every_sequence(trained: Start) -> None:
    rows = all_rows(trained.run_dir)
    batches = rows.groupby(["step", "update"])
    assert [*batches.groups] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for (_, update), of_batch in batches:
        assert len(of_batch) == 32  # 4 prompts x 8 responses
        if update == 0:  # the policy has not moved: every ratio is 1
            with_s = of_batch[of_batch["S"].notna()]
            assert (with_s["inside"] == 1).all() and (of_batch["minibatch"] == 0).all()
            assert not (with_s["S"].abs() >= 1e-3).any()
    # Sampling is not reproducible, and a mini-batch without unequal rewards in a group leaves the policy where it is.
    assert rows["S"][rows["minibatch"] > 0].abs().max() > 1e-4


def test_rows_join_with_the_dumped_responses(trained: Start) -> None:
    import pandas as pd

    from fspo.records import complete_lines, read_info
    from fspo.report.build import build_report

    rows = pd.read_parquet(trained.run_dir / "responses")
    measured = read_info(trained.run_dir).get("clip_values_measured", [])
    assert len(rows) == 4 * 32
    for step, of_step in rows.groupby("step"):
        dump = {row["uid"]: row for row in complete_lines(trained.run_dir / f"rollouts/{step}.jsonl")}
        assert len(dump) == 64 and set(of_step["row"]) == set(range(64))
        for row in of_step.itertuples():
            line = dump[row.id]
            a, b = map(int, re.fullmatch(r"(\d+)%(\d+)=", line["input"][-7:]).groups())  # type: ignore[union-attr]
            response = line["output"]
            assert_ends_or_is_cut(response, row.L)
            assert bool(row.truncated) == (row.L == 64) and row.reward == line["score"]
            if not row.truncated:  # otherwise it may have been cut at the right digits
                assert response.endswith(f"{a % b:03d}") == (row.reward > 0)
            in_force = [value["c_high"] for value in measured if value["after_step"] < step]
            c = in_force[-1] if in_force else math.inf  # a run begins without a clip
            if not math.isnan(row.S):  # of a response with a gradient
                assert bool(row.inside) == (abs(row.S) <= c * math.sqrt(row.L))
    assert build_report([trained.run_dir], trained.run_dir / "report").page.is_file()


def assert_ends_or_is_cut(response: str, length: int) -> None:
    """Of ``length`` tokens in the response mask: a character a token, and the one that ends it; or cut at the limit."""
    assert len(response) == length - 1 or len(response) == length == 64, (response, length)


def test_responses_end_with_the_chat_template_s_token_which_is_in_the_mask(trained: Start) -> None:
    file = trained.run_dir / "generation_config.json"
    assert re.search(
        rf"^note: the chat template ends .* '<eos>' \(1\), .* '<pad>' \(0\) only: .*{file}", trained.output(), re.M
    )
    assert json.loads(file.read_text()) == {"eos_token_id": [0, 1]}
    # Without the stop token all of them would go on to the limit.
    assert all(metrics["response_length/clip_ratio"] < 1 for metrics in trained.steps().values())


def test_run_folder_tells_what_was_run(trained: Start) -> None:
    info = json.loads((trained.run_dir / "run.json").read_text())
    assert (info["algo"], info["seed"], info["status"]) == ("fspo", 1, "finished")
    assert info["versions"]["verl"] == "0.9.1"
    assert (trained.run_dir / "config.yaml").is_file()
    assert (trained.run_dir / "run.png").read_bytes().startswith(b"\x89PNG")
    assert str(trained.run_dir / "run.png") in trained.output()
    assert "step 2/2" in trained.output()


def test_weights_changed_and_export_loads(trained: Start, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "exported"
    subprocess.run(
        [sys.executable, "-m", "recipe.runner.export", str(trained.run_dir), "--out", str(out)], check=True, timeout=200
    )
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    from fspo.files import local_path

    start = AutoModelForCausalLM.from_pretrained(
        local_path("pkg://recipe.math.data/assets/demo_model"), dtype=torch.float32
    )
    # verl's merger writes bf16, so the start is compared in bf16 as well.
    before = {name: tensor.bfloat16().float() for name, tensor in start.state_dict().items()}
    after = exported.state_dict()
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > len(before) / 2
    # vLLM loads the same folder and gives transformers' log-probs.
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "150%44"}], add_generation_prompt=True)
    ids = prompt["input_ids"] if not isinstance(prompt, list) else prompt
    script = tmp_path / "load.py"
    script.write_text(
        "import recipe.runner.cpu.patches as patches; patches.report_vllm_version()\n"
        "import json, sys; from vllm import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    llm = LLM(sys.argv[1], dtype='float32', enforce_eager=True, max_model_len=128)\n"
        "    out = llm.generate({'prompt_token_ids': json.loads(sys.argv[2])},\n"
        "                       SamplingParams(temperature=0, max_tokens=8, logprobs=0))[0].outputs[0]\n"
        "    print('RESULT', json.dumps([list(out.token_ids), [list(p.values())[0].logprob for p in out.logprobs]]))\n"
    )
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    run = subprocess.run(
        [sys.executable, str(script), str(out), json.dumps(list(ids))],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    line = next((line for line in run.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line is not None, run.stdout[-2000:] + run.stderr[-2000:]
    tokens, log_probs = json.loads(line.removeprefix("RESULT "))
    with torch.no_grad():
        logits = exported(torch.tensor([list(ids) + tokens])).logits[0, len(ids) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(log_probs), expected, atol=1e-4)


RATE = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture(scope="module")
def resumed(start: Starter, trained: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Start, int]:
    """Resumed in a copy of the folder; the FSDP worker, whose process id is returned too, is killed after two steps."""
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(trained.run_dir, folder, dirs_exist_ok=True)
    (folder / "stdout.log").unlink()
    overrides = [*SMALL, "trainer.save_freq=1", "trainer.total_training_steps=50", *PROBE]
    overrides += [f"{RATE}=5e-5", f"run.allow_changed=[{RATE}]"]
    run = start(folder, *overrides, **probe_environment(folder))
    run.wait_for("step 4/50", 400)
    worker = next(p for p in run.processes() if "WorkerDict" in " ".join(p.cmdline()))
    worker.send_signal(signal.SIGKILL)
    run.wait(60)
    return run, worker.pid


def test_resume_continues_at_the_right_step(resumed: tuple[Start, int]) -> None:
    run, _ = resumed
    rows = [json.loads(line)["step"] for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, len(rows) + 1))  # one row a step, those of before among them
    assert [run.steps()[step]["actor/lr"] for step in (2, 3)] == [1e-4, 5e-5]  # its settings are the command's
    assert f"resumed from {run.run_dir}/checkpoints/global_step_2" in run.output()
    # Before its first update the resumed actor is not the start (the reference is), and vLLM has its weights.
    probe = read_probe(run)[3]
    assert np.abs(probe["actor"] - probe["reference"]).max() > 1e-3
    assert np.abs(probe["actor"] - probe["rollout"]).max() < 1e-4
    checkpoints = run.run_dir / "checkpoints"
    newest = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert newest >= 3
    assert (checkpoints / f"global_step_{newest}" / "fspo_state.pt").is_file()


def test_a_killed_worker_ends_the_run(resumed: tuple[Start, int]) -> None:
    run, worker = resumed
    assert run.process.returncode == 75
    (death,) = re.findall(
        r"^error: the FSDP worker \(process (\d+)\) died during the .* its log: (.*)$", run.output(), re.M
    )
    assert int(death[0]) == worker and Path(death[1]).is_file()
    assert run.left_behind() == []


def test_evaluation_of_a_checkpoint(start: Starter, trained: Start) -> None:
    before = (trained.run_dir / "metrics.jsonl").read_text()
    values = "actor_rollout_ref.rollout.val_kwargs"
    overrides = ("evaluate=true", f"{values}.n=2", f"{values}.do_sample=true")  # the folder restores the others
    run = start(trained.run_dir, *overrides, **probe_environment(trained.run_dir))
    assert run.wait(400) == 0, run.output()[-4000:]
    result = json.loads((trained.run_dir / "evaluation" / "evaluation.json").read_text())["fspo/remainder"]
    assert (result["problems"], result["responses"]) == (8, 16)
    dump = (trained.run_dir / "evaluation/validation/2.jsonl").read_text().splitlines()
    responses = [(row["output"], row["response_length"]) for row in map(json.loads, dump)]
    for response, length in responses:
        assert_ends_or_is_cut(response, length)
    assert len(responses) == 16 and sum(length < 64 for _, length in responses) > 1  # stopped in a validation, too
    assert 0.0 <= result["avg"]["low"] <= result["avg"]["value"] <= result["avg"]["high"] <= 1.0
    assert result["pass"]["2"]["value"] >= result["pass"]["1"]["value"] == pytest.approx(result["avg"]["value"])
    metrics = json.loads((trained.run_dir / "evaluation" / "metrics.jsonl").read_text())["metrics"]
    # Two draws from two responses: half of the time one of them twice, else both. Resampled, it is only near this.
    best = (result["pass"]["1"]["value"] + result["pass"]["2"]["value"]) / 2
    assert metrics["val-core/fspo/remainder/acc/best@2/mean"] == pytest.approx(best, abs=1e-9)
    assert re.search(r"\| fspo/remainder +\| 8 +\| 2 +\|", run.output())
    assert "resumed from" in run.output()
    assert (trained.run_dir / "metrics.jsonl").read_text() == before  # the training run's files stay as they are


def test_two_ranks_train_until_ctrl_c(start: Starter, tmp_path: Path) -> None:
    run = start(
        tmp_path,
        *SMALL,
        "algo=rloo",
        "trainer.n_gpus_per_node=2",
        "trainer.save_freq=1",
        "trainer.total_training_steps=50",
        *PROBE,
        **probe_environment(tmp_path),
    )
    run.wait_for("step 3/50", 600)
    assert len(run.processes()) > 5
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does, to the whole process group
    assert run.wait(120) == 130
    step = int((run.run_dir / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert step >= 3 and f"interrupted after step {step}, which is saved" in run.output()
    assert "keeps what was done" not in run.output() and "Traceback" not in run.output()
    assert run.left_behind() == []
    assert_finite_and_synchronised(run)
