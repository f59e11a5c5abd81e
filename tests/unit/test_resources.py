"""What a run needs of Ray, and what is said when Ray has less."""

from __future__ import annotations

import pytest
from composing import composed

from recipe.runner.faults.resources import missing

NODE, HALF = {"GPU": 8, "CPU": 29}, {"GPU": 4, "CPU": 64}
TWO_NODES = ("trainer.nnodes=2", "trainer.n_gpus_per_node=8")
#: One that trains, and three that only generate: 3 + 2 * 3 + 3 and those of the demo's helpers.
SEPARATE = ("mode=separate_async", "actor_rollout_ref.rollout.n_gpus_per_node=3")


@pytest.mark.parametrize(
    ("words", "nodes", "says"),
    [
        ((), [{"GPU": 1, "CPU": 9}], None),
        ((), [{"GPU": 1, "CPU": 8}], "ray_kwargs.ray_init.num_cpus=9 "),
        (("actor_rollout_ref.rollout.agent.num_workers=4",), [{"GPU": 1, "CPU": 11}], "num_cpus=12 "),
        (SEPARATE, [{"GPU": 4, "CPU": 15}], None),
        (SEPARATE, [{"GPU": 4, "CPU": 14}], "num_cpus=15 "),
        (SEPARATE, [{"GPU": 3, "CPU": 64}], "4 GPUs"),
        (TWO_NODES, [], "2 node(s)"),
        (TWO_NODES, [NODE, HALF, HALF], "8, 4, 4"),
        (TWO_NODES, [NODE, NODE], None),
    ],
)
def test_what_is_missing_is_said(words: tuple[str, ...], nodes: list[dict[str, float]], says: str | None) -> None:
    lacking = missing(composed(*words), nodes)
    assert lacking is None if says is None else says in str(lacking)
