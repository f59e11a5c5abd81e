"""verl's asynchronous modes with our hooks: training, a kill and a resume, and the length funnel that adds up."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from real_stack import SMALL, Start, Starter, model_with_another_eos

from fspo.report.funnel_steps import STAGES
from fspo.table import Table, read_table
from recipe.runner.faults.processes import role_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS, RESPONSES = 8, 64
NO_MASK = "algorithm.rollout_correction.rollout_rs=null"
#: With published clip values, so that a test can count what lies inside them.
PI_OLD_OF_VLLM = ("fspo.pi_old=rollout", NO_MASK, "fspo.clip_values=published")


def lines(run: Start, name: str) -> list[dict[str, Any]]:
    """The run folder's records, of a step that was done twice only the later ones."""
    records = [json.loads(line) for line in (run.run_dir / name).read_text().splitlines()]
    last = {(record["step"], record.get("minibatch")): record for record in records}
    return [last[key] for key in sorted(last, key=str)]


def ended(record: dict[str, Any], stage: str) -> int:
    return sum(row[1 + STAGES.index(stage)] for row in record["rows"])


@pytest.mark.parametrize(("mode", "how"), [("colocate_async", signal.SIGUSR1), ("separate_async", signal.SIGKILL)])
def test_a_mode_trains_is_stopped_resumes_and_counts_every_response(
    start: Starter, tmp_path: Path, mode: str, how: signal.Signals
) -> None:
    command = (
        *SMALL,
        f"actor_rollout_ref.model.path={model_with_another_eos(tmp_path / 'model')}",
        f"mode={mode}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=4",
        "trainer.v1.sampler.max_off_policy_threshold=2",  # so that something is dropped
    )
    if how == signal.SIGUSR1:
        command += ("trainer.checkpoint_callback_class=save_probe.SaveProbe",)
    calls = tmp_path / "calls"
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    probe = {"FSPO_PROBE_FILE": str(calls), "PYTHONPATH": path}
    stopped = start(tmp_path / "run", *command, **probe)
    stopped.wait_for(f"step 5/{STEPS}", 500)
    stopped.process.send_signal(how)
    if how == signal.SIGUSR1:
        assert stopped.wait(200) == 75, stopped.output()[-4000:]
        *_, wake, abort, sleep, save = calls.read_text().split()
        # The first by the end of the step, the others by the save.
        assert (wake, abort, sleep) == ("wake", "abort", "sleep")
        assert f"preempted after step {save.removeprefix('save-')}; it is saved" in stopped.output()
    else:
        stopped.wait(10)
        assert f"error: the launching process (process {stopped.process.pid}) died during the " in stopped.output()
    assert stopped.left_behind() == []
    run = start(tmp_path / "run", *command, **probe)
    assert run.wait(500) == 0, run.output()[-4000:]
    assert run.left_behind() == []
    # Its turns end with another token than its eos: without the stop token all responses would be cut.
    assert min(metrics["response_length/clip_ratio"] for metrics in run.steps().values()) < 1
    assert "resumed from" in run.output() and "prompts were under way when the checkpoint was saved" in run.output()

    funnel = {record["step"]: record for record in lines(run, "funnel.jsonl")}
    assert sorted(funnel) == list(range(1, STEPS + 1))
    under_way = 0
    for record in funnel.values():
        assert ended(record, "trained") == RESPONSES
        under_way += record["started"] - sum(ended(record, stage) for stage in STAGES)
        assert record["under_way"] == under_way >= 0
    # The gradient scale is of the whole first step, of which separate_async trains on the shortest responses first.
    info = json.loads((run.run_dir / "run.json").read_text())
    assert info["loss_divided_by"] == pytest.approx(funnel[1]["tokens"]["trained"] / RESPONSES)

    # Of what has been trained on, the queue of a resumed run holds the responses of the step that was saved only.
    state = tmp_path / "run" / "checkpoints" / f"global_step_{STEPS}" / "transfer_queue" / "controller_state.pkl"
    keys = pickle.loads(state.read_bytes())["partitions"]["train"].keys_mapping
    assert sum("_" in key and key.split("_")[0] not in keys for key in keys) == RESPONSES

    table = read_table(run.run_dir)
    assert table.batches.tolist() == [[step, index] for step in range(1, STEPS + 1) for index in (0, 1)]
    first = table.columns["update"] == 0
    s_B, step_B = (table.columns[name] for name in ("S", "step"))
    for step, index in table.batches.tolist():  # without those that the mask removes
        assert ((step_B == step) & (first == (index == 0))).sum() <= RESPONSES / 2
    # pi_old is that of the cycle's beginning: in its first mini-batch S is 0, in the second it is not.
    assert (s_B[first] ** 2).sum() == pytest.approx(0, abs=1e-6) and (s_B[~first] ** 2).sum() > 1e-3


