"""The worker processes: limits, replacement, threads, and that none of them is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hostile import hostile_answers

from recipe.math.answers import MathScorer, Status, Verdict, soft_overlong_penalty, status_rates
from recipe.math.answers.scorer import WorkerStartError

ROOT = Path(__file__).resolve().parents[2]
#: An integer of 370 million digits, in one call of C.
ENDLESS = r"\boxed{9^{9^9}+%d}"


@pytest.fixture(scope="module")
def scorer() -> Iterator[MathScorer]:
    with MathScorer(n_workers=2, time_limit_s=2.0) as scorer:
        assert scorer.score(r"\boxed{x+0}", "0+x").score == 1
        yield scorer


def processes(scorer: MathScorer) -> list[psutil.Process]:
    """Keepers, and behind them the children that judge."""
    keepers = [psutil.Process(worker._process.pid) for worker in scorer._workers if worker._process is not None]
    children = [keeper.children() for keeper in keepers]
    while not all(children):  # a keeper that begins has none yet
        children = [keeper.children() for keeper in keepers]
    return [*keepers, *(child for of_keeper in children for child in of_keeper)]


def gone(of: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(of, timeout=60)[1]


def test_an_endless_answer_times_out_and_costs_no_other_verdict(scorer: MathScorer) -> None:
    responses = [ENDLESS % i if i in (3, 7) else f"\\boxed{{x+{i}}}" for i in range(10)]
    with ThreadPoolExecutor(10) as threads:
        verdicts = list(threads.map(scorer.score, responses, ["7" if i in (3, 7) else f"{i}+x" for i in range(10)]))
    assert [v.status for v in verdicts] == [Status.TIMEOUT if i in (3, 7) else Status.CORRECT for i in range(10)]


def test_a_killed_worker_is_replaced(scorer: MathScorer) -> None:
    for victims in (slice(-2, None), slice(2)):  # the children, then the keepers
        started = processes(scorer)[victims]
        keepers = [process for process in started if process.ppid() == os.getpid()]
        for process in started:
            process.kill()
        assert gone(keepers)
        for i in range(4):
            assert scorer.score(f"\\boxed{{z+{i}}}", f"{i}+z+{victims.start or 0}-{victims.start or 0}").score == 1


def test_an_answer_that_kills_its_worker_is_a_crash_and_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    with MathScorer(n_workers=1) as scorer:
        assert scorer.score(r"\boxed{v+0}", "0+v").score == 1
        worker = scorer._workers[0]
        monkeypatch.setattr(worker, "_started", lambda: subprocess.Popen(["true"], stdin=-1, stdout=-1, text=True))
        worker.close()
        assert scorer.score(r"\boxed{v+1}", "1+v") == Verdict.of(Status.CRASHED)
        monkeypatch.undo()
        assert scorer.score(r"\boxed{v+1}", "1+v").score == 1


def test_workers_have_a_limit_of_memory(scorer: MathScorer) -> None:
    assert scorer.score(r"\boxed{u+0}", "0+u").score == 1  # a child that answers has its limit
    limits = [process.rlimit(psutil.RLIMIT_AS) for process in processes(scorer) if not process.children()]
    assert (1024 << 20, 1024 << 20) in limits


def test_many_threads_get_their_own_verdicts(scorer: MathScorer) -> None:
    def ask(i: int) -> bool:
        return scorer.score(f"thread {i}: \\boxed{{y+{i}}}", f"{i if i % 3 else i + 1}+y").score == 1

    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(ask, range(96))) == [i % 3 != 0 for i in range(96)]


def test_a_forked_process_has_workers_of_its_own(scorer: MathScorer) -> None:
    ours = processes(scorer)
    asked = r"\boxed{w+1}", "1+w"
    forked = multiprocessing.get_context("fork").Process(
        target=lambda: os._exit(scorer.score(*asked).score == 1), daemon=True
    )
    forked.start()
    forked.join(60)
    assert forked.exitcode == 1
    assert scorer.score(r"\boxed{w+2}", "2+w").score == 1
    assert processes(scorer) == ours


def test_close_ends_all_processes_and_the_scorer_can_be_used_again(scorer: MathScorer) -> None:
    started = processes(scorer)
    scorer.close()
    assert started and gone(started)
    assert scorer.score(r"\boxed{u+1}", "1+u").score == 1


SCRIPT = """
import sys, threading, time
from recipe.math.answers import MathScorer
scorer = MathScorer(n_workers=1, time_limit_s=5)
scorer.score(r"\\boxed{x}", "y")
print(scorer._workers[0]._process.pid, flush=True)
threading.Thread(target=scorer.score, args=(sys.argv[1], "7"), daemon=True).start()
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
        assert len(started) == 2
        parent.send_signal(signal.SIGKILL)
        assert gone(started)


def test_hostile_answers_earn_nothing_and_run_no_code(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    code = f"__import__('pathlib').Path('{trace}').touch()"
    answers = [(text, "1") for text in (code, f"\\boxed{{{code}}}", f"Answer: {code}", f"\\boxed{{\\text{{{code}}}}}")]
    with MathScorer(n_workers=2) as scorer, ThreadPoolExecutor(8) as threads:
        answers += hostile_answers(64, seed=0)
        verdicts = list(threads.map(scorer.score, *zip(*answers, strict=True)))
        assert [verdict for verdict in verdicts if verdict.score or verdict.status is Status.CRASHED] == []
        assert scorer.score(r"\boxed{x+1}", "1+x").score == 1, "an ordinary answer still gets its verdict"
    assert not trace.exists()


def test_math_verify_that_cannot_be_imported_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with MathScorer(n_workers=1) as scorer, pytest.raises(WorkerStartError, match="import math_verify"):
        scorer.score(r"\boxed{x}", "y")


@pytest.mark.parametrize("limits", [{"n_workers": 0}, {"time_limit_s": 0}, {"memory_limit_mb": 100}])
def test_limits_that_no_worker_can_have_are_refused(limits: dict[str, int]) -> None:
    ((name, value),) = limits.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        MathScorer(**limits)  # type: ignore[arg-type]


def test_overlong_penalty_is_the_published_one() -> None:
    assert [soft_overlong_penalty(n, 100, 20) for n in (0, 80, 90, 100, 1000)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    for buffer in (0, 101):
        with pytest.raises(ValueError, match=f"buffer_length={buffer}"):
            soft_overlong_penalty(10, 100, buffer)


def test_status_rates_name_every_status_and_leave_out_other_rewards() -> None:
    rates = status_rates(["correct", "timeout", None, "of another reward", "correct"])
    assert (rates["reward/status/correct"], rates["reward/status/timeout"]) == (2 / 3, 1 / 3)
    assert rates["reward/status/n"] == 3.0
    assert set(rates) == {f"reward/status/{status.value}" for status in Status} | {"reward/status/n"}
    assert status_rates([])["reward/status/correct"] == 0.0
