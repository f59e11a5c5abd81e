"""The process that trains, an actor of Ray, and what the launching process keeps of it."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from verl.trainer.main_ppo import TaskRunnerV1

from recipe.runner.faults.preemption import job_variables
from recipe.runner.launch.loggers import run_name
from recipe.runner.launch.run_folder import Start
from recipe.runner.progress import PROGRESS
from recipe.runner.verl_patches.shown import show_configuration


class TaskRunner(TaskRunnerV1.__ray_actor_class__):  # type: ignore[misc,name-defined]
    """verl's task runner with the job's trainer registered, whose lines for a person go to the run folder.

    ``variables`` are what the launching process's environment says of its job.
    """

    def __init__(self, modules: tuple[str, ...], written: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        super().__init__()
        self._modules, self._written = modules, written
        os.environ.update(variables)

    def run(self, config: DictConfig) -> None:
        PROGRESS.write_to(config.run.dir)
        PROGRESS.say("the trainer is up, importing the trainer")
        for module in self._modules:
            importlib.import_module(module)
        with open_dict(config):
            config.trainer.experiment_name = run_name(config)
        show_configuration(self._written)
        super().run(config)


class TrainerHandle:
    """What verl's ``run_ppo`` takes for the runner's class: it starts the actor and keeps the handle."""

    def __init__(self, start: Start) -> None:
        self.handle: Any = None
        job = start.job
        self._arguments = (job.modules, start.written(), job_variables())
        self._options: dict[str, Any] = {}

    def options(self, **options: Any) -> TrainerHandle:
        """verl asks for Nsight Systems (``global_profiler.tool=nsys``) this way, on GPUs."""
        self._options = options
        return self

    def remote(self) -> Any:
        """Start the actor."""
        runner = ray.remote(TaskRunner).options(num_cpus=1, **self._options)
        self.handle = runner.remote(*self._arguments)
        return self.handle

    def kill(self) -> None:
        """End the actor, if it was started and Ray is there."""
        if self.handle is not None and ray.is_initialized():
            with contextlib.suppress(Exception):  # Ray itself may be what died
                ray.kill(self.handle)
