"""What a run needs of Ray, and what is said when Ray has less."""

from __future__ import annotations

import pytest
from composing import composed

from recipe.runner.faults.resources import Needs, missing, needs_of


def test_needs_follow_the_configuration() -> None:
    assert needs_of(composed()) == Needs(nodes=1, gpus_per_node=1, cpus=9, gpus=1)
    two = composed("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.agent.num_workers=4")
    assert needs_of(two) == Needs(nodes=1, gpus_per_node=2, cpus=15, gpus=2)
    separate = composed("mode=separate_async", "actor_rollout_ref.rollout.n_gpus_per_node=3")
    assert needs_of(separate) == Needs(nodes=1, gpus_per_node=1, cpus=15, gpus=4)


TWO_NODES = Needs(nodes=2, gpus_per_node=8, cpus=48, gpus=16)


@pytest.mark.parametrize(
    ("needs", "nodes", "says"),
    [
        (TWO_NODES, [], "2 node(s)"),
        (TWO_NODES, [{"GPU": 8, "CPU": 64}, {"GPU": 4, "CPU": 64}], "8, 4"),
        (TWO_NODES, [{"GPU": 8, "CPU": 20}, {"GPU": 8, "CPU": 20}], "ray_kwargs.ray_init.num_cpus=48"),
        (TWO_NODES, [{"GPU": 8, "CPU": 24}, {"GPU": 8, "CPU": 24}], None),
        # Devices that only generate count, too.
        (Needs(nodes=1, gpus_per_node=8, cpus=8, gpus=16), [{"GPU": 8, "CPU": 64}], "16 GPUs"),
    ],
)
def test_what_is_missing_is_said(needs: Needs, nodes: list[dict[str, float]], says: str | None) -> None:
    lacking = missing(needs, nodes)
    assert lacking is None if says is None else says in str(lacking)
