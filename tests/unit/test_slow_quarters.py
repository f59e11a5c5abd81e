"""The quarters of the slow tests (tests/conftest.py): each test in one of them, plain verl's start in all."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
TEST = "import pytest\n@pytest.mark.slow\ndef test_slow(): pass\ndef test_quick(): pass\n"
ALWAYS = "e2e/test_plugins.py"
SECONDS = {"unit/test_long.py": 500, "unit/test_a.py": 100, "unit/test_b.py": 90, "unit/test_gone.py": 400}
FILES = [*(f"unit/test_{name}.py" for name in ("long", "a", "b", "c", "d", "e")), "e2e/test_f.py"]


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A slow test and another one in each of the files."""
    shutil.copy(TESTS / "conftest.py", pytester.path)
    (pytester.path / "slow_seconds.json").write_text(json.dumps(SECONDS))
    pytester.makeini("[pytest]\nmarkers = slow\naddopts = --import-mode=importlib -p no:cacheprovider -p no:xdist")
    for file in (ALWAYS, *FILES):
        (pytester.path / file).parent.mkdir(exist_ok=True)
        (pytester.path / file).write_text(TEST)
    return pytester


def slow_tests(project: pytest.Pytester, number: int) -> list[str]:
    """Files whose slow test has run, in the order of the run."""
    reports = project.inline_run(f"--slow-quarter={number}").getreports("pytest_runtest_logreport")
    calls = [report.nodeid for report in reports if report.when == "call" and report.passed]
    assert all(nodeid.endswith("::test_slow") for nodeid in calls)
    return [nodeid.partition("::")[0] for nodeid in calls]


def test_four_numbers_in_a_row_run_every_slow_test_once_and_plain_verl_always(project: pytest.Pytester) -> None:
    quarters = [slow_tests(project, number) for number in range(3, 7)]
    assert [quarter.pop(0) for quarter in quarters] == [ALWAYS] * 4
    assert sorted(file for quarter in quarters for file in quarter) == sorted(FILES)


def test_every_quarter_fits_into_the_time_after_make_test() -> None:
    hook = runpy.run_path(str(TESTS / "conftest.py"))
    seconds, quarter = hook["SLOW_SECONDS"], hook["quarter_by_file"](hook["SLOW_SECONDS"].keys() - {ALWAYS})
    load = [sum(seconds[file] for file in quarter if quarter[file] == number) for number in range(hook["QUARTERS"])]
    assert max(load) + seconds[ALWAYS] <= 35 * 60, load  # 45 minutes less `make test` and its set-up
    assert int((TESTS / "slow_quarter").read_text()) >= 0
