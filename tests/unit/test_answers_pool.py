"""The worker processes: limits, replacement, threads, and that none of them is left behind."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from recipe.math.answers import MathScorer, Status
from recipe.math.reward import compute_score

#: An integer of 370 million digits, in one call of C.
ENDLESS = r"\boxed{9^{9^9}+%d}"


def keepers(scorer: MathScorer) -> list[psutil.Process]:
    return [psutil.Process(worker._process.pid) for worker in scorer._workers if worker._process]


def children(scorer: MathScorer) -> list[psutil.Process]:
    """The processes that judge, behind the keepers."""
    return [child for keeper in keepers(scorer) for child in keeper.children()]


def limited(scorer: MathScorer) -> list[psutil.Process]:
    """The children whose memory is bounded: one that was just forked has not come so far, a killed one is no more."""
    with suppress(psutil.NoSuchProcess):
        return [child for child in children(scorer) if child.rlimit(psutil.RLIMIT_AS) == (1 << 30, 1 << 30)]
    return []


def gone(of: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(of, timeout=120)[1]


def test_endless_and_many_answers_get_their_own_verdicts() -> None:
    """The others take 3 ms of a processor, the first of a process 0.1 s: with 5 s they never use it."""
    responses = [ENDLESS % i if i in (3, 57) else f"thread {i}: \\boxed{{y+{i}}}" for i in range(96)]
    truths = ["7" if i in (3, 57) else f"{i if i % 3 else i + 1}+y" for i in range(96)]
    expected = [Status.CORRECT if i % 3 else Status.WRONG for i in range(96)]
    expected[3] = expected[57] = Status.TIMEOUT
    with closing(MathScorer(n_workers=2, time_limit_s=5.0)) as scorer, ThreadPoolExecutor(32) as threads:
        assert list(threads.map(scorer.judge, responses, truths)) == expected
        wait_until(lambda: len(limited(scorer)) == 2)  # a keeper whose child has used its time forks the next
        started = [*keepers(scorer), *children(scorer)]
        scorer.close()
        assert len(started) == 4 and gone(started)
        assert scorer.judge(r"\boxed{u+1}", "1+u").score == 1, "it can be used again"


def test_a_killed_or_stopped_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    acts = itertools.product((psutil.Process.kill, psutil.Process.suspend), (children, keepers))
    with closing(MathScorer(n_workers=1, time_limit_s=10.0)) as scorer:
        for number, (act, victims) in enumerate(acts):
            assert scorer.judge(rf"\boxed{{y+{number}}}", f"{number}+y") is Status.CORRECT, (act, victims)
            started = [*keepers(scorer), *children(scorer)]
            for process in victims(scorer):
                act(process)
            if act is psutil.Process.suspend:
                with monkeypatch.context() as impatient:  # what has stopped is silent, however long one waits
                    impatient.setattr("recipe.math.answers.scorer.GRACE_S", -9.9)
                    assert scorer.judge(ENDLESS % number, "7") is Status.TIMEOUT, victims
            assert scorer.judge(rf"\boxed{{z+{number}}}", "z-1") is Status.WRONG, (act, victims)
            assert len(started) == 2 and gone(started), (act, victims)


def test_a_forked_process_has_workers_of_its_own() -> None:
    def is_right(letter: str) -> bool:
        return compute_score("of/tests", f"\\boxed{{{letter}+1}}", f"1+{letter}", time_limit_s=60)["score"] == 1

    assert is_right("v")
    forked = multiprocessing.get_context("fork").Process(target=lambda: os._exit(is_right("w")), daemon=True)
    forked.start()
    forked.join(300)
    assert forked.exitcode == 1 and is_right("u")


SCRIPT = """
import sys
from recipe.math.answers import MathScorer
scorer = MathScorer(n_workers=1, time_limit_s=600)
scorer.judge(r"\\boxed{x}", "y")
print(scorer._workers[0]._process.pid, flush=True)
scorer.judge(sys.argv[1], "7")
"""


def test_no_process_outlives_a_killed_parent() -> None:
    command = [sys.executable, "-c", SCRIPT, ENDLESS % 0]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        keeper = psutil.Process(int(parent.stdout.readline()))
        (child,) = keeper.children()
        wait_until(lambda: child.cpu_times().user > 0.5)  # it judges the endless answer
        parent.kill()
        assert gone([keeper, child])


def test_math_verify_that_cannot_be_imported_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with closing(MathScorer(n_workers=1)) as scorer, pytest.raises(RuntimeError, match="import math_verify"):
        scorer.judge(r"\boxed{x}", "y")
