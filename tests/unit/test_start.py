"""What the launching process does before and while verl trains, as far as it needs no Ray."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from composing import composed
from omegaconf import DictConfig
from waiting import wait_until

from recipe.fspo.job import JOB
from recipe.runner.faults import preemption
from recipe.runner.faults.phase import Phase, write_phase
from recipe.runner.faults.preemption import ENDING, STOP_VARIABLE, ask_to_stop, stop_request
from recipe.runner.launch import start
from recipe.runner.launch.commands import launch_or_exit
from recipe.runner.launch.compose import parsed
from recipe.runner.launch.trainer_process import TaskRunner
from recipe.runner.progress import Progress

#: verl's own part, and the supervisor of Ray's processes, are not here.
NO_SUPERVISOR = SimpleNamespace(
    failure=None, let_go=lambda _: None, **dict.fromkeys(("start", "stand_down", "close"), lambda: None)
)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """A command of the demo in ``tmp_path``; what a signal would do is undone."""
    monkeypatch.setattr(start, "_supervisor", lambda *_: NO_SUPERVISOR)
    before = vars(ENDING).copy()
    small = ("experiment=demo", "data.offline_task.n_train=64", "data.offline_task.n_test=8")
    yield (f"run.dir={tmp_path}", *small, "ray_kwargs.ray_init.address=auto")
    vars(ENDING).update(before)
    ENDING.signals.clear()


@pytest.mark.parametrize("old", [True, False])
def test_a_start_forgets_the_request_of_an_earlier_one_and_prints_only_its_own_lines(
    tmp_path: Path,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    old: bool,
) -> None:
    asked = []

    def run(config: DictConfig, **_: object) -> None:
        write_phase(config.run.dir, Phase(1, "generation"))  # here the trainer itself looks
        asked.append(stop_request(config.run.dir) is not None)
        progress.say("of this start")

    progress = Progress()
    progress.write_to(tmp_path)
    monkeypatch.setattr(start, "run_ppo", run)
    launch_or_exit(composed(*words), JOB, parsed(words))
    progress.say("between both")
    (tmp_path / "stop").touch()
    if old:
        os.utime(tmp_path / "stop", (1e9, 1e9))
    capsys.readouterr()
    launch_or_exit(composed(*words), JOB, parsed(words))
    printed = capsys.readouterr().out
    assert asked == [False, not old] and (f"note: {tmp_path}/stop " in printed) == old
    assert "of this start" in printed and "between both" not in printed


@pytest.mark.parametrize("by", ["a person", "the job", "a signal"])
def test_a_stop_ends_a_start_up_at_once(
    tmp_path: Path,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    by: str,
) -> None:
    ended: list[tuple[int, str]] = []

    def leave(status: int) -> None:
        ended.append((status, json.loads((tmp_path / "run.json").read_text())["status"]))
        raise SystemExit  # of the thread

    def starting_ray(config: DictConfig, **_: object) -> None:
        if by == "a signal":
            threading.Thread(target=ENDING.take, args=(signal.SIGTERM,)).start()
        else:
            (tmp_path / "of_the_job").touch() if by == "the job" else ask_to_stop(config.run.dir)
        wait_until(lambda: ended)

    monkeypatch.setenv(STOP_VARIABLE, str(tmp_path / "of_the_job"))
    monkeypatch.setattr(start, "run_ppo", starting_ray)
    monkeypatch.setattr(os, "_exit", leave)
    launch_or_exit(composed(*words), JOB, parsed(words))
    assert ended == [(75, "preempted")]
    assert "before the end of the first step: nothing saved" in capsys.readouterr().err


def test_the_trainer_has_its_job_s_variables_whoever_has_started_its_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOP_VARIABLE, "/job/stop")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    variables = preemption.job_variables()
    monkeypatch.setenv(STOP_VARIABLE, "/another/stop")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1")
    TaskRunner((), {}, variables)
    assert os.environ[STOP_VARIABLE] == "/job/stop" and preemption.time_left_s() == float("inf")
