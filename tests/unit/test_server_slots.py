"""Requests that a run sends to vLLM's servers at once, and the slots for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from composing import composed

from recipe.runner.verl_patches import server_slots

JOB = ("experiment=qwen3_8b",)  # 512 prompts of 16 responses, TP=2
SEPARATE = ("mode=separate_async", "actor_rollout_ref.rollout.nnodes=2", "actor_rollout_ref.rollout.n_gpus_per_node=8")


@pytest.mark.parametrize(
    ("overrides", "slots"),
    [
        ((), None),
        (("mode=colocate_async",), 2 * 8192 + 64),
        (("mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=1.5"), 20480 + 64),
        ((*SEPARATE, "trainer.v1.separate_async.num_warmup_batches=0"), 8192 + 64),
    ],
)
def test_every_request_of_an_asynchronous_run_has_a_slot(overrides: tuple[str, ...], slots: int | None) -> None:
    assert server_slots.slots(composed(*JOB, *overrides)) == slots


def test_a_server_has_the_larger_of_verls_number_and_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.rollout.replica import RolloutReplica

    from recipe.runner.verl_patches.server_slots import give_servers_slots

    monkeypatch.setattr(RolloutReplica, "max_concurrency", RolloutReplica.max_concurrency)  # put back afterwards

    def of(max_num_seqs: int) -> int:
        replica = SimpleNamespace(config=SimpleNamespace(max_num_seqs=max_num_seqs))
        return int(RolloutReplica.max_concurrency.fget(replica))

    assert of(256) == 1000, "verl has another number now: is the patch still needed?"
    give_servers_slots(4096)
    assert (of(256), of(8000)) == (4096, 8016)
