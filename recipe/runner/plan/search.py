"""Layouts of a job, tried one after the other: the cheapest in GPU hours that leave some memory."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch.commands import BadInput
from recipe.runner.launch.job import Job
from recipe.runner.plan.memory import GIB, PHASES
from recipe.runner.plan.model import ModelShape, read_architecture
from recipe.runner.plan.prediction import Plan, predicted
from recipe.runner.plan.setup import Hardware, Setup, refuse_uncovered

#: GiB that each phase leaves of a GPU.
SPARE_GB: Final = 3.0
#: What a token budget, ``fsdp_size`` or ``forward_prefetch`` has to gain to be overridden.
_WORTH: Final = 1.01
#: Larger is faster as long as it fits, so the first that fits is taken. vLLM's largest CUDA graph has 512 sequences.
_SHARES: Final = (0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4)
_SEQUENCES: Final = range(512, 0, -32)
_FSDP: Final = "actor_rollout_ref.actor.fsdp_config"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
Overrides = dict[str, Any]


def search(
    job: Job,
    modes: Mapping[str, DictConfig],
    fixed: Collection[str],
    hardware: Hardware,
    model_config: str | None = None,
) -> list[tuple[Overrides, Plan]]:
    """The five cheapest layouts in GPU hours of the whole run: what each overrides, and its plan.

    Args:
        job: What is planned.
        modes: Its configurations by the mode to override; as it is, it has an empty name.
        fixed: Keys that keep their values.
        hardware, model_config: As in :func:`~recipe.runner.plan.prediction.plan`.

    Raises:
        BadInput: for a setting without a formula, or if no layout leaves SPARE_GB.
    """
    refuse_uncovered(modes[""])
    model = ModelShape.from_config(*read_architecture(modes[""].actor_rollout_ref.model.path, model_config))
    tried = [
        ({"mode": mode} | overrides if mode else overrides, plan)
        for mode, config in modes.items()
        for overrides, plan in _layouts(copy.deepcopy(config), job, fixed, hardware, model)
    ]
    if not tried:
        raise BadInput(f"no layout leaves {SPARE_GB:g} GiB of each GPU: take a smaller model or more GPUs, or fix less")
    return sorted(tried, key=lambda layout: layout[1].time["gpu_hours"])[:5]


def spare_gb(plan: Plan) -> float:
    """GiB that the fullest phase leaves of a GPU."""
    return plan.hardware.gpu_gb - max(plan.memory.total(phase) for phase in PHASES) / GIB


def _layouts(
    config: DictConfig, job: Job, fixed: Collection[str], hardware: Hardware, model: ModelShape
) -> Iterator[tuple[Overrides, Plan]]:
    """The layouts that fit, the fastest for each choice of nodes, parallelism and offloading. A plan's memory and time
    are its own; the ``config`` that its setup has is changed by the next."""
    own: Overrides = {}

    def grid(key: str, values: Iterable[Any]) -> list[tuple[str, Any]]:
        own[key] = OmegaConf.select(config, key)
        return [(key, value) for value in ([own[key]] if key in fixed else values)]

    def fitting(layout: Overrides) -> Plan | None:
        for key, value in layout.items():
            OmegaConf.update(config, key, value)
        plan = predicted(config, job, model, hardware)
        return None if plan.problems or spare_gb(plan) < SPARE_GB else plan

    def fullest(layout: Overrides) -> tuple[Overrides, Plan] | None:
        for share in shares:
            fit = math.inf
            for sequences in numbers:
                if sequences[1] > fit:
                    continue
                filled = layout | dict([share, sequences])
                if (plan := fitting(filled)) is None:
                    break  # the number of sequences changes little
                fit = plan.time["fit"]
                if sequences[1] <= fit:
                    return filled, plan
        return None

    setup = Setup(config, job)
    gpus, longest = setup.trainer.n_gpus_per_node, -(-setup.longest // setup.ulysses)
    groups = (
        grid("trainer.nnodes", (1, 2)),
        grid(f"{_ROLLOUT}.nnodes", (1, 2) if setup.rollout_gpus else (setup.rollout.nnodes,)),
        grid(f"{_ROLLOUT}.tensor_model_parallel_size", (size for size in (1, 2, 4, 8) if gpus % size == 0)),
        grid(f"{_FSDP}.param_offload", (True, False)),
        grid(f"{_FSDP}.optimizer_offload", (True, False)),
    )
    shares, numbers = grid(f"{_ROLLOUT}.gpu_memory_utilization", _SHARES), grid(f"{_ROLLOUT}.max_num_seqs", _SEQUENCES)
    further = (
        *grid("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", (longest, 2 * longest, 4 * longest)),
        *grid(f"{_FSDP}.fsdp_size", (-1, gpus)),
        *grid(f"{_FSDP}.forward_prefetch", (False, True)),
    )
    for group in itertools.product(*groups):
        if (best := fullest(own | dict(group))) is None:
            continue
        for key, value in further:
            plan = fitting(other := best[0] | {key: value})
            if plan and plan.time["gpu_hours"] * _WORTH < best[1].time["gpu_hours"]:
                best = other, plan
        yield {key: value for key, value in best[0].items() if value != own[key]}, best[1]
