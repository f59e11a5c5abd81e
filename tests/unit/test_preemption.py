"""The end before its time: the file that asks for it, the signals, and the job scripts that ask for a warning."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from waiting import wait_until

from recipe.runner.faults import preemption
from recipe.runner.faults.preemption import (
    STOP_VARIABLE,
    UNSAVED_VARIABLE,
    ask_to_stop,
    end_note,
    remove_old_request,
    stop_request,
    tell_of_save,
    time_left_s,
)

SLURM = Path(__file__).resolve().parents[2] / "slurm"


STOPPED = """
import sys, time
from recipe.runner.faults.phase import Phase, write_phase
from recipe.runner.faults.preemption import *
write_phase(sys.argv[1], Phase(3, "update"))
stop_on_signals(sys.argv[1])
print("ready", flush=True)
while not stop_request(sys.argv[1]):
    time.sleep(0.02)
print("asked", flush=True)
sys.stdin.read()
sys.exit(75)
"""


def test_the_signal_asks_the_run_to_stop_and_does_no_harm_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        for line in ("ready\n", "asked\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGUSR1)
        process.stdin.close()
        assert process.wait(30) == 75
    assert (tmp_path / "stop").read_bytes() == b""


def test_a_request_of_before_the_start_is_removed_and_a_later_one_stays(tmp_path: Path) -> None:
    assert not remove_old_request(tmp_path)
    ask_to_stop(tmp_path)  # this process began before
    assert not remove_old_request(tmp_path) and stop_request(tmp_path)
    before = psutil.Process().create_time() - 1
    os.utime(tmp_path / "stop", (before, before))
    assert remove_old_request(tmp_path) and not stop_request(tmp_path)
    ask_to_stop(tmp_path)
    os.utime(tmp_path / "stop", (before, before))
    ask_to_stop(tmp_path)  # asked again, since
    assert not remove_old_request(tmp_path) and stop_request(tmp_path)


@pytest.mark.parametrize("ahead_s", [-7200, 7200])
def test_the_age_of_a_request_is_that_of_the_file_system_s_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    """The clock of this machine, which knows when the process began, is hours behind or ahead of the file server's."""
    began = psutil.Process().create_time()
    here = SimpleNamespace(time=lambda: time.time() - ahead_s)
    monkeypatch.setattr(preemption, "time", here)
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: began - ahead_s)
    ask_to_stop(tmp_path)
    assert not remove_old_request(tmp_path) and stop_request(tmp_path)
    os.utime(tmp_path / "stop", (began - 1, began - 1))
    assert remove_old_request(tmp_path) and not stop_request(tmp_path)


def test_a_folder_of_that_name_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "stop").mkdir()
    assert stop_request(tmp_path) is None


def test_a_job_script_s_request_reaches_whichever_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_job = tmp_path / "of_the_job"
    monkeypatch.delenv(STOP_VARIABLE, raising=False)
    assert stop_request(tmp_path) is None
    monkeypatch.setenv(STOP_VARIABLE, str(of_job))
    assert stop_request(tmp_path) is None
    of_job.touch()
    assert stop_request(tmp_path) == stop_request(tmp_path / "another") == of_job
    ask_to_stop(tmp_path)
    assert stop_request(tmp_path) == tmp_path / "stop"


def test_a_save_removes_the_job_script_s_list_of_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNSAVED_VARIABLE, str(tmp_path / "unsaved"))
    (tmp_path / "unsaved").touch()
    for _ in range(2):  # with it, and without
        tell_of_save()
        assert not (tmp_path / "unsaved").exists()
    monkeypatch.delenv(UNSAVED_VARIABLE)
    tell_of_save()


