"""Requests that a run sends to vLLM's servers at once, and the slots for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from composing import composed

from recipe.runner.launch import checks
from recipe.runner.verl_patches import server_slots

JOB = ("experiment=qwen3_8b",)  # 512 prompts of 16 responses, TP=2
SEPARATE = ("mode=separate_async", "actor_rollout_ref.rollout.nnodes=2", "actor_rollout_ref.rollout.n_gpus_per_node=8")


@pytest.mark.parametrize(
    ("overrides", "servers", "per_server", "slots"),
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
    overrides: tuple[str, ...], servers: int, per_server: int, slots: int | None
) -> None:
    config = composed(*JOB, *overrides)
    assert (server_slots.servers(config), server_slots.requests_per_server(config)) == (servers, per_server)
    assert server_slots.slots(config) == slots


def test_more_slots_than_a_server_may_have_are_refused_before_ray() -> None:
    prompts = "data.train_batch_size=2046"  # 2 x 2046 x 16 + 64 = 65,536
    assert list(checks.batch_problems(composed(*JOB, "mode=sync", "data.train_batch_size=8192"))) == []
    assert not any(
        "slots" in problem for problem in checks.batch_problems(composed(*JOB, "mode=colocate_async", prompts))
    )
    over = composed(*JOB, "mode=colocate_async", "data.train_batch_size=2048")
    assert "65600 slots" in "".join(checks.batch_problems(over)) and checks.batch_problems in checks.RULES


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
