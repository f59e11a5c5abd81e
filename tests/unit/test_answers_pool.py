"""The worker processes: limits, replacement, threads, and that none of them is left behind."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchmarks.rewards import HOSTILE
from recipe.math.answers import MathScorer, Status, status_rates

ROOT = Path(__file__).resolve().parents[2]
#: An integer of 370 million digits, in one call of C.
ENDLESS = r"\boxed{9^{9^9}+%d}"


@pytest.fixture(scope="module")
def scorer() -> Iterator[MathScorer]:
    with MathScorer(n_workers=2, time_limit_s=2.0) as scorer, ThreadPoolExecutor(2) as threads:
        assert all(threads.map(scorer.judge, [r"\boxed{x+0}", r"\boxed{x+1}"], ["0+x", "1+x"]))
        yield scorer


def processes(scorer: MathScorer) -> list[psutil.Process]:
    """Keepers, and behind them the children that judge."""
    keepers = [psutil.Process(worker._process.pid) for worker in scorer._workers if worker._process is not None]
    return [*keepers, *(child for keeper in keepers for child in keeper.children())]


def gone(of: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(of, timeout=60)[1]


def test_endless_and_many_answers_get_their_own_verdicts(scorer: MathScorer) -> None:
    responses = [ENDLESS % i if i in (3, 57) else f"thread {i}: \\boxed{{y+{i}}}" for i in range(96)]
    truths = ["7" if i in (3, 57) else f"{i if i % 3 else i + 1}+y" for i in range(96)]
    with ThreadPoolExecutor(32) as threads:
        statuses = list(threads.map(scorer.judge, responses, truths))
    expected = [Status.CORRECT if i % 3 else Status.WRONG for i in range(96)]
    expected[3] = expected[57] = Status.TIMEOUT
    assert statuses == expected


def test_a_killed_worker_is_replaced(scorer: MathScorer) -> None:
    for victims, name in ((slice(2, None), "z"), (slice(2), "q")):  # the children, then the keepers
        keepers = processes(scorer)[:2]
        for process in processes(scorer)[victims]:
            process.kill()
        assert gone(keepers)
        assert [scorer.judge(f"\\boxed{{{name}+{i}}}", f"{i}+{name}").score for i in range(4)] == [1] * 4


def test_a_crash_is_not_remembered(scorer: MathScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = lambda self: subprocess.Popen(["true"], stdin=-1, stdout=-1, text=True)  # noqa: E731
    scorer.close()
    monkeypatch.setattr("recipe.math.answers.scorer._Worker._started", dead)
    assert scorer.judge(r"\boxed{v+1}", "1+v") is Status.CRASHED
    monkeypatch.undo()
    assert scorer.judge(r"\boxed{v+1}", "1+v") is Status.CORRECT


def test_a_worker_has_a_limit_of_memory(scorer: MathScorer) -> None:
    assert scorer.judge(r"\boxed{u+0}", "0+u").score == 1
    assert (1024 << 20, 1024 << 20) in [process.rlimit(psutil.RLIMIT_AS) for process in processes(scorer)]


def test_a_forked_process_has_workers_of_its_own(scorer: MathScorer) -> None:
    ours = processes(scorer)
    fork = multiprocessing.get_context("fork")
    forked = fork.Process(target=lambda: os._exit(scorer.judge(r"\boxed{w+1}", "1+w").score == 1), daemon=True)
    forked.start()
    forked.join(60)
    assert forked.exitcode == 1
    assert scorer.judge(r"\boxed{w+2}", "2+w").score == 1 and processes(scorer) == ours


def test_a_closed_scorer_has_no_process_and_can_be_used_again(scorer: MathScorer) -> None:
    started = processes(scorer)
    scorer.close()
    assert started and gone(started)
    assert scorer.judge(r"\boxed{u+1}", "1+u").score == 1


SCRIPT = """
import sys, threading, time
from recipe.math.answers import MathScorer
scorer = MathScorer(n_workers=1, time_limit_s=5)
scorer.judge(r"\\boxed{x}", "y")
print(scorer._workers[0]._process.pid, flush=True)
threading.Thread(target=scorer.judge, args=(sys.argv[1], "7"), daemon=True).start()
time.sleep(600)
"""


@pytest.mark.parametrize("asked", [r"\boxed{x+1}", ENDLESS % 0], ids=["idle", "computing"])
def test_no_process_outlives_a_killed_parent(asked: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, asked]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        keeper = psutil.Process(int(parent.stdout.readline()))
        started = [keeper, *keeper.children()]
        parent.kill()
        assert len(started) == 2 and gone(started)


def test_hostile_answers_earn_nothing_and_run_no_code(scorer: MathScorer, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    code = f"__import__('pathlib').Path('{trace}').touch()"
    answers = [(text, "1") for text in (code, f"\\boxed{{{code}}}", f"Answer: {code}", f"\\boxed{{\\text{{{code}}}}}")]
    answers += [(hostile % i, "17") for i in range(3) for hostile in HOSTILE]
    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(scorer.judge, *zip(*answers, strict=True)))
    assert [status for status in verdicts if status.score or status is Status.CRASHED] == []
    assert not trace.exists()


def test_math_verify_that_cannot_be_imported_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with MathScorer(n_workers=1) as scorer, pytest.raises(RuntimeError, match="import math_verify"):
        scorer.judge(r"\boxed{x}", "y")


@pytest.mark.parametrize("limits", [{"n_workers": 0}, {"time_limit_s": 0}, {"memory_limit_mb": 100}])
def test_a_limit_that_no_worker_can_have_is_refused(limits: dict[str, int]) -> None:
    ((name, value),) = limits.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        MathScorer(**limits)  # type: ignore[arg-type]


def test_rates_name_every_status_and_leave_out_others() -> None:
    rates = status_rates(["correct", "timeout", None, "of another reward", "correct"])
    assert (rates["reward/status/correct"], rates["reward/status/timeout"]) == (2 / 3, 1 / 3)
    assert set(rates) == {f"reward/status/{status.value}" for status in Status} | {"reward/status/n"}
    assert rates["reward/status/n"] == 3.0 and status_rates([])["reward/status/correct"] == 0.0
