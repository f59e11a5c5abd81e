"""Requests that a run sends to vLLM's servers at once, and the slots for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from composing import composed

from recipe.runner.verl_patches import server_slots


def test_a_server_has_the_larger_of_verls_number_and_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.rollout.replica import RolloutReplica

    monkeypatch.setattr(RolloutReplica, "max_concurrency", RolloutReplica.max_concurrency)  # put back afterwards

    def of(max_num_seqs: int) -> int:
        replica = SimpleNamespace(config=SimpleNamespace(max_num_seqs=max_num_seqs))
        return int(RolloutReplica.max_concurrency.fget(replica))

    server_slots.give_servers_slots(4096)
    assert (of(256), of(8000)) == (4096, 8016)
    job = ("experiment=qwen3_8b", "mode=colocate_async")  # 512 prompts of 16 responses, and as many in advance
    assert server_slots.slots(composed(*job)) == 2 * 8192 + 64
    assert server_slots.slots(composed("experiment=qwen3_8b")) is None
