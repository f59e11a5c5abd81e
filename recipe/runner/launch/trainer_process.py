"""The process that trains, an actor of Ray, and what the launching process keeps of it."""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
from collections.abc import Mapping
from typing import Any, TextIO

import ray
from omegaconf import DictConfig
from verl.trainer.main_ppo import TaskRunnerV1

from recipe.runner.faults.preemption import (
    ENDED_BY,
    NOTHING_TO_SAVE,
    STOP,
    WARNED,
    Preempted,
    end_on_signals,
    save_on_ctrl_c,
)
from recipe.runner.faults.supervisor import Supervisor
from recipe.runner.launch.job import Job
from recipe.runner.launch.progress import PROGRESS, Columns, say
from recipe.runner.verl_patches.shown import show_configuration


class TaskRunner(TaskRunnerV1.__ray_actor_class__):  # type: ignore[misc,name-defined]
    """verl's task runner with the job's trainer registered, and progress that the launcher can fetch."""

    def __init__(
        self, modules: tuple[str, ...], headline: tuple[str, ...], columns: Columns, written: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._modules, self._written = modules, written
        PROGRESS.headline, PROGRESS.columns = headline, columns

    def run(self, config: DictConfig) -> None:
        PROGRESS.say("the trainer is up, importing the trainer")
        for module in self._modules:
            importlib.import_module(module)
        show_configuration(self._written)
        super().run(config)

    def progress(self, index: int) -> list[str]:
        """The lines since ``index``."""
        return PROGRESS.since(index)

    def request_stop(self, why: str) -> bool:
        """Save and end after the step in progress; False if training has not begun."""
        if is_training := STOP.request():
            PROGRESS.say(f"{why}: saving after the step in progress")
        return is_training


class TrainerHandle:
    """What verl's ``run_ppo`` takes for the runner's class: it starts the actor and keeps the handle."""

    def __init__(self, job: Job, written: Mapping[str, Any]) -> None:
        self.handle: Any = None
        self.supervisor: Supervisor | None = None
        #: How many lines have been printed.
        self.printed = 0
        self._arguments = (job.modules, job.headline, job.columns, written)
        self._stopped_before_training = False
        self._options: dict[str, Any] = {}

    def options(self, **options: Any) -> TrainerHandle:
        """verl asks for Nsight Systems (``global_profiler.tool=nsys``) this way, on GPUs."""
        self._options = options
        return self

    def remote(self) -> Any:
        """Start the actor."""
        end_on_signals()  # Ray has been started
        save_on_ctrl_c()
        # Two threads: one trains, one answers `progress` and `request_stop`.
        runner = ray.remote(TaskRunner).options(num_cpus=1, max_concurrency=2, **self._options)
        self.handle = runner.remote(*self._arguments)
        return self.handle

    def kill(self) -> None:
        """End the actor, if it was started and Ray is there."""
        if self.handle is not None and ray.is_initialized():
            with contextlib.suppress(Exception):  # Ray itself may be what died
                ray.kill(self.handle)

    def print_progress(self, stop: threading.Event, out: TextIO) -> None:
        """Print the actor's lines to ``out`` until told to stop, and then those that are left."""
        last, warned = False, False
        while not last:
            last = stop.wait(0.5)
            if self.handle is None:
                continue
            try:
                if WARNED.is_set() and not warned and not last:
                    self._pass_warning_on()
                    warned = True
                lines = ray.get(self.handle.progress.remote(self.printed), timeout=10)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                continue  # run_ppo reports what is wrong
            for line in lines:
                say(line, out)
            self.printed += len(lines)

    def _pass_warning_on(self) -> None:
        why = "interrupted (Ctrl-C once more ends the run at once)" if signal.SIGINT in ENDED_BY else "warned"
        if not ray.get(self.handle.request_stop.remote(why), timeout=30):
            self._stopped_before_training = True
            if self.supervisor is not None:
                self.supervisor.stand_down()
            ray.kill(self.handle)

    def preempted_by(self, error: BaseException) -> Preempted | None:
        """The preemption behind an error of ``run_ppo``; None if there is another reason."""
        if self._stopped_before_training and isinstance(error, ray.exceptions.RayActorError):
            return Preempted(NOTHING_TO_SAVE)
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, Preempted) else None
