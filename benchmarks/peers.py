"""verl's own tests with this package's plugins, and without: ``python -m benchmarks.peers CHECKOUT``.

CHECKOUT is one of verl, at the commit of the installed release; the release is what is tested. Each file, by default
``tests/**/*_on_cpu.py``, runs twice in a pytest process of its own, the second time with the plugins and an audit.
Prints the outcomes that both have, the tests that differ, and the files that did not end; exit status 1 if any differ.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

#: Of the checkout, these would be imported in place of the installed packages. verl's tests read files of verl.
_INSTALLED: Final = ("verl", "recipe")
_NO_END: Final = "no end"


def outcomes(report: Path) -> dict[str, str]:
    """Outcome by test of a JUnit report; a file that cannot be imported is one test, with an error."""
    words = {"failure": "failed", "error": "error", "skipped": "skipped"}
    return {
        f"{case.get('classname')}.{case.get('name')}": next((words[x.tag] for x in case if x.tag in words), "passed")
        for case in ElementTree.parse(report).iter("testcase")
    }


def run(folder: Path, file: str, plugins: bool, limit_s: float) -> dict[str, str]:
    """Outcome by test of one file; only _NO_END, if it did not end in time or wrote no report."""
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("FSPO_", "VERL_"))}
        both = {"FSPO_AUDIT": f"{temporary}/audit"} if plugins else {"VERL_USE_EXTERNAL_PLUGINS": "none"}
        environment |= both | {"HF_HUB_OFFLINE": "1"}
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", file]
        out = subprocess.DEVNULL
        with subprocess.Popen(
            words, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True
        ) as tests:
            try:
                tests.wait(limit_s)
            except subprocess.TimeoutExpired:
                return {file: _NO_END}
            finally:  # with what they have started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(tests.pid, signal.SIGKILL)
        return outcomes(report) if report.exists() else {file: _NO_END}


def differing(without: Mapping[str, str], beside: Mapping[str, str]) -> list[str]:
    """A line for each test whose outcome is another one with the plugins."""
    names = sorted(without.keys() | beside.keys())
    ends = [(name, without.get(name, "missing"), beside.get(name, "missing")) for name in names]
    return [f"{name}: {plain} without the plugins, {own} with them" for name, plain, own in ends if plain != own]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    parser.add_argument("--files", nargs="*", default=[], metavar="FILE", help="of the checkout, such as tests/a.py")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="for one file (default: 120)")
    options = parser.parse_args(arguments)
    checkout: Path = options.checkout.resolve()
    files = options.files or sorted(str(x.relative_to(checkout)) for x in checkout.glob("tests/**/*_on_cpu.py"))
    if missing := [x for x in files if not (checkout / x).is_file()] or ([] if files else ["tests/**/*_on_cpu.py"]):
        parser.error(f"{checkout} has no {', '.join(missing)}: give a checkout of verl, and files of it")
    counts: Counter[str] = Counter()
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        release = importlib.util.find_spec("verl")
        if release is not None and release.submodule_search_locations:
            (folder / "verl").symlink_to(release.submodule_search_locations[0])
        for entry in checkout.iterdir():
            if entry.name not in _INSTALLED:
                (folder / entry.name).symlink_to(entry)
        for file in files:
            without, beside = (run(folder, file, plugins, options.limit) for plugins in (False, True))
            counts.update(outcome for name, outcome in without.items() if beside.get(name) == outcome)
            lines += differing(without, beside)
            print(file, dict(Counter(beside.values())), flush=True)
    print(f"the same in both, of {len(files)} files: {dict(counts)}", *lines, f"differ: {len(lines)}", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
