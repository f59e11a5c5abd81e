"""What all tests share: the examples of Hypothesis, threads, a small disk, and the quarters of the slow tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time; --hypothesis-profile=others draws others. No assertion about time.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("others", deadline=None)
settings.load_profile("fixed")

if "PYTEST_XDIST_WORKER" in os.environ:  # a process per core, before numpy or torch is imported
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, int], None]]:
    """Mounts a file system of so many KiB on a folder, which it makes."""
    mounted: list[Path] = []

    def mount(folder: Path, kib: int) -> None:
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("only root can mount a small file system to fill")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


HERE = Path(__file__).parent
#: CI runs one of so many parts of the slow tests (CONTRIBUTING.md, "Tests").
QUARTERS = 4
#: Belongs to every quarter, comes first and does not depend on the time that is left: verl's own trainer is the only
#: start that this package does not begin itself.
ALWAYS = "e2e/test_plugins.py"
#: What the slow tests of each file take on two quiet cores, in seconds; for a file that is not listed, a minute.
SLOW_SECONDS: dict[str, int] = json.loads((HERE / "slow_seconds.json").read_text())
STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    quarter = f"only the slow tests of quarter N modulo {QUARTERS}, and {ALWAYS}; N is the number in tests/slow_quarter"
    parser.addoption("--slow-quarter", type=int, metavar="N", help=quarter)
    within = f"start no further test after so many seconds, {ALWAYS} excepted; the summary names those not run"
    parser.addoption("--slow-within", type=float, metavar="SECONDS", help=within)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED] = time.monotonic()


def file_of(nodeid: str) -> str:
    """The test's file as `slow_seconds.json` names it."""
    return nodeid.partition("::")[0].removeprefix("tests/")


def quarter_by_file(files: Iterable[str]) -> dict[str, int]:
    """The longest file first, each to the quarter that has least to do so far."""
    load, quarter = [0] * QUARTERS, {}
    for file in sorted(files, key=lambda file: (-SLOW_SECONDS.get(file, 60), file)):
        quarter[file] = load.index(min(load))
        load[quarter[file]] += SLOW_SECONDS.get(file, 60)
    return quarter


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number = config.getoption("slow_quarter")
    if number is None:
        return
    slow = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            slow[file_of(item.nodeid)].append(item)
    quarter = quarter_by_file(slow.keys() - {ALWAYS})
    files = sorted(file for file in quarter if quarter[file] == number % QUARTERS)
    # Where the time is too short, the quarter's next turn begins with another file.
    first = number // QUARTERS % max(1, len(files))
    chosen = [item for file in (ALWAYS, *files[first:], *files[:first]) for item in slow[file]]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> str | None:
    number = config.getoption("slow_quarter")
    if number is None:
        return None
    files = ", ".join(dict.fromkeys(file_of(item.nodeid) for item in items))
    return f"slow tests: quarter {number % QUARTERS + 1} of {QUARTERS} (tests/slow_quarter is {number}): {files}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    within = item.config.getoption("slow_within")
    late = within is not None and time.monotonic() - item.config.stash[STARTED] > within
    if late and file_of(item.nodeid) != ALWAYS:
        item.user_properties.append(("not run", True))
        pytest.skip(f"not run: {within:.0f} s have passed (--slow-within)")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    options = terminalreporter.config.option
    if options.slow_quarter is None or options.collectonly:
        return
    seconds: defaultdict[str, float] = defaultdict(float)
    not_run = []
    for report in (entry for reports in terminalreporter.stats.values() for entry in reports):
        if isinstance(report, pytest.TestReport):
            seconds[file_of(report.nodeid)] += report.duration
            if report.when == "setup" and ("not run", True) in report.user_properties:
                not_run.append(report.nodeid)
    terminalreporter.section("slow tests")
    for file, took in seconds.items():
        terminalreporter.line(f"{file}: {took:.0f} s (tests/slow_seconds.json: {SLOW_SECONDS.get(file, 'not listed')})")
    for nodeid in not_run:
        terminalreporter.line(f"not run for want of time: {nodeid}")
