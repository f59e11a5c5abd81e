"""A failed run is started again, within limits; its history and how much of its time counted."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from recipe.fspo.job import JOB
from recipe.runner import main
from recipe.runner.faults.phase import Phase, write_phase
from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.launch import restarts
from recipe.runner.launch.restarts import supervise

PYTHON = sys.executable
#: In place of Python: does what the next line of the plan says (steps done, exit status), and notes what it was given.
START = """#!/bin/sh
cd "$(dirname "$0")"
n=$(wc -l < starts); n=$((n + 1))
echo "$FSPO_RESTARTED $*" >> starts
set -- $(sed -n "${n}p" plan)
for step in $(seq 1 "$1"); do echo "{\\"step\\": $step}" >> metrics.jsonl; done
[ "$2" != killed ] || kill -9 $$
exit "$2"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "start"
    program.write_text(START, encoding="utf-8")
    program.chmod(0o755)
    (tmp_path / "starts").touch()
    monkeypatch.setattr(sys, "executable", str(program))
    return tmp_path


def run(folder: Path, *plan: str, limit: int = 3) -> tuple[int, list[dict[str, Any]]]:
    """The exit status, and what the starts were told."""
    (folder / "plan").write_text("\n".join(plan) + "\n", encoding="utf-8")
    code = supervise("recipe.fspo.main", ["algo=fspo"], folder, limit)
    starts = (folder / "starts").read_text(encoding="utf-8").splitlines()
    assert all(line.endswith(f"-m recipe.fspo.main algo=fspo run.dir='{folder}'") for line in starts)
    return code, [json.loads(line[: line.index("} ") + 1]) for line in starts]


def test_a_failed_run_is_started_again_until_it_finishes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, starts = run(folder, "2 1", "4 killed", "6 0")
    assert (code, [begun["restarts"] for begun in starts]) == (0, [0, 1, 2])
    assert "reason" not in starts[0] and starts[2]["reason"] == "the launching process ended by signal 9"
    assert capsys.readouterr().out.splitlines()[1] == "restart 2: the launching process ended by signal 9"


def test_the_reason_is_that_of_a_start_which_died_before_its_run_folder_began(folder: Path) -> None:
    (folder / "run.json").write_text('{"status": "failed", "algo": "fspo", "starts": [{"error": "the disk is full"}]}')
    write_phase(str(folder), Phase(3, "update"))
    assert run(folder, "1 1", "2 0")[1][1]["reason"] == "the launching process ended with status 1"


@pytest.mark.parametrize("status", [0, 2, 75, 130, 143])
def test_other_ends_are_passed_on(folder: Path, status: int) -> None:
    code, starts = run(folder, f"1 {status}")
    assert (code, len(starts)) == (status, 1)


def test_two_failures_without_a_step_between_end_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, starts = run(folder, "0 1", "0 1", "9 0")
    assert (code, len(starts)) == (1, 2)
    assert "not started again: it failed twice without getting beyond step 0" in capsys.readouterr().err


def test_a_run_that_has_gone_back_gets_beyond_the_steps_it_does_again(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 10)), encoding="utf-8")
    code, starts = run(folder, "4 1", "6 1", "7 0")
    assert (code, len(starts)) == (0, 3)


def test_no_more_than_the_limit_within_an_hour(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = [f"{step} 1" for step in range(1, 6)]
    code, starts = run(folder, *plan, limit=2)
    assert (code, len(starts)) == (1, 3)
    monkeypatch.setattr(restarts, "_HOUR_S", 0.0)
    (folder / "starts").write_text("")
    (folder / "metrics.jsonl").unlink()
    assert run(folder, *plan, "6 0", limit=2)[0] == 0


def test_the_warning_is_passed_on(folder: Path) -> None:
    """Also to a start that does not listen yet; and to the next one, if that one fails."""
    code = (
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        "first = not Path('failed').exists()\n"
        "if first:\n    os.kill(os.getppid(), signal.SIGUSR1)\ntime.sleep(0.3)\n"
        "from recipe.runner.faults.preemption import WARNED, watch_for_warning\nwatch_for_warning()\n"
        "if first:\n    Path('failed').touch()\n    sys.exit(1)\n"
        "sys.exit(75 if WARNED.wait(20) else 3)"
    )
    root = Path(__file__).resolve().parents[2]
    (folder / "code").write_text(code)
    (folder / "start").write_text(f"#!/bin/sh\ncd {folder}; PYTHONPATH={root} exec {PYTHON} code\n")
    before = signal.getsignal(signal.SIGUSR1)
    assert supervise("recipe.fspo.main", [], folder, 3) == 75
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize(("name", "status"), [("TERM", 143), ("INT", 130)])
def test_a_failure_after_somebody_asked_for_the_end_is_not_mended(folder: Path, name: str, status: int) -> None:
    """The signal is passed on; a terminal's own reaches the start by no other way."""
    starts = folder / "starts"
    wait = "for i in 1 2 3 4 5 6 7 8 9; do sleep 0.1; done"
    trap = f"trap 'echo passed on >> {starts}; exit 1' {name}"
    (folder / "start").write_text(f"#!/bin/sh\n{trap}\nkill -{name} $PPID\n{wait}\n")
    assert supervise("recipe.fspo.main", [], folder, 3) == status
    assert starts.read_text().splitlines() == ["passed on"]


def test_a_warning_before_the_first_start_is_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "start").write_text("#!/bin/sh\ntrap 'exit 75' USR1\nwhile :; do sleep 0.05; done\n")
    warned = threading.Event()
    warned.set()
    monkeypatch.setattr(restarts, "WARNED", warned)
    assert supervise("recipe.fspo.main", [], folder, 1) == 75


def test_a_closed_terminal_ends_no_run_under_nohup(folder: Path) -> None:
    (folder / "start").write_text("#!/bin/sh\nkill -HUP $PPID\nkill -HUP $$\nexit 0\n")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert supervise("recipe.fspo.main", [], folder, 1) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_evaluation_is_not_started_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder's log has the step of an earlier evaluation, so that a restart would train."""
    done: list[str] = []
    monkeypatch.setattr(main, "supervise", lambda *_: done.append("supervised"))
    monkeypatch.setattr(main, "launch_or_exit", lambda *_: done.append("evaluated"))
    for name in ("watch_for_warning", "end_on_signals"):
        monkeypatch.setattr(main, name, lambda *_: None)
    monkeypatch.setattr(main, "export_platform", lambda *_, **__: None)
    monkeypatch.setenv(RUN_ID_VARIABLE, "")
    arguments = ["experiment=demo", f"run.dir={folder}", "run.restarts=2"]
    main.main(JOB, "", "", [*arguments, "evaluate=true"])
    with pytest.raises(SystemExit):
        main.main(JOB, "", "", arguments)
    assert done == ["evaluated", "supervised"]
