"""A run's processes: which of them died first, what is said then, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from recipe.runner.faults import processes, supervisor
from recipe.runner.faults.phase import Phase, write_phase
from recipe.runner.faults.processes import is_alive, log_of, processes_of, role_of
from recipe.runner.faults.supervisor import Supervisor

Begin = Callable[..., "subprocess.Popen[bytes]"]
Watch = Callable[..., tuple[Supervisor, list[str]]]


def test_processes_are_found_by_mark_and_named_by_title(
    run_id: str, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_SETTLED_S", 0.0)
    forks = "import os, time; os.fork() and print(flush=True); time.sleep(600)"
    worker, idle = begin("ray::WorkerDict.actor_rollout_update_actor", forks), begin("ray::IDLE")
    (child,) = psutil.Process(worker.pid).children()  # a program that a worker is about to call
    foreign: set[int] = {0}
    assert set(processes_of(run_id)) == set(processes_of(run_id, foreign)) == {worker.pid, child.pid, idle.pid}
    assert {os.getppid()} - {0} <= foreign and not foreign & {0, worker.pid, idle.pid}
    wait_until(lambda: role_of(worker.pid) == "FSDP worker")  # the title is there once the program has begun
    assert role_of(idle.pid) is None and role_of(child.pid) is None
    assert log_of(worker.pid) == str(tmp_path / "log.err")
    child.kill()
    worker.kill()
    wait_until(lambda: not is_alive(worker.pid))  # a zombie, which nobody has waited for yet
    wait_until(lambda: processes_of(run_id) == [idle.pid])


@pytest.fixture
def watch(run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Starts the supervisor of a run in the update of step 3, which sees these roles; and a list of what it calls."""
    called: list[str] = []
    monkeypatch.setattr(os, "_exit", lambda status: called.append(f"leave {status}"))
    for seconds in ("GRACE_S", "LEAVE_S", "_SEEN_S"):
        monkeypatch.setattr(supervisor, seconds, 0.3)
    made = Supervisor(run_id, tmp_path, lambda: called.append("stop"), lambda sentence: called.append(sentence) or 75)

    def watch(*roles: str, ending: bool = False) -> tuple[Supervisor, list[str]]:
        write_phase(tmp_path, Phase(3, "update", 0.0, ending=ending))
        made.start()
        wait_until(lambda: {process.role for process in made.processes} == {*roles})
        return made, called

    yield watch
    made.close()


def test_the_first_death_is_named_and_ends_the_run(
    begin: Begin, watch: Watch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    idle, engine, worker = (begin(title) for title in ("ray::IDLE", "VLLM::EngineCore", "ray::WorkerDict"))
    supervisor, called = watch("vLLM engine", "FSDP worker")
    idle.kill()  # not one that a run needs
    time.sleep(0.5)
    assert supervisor.failure is None
    engine.kill()
    worker.kill()
    wait_until(lambda: {"stop", "leave 75"} <= {*called})  # each in a thread of its own
    failure = supervisor.failure
    assert failure is not None and failure.process is not None and failure.process.pid in (engine.pid, worker.pid)
    sentence = f"(process {failure.process.pid}) died during the update of step 3; its log: {tmp_path}/log.err"
    assert failure.sentence.endswith(sentence)
    assert [word for word in called if word != "stop"] == [failure.sentence, "leave 75"]
    assert capfd.readouterr().err == f"error: {failure.sentence}\n"


def test_a_stopped_process_explains_an_error_of_ray(begin: Begin, watch: Watch, tmp_path: Path) -> None:
    control = begin("gcs_server")
    supervisor, _ = watch("control service of Ray (gcs_server)")
    control.send_signal(signal.SIGSTOP)
    wait_until(lambda: processes.is_stopped(control.pid))
    failed = supervisor.explain(RuntimeError("Ray is gone"), tmp_path / "launcher.log")
    assert failed.may_pass
    for part in (f"(process {control.pid}) is stopped", "during the update of step 3", f"{tmp_path}/launcher.log"):
        assert part in failed.sentence


def test_a_run_that_ends_by_itself_is_left_alone(begin: Begin, watch: Watch) -> None:
    storage, worker = begin("ray::SimpleStorageUnit"), begin("ray::WorkerDict")
    supervisor, called = watch("TransferQueue's storage", "FSDP worker", ending=True)
    storage.kill()  # the trainer closes it at its end
    time.sleep(0.5)
    supervisor.over.set()
    worker.kill()
    time.sleep(0.8)
    assert supervisor.failure is None and called == []


@pytest.mark.parametrize("bye", [False, True])
def test_the_reaper_speaks_and_ends_what_a_launcher_has_left(
    run_id: str, begin: Begin, tmp_path: Path, bye: bool
) -> None:
    """And that it is there when the launching process is killed: e2e/test_async.py."""
    write_phase(tmp_path, Phase(2, "save"))
    (folder := tmp_path / "ray").mkdir()
    left, launcher = begin("ray::WorkerDict"), subprocess.Popen(["sleep", "600"])
    code = "from recipe.runner.faults import reaper; reaper._PATIENCE_S = 0; reaper.main(*__import__('sys').argv[1:])"
    command = [sys.executable, "-c", code, run_id, str(tmp_path), str(launcher.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reaper:
        reaper.stdin.write(f"{folder}\n" * bye)
        reaper.stdin.close()
        with pytest.raises(subprocess.TimeoutExpired):
            reaper.wait(1)
        assert is_alive(left.pid), "the launching process is still there"
        launcher.kill()
        launcher.wait()
        said = reaper.stderr.read()
    died = f"error: the launching process (process {launcher.pid}) died during the save of step 2; its log: {tmp_path}/"
    assert said == ("" if bye else f"{died}launcher.log\n")
    assert not is_alive(left.pid) and folder.exists() != bye
