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


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([], "2 node(s) with 8 GPU(s) each are needed"),
        ([{"GPU": 8, "CPU": 64}], "the 1 node(s) in Ray have: 8"),
        ([{"GPU": 8, "CPU": 64}, {"GPU": 4, "CPU": 64}], "have: 8, 4"),
        ([{"GPU": 8, "CPU": 20}, {"GPU": 8, "CPU": 20}], "48 CPUs are needed, Ray has 40"),
        ([{"GPU": 8, "CPU": 24}, {"GPU": 8, "CPU": 24}], None),
    ],
)
def test_what_is_missing_is_said(nodes: list[dict[str, float]], says: str | None) -> None:
    found = missing(Needs(nodes=2, gpus_per_node=8, cpus=48, gpus=16), nodes)
    assert found is None if says is None else says in found


def test_devices_that_only_generate_count_too() -> None:
    found = missing(Needs(nodes=1, gpus_per_node=8, cpus=8, gpus=16), [{"GPU": 8, "CPU": 64}])
    assert found is not None and "16 GPUs are needed" in found and "Ray has 8" in found
