"""Code of the user's answers from a process of its own, whatever it prints and whatever still runs in it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from recipe.runner.launch.own_process import asked

ANSWERS = "from recipe.runner.launch.own_process import answer\nimport atexit, os, sys\n"
NOISE = """
def noise():
    print("printed")
    os.write(1, b"written")
    os.system("echo of a child")
    return {"a": [1, None]}
answer(noise)
"""
HANGS = """
import asyncio, time
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor().submit(time.sleep, 100)
answer(lambda: "done")
"""
TIDIES = "atexit.register(open, 'tidied', 'w')\nanswer(lambda: 'done')\n"


@pytest.mark.parametrize(
    ("text", "value", "says"),
    [
        (NOISE, {"a": [1, None]}, None),
        (HANGS, "done", None),
        (TIDIES, "done", None),
        ("os._exit(0)", None, "status 0"),
        ("sys.exit('no such library')", None, "status 1: no such library"),
    ],
    ids=["noise", "hangs", "tidies", "ends", "fails"],
)
def test_the_answer_comes_and_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, value: object, says: str | None
) -> None:
    (tmp_path / "code_of_mine.py").write_text(ANSWERS + text)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}{os.pathsep}{tmp_path}")
    monkeypatch.chdir(tmp_path)
    begun = time.monotonic()
    answer, ended = asked("code_of_mine")
    assert answer == value and (ended is None) == (says is None) and (says or "") in (ended or "")
    assert time.monotonic() - begun < 60  # of the 100 s that the thread sleeps
    assert (tmp_path / "tidied").exists() == (text == TIDIES)
