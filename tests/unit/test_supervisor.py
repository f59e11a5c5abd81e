"""A run's processes: where it stands, which of them died first, what is said then, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from recipe.runner.faults import processes, supervisor
from recipe.runner.faults.hang import HangLimit
from recipe.runner.faults.phase import PHASE_FILE, Phase, read_phase, write_phase
from recipe.runner.faults.processes import RUN_ID_VARIABLE, is_alive, kill, log_of, processes_of, role_of
from recipe.runner.faults.supervisor import Supervisor

Begin = Callable[..., "subprocess.Popen[bytes]"]


def test_a_process_that_may_not_be_read_is_asked_once(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may not read the environment of the kernel's threads, of which a large node has thousands."""
    asked: list[int] = []

    def environ(process: psutil.Process) -> dict[str, str]:
        asked.append(process.pid)
        raise psutil.AccessDenied(process.pid)

    # SLURM's daemon starts a job's program as another user.
    old, young = (subprocess.Popen(["/bin/sleep", "60"]) for _ in range(2))
    now = time.time()
    monkeypatch.setattr(psutil.Process, "environ", environ)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: now - 3600 * (process.pid == old.pid))
    try:
        foreign: set[int] = set()
        assert processes_of(run_id, foreign) == []
        assert old.pid in foreign and young.pid not in foreign
        assert old.pid in asked and young.pid in asked
        asked.clear()
        assert processes_of(run_id, foreign) == []
        assert young.pid in asked and old.pid not in asked
    finally:
        for process in (old, young):
            process.kill()
            process.wait(10)


def test_a_process_that_gets_the_mark_later_is_found(run_id: str) -> None:
    """In a cluster that a run joins, Ray starts a worker in its node's environment, and then replaces its program."""
    mark = {RUN_ID_VARIABLE: run_id}
    later = f"import os, sys; sys.stdin.readline(); os.execve('/bin/sleep', ['ray::WorkerDict', '60'], {mark})"
    worker = subprocess.Popen([sys.executable, "-c", later], stdin=subprocess.PIPE, text=True)
    try:
        foreign: set[int] = set()
        assert processes_of(run_id, foreign) == []
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
        wait_until(lambda: processes_of(run_id, foreign) == [worker.pid])
    finally:
        worker.kill()
        worker.communicate()


def test_processes_are_found_by_mark_and_named_by_title(
    run_id: str, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_SETTLED_S", 0.0)
    worker, idle = begin("ray::WorkerDict.actor_rollout_update_actor"), begin("ray::IDLE")
    other = subprocess.Popen(["/bin/sleep", "60"])
    foreign: set[int] = {0}
    assert set(processes_of(run_id)) == set(processes_of(run_id, foreign)) == {worker.pid, idle.pid}
    assert os.getppid() in foreign and not foreign & {0, worker.pid, idle.pid}
    assert set(processes_of(run_id, foreign)) == {worker.pid, idle.pid}
    wait_until(lambda: role_of(worker.pid) == "FSDP worker")  # the title is there once the program has begun
    assert role_of(idle.pid) is None
    assert log_of(worker.pid) == str(tmp_path / "log.err")
    worker.kill()
    wait_until(lambda: not is_alive(worker.pid))  # a zombie, which nobody has waited for yet
    assert processes_of(run_id) == [idle.pid]
    other.kill()
    other.wait(10)


class Watched:
    """Notes what a supervisor calls, and when."""

    def __init__(
        self, run_id: str, folder: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase, hang: HangLimit | None
    ) -> None:
        self.called: dict[str, float] = {}
        self.recorded: list[str] = []
        self.statuses: list[int] = []
        monkeypatch.setattr(supervisor, "_leave", self._leave)
        monkeypatch.setattr(supervisor, "GRACE_S", 0.3)
        monkeypatch.setattr(supervisor, "LEAVE_S", 0.3)
        write_phase(folder, phase)
        self.run_id = run_id
        self.supervisor = Supervisor(run_id, folder, lambda: self._note("stop"), self._record, hang)

    def start(self, titles: set[str]) -> None:
        self.supervisor.start()
        wait_until(lambda: {process.role for process in self.supervisor.processes} == titles)

    def _record(self, sentence: str) -> int:
        self.recorded.append(sentence)
        return 75

    def _leave(self, status: int) -> None:
        self.statuses.append(status)
        self._note("leave")

    def _note(self, name: str) -> None:
        self.called[name] = time.monotonic()


@pytest.fixture
def watch(run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watched]]:
    """Makes the supervisor of a run that is in a phase."""
    made: list[Watched] = []

    def watch(phase: Phase, hang: HangLimit | None = None) -> Watched:
        made.append(Watched(run_id, tmp_path, monkeypatch, phase, hang))
        return made[-1]

    yield watch
    for watched in made:
        watched.supervisor.close()


