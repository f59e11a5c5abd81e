"""Many small checks as one test, whose failure is the list of those that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest


def check_all(checks: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Run every check, of which each has a name; fail with a line for each that raises."""
    failed = []
    for name, check in checks:
        try:
            check()
        except (Exception, SystemExit, pytest.fail.Exception) as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error).strip()}")
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
