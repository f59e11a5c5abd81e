"""The end before its time: the file that asks for it, the signals, and the job scripts that ask for a warning."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from recipe.runner.faults.preemption import (
    SIGNALS,
    STOP_VARIABLE,
    UNSAVED_VARIABLE,
    ask_to_stop,
    remove_old_request,
    stop_request,
    tell_of_save,
    time_left_s,
)
from recipe.runner.faults.processes import is_alive

SLURM = Path(__file__).resolve().parents[2] / "slurm"


def test_who_asks_for_the_end_and_what_a_start_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_job = tmp_path / "of_the_job"
    monkeypatch.setenv(STOP_VARIABLE, str(of_job))
    assert stop_request(tmp_path) is None and not remove_old_request(tmp_path)
    of_job.touch()
    assert stop_request(tmp_path) == stop_request(tmp_path / "another") == of_job
    ask_to_stop(tmp_path)
    assert stop_request(tmp_path) == tmp_path / "stop"
    assert remove_old_request(tmp_path) and stop_request(tmp_path) == of_job


def test_a_save_removes_the_job_script_s_list_of_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNSAVED_VARIABLE, str(tmp_path / "unsaved"))
    (tmp_path / "unsaved").touch()
    for _ in range(2):  # with it, and without
        tell_of_save()
        assert not (tmp_path / "unsaved").exists()


def test_the_time_that_a_job_has_left_is_slurm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert time_left_s() == float("inf")
    for none in ("", "0", "UNLIMITED", str(int(psutil.Process().create_time()) - 1)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", none)
        assert time_left_s() == float("inf")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    assert 900 < time_left_s() <= 1000


#: A launching process, with a child and a private folder; what it prints after "ready" is there when it may go on.
LAUNCHER = """
import subprocess, sys, time
from pathlib import Path
from recipe.runner.faults import preemption
from recipe.runner.faults.phase import Phase, write_phase
from recipe.runner.faults.preemption import ENDING, stop_request, take_signals
run, phase, one_signal_s = sys.argv[1:]
preemption._ONE_SIGNAL_S = float(one_signal_s)
take_signals(ENDING.take)
ENDING.folder = Path(run, "private")
ENDING.folder.mkdir()
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if phase != "imports":
    write_phase(run, Phase(3, phase))
    ENDING.run_dir = run
print(child.pid, flush=True)
while not stop_request(run):
    time.sleep(0.02)
print("asked", flush=True)
print(sys.stdin.readline())
child.kill()
"""


def launcher(run: Path, phase: str, one_signal_s: float = 0.0, ignored: int = 0) -> subprocess.Popen[str]:
    """Such a process; a shell's background job, as these tests may be, ignores Ctrl-C, and nohup another signal."""

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if ignored:
            signal.signal(ignored, signal.SIG_IGN)

    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(run), phase, str(one_signal_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=begin,
    )


@pytest.mark.parametrize("number", SIGNALS)
def test_a_first_signal_saves_and_a_second_ends_at_once(tmp_path: Path, number: int) -> None:
    with launcher(tmp_path, "update") as process:
        assert process.stdout is not None and process.stderr is not None
        child = int(process.stdout.readline())
        process.send_signal(number)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert "saving after the step in progress" in process.stderr.read()
    wait_until(lambda: not is_alive(child) and not (tmp_path / "private").exists())


@pytest.mark.parametrize("phase", ["imports", "start-up", "first weight sync"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR2, 75)])
def test_before_the_first_step_a_first_signal_ends_at_once(
    tmp_path: Path, phase: str, number: int, status: int
) -> None:
    with launcher(tmp_path, phase) as process:
        assert process.stdout is not None and process.stderr is not None
        child = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(30) == status
        assert "nothing saved" in process.stderr.read()
    wait_until(lambda: not is_alive(child))
    assert not stop_request(tmp_path)


def test_a_signal_that_comes_twice_within_a_second_is_one(tmp_path: Path) -> None:
    """SLURM sends TERM so, at the end of the time limit and to what it preempts without a grace time."""
    with launcher(tmp_path, "update", one_signal_s=1000) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert process.communicate("goes on\n", timeout=30)[0] == "goes on\n\n" and process.returncode == 0


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    with launcher(tmp_path, "imports", ignored=signal.SIGHUP) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        ask_to_stop(tmp_path)
        assert process.communicate("goes on\n", timeout=30)[0] == "asked\ngoes on\n\n" and process.returncode == 0


def test_what_multiprocessing_starts_leaves_the_signals_blocked() -> None:
    code = """
import signal
from multiprocessing import resource_tracker
from recipe.runner.faults.preemption import SIGNALS, take_signals
take_signals(print)
resource_tracker.ensure_running()
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= set(SIGNALS) - {signal.SIGINT})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


def test_the_launcher_of_the_page_stops_and_submits_again(tmp_path: Path) -> None:
    page = (SLURM.parent / "docs" / "architecture.md").read_text()
    (script,) = re.findall(r"```text\n(#!/bin/bash\n.*?)```", page, re.S)
    assert len(script.splitlines()) <= 15
    (tmp_path / "mine.sh").write_text(script)
    run = """[ $((SLURM_JOB_END_TIME - $(date +%s))) -gt 86000 ] || exit 9
touch begun
while [ ! -e runs/mine/stop ]; do sleep 0.1; done
exit $STATUS"""
    for name, text in {"python": run, "qsub": 'echo "again $1"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PBS_O_WORKDIR": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(tmp_path / "mine.sh")]
    for status, printed in ((75, "again mine.sh\n"), (1, ""), (75, "again mine.sh\n")):
        job = subprocess.Popen(
            command,
            env=environment | {"STATUS": str(status)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_until((tmp_path / "begun").exists)
        os.killpg(job.pid, signal.SIGUSR2)  # to all processes of the job, as many schedulers do
        assert (job.communicate(timeout=60)[0], job.returncode) == (printed, status)
        (tmp_path / "runs/mine/stop").unlink()
        (tmp_path / "begun").unlink()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, (tmp_path / "begun").exists()) == (1, False)  # three starts have saved nothing
