"""The worker processes: limits, replacement, threads, and that none of them is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hostile import hostile_answers

from benchmarks.rewards import score_all
from recipe.math.answers import MathScorer, Status, Verdict, format_reward, soft_overlong_penalty, status_rates

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = r"\boxed{\int_0^1 x^x \sin(e^{x^%d}) dx}"


@pytest.fixture(scope="module")
def scorer() -> Iterator[MathScorer]:
    with MathScorer(n_workers=2, time_limit_s=0.3) as scorer:
        yield scorer


def launcher_of(scorer: MathScorer) -> psutil.Process:
    launcher = scorer._pool._launcher
    assert launcher is not None
    return psutil.Process(launcher._process.pid)


def gone(processes: list[psutil.Process], patience_s: float = 20.0) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    return not alive


def test_stuck_worker_is_replaced_and_the_rest_of_its_batch_is_scored(scorer: MathScorer) -> None:
    responses = [f"\\boxed{{x+{i}}}" for i in range(10)]
    responses[3], responses[7] = ENDLESS % 2, ENDLESS % 3
    verdicts = score_all(scorer, responses, [f"{i}+x" for i in range(10)])
    assert [v.status for v in verdicts] == [Status.TIMEOUT if i in (3, 7) else Status.CORRECT for i in range(10)]


def test_worker_killed_from_outside_costs_no_verdict(scorer: MathScorer) -> None:
    assert scorer.score(r"\boxed{z+1}", "1+z").status is Status.CORRECT
    for worker in launcher_of(scorer).children():
        worker.kill()
    assert scorer.score(r"\boxed{z+2}", "2+z").status is Status.CORRECT
    launcher = launcher_of(scorer)
    workers = launcher.children()
    launcher.kill()
    assert gone(workers), "workers must die with their launcher"
    assert scorer.score(r"\boxed{u+2}", "2+u").status is Status.CORRECT


def test_a_launcher_that_is_about_to_end_is_replaced(scorer: MathScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scorer.score(r"\boxed{w+1}", "1+w").status is Status.CORRECT
    launcher = scorer._pool._launcher
    assert launcher is not None
    looks, ended = [], type(launcher).ended

    def seems_to_run(self: Any) -> bool:  # when it is looked at first, while another thread still waits for it
        looks.append(self)
        return len(looks) > 1 and ended(self)

    launcher_of(scorer).kill()
    launcher_of(scorer).wait(10)
    monkeypatch.setattr(type(launcher), "ended", seems_to_run)
    gc.collect()  # what other tests have left in this process is not of the pool
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert scorer.score(r"\boxed{w+2}", "2+w").status is Status.CORRECT
        gc.collect()
    assert [warning for warning in seen if warning.category is ResourceWarning] == []


def test_worker_that_dies_twice_is_a_crash_and_not_remembered(
    scorer: MathScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(worker: object) -> None:
        os.kill(worker.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        raise EOFError

    monkeypatch.setattr(scorer._pool, "_receive", die)
    assert scorer.score(r"\boxed{v+1}", "1+v") == Verdict.of(Status.CRASHED)
    monkeypatch.undo()
    assert scorer.score(r"\boxed{v+1}", "1+v").status is Status.CORRECT


def test_many_threads_get_their_own_verdicts(scorer: MathScorer) -> None:
    def ask(i: int) -> Verdict:
        return scorer.score(f"thread {i}: \\boxed{{y+{i}}}", f"{i if i % 3 else i + 1}+y")

    with ThreadPoolExecutor(12) as executor:
        verdicts = list(executor.map(ask, range(60)))
    assert [v.status is Status.CORRECT for v in verdicts] == [i % 3 != 0 for i in range(60)]


def test_no_caller_waits_for_the_whole_batch() -> None:
    """Callers are served in their order: of 300 from 16 threads with one worker, each waits for about 16 answers."""

    def ask(i: int) -> tuple[float, float]:
        begin = time.monotonic()
        scorer.score(f"\\boxed{{y+{i}}}", f"{i}+y")
        return begin, time.monotonic()

    with MathScorer(n_workers=1) as scorer, ThreadPoolExecutor(16) as executor:
        ask(-1)
        times = list(executor.map(ask, range(300)))
    for begin, end in times:  # no other answer that was asked for later than by all 16 threads came before it
        assert sum(begin < other and then < end for other, then in times) <= 2 * 16


def test_a_full_process_table_refuses_an_answer_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's fork fails as the kernel fails it (root's processes have no limit that a test could set)."""
    full = tmp_path / "full"
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, os\n"
        "fork = os.fork\n"
        "def limited():\n"
        f"    if os.path.exists({str(full)!r}):\n"
        "        raise BlockingIOError(errno.EAGAIN, 'Resource temporarily unavailable')\n"
        "    return fork()\n"
        "os.fork = limited\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with MathScorer(n_workers=1, time_limit_s=0.2) as scorer:
        assert scorer.score(r"\boxed{x+1}", "1+x").status is Status.CORRECT
        launcher = launcher_of(scorer)
        full.touch()
        assert scorer.score(r"\boxed{x+2}", "2+x").status is Status.CORRECT, "a worker was there"
        assert scorer.score(ENDLESS % 2, "1").status is Status.TIMEOUT
        assert scorer.score(r"\boxed{x+3}", "3+x").status is Status.REFUSED
        full.unlink()
        assert scorer.score(r"\boxed{x+3}", "3+x").status is Status.CORRECT
        assert launcher_of(scorer) == launcher


