"""Programs that a model has written run within their limits, and leave nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from fspo.rewards import Status, run_program, score_program

SUM = "print(sum(map(int, input().split())))"
CASES = json.dumps({"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]})


def fenced(program: str) -> str:
    return f"Like this:\n```python\n{program}\n```\nThat is all."


@pytest.mark.parametrize(
    ("response", "status"),
    [
        (fenced(SUM), Status.CORRECT),
        (fenced("print(3)"), Status.WRONG),  # right in the first case only
        (fenced("1 / 0"), Status.WRONG),
        (fenced("print(3"), Status.WRONG),
        (fenced("import sys; print(3); sys.exit(1)"), Status.WRONG),
        (f"```python\nprint(1)\n```\nBetter:\n```py\n{SUM}\n```", Status.CORRECT),
        (SUM, Status.NO_ANSWER),
        (f"It reads\n```text\n1 2\n```\nand so:\n```python\n{SUM}\n```", Status.CORRECT),
        (f"```bash\npip install x\n```\n\n```python\n{SUM}\n```\nIt prints\n```\n3\n```", Status.CORRECT),
        (f'```python title="a.py"\r\n{SUM}\r\n```\r\n', Status.CORRECT),
        (f"1. So:\n   ```{{.python}}\n   {SUM}\n   ```", Status.CORRECT),
        (f'````python\ns = """\n```\n"""\n{SUM}\n````\nIn short ```{SUM}```', Status.CORRECT),
        (f"```python\n{SUM}", Status.NO_ANSWER),
        (f"```text\n{SUM}\n```", Status.NO_ANSWER),
        (f"```\nprint(1)\n```\n```\n{SUM}\n```", Status.CORRECT),
        (f"<answer>```python\n{SUM}\n```</answer>", Status.CORRECT),
        (f"So:\n```python\n{SUM}```\nDone.", Status.CORRECT),
        (f"```text\n1 2\n```python\n{SUM}\n```", Status.CORRECT),  # the first block is never closed
        (f"```python\n{SUM}\n```\n```python-repl\n>>> 1\n```", Status.CORRECT),
    ],
)
def test_the_last_block_is_judged_by_what_it_prints(response: str, status: Status) -> None:
    assert score_program(response, CASES).status is status


@pytest.mark.parametrize("truth", ["7", "{}", '{"inputs": [], "outputs": []}', '{"inputs": ["1"], "outputs": [1]}', ""])
def test_a_ground_truth_of_another_form_is_a_defect_of_the_data(truth: str) -> None:
    assert score_program(fenced(SUM), truth).status is Status.BAD_TRUTH


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("while True: pass", Status.TIMEOUT),
        ("import signal\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\nimport time\ntime.sleep(60)", Status.TIMEOUT),
        ("x = bytearray(1 << 30)", Status.REFUSED),
        ("while True: print('y' * 1000)", Status.REFUSED),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", Status.CRASHED),
    ],
)
def test_limits(program: str, status: Status) -> None:
    assert run_program(program, time_limit_s=0.2, memory_limit_mb=128).status is status


def test_a_program_sees_no_environment_and_an_empty_folder() -> None:
    os.environ["FSPO_TEST_SECRET"] = "key"
    try:
        result = run_program("import os; print(os.environ.get('FSPO_TEST_SECRET'), os.listdir())")
    finally:
        del os.environ["FSPO_TEST_SECRET"]
    assert result.stdout == "None ['program.py']\n"


def test_nothing_outlives_a_program(tmp_path: Path) -> None:
    # As root the program can start another one; it leaves its group, and its parent ends at once.
    orphan = (
        f"import os, time; os.setsid(); open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    program = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {orphan!r}])\ntime.sleep(0.3)"
    result = run_program(program)
    if (tmp_path / "pid").exists():
        assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    else:
        assert result.status is Status.WRONG  # for anyone else than root, the limit of processes
    assert not [child for child in psutil.Process().children() if "program_runner" in " ".join(child.cmdline())]


def test_a_limit_that_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match="time_limit_s=0"):
        run_program("", time_limit_s=0)
    with pytest.raises(ValueError, match="memory_limit_mb=1"):
        run_program("", memory_limit_mb=1)
