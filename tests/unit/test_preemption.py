"""The warning signal in the launching process, and what the lead time is compared with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.runner.faults.preemption import LEAD_VARIABLE, LeadTime

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


def test_a_lead_shorter_than_a_step_and_a_save_is_said_once() -> None:
    lead = LeadTime(lead_s=100)
    lead.measured(step_s=80)
    assert lead.shortfall() is None  # 80 s, no save known yet
    lead.measured(save_s=30)
    note = lead.shortfall()
    assert note is not None and "100 s" in note and "80 s" in note and "30 s" in note and "USR1@165" in note
    assert lead.shortfall() is None
    lead.measured(step_s=81)
    assert lead.shortfall() is None  # hardly more
    lead.measured(validation_s=170, save_s=20)  # the longest of each counts, a validation not on top of a step
    note = lead.shortfall()
    assert note is not None and "USR1@300" in note
    nobody_warns = LeadTime(lead_s=None)
    nobody_warns.measured(step_s=1000)
    assert nobody_warns.shortfall() is None


def test_lead_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEAD_VARIABLE, "900")
    assert LeadTime.from_environment().lead_s == 900
    monkeypatch.delenv(LEAD_VARIABLE)
    assert LeadTime.from_environment().lead_s is None
    monkeypatch.setenv(LEAD_VARIABLE, "15min")
    with pytest.raises(ValueError, match="15min"):
        LeadTime.from_environment()


@pytest.mark.parametrize("script", ["fspo_8b.sh", "fspo_1_7b.sh", "compare.sh", "demo_cpu.sh"])
def test_job_scripts_export_the_lead_they_ask_for(script: str) -> None:
    text = (SLURM / script).read_text()
    asked = re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.M)
    exported = re.search(rf'{LEAD_VARIABLE}="\$\{{{LEAD_VARIABLE}:-(\d+)\}}"', text)
    assert asked and exported and asked[1] == exported[1]
    assert "#SBATCH --requeue" in text