def test_more_requests_than_verl_has_slots_for_do_not_stop_a_run(start: Starter, tmp_path: Path) -> None:
    """With verl's number, 8 here, the run stands still at the weights of step 2 (verl issue 7990).

    Its pi_old is vLLM's, whose ratios the metrics count.
    """
    run = start(
        tmp_path,
        *SMALL,
        "mode=colocate_async",  # separate_async gets through such a short run with 8 slots, too
        "trainer.v1.colocate_async.num_warmup_batches=2",  # 192 requests at once
        "trainer.total_training_steps=4",
        *PI_OLD_OF_VLLM,
        VERL_USE_EXTERNAL_MODULES="few_slots",
        PYTHONPATH=os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))),
    )
    assert run.wait(400) == 0, run.output()[-4000:]
    assert sorted(run.steps()) == [1, 2, 3, 4]
    assert_accept_rates(run)


def assert_accept_rates(run: Start) -> None:
    """Each step's metric is the share of its rows inside 0.03 sqrt(L), whatever is dropped before."""
    columns = read_table(run.run_dir).columns
    for step, metrics in run.steps().items():
        s_B, length_B = (columns[name][columns["step"] == step] for name in ("S", "L"))
        inside = int((abs(s_B) <= 0.03 * length_B**0.5).sum())
        assert metrics["fspo/accept_rate"] == pytest.approx(inside / len(s_B), abs=1e-6)


def order_recording(folder: Path, parts: int) -> None:
    """Sort what ``sync`` recorded by prompt, and store it also where ``separate_async`` looks for its mini-batches.

    verl records responses in the order in which they were done; a replay takes the prompts in the recording's order. It
    joins the parts of a step, and of each prompt the first responses, so that every part may hold them all.
    """
    from verl.utils.tensordict_utils import index_select_tensor_dict

    for path in folder.glob("*/*/*/*/0/tq_batch.pt"):
        whole = torch.load(path, weights_only=False)
        prompt = list(whole["tensordict"]["index"])
        rows = sorted(range(len(prompt)), key=prompt.__getitem__)
        whole |= {name: [whole[name][row] for row in rows] for name in ("keys", "tags")}
        whole["tensordict"] = index_select_tensor_dict(whole["tensordict"], rows)
        torch.save(whole, path)
        for part in range(1, parts):
            shutil.copytree(path.parent, path.parents[1] / str(part))


def squares(table: Table) -> list[float]:
    """The sum of S**2 over each mini-batch."""
    columns = table.columns
    places = ((columns["step"] == step) & (columns["update"] == update) for step, update in table.batches.tolist())
    return [float((columns["S"][of_batch].astype(float) ** 2).sum()) for of_batch in places]


