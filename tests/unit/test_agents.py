"""The last exception of an agent loop is kept, because verl trains on without its response."""

from __future__ import annotations

import logging
from types import SimpleNamespace

from recipe.runner import response_watch


def test_a_worker_keeps_the_last_exception_of_its_loops() -> None:
    worker = SimpleNamespace()
    assert response_watch._kept(worker) == ""
    response_watch._keep(worker)
    try:
        for text in ("first", "the tool server is down"):
            try:
                raise ConnectionError(text)
            except ConnectionError:
                response_watch.agent_loop_tq.logger.exception("Error in _run_prompt")
        assert "ConnectionError: the tool server is down" in response_watch._kept(worker)
    finally:
        response_watch.agent_loop_tq.logger.removeHandler(worker.last_failure)
    assert isinstance(worker.last_failure, logging.Handler)
