"""How tests are spread over processes: unit tests by file, and starts of the real stack one after the other."""

from __future__ import annotations

from typing import Any

import pytest

try:
    from xdist.scheduler import LoadFileScheduling
except ImportError:  # pytest alone runs one test after the other anyway
    LoadFileScheduling = object

#: The one unit of work that all files of tests/e2e make up: two starts of Ray on two cores must not overlap.
STARTS = "tests/e2e"


class StartsAlone(LoadFileScheduling):
    """Files of unit tests on all workers; what is in tests/e2e by one of them, once the others have nothing to do."""

    def _split_scope(self, nodeid: str) -> str:
        return STARTS if nodeid.startswith(f"{STARTS}/") else super()._split_scope(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        if STARTS in self.workqueue:
            self.workqueue.move_to_end(STARTS)
            others = [work for worker, work in self.assigned_work.items() if worker is not node]
            if len(self.workqueue) == 1 and any(self._pending_of(work) for work in others):
                return
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        if list(self.workqueue) != [STARTS]:
            super()._reschedule(node)
            return
        *others, last = self.nodes
        for other in others:
            if not other.shutting_down:
                other.shutdown()  # once it has done what it has
        self._assign_work_unit(last)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return StartsAlone(config, log)
