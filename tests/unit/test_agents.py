"""The last exception of an agent loop is kept, because verl trains on without its response."""

from __future__ import annotations

import logging
from types import SimpleNamespace

from recipe.runner import agent_failures


def test_a_worker_keeps_the_last_exception_of_its_loops() -> None:
    worker = SimpleNamespace()
    assert agent_failures._kept(worker) == ""
    agent_failures._keep(worker)
    try:
        for text in ("first", "the tool server is down"):
            try:
                raise ConnectionError(text)
            except ConnectionError:
                agent_failures.agent_loop_tq.logger.exception("Error in _run_prompt")
        assert "ConnectionError: the tool server is down" in agent_failures._kept(worker)
    finally:
        agent_failures.agent_loop_tq.logger.removeHandler(worker.last_failure)
    assert isinstance(worker.last_failure, logging.Handler)
