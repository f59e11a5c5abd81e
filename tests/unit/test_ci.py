"""The time after which CI starts no slow test (tests/conftest.py)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_no_test_starts_after_the_time_and_those_not_run_are_named(pytester: pytest.Pytester) -> None:
    shutil.copy(ROOT / "tests/conftest.py", pytester.path)
    pytester.makepyfile(test_it="def test_first(): pass\ndef test_second(): pass")
    quiet = ("-ra", "-p", "no:cacheprovider", "-p", "no:xdist")
    pytester.runpytest(*quiet, "--start-within=1e9").assert_outcomes(passed=2)
    done = pytester.runpytest(*quiet, "--start-within=0")
    done.assert_outcomes(skipped=2)
    done.stdout.fnmatch_lines(["*not run*test_it.py::test_first", "*not run*test_it.py::test_second"])
