"""verl's asynchronous modes with our hooks: training, an end, a resume, and a line for what is evicted."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from columns import all_rows
from real_stack import (
    AGAIN,
    LATER,
    SMALL,
    SOON,
    Start,
    Starter,
    latest_step,
    measured,
    model_with_another_eos,
    saved_under,
)

from fspo.files import read_lines
from fspo.table import Table, read_table

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3 * LATER)]

RESPONSES = 64
NO_MASK = "algorithm.rollout_correction.rollout_rs=null"


@pytest.mark.parametrize(("mode", "how"), [("colocate_async", signal.SIGUSR1), ("separate_async", signal.SIGKILL)])
def test_a_mode_trains_is_ended_resumes_and_counts_every_response(
    start: Starter, tmp_path: Path, mode: str, how: signal.Signals
) -> None:
    command = (
        *SMALL,
        f"actor_rollout_ref.model.path={model_with_another_eos(tmp_path / 'model')}",
        f"mode={mode}",
        "trainer.save_freq=2",
        "trainer.v1.sampler.max_off_policy_threshold=2",  # so that something is dropped
    )
    folder = tmp_path / "run"
    first = start(folder, *command, "trainer.total_training_steps=1000")
    first.wait_for_step(3)
    first.process.send_signal(how)
    if how == signal.SIGUSR1:
        first.ends_with(AGAIN)
        assert latest_step(folder) == max(first.steps()) >= 3
        assert first.info()["status"] == "preempted"
    else:  # whoever watches the launching process ends what it has left
        first.ends_with(-signal.SIGKILL, SOON)
        assert f"the launching process (process {first.process.pid}) died during the " in first.output()
    resumed = latest_step(folder)
    steps = resumed + 4
    run = start(folder, *command, f"trainer.total_training_steps={steps}")
    run.ends_with(0)
    assert f"resumed from {saved_under(folder)}/global_step_{resumed}\n" in run.output()

    logged = {record["step"]: record["metrics"] for record in read_lines(folder / "metrics.jsonl")}
    assert sorted(logged) == [*range(1, steps + 1)]
    # Its turns end with another token than its eos: without the stop token all responses would be cut.
    assert min(metrics["response_length/clip_ratio"] for metrics in logged.values()) < 1
    # What is dropped hangs on the times of generation and update; test_rows.py counts it.
    ends = read_lines(file) if (file := folder / "ends.jsonl").exists() else []
    assert {line["reason"] for line in ends} <= {"failed", "stale", "surplus"}
    assert all(line["lengths"] and 0 < line["step"] <= steps for line in ends)

    rows = all_rows(folder)
    # The gradient scale is of the whole first step, of which separate_async trains on the shortest responses first.
    assert measured(folder)["loss_divided_by"] == pytest.approx(logged[1]["fspo/length_trained"])
    batches = rows.groupby(["step", "update"])
    assert [*batches.groups] == [(step, update) for step in range(1, steps + 1) for update in (0, 1)]
    assert (batches["S"].count() <= RESPONSES / 2).all()  # without those that the mask removes
    # pi_old is that of the cycle's beginning: in its first mini-batch S is 0, in the second it is not.
    first_S, later_S = (rows["S"][(rows["update"] == 0) == is_first].dropna() for is_first in (True, False))
    assert (first_S**2).sum() == pytest.approx(0, abs=1e-6) and (later_S**2).sum() > 1e-3


def order_recording(folder: Path, parts: int) -> None:
    """Sort what ``sync`` recorded by prompt, and store it also where ``separate_async`` looks for its mini-batches.

    verl records responses in the order in which they were done; a replay takes the prompts in the recording's order. It
    joins the parts of a step, and of each prompt the first responses, so that every part may hold them all.
    """
    import torch
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
    batches = sorted({*zip(columns["step"].tolist(), columns["update"].tolist(), strict=True)})
    places = ((columns["step"] == step) & (columns["update"] == update) for step, update in batches)
    return [float((columns["S"][of_batch].astype(float) ** 2).sum()) for of_batch in places]


@pytest.mark.nightly  # four runs; test_worker.py holds the losses
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
        replay.ends_with(0)
        return replay

    pairs = [[run("sync2", 2)]]
    order_recording(recording, parts=4)
    pairs[0].append(run("separate2", 2, "mode=separate_async", NO_MASK))
    rollout = "algorithm.rollout_correction.bypass_mode=true"
    pairs.append([run("sync8", 8, rollout), run("separate8", 8, rollout, "mode=separate_async", NO_MASK)])
    for pair in pairs:
        one, other = (replay.steps() for replay in pair)
        for step in (1, 2, 3):
            for name in ("actor/pg_loss", "actor/grad_norm"):
                assert other[step][name] == pytest.approx(one[step][name], rel=1e-5, abs=1e-5), (step, name)
        moved, again = (squares(read_table(replay.folder)) for replay in pair)
        assert again == pytest.approx(moved, rel=1e-4, abs=1e-6)
        assert max(moved) > 1e-3  # there is a mini-batch in which S is not 0
    # Before any update, S to vLLM's own log-probabilities is the difference between vLLM and the actor.
    assert 0 < moved[0] / RESPONSES < 1e-8
