"""The end before its time: the file that asks for it, the signals, and the job scripts that ask for a warning."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_until

from recipe.runner.faults.preemption import (
    SIGNALS,
    STOP_VARIABLE,
    remove_old_request,
    stop_request,
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
    (tmp_path / "stop").touch()
    assert not remove_old_request(tmp_path) and stop_request(tmp_path) == tmp_path / "stop", "asked of this start"
    os.utime(tmp_path / "stop", (0, psutil.Process().create_time() - 10))
    assert remove_old_request(tmp_path) and stop_request(tmp_path) == of_job


def test_the_time_that_a_job_has_left_is_slurm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert time_left_s() == float("inf")
    for none in ("", "UNLIMITED", str(int(psutil.Process().create_time()) - 1)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", none)
        assert time_left_s() == float("inf")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    assert 900 < time_left_s() <= 1000


#: A launching process, with a child and a private folder.
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
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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


@contextlib.contextmanager
def launcher(run: Path, phase: str, one_signal_s: float = 0.0, ignored: int = 0) -> Iterator[Any]:
    """Such a process; nothing of it is left in the end.

    A shell's background job, as these tests may be, ignores Ctrl-C, and nohup another signal.
    """

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if ignored:
            signal.signal(ignored, signal.SIG_IGN)

    command = [sys.executable, "-c", LAUNCHER, str(run), phase, str(one_signal_s)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, preexec_fn=begin, **pipes) as process:  # type: ignore[call-overload]
        child = int(process.stdout.readline())
        yield process
    wait_until(lambda: not is_alive(child))


@pytest.mark.parametrize("number", SIGNALS)
def test_a_first_signal_saves_and_a_second_ends_at_once(tmp_path: Path, number: int) -> None:
    with launcher(tmp_path, "update") as process:
        process.send_signal(number)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(number)
        assert process.wait(120) == 128 + number
        assert "saving after the step in progress" in process.stderr.read()
    wait_until(lambda: not (tmp_path / "private").exists())


@pytest.mark.parametrize(
    ("phase", "name", "status"),
    [("imports", "SIGTERM", 75), ("start-up", "SIGINT", 130), ("first weight sync", "SIGUSR2", 75)],
)
def test_before_the_first_step_a_first_signal_ends_at_once(tmp_path: Path, phase: str, name: str, status: int) -> None:
    with launcher(tmp_path, phase) as process:
        process.send_signal(signal.Signals[name])
        assert process.wait(120) == status
        assert "nothing saved" in process.stderr.read()
    assert not stop_request(tmp_path)


@pytest.mark.parametrize(("number", "ignored"), [(signal.SIGTERM, 0), (signal.SIGHUP, signal.SIGHUP)])
def test_two_signals_within_a_second_are_one_an_ignored_is_none(tmp_path: Path, number: int, ignored: int) -> None:
    """SLURM sends TERM so, at the end of the time limit and to what it preempts without a grace time."""
    phase = "imports" if ignored else "update"  # during the imports a signal would end the process
    with launcher(tmp_path, phase, one_signal_s=1000, ignored=ignored) as process:
        process.send_signal(number)
        if ignored:
            (tmp_path / "stop").touch()
        assert process.stdout.readline() == "asked\n"
        process.send_signal(number)
        time.sleep(0.2)
        assert process.communicate("goes on\n", timeout=120)[0] == "goes on\n\n" and process.returncode == 0


def test_the_launcher_of_the_page_stops_and_submits_again(tmp_path: Path) -> None:
    page = (SLURM.parent / "docs" / "architecture.md").read_text()
    (script,) = re.findall(r"```text\n(#!/bin/bash\n.*?)```", page, re.S)
    assert len(script.splitlines()) <= 15
    (tmp_path / "mine.sh").write_text(script.replace("sleep 5", "sleep 0.1"))
    run = """[ $((SLURM_JOB_END_TIME - $(date +%s))) -gt 86000 ] || exit 9
touch begun
while [ ! -e runs/mine/stop ]; do sleep 0.1; done
exit $STATUS"""
    for name, text in {"python": run, "qsub": 'echo "again $1"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PBS_O_WORKDIR": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def submitted(status: int) -> subprocess.Popen[str]:
        variables, command = environment | {"STATUS": str(status)}, ["bash", str(tmp_path / "mine.sh")]
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True)

    for status, printed in ((75, "again mine.sh\n"), (1, ""), (75, "again mine.sh\n")):
        job = submitted(status)
        wait_until((tmp_path / "begun").exists)
        os.killpg(job.pid, signal.SIGUSR2)  # to all processes of the job, as many schedulers do
        assert (job.communicate(timeout=120)[0], job.returncode) == (printed, status)
        (tmp_path / "runs/mine/stop").unlink()
        (tmp_path / "begun").unlink()
    with submitted(0) as job:  # three starts have saved nothing
        assert job.wait(120) == 1 and not (tmp_path / "begun").exists()