def test_the_time_that_a_job_has_left_is_slurm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert time_left_s() == float("inf")
    for none in ("", "0", "UNLIMITED", str(int(psutil.Process().create_time()) - 1)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", none)
        assert time_left_s() == float("inf")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    assert 900 < time_left_s() <= 1000


def interrupted(code: str, *waits: str) -> tuple[int, str]:
    """Exit status and output of a program that gets SIGINT after each of these lines."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import signal, sys, time\nfrom recipe.runner.faults.preemption import *\n{code}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell's background job ignores it, and this may be one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    lines = []
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.strip() in waits:
                os.killpg(process.pid, signal.SIGINT)
    return process.returncode, "".join(lines)


IMPORT = """
leave_on_ctrl_c()
try:
    print("importing", flush=True)
    time.sleep(30)
except BaseException:  # as some packages do
    pass
print("imported")
"""


@pytest.mark.parametrize("end", ["2026-11-27T19:00", "+3600", "1795806000000"])
def test_an_end_of_a_job_that_is_no_time_is_said(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", end)
    note = end_note() or ""
    assert f"SLURM_JOB_END_TIME={end} " in note and "export SLURM_JOB_END_TIME=" in note


@pytest.mark.parametrize("end", ["", "1000", "UNLIMITED", pytest.param(str(int(time.time()) + 3600), id="in an hour")])
def test_a_time_at_which_a_job_ends_gets_no_word(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", end)
    assert end_note() is None


def test_ctrl_c_during_an_import_is_a_sentence() -> None:
    assert interrupted(IMPORT, "importing") == (130, "importing\ninterrupted before the run began\n")


RUN = """
import threading
from recipe.runner.faults.phase import Phase, write_phase
run = {run!r}
write_phase(run, Phase(*{phase!r}))
stop_on_signals(None)

def say_when_asked():
    while not stop_request(run):
        time.sleep(0.02)
    print("second", flush=True)

try:
    {save}
    print("first", flush=True)
    threading.Thread(target=say_when_asked, daemon=True).start()
    time.sleep(20)
except KeyboardInterrupt:
    print("third", flush=True)
    time.sleep(1)
print("saved" if stop_request(run) else "at once", *(signum.name for signum in ENDED_BY))
"""
SAVE = "stop_on_signals(run)"


@pytest.mark.parametrize(
    ("save", "phase", "waits", "ends"),
    [
        (SAVE, (3, "update"), ("first", "second", "third"), "saved SIGINT SIGINT"),
        (SAVE, (3, "validation"), ("first", "second", "third"), "saved SIGINT SIGINT"),
        (SAVE, (0, "validation"), ("first", "third"), "at once SIGINT"),
        (SAVE, (3, "start-up"), ("first", "third"), "at once SIGINT"),
        (SAVE, (3, "first weight sync"), ("first", "third"), "at once SIGINT"),
        ("pass", (3, "update"), ("first", "third"), "at once SIGINT"),
    ],
)
def test_a_first_ctrl_c_stops_the_next_ends_and_another_does_no_harm(
    tmp_path: Path, save: str, phase: tuple[int, str], waits: tuple[str, ...], ends: str
) -> None:
    status, output = interrupted(RUN.format(save=save, phase=phase, run=str(tmp_path)), *waits)
    lines = output.split("\n")
    assert (status, [line for line in lines if "Ctrl-C once more" not in line]) == (0, [*waits, ends, ""])
    assert len(lines) == len(waits) + 2 + ("second" in waits)


def test_a_ctrl_c_that_cannot_be_written_down_ends_the_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "stop").symlink_to("/no/such/folder/stop")
    status, output = interrupted(RUN.format(save=SAVE, phase=(3, "update"), run=str(tmp_path)), "first", "third")
    assert status == 0 and str(tmp_path / "stop") in output and output.endswith("\nthird\nat once SIGINT SIGINT\n")


def test_a_background_job_goes_on_ignoring_ctrl_c() -> None:
    code = (
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\nleave_on_ctrl_c(); stop_on_signals(None); stop_on_signals('.')\n"
    )
    status, output = interrupted(f"{code}print('ready', flush=True); time.sleep(1); print('done')", "ready")
    assert (status, output) == (0, "ready\ndone\n")


def test_the_launcher_of_the_page_for_extending_stops_the_run_and_submits_again(tmp_path: Path) -> None:
    page = (SLURM.parent / "docs" / "extending.md").read_text()
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


@pytest.mark.parametrize("script", ["fspo_8b.sh", "fspo_1_7b.sh", "compare.sh", "demo_cpu.sh"])
def test_job_scripts_ask_for_a_warning_and_a_requeue(script: str) -> None:
    text = (SLURM / script).read_text()
    assert re.search(r"^#SBATCH --signal=B:USR1@\d+$", text, re.M) and "#SBATCH --requeue" in text
