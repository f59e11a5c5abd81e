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


@pytest.mark.parametrize("script", ["fspo_8b.sh", "fspo_1_7b.sh", "compare.sh", "demo_cpu.sh"])
def test_job_scripts_ask_for_a_warning_and_a_requeue(script: str) -> None:
    text = (SLURM / script).read_text()
    assert re.search(r"^#SBATCH --signal=B:USR1@\d+$", text, re.M) and "#SBATCH --requeue" in text
