"""What the planner computes: memory, batch arithmetic and time of a run that has not started.

Nothing here imports verl, ray or vllm.
"""

from __future__ import annotations

from omegaconf import DictConfig

from recipe.runner.launch.job import Job


def estimate(config: DictConfig, job: Job) -> list[str]:
    """The planner's lines about a composed configuration of a job, or one that says why there is no plan of it."""
    from recipe.runner.launch.commands import BadInput
    from recipe.runner.plan.prediction import plan

    try:
        planned = plan(config, job)
    except BadInput as error:
        return [f"not planned: {error}"]
    assumed = f"does not fit GPUs of {planned.hardware.gpu_gb:g} GiB, which the plan assumes"
    return [*planned.lines(), *(f"{assumed}: {problem}" for problem in planned.problems)]
