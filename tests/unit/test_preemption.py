"""The warning before the end: the signal in the launching process, and the job scripts that ask for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SLURM = Path(__file__).resolve().parents[2] / "slurm"


def test_a_process_that_ignored_the_signal_until_now_notes_it_once() -> None:
    """As in a job: slurm/node.sh ignores USR1 until Python has its handler. It may come again, and must not kill."""
    code = (
        "from recipe.runner.faults.preemption import WARNED, watch_for_warning\n"
        "import os, signal, sys\nwatch_for_warning(); print('ready', flush=True)\n"
        "noted = WARNED.wait(30); os.kill(os.getpid(), signal.SIGUSR1)\n"
        "sys.exit(75 if noted and signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN else 1)"
    )
    command = ["bash", "-c", f"trap '' USR1; exec {sys.executable} -c \"$CODE\""]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "CODE": code}, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == 75


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


def test_ctrl_c_during_an_import_is_a_sentence() -> None:
    assert interrupted(IMPORT, "importing") == (130, "importing\ninterrupted before the run began\n")


RUN = """
import threading
end_on_ctrl_c()
try:
    {save}
    print("first", flush=True)
    threading.Thread(target=lambda: WARNED.wait(20) and print("second", flush=True), daemon=True).start()
    time.sleep(20)
except KeyboardInterrupt:
    print("third", flush=True)
    time.sleep(1)
print("saved" if WARNED.is_set() else "at once", *(signum.name for signum in ENDED_BY))
"""


@pytest.mark.parametrize(
    ("save", "waits", "ends"),
    [
        ("save_on_ctrl_c()", ("first", "second", "third"), "saved SIGINT SIGINT"),
        ("pass", ("first", "third"), "at once SIGINT"),
    ],
    ids=["a run", "the start"],
)
def test_a_first_ctrl_c_warns_the_next_ends_and_another_does_no_harm(
    save: str, waits: tuple[str, ...], ends: str
) -> None:
    status, output = interrupted(RUN.format(save=save), *waits)
    assert (status, output.split("\n")) == (0, [*waits, ends, ""])


def test_a_background_job_goes_on_ignoring_ctrl_c() -> None:
    code = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nleave_on_ctrl_c(); end_on_ctrl_c(); save_on_ctrl_c()\n"
    status, output = interrupted(f"{code}print('ready', flush=True); time.sleep(1); print('done')", "ready")
    assert (status, output) == (0, "ready\ndone\n")


@pytest.mark.parametrize("script", ["fspo_8b.sh", "fspo_1_7b.sh", "compare.sh", "demo_cpu.sh"])
def test_job_scripts_ask_for_a_warning_and_a_requeue(script: str) -> None:
    text = (SLURM / script).read_text()
    assert re.search(r"^#SBATCH --signal=B:USR1@\d+$", text, re.M) and "#SBATCH --requeue" in text
