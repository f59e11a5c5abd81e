"""Slots of vLLM's servers for the requests that a run sends at once."""

from __future__ import annotations

import pytest
from composing import composed
from verl.workers.rollout.replica import RolloutReplica

from recipe.runner.hooks import RunnerHooks


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_servers_of_asynchronous_modes_take_all_at_once(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(RolloutReplica, "max_concurrency", 1016)  # put back afterwards
    monkeypatch.setattr("recipe.runner.hooks._LOGGERS", {})
    trainer = type("Trainer", (RunnerHooks,), {"verl_mode": mode})
    trainer(composed(f"mode={mode}", "trainer.default_local_dir=/nowhere"))
    requests = 512 * 16 * 2  # of experiment=qwen3_8b, and as many in advance
    assert (RolloutReplica.max_concurrency > requests) == (mode != "sync")