def test_close_ends_all_processes_and_the_scorer_can_be_used_again(scorer: MathScorer) -> None:
    scorer.score("about 1", "2")
    started = [launcher_of(scorer), *launcher_of(scorer).children()]
    scorer.close()
    assert gone(started)
    assert scorer.score(r"\boxed{w+1}", "1+w").status is Status.CORRECT


SCRIPT = """
import os, sys, time
from recipe.math.answers import MathScorer
scorer = MathScorer(n_workers=1)
scorer.score("about 1", "2")
print(scorer._pool._launcher._process.pid, flush=True)
{ending}
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["os._exit(1)", "time.sleep(600)"])
def test_no_process_outlives_its_parent(ending: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(ending=ending)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    try:
        launcher_pid = int(parent.stdout.readline())
        try:
            launcher = psutil.Process(launcher_pid)
            started = [launcher, *launcher.children()]
        except psutil.NoSuchProcess:  # the parent was quicker than we were
            started = []
        if "sleep" in ending:
            parent.kill()
        parent.wait(timeout=60)
        assert gone(started)
    finally:
        parent.kill()
        parent.stdout.close()


@pytest.mark.parametrize("n", [16, pytest.param(1_200, marks=pytest.mark.slow)])
def test_hostile_answers_are_all_scored_in_bounded_memory(n: int) -> None:
    answers = hostile_answers(n, seed=n)
    peaks: list[int] = []
    with MathScorer(n_workers=2, time_limit_s=0.5) as scorer:
        scorer.score("about 1", "2")
        launcher = launcher_of(scorer)
        for response, truth in answers:
            verdict = scorer.score(response, truth)
            assert verdict.score == 0.0 and verdict.status is not Status.CRASHED, (response[:200], truth)
            peaks += [p.memory_info().rss for p in launcher.children() if p.is_running()]
        # Nobody is lost: after all that, an ordinary answer still gets its verdict.
        assert scorer.score(r"\boxed{x+1}", "1+x").status is Status.CORRECT
    assert max(peaks) < 1024 << 20


def test_overlong_penalty_is_the_published_one() -> None:
    assert [soft_overlong_penalty(n, 100, 20) for n in (0, 80, 90, 100, 1000)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    for buffer in (0, 101):
        with pytest.raises(ValueError, match=f"buffer_length={buffer}"):
            soft_overlong_penalty(10, 100, buffer)


def test_format_reward() -> None:
    assert format_reward(r"so \boxed{3}") == 1.0
    for response in (r"\boxed{3} then \boxed{4}", r"\boxed{ }", r"\boxed{3", r"\boxed 3", "3"):
        assert format_reward(response) == 0.0


def test_status_rates_name_every_status_and_leave_out_other_rewards() -> None:
    rates = status_rates(["correct", "timeout", None, "of another reward", "correct"])
    assert rates["reward/status/correct"] == 2 / 3
    assert rates["reward/status/timeout"] == 1 / 3
    assert rates["reward/status/n"] == 3.0
    assert set(rates) == {f"reward/status/{status.value}" for status in Status} | {"reward/status/n"}
    assert status_rates([])["reward/status/correct"] == 0.0
