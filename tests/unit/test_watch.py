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

import pytest

from recipe.fspo.phase import PHASE_FILE, Phase, read_phase, write_phase
from recipe.fspo.processes import MARK_VARIABLE, is_alive, kill, log_of, marked, role_of
from recipe.fspo.watch import Death, Watch

Begin = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def mark() -> Iterator[str]:
    mark = uuid.uuid4().hex
    yield mark
    kill(marked(mark))


@pytest.fixture
def begin(mark: str, tmp_path: Path) -> Iterator[Begin]:
    """Starts a process with a title like one of Ray's or vLLM's and with this run's mark."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin(title: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, MARK_VARIABLE: mark}
        with (tmp_path / "log.err").open("wb") as log:
            begun.append(subprocess.Popen([title, "60"], executable="/bin/sleep", env=environment, stderr=log))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.wait(10)


def wait_until(true: Callable[[], object], seconds: float = 10.0) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_the_phase_is_read_as_written_and_the_newest_of_a_series_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
    assert read_phase([first]) is None
    write_phase(first, 3, "update")
    time.sleep(0.01)
    write_phase(second, 1, "weight sync", ending=True)
    phase = read_phase([second, first, tmp_path / "missing"])
    assert phase is not None and (phase.step, phase.ending) == (1, True)
    assert phase.words() == "during the weight sync of step 1"
    assert [path.name for path in first.iterdir()] == [PHASE_FILE]
    (second / PHASE_FILE).write_text("{")
    phase = read_phase([first, second])
    assert phase is not None and abs(phase.since - time.time()) < 10 and phase.phase == "update"


def test_processes_are_found_by_mark_and_named_by_title(mark: str, begin: Begin, tmp_path: Path) -> None:
    worker, idle = begin("ray::WorkerDict.actor_rollout_update_actor"), begin("ray::IDLE")
    unmarked = subprocess.Popen(["/bin/sleep", "60"])
    foreign: set[int] = {0}
    assert set(marked(mark)) == set(marked(mark, foreign)) == {worker.pid, idle.pid}
    assert os.getppid() in foreign and not foreign & {0, worker.pid, idle.pid}
    assert set(marked(mark, foreign)) == {worker.pid, idle.pid}
    wait_until(lambda: role_of(worker.pid) == "FSDP worker")  # the title is there once the program has begun
    assert role_of(idle.pid) is None
    assert log_of(worker.pid) == str(tmp_path / "log.err")
    worker.kill()
    wait_until(lambda: not is_alive(worker.pid))  # a zombie, which nobody has waited for yet
    assert marked(mark) == [idle.pid]
    unmarked.kill()
    unmarked.wait(10)


class Told:
    """Notes what a watch calls, and when."""

    def __init__(self, mark: str, phase: Phase | None) -> None:
        self.called: dict[str, float] = {}
        self.deaths: list[Death] = []
        self.watch = Watch(
            mark, lambda: phase, self.deaths.append, lambda: self._note("stop"), lambda: self._note("leave")
        )

    def _note(self, name: str) -> None:
        self.called[name] = time.monotonic()


def test_the_first_death_is_named_and_a_run_that_goes_on_is_ended(
    mark: str, begin: Begin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("recipe.fspo.watch.GRACE_S", 0.3)
    monkeypatch.setattr("recipe.fspo.watch.LEAVE_S", 0.3)
    told = Told(mark, Phase(3, "update", 0.0))
    processes = [begin(title) for title in ("ray::IDLE", "VLLM::EngineCore", "ray::WorkerDict")]
    told.watch.start()
    wait_until(lambda: len(told.watch._known) == 2)
    processes[0].kill()  # not one that a run needs
    time.sleep(0.5)
    assert told.deaths == []
    processes[1].kill()
    processes[2].kill()
    wait_until(lambda: "leave" in told.called)
    (death,) = told.deaths
    assert death.pid in (processes[1].pid, processes[2].pid)
    assert 0.2 < told.called["leave"] - told.called["stop"] < 2
    sentence = Death("vLLM engine", 12, str(tmp_path), Phase(3, "update", 0.0)).sentence()
    assert sentence == f"the vLLM engine (process 12) died during the update of step 3; its log: {tmp_path}"


def test_a_run_that_ends_by_itself_is_left_alone(mark: str, begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipe.fspo.watch.GRACE_S", 0.3)
    told = Told(mark, Phase(3, "update", 0.0, ending=True))
    storage, worker = begin("ray::SimpleStorageUnit"), begin("ray::WorkerDict")
    told.watch.start()
    wait_until(lambda: len(told.watch._known) == 2)
    storage.kill()  # the trainer closes it at its end
    time.sleep(0.5)
    assert told.deaths == []
    told.watch.stop()
    worker.kill()
    time.sleep(0.8)
    assert told.deaths == [] and told.called == {}


LAUNCHER = """
import os, sys, time
from recipe.fspo.guardian import Guardian
from recipe.fspo.processes import MARK_VARIABLE
os.environ[MARK_VARIABLE] = sys.argv[1]
guardian = Guardian(sys.argv[1], sys.argv[2])
if sys.argv[3] != "-":
    guardian.tell(sys.argv[3])
    if sys.argv[3] == "done":
        guardian.bye()
import subprocess
subprocess.Popen(["/bin/sleep", "60"], start_new_session=True)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ("-", "error: the launching process (process "),
        ("the FSDP worker died", "error: the FSDP worker died"),
        ("done", ""),
    ],
)
def test_the_guardian_speaks_for_a_killed_launcher_and_ends_what_it_left(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, says: str
) -> None:
    write_phase(tmp_path, 2, "save")
    command = [sys.executable, "-c", LAUNCHER, mark, str(tmp_path), told]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        assert launcher.stdout.readline() == "ready\n"
        assert len(marked(mark)) == 1  # the launcher set its mark after it had begun, the guardian has none
        launcher.send_signal(signal.SIGKILL)
        wait_until(lambda: marked(mark) == [], 15)
        heard = launcher.stderr.read()  # ends with the guardian
    assert heard.startswith(says) and bool(heard) == bool(says)
    if told == "-":
        assert f"died during the save of step 2; its log: {tmp_path}/driver.log" in heard


def test_a_program_that_a_worker_is_about_to_call_is_no_worker(mark: str, tmp_path: Path) -> None:
    code = "import os, time; pid = os.fork(); pid and print(pid, flush=True); time.sleep(60)"
    worker = subprocess.Popen(
        ["ray::WorkerDict", "-c", code], executable=sys.executable, stdout=subprocess.PIPE, text=True,
        env={**os.environ, MARK_VARIABLE: mark},
    )  # fmt: skip
    with worker:
        assert worker.stdout is not None
        child = int(worker.stdout.readline())
        assert role_of(worker.pid) == "FSDP worker"
        assert role_of(child) is None
        kill([child, worker.pid])


def test_a_guardian_leaves_a_launcher_alone_that_goes_on(
    mark: str, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_run = begin("ray::WorkerDict")
    code = "from recipe.fspo import guardian; guardian._PATIENCE_S = 0.5; guardian.main(*__import__('sys').argv[1:])"
    command = [sys.executable, "-c", code, mark, str(tmp_path), str(os.getpid())]
    ended = subprocess.run(command, input="bye\n", capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert is_alive(next_run.pid)
