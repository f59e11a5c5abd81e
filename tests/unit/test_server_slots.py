"""Requests that a run sends to vLLM's servers at once, the slots for them, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from composing import composed

from recipe.runner.launch import server_slots

JOB = ("experiment=qwen3_8b",)  # 512 prompts of 16 responses, TP=2
SEPARATE = ("mode=separate_async", "actor_rollout_ref.rollout.nnodes=2", "actor_rollout_ref.rollout.n_gpus_per_node=8")


@pytest.mark.parametrize(
    ("overrides", "servers", "each", "slots"),
    [
        ((), 4, 2048, None),
        (("mode=colocate_async",), 4, 4096, 2 * 8192 + 64),
        (("mode=colocate_async", "trainer.nnodes=2"), 8, 2048, 2 * 8192 + 64),
        (("mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=1.5"), 4, 5120, 20480 + 64),
        ((*SEPARATE, "trainer.v1.separate_async.num_warmup_batches=0"), 8, 1024, 8192 + 64),
        (("mode=colocate_async", "trainer.v1.separate_async.num_warmup_batches=9"), 4, 4096, 2 * 8192 + 64),
    ],
)
def test_every_request_of_an_asynchronous_run_has_a_slot(
    overrides: tuple[str, ...], servers: int, each: int, slots: int | None
) -> None:
    config = composed(*JOB, *overrides)
    assert (server_slots.servers(config), server_slots.requests_per_server(config)) == (servers, each)
    assert server_slots.slots(config) == slots
    assert list(server_slots.problems(config)) == []


def test_more_requests_than_a_server_can_hold_are_refused_with_a_batch_that_fits() -> None:
    large = (*JOB, "mode=colocate_async", "data.train_batch_size=16384")
    (problem,) = server_slots.problems(composed(*large))
    assert "data.train_batch_size=16384 " in problem and " 131072 requests " in problem
    assert "trainer.v1.colocate_async.num_warmup_batches" in problem
    remedy = problem.partition(": set ")[2].split()[0]
    assert list(server_slots.problems(composed(*large, remedy))) == []
    assert list(server_slots.problems(composed(*large, "trainer.nnodes=2"))) == []
    assert list(server_slots.problems(composed(*JOB, "data.train_batch_size=65536"))) == [], "verl's order in sync"


def test_a_server_has_the_larger_of_verls_number_and_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.rollout.replica import RolloutReplica

    from recipe.fspo.trainer import give_servers_slots

    monkeypatch.setattr(RolloutReplica, "max_concurrency", RolloutReplica.max_concurrency)  # put back afterwards

    def of(max_num_seqs: int) -> int:
        replica = SimpleNamespace(config=SimpleNamespace(max_num_seqs=max_num_seqs))
        return int(RolloutReplica.max_concurrency.fget(replica))

    assert of(256) == 1000, "verl has another number now: is the patch still needed?"
    give_servers_slots(4096)
    assert (of(256), of(8000)) == (4096, 8016)