def test_the_first_death_is_named_and_a_run_that_goes_on_is_ended(
    begin: Begin, watch: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = watch(Phase(3, "update", 0.0))
    processes = [begin(title) for title in ("ray::IDLE", "VLLM::EngineCore", "ray::WorkerDict")]
    watched.start({"vLLM engine", "FSDP worker"})
    processes[0].kill()  # not one that a run needs
    time.sleep(0.5)
    assert watched.supervisor.failure is None
    processes[1].kill()
    processes[2].kill()
    wait_until(lambda: "leave" in watched.called)
    failure = watched.supervisor.failure
    assert failure.process.pid in (processes[1].pid, processes[2].pid)
    assert 0.2 < watched.called["leave"] - watched.called["stop"] < 2
    sentence = f"(process {failure.process.pid}) died during the update of step 3; its log: {tmp_path}/log.err"
    assert failure.sentence.endswith(sentence) and watched.recorded == [failure.sentence]
    assert watched.statuses == [75]


def test_a_stopped_process_explains_the_death_of_another(
    begin: Begin, watch: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = watch(Phase(3, "update", 0.0))
    node, control = begin("raylet"), begin("gcs_server")
    watched.start({"Ray node (raylet)", "control service of Ray (gcs_server)"})
    control.send_signal(signal.SIGSTOP)
    wait_until(lambda: processes.is_stopped(control.pid))
    node.kill()
    wait_until(lambda: watched.supervisor.failure)
    assert watched.supervisor.failure.process.pid == node.pid
    assert f"(gcs_server) (process {control.pid}) is stopped" in watched.supervisor.failure.sentence


def test_a_stopped_process_explains_an_error_of_ray(
    begin: Begin, watch: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = watch(Phase(3, "update", 0.0))
    control = begin("gcs_server")
    watched.start({"control service of Ray (gcs_server)"})
    control.send_signal(signal.SIGSTOP)
    wait_until(lambda: processes.is_stopped(control.pid))
    failed = watched.supervisor.explain(RuntimeError("Ray is gone"), tmp_path / "launcher.log")
    assert failed.of_process
    for part in (f"(process {control.pid}) is stopped", "during the update of step 3", f"{tmp_path}/launcher.log"):
        assert part in str(failed)


def test_a_hang_ends_a_run_as_a_death_does(begin: Begin, watch: Callable[..., Watched], tmp_path: Path) -> None:
    watched = watch(Phase(3, "update", 0.0), HangLimit(0.5, tmp_path, lambda line: None))
    begin("ray::WorkerDict").send_signal(signal.SIGSTOP)
    watched.start({"FSDP worker"})
    wait_until(lambda: "leave" in watched.called)
    (sentence,) = watched.recorded
    assert "the FSDP worker (process " in sentence and "during the update of step 3" in sentence
    assert "is stopped" in sentence and "run.hang_after_s" in sentence


def test_a_run_that_ends_by_itself_is_left_alone(begin: Begin, watch: Callable[..., Watched], tmp_path: Path) -> None:
    watched = watch(Phase(3, "update", 0.0, ending=True))
    storage, worker = begin("ray::SimpleStorageUnit"), begin("ray::WorkerDict")
    watched.start({"TransferQueue's storage", "FSDP worker"})
    storage.kill()  # the trainer closes it at its end
    time.sleep(0.5)
    assert watched.supervisor.failure is None
    watched.supervisor.stand_down()
    worker.kill()
    time.sleep(0.8)
    assert watched.supervisor.failure is None and watched.called == {}


LAUNCHER = """
import os, sys, time
from pathlib import Path
from recipe.runner.faults.reaper import Reaper
from recipe.runner.faults.processes import RUN_ID_VARIABLE
os.environ[RUN_ID_VARIABLE] = sys.argv[1]
reaper = Reaper(sys.argv[1], sys.argv[2])
if sys.argv[3] != "-":
    reaper.tell(sys.argv[3])
    if sys.argv[3] == "done":
        reaper.bye(Path(sys.argv[2], "ray"))
import subprocess
subprocess.Popen(["/bin/sleep", "60"], start_new_session=True)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_the_reaper_speaks_for_a_killed_launcher_and_ends_what_it_left(tmp_path: Path) -> None:
    write_phase(tmp_path, Phase(2, "save"))
    (tmp_path / "ray" / "session").mkdir(parents=True)
    says = {
        "-": "error: the launching process (process ",
        "the FSDP worker died": "error: the FSDP worker died",
        "done": "",
    }
    run_ids = {last_words: uuid.uuid4().hex for last_words in says}
    launchers = {}
    try:
        for last_words, run_id in run_ids.items():  # all at once: a reaper is patient for six seconds
            command = [sys.executable, "-c", LAUNCHER, run_id, str(tmp_path), last_words]
            launchers[last_words] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for last_words, launcher in launchers.items():
            assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
            # The launcher set its run_id after it had begun, and the reaper has none.
            assert len(processes_of(run_ids[last_words])) == 1
            launcher.send_signal(signal.SIGKILL)
        for last_words, launcher in launchers.items():
            wait_until(lambda run_id=run_ids[last_words]: processes_of(run_id) == [], 15)
            assert launcher.stderr is not None
            heard = launcher.stderr.read()  # ends with the reaper
            assert heard.startswith(says[last_words]) and bool(heard) == bool(says[last_words])
            if last_words == "-":
                assert f"died during the save of step 2; its log: {tmp_path}/launcher.log" in heard
        assert not (tmp_path / "ray").exists(), "it is left to the reaper"
    finally:
        for last_words, launcher in launchers.items():
            launcher.kill()
            launcher.communicate(timeout=10)
            kill(processes_of(run_ids[last_words]))


def test_a_program_that_a_worker_is_about_to_call_is_no_worker(begin: Begin) -> None:
    worker = begin("ray::WorkerDict", "import os, time; os.fork() and print(flush=True); time.sleep(60)")
    (child,) = psutil.Process(worker.pid).children()
    assert role_of(worker.pid) == "FSDP worker"
    assert role_of(child.pid) is None


def test_a_reaper_leaves_a_launcher_alone_that_goes_on(run_id: str, begin: Begin, tmp_path: Path) -> None:
    next_run = begin("ray::WorkerDict")
    code = "from recipe.runner.faults import reaper; reaper._PATIENCE_S = 0.5; reaper.main(*__import__('sys').argv[1:])"
    command = [sys.executable, "-c", code, run_id, str(tmp_path), str(os.getpid())]
    ended = subprocess.run(command, input="bye\n", capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert is_alive(next_run.pid)


def test_a_phase_that_is_missing_or_damaged_is_none(tmp_path: Path) -> None:
    assert read_phase(tmp_path) is None
    write_phase(tmp_path, Phase(1, "weight sync", ending=True))
    phase = read_phase(tmp_path)
    assert phase is not None and phase.words() == "during the weight sync of step 1" and phase.ending
    (tmp_path / PHASE_FILE).write_text("{")
    assert read_phase(tmp_path) is None