@pytest.mark.nightly  # five runs; test_worker.py holds the losses
def test_replayed_rollouts_give_the_losses_of_synchronous_training(start: Starter, tmp_path: Path) -> None:
    """With four mini-batches between transfers of the weights, and with one and vLLM's log-probabilities as pi_old.

    With four, S is not 0 in the later ones; with vLLM's it is not 0 in the only one.
    """
    recording = tmp_path / "recording"

    def run(name: str, prompts: int, *overrides: str) -> Start:
        replay = start(
            tmp_path / name / "replay" / "run",  # verl looks for a recording under the run's name, here replay/run
            *SMALL,
            "trainer.experiment_name=replay",
            "trainer.total_training_steps=3",
            "trainer.v1.separate_async.num_warmup_batches=0",
            "skip.rollout_tq.enable=true",
            f"skip.rollout_tq.dump_dir={recording}",
            "skip.rollout_tq.steps=[1,2,3]",
            "data.shuffle=false",
            "data.gen_batch_size=1",  # as in separate_async, and a part of the recording's name
            # In the first step of separate_async the other one's factor grows with the responses.
            "fspo.match_scale=native",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
            *overrides,
        )
        assert replay.wait(400) == 0, replay.output()[-4000:]
        return replay

    pairs = [[run("sync2", 2)]]
    order_recording(recording, parts=4)
    pairs[0].append(run("separate2", 2, "mode=separate_async", NO_MASK, "fspo.allow_uncorrected=true"))
    rollout = "fspo.pi_old=rollout"
    pairs.append([run("sync8", 8, rollout), run("separate8", 8, rollout, "mode=separate_async", NO_MASK)])
    for pair in pairs:
        one, other = (replay.steps() for replay in pair)
        for step in (1, 2, 3):
            for name in ("actor/pg_loss", "actor/grad_norm"):
                assert other[step][name] == pytest.approx(one[step][name], rel=1e-5, abs=1e-5), (step, name)
        moved, again = (squares(read_table(replay.run_dir)) for replay in pair)
        assert again == pytest.approx(moved, rel=1e-4, abs=1e-6)
        assert max(moved) > 1e-3  # there is a mini-batch in which S is not 0
    # Before any update, S to vLLM's own log-probabilities is the difference between vLLM and the actor.
    assert 0 < moved[0] / RESPONSES < 1e-8


@pytest.mark.nightly  # vLLM's pi_old: the test before
def test_dropping_with_pi_old_of_vllm(start: Starter, tmp_path: Path) -> None:
    run = start(
        tmp_path,
        *SMALL,
        "mode=separate_async",
        f"trainer.total_training_steps={STEPS}",
        "trainer.v1.separate_async.num_warmup_batches=2",
        "trainer.v1.sampler.max_off_policy_threshold=2",
        *PI_OLD_OF_VLLM,
    )
    assert run.wait(500) == 0, run.output()[-4000:]
    funnel = lines(run, "funnel.jsonl")
    assert sum(ended(record, "stale") for record in funnel) > 0
    assert all(ended(record, "trained") == RESPONSES for record in funnel)
    assert sorted(run.steps()) == list(range(1, STEPS + 1))
    assert_accept_rates(run)


@pytest.mark.nightly  # in sync: test_train.py
@pytest.mark.parametrize(
    ("mode", "how"),
    [("colocate_async", signal.SIGKILL), ("separate_async", signal.SIGKILL), ("separate_async", signal.SIGSTOP)],
)
def test_a_killed_or_stopped_engine_ends_a_mode(start: Starter, tmp_path: Path, mode: str, how: signal.Signals) -> None:
    run = start(tmp_path, *SMALL, f"mode={mode}", "trainer.total_training_steps=50", "run.hang_after_s=30")
    run.wait_for("step 3/50", 500)
    (engine,) = [process.pid for process in run.processes() if role_of(process.pid) == "vLLM engine"]
    os.kill(engine, how)
    assert run.wait(300) == 75
    fate = "died during" if how == signal.SIGKILL else "is stopped"
    assert f"the vLLM engine (process {engine}) {fate}" in run.output(), run.output()[-3000:]
    assert run.left_behind() == []
