"""verl's asynchronous modes with our hooks: training, an end, a resume, and a line for what is evicted."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil
import pytest
from columns import all_rows
from real_stack import AGAIN, LATER, SMALL, SOON, Starter, latest_step, measured, model_with_another_eos

from fspo.files import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3 * LATER)]

RESPONSES = 64


@pytest.mark.parametrize(("mode", "how"), [("colocate_async", signal.SIGTERM), ("separate_async", signal.SIGKILL)])
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
    if how == signal.SIGTERM:
        for process in first.processes():  # as SLURM does, which sends it to all processes of a step
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(how)
        first.ends_with(AGAIN)
        assert latest_step(folder) == max(first.steps()) >= 3
        assert first.info()["status"] == "preempted"
    else:  # whoever watches the launching process ends what it has left
        first.process.kill()
        first.ends_with(-signal.SIGKILL, SOON)
        assert f"the launching process (process {first.process.pid}) died during the " in first.output()
    resumed = latest_step(folder)
    steps = resumed + 2
    run = start(folder, *command, f"trainer.total_training_steps={steps}")
    run.ends_with(0)
    assert f"resumed from {folder}/global_step_{resumed}\n" in run.output()

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
