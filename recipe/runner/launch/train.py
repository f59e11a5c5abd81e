"""Trains by verl's own ``run_ppo``, watches all processes meanwhile, and records how it ended."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

import ray
from omegaconf import DictConfig, open_dict
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

from fspo.files import INFO_FILE
from recipe.runner.faults.hang import HangLimit
from recipe.runner.faults.phase import PROGRESS_FILE, Phase, read_phase, say, write_phase
from recipe.runner.faults.preemption import (
    ENDING,
    FAILED,
    INTERRUPTED,
    NOTHING_SAVED,
    PREEMPTED,
    STOP_FILE,
    Preempted,
    remove_old_request,
    status_of,
    stop_request,
)
from recipe.runner.faults.processes import own_run_id
from recipe.runner.faults.supervisor import Supervisor
from recipe.runner.launch import run_folder
from recipe.runner.launch.run_folder import last_steps, status_after_failure
from recipe.runner.progress import print_new
from recipe.runner.ranks import only_generating


class _KeptTaskRunner:
    """What verl's ``run_ppo`` takes for a class of task runners: starts verl's own, and keeps its handle."""

    def __init__(self) -> None:
        self.handle: Any = None
        self._options: dict[str, Any] = {}

    def options(self, **options: Any) -> _KeptTaskRunner:
        # verl asks for Nsight Systems (global_profiler.tool=nsys) this way.
        self._options = options
        return self

    def remote(self) -> Any:
        """Start the actor."""
        # upstream: verl.trainer.main_ppo:run_ppo(config, task_runner_class)
        self.handle = TaskRunnerV1.options(num_cpus=1, **self._options).remote()
        return self.handle

    def kill(self) -> None:
        """End the actor, if it was started and Ray is there."""
        if self.handle is not None and ray.is_initialized():
            with contextlib.suppress(Exception):  # Ray itself may be what died
                ray.kill(self.handle)


def train(config: DictConfig) -> int:
    """Start Ray, train, and end whatever was started; the exit status. Why it is not 0 is printed.

    Raises OSError if a file cannot be written, before Ray is started.
    """
    folder = Path(config.trainer.default_local_dir)
    write_phase(folder, Phase(0, "start-up"))
    if remove_old_request(folder):
        print(f"note: {folder / STOP_FILE} was of an earlier start, and is removed", flush=True)
    print(f"run folder: {folder}\nstarting Ray", flush=True)
    runner, over = _KeptTaskRunner(), threading.Event()
    supervisor = _supervisor(config, runner)
    supervisor.start()

    def let_go() -> None:
        supervisor.let_go(ENDING.folder)
        run_folder.end(folder, _how_ended())

    ENDING.run_dir, ENDING.let_go = str(folder), let_go
    follower = threading.Thread(target=_follow, args=(folder, over, sys.stdout), daemon=True)
    follower.start()
    if ENDING.folder is not None:
        with open_dict(config):
            config.ray_kwargs.ray_init._temp_dir = str(ENDING.folder)
    status, why, code = "failed", None, FAILED
    try:
        # What verl prints in this process goes to the log; progress has its own way to the terminal.
        with contextlib.redirect_stdout((folder / "launcher.log").open("a", encoding="utf-8", buffering=1)):
            run_ppo(config, task_runner_class=runner)
        status, code = "finished", 0
    except Exception as error:
        why = str(error)
        of_run = isinstance(error, ray.exceptions.RayError) or (isinstance(error, OSError) and ray.is_initialized())
        if supervisor.failure is None and not of_run:
            raise
        if isinstance(preempted := getattr(error, "cause", None), Preempted):
            status, code, why = _how_ended(), status_of(ENDING.signals), None
            last_words = f"interrupted {how_far(config)}" if code == INTERRUPTED else str(preempted)
        else:
            failed = supervisor.explain(error, folder / "launcher.log")
            code = status_after_failure(folder) if failed.may_pass else FAILED
            why, last_words = failed.sentence, f"error: {failed.sentence}"
    finally:
        over.set()
        supervisor.close()
        follower.join(timeout=30)
        try:
            run_folder.end(folder, status, why)
        except (OSError, ValueError) as error:  # whoever requeues the run looks at its exit status
            say(f"note: {INFO_FILE} does not say that the run is {status}: {error}", sys.stdout)
    if code:
        print(last_words, file=sys.stderr)
    return code


def how_far(config: DictConfig) -> str:
    """How far a run came that was ended early, and what of it is saved: the end of a sentence."""
    if config.evaluate:
        return "before the evaluation was complete"
    saved, done = last_steps(Path(config.trainer.default_local_dir))
    if not done:
        return NOTHING_SAVED
    return f"after step {done}; {f'the last checkpoint is that of step {saved}' if saved else 'nothing is saved'}"


def _how_ended() -> str:
    """What run.json says of a run that was ended before its time."""
    return "preempted" if status_of(ENDING.signals) == PREEMPTED else "interrupted"


def _follow(folder: Path, over: threading.Event, out: TextIO) -> None:
    """Print what the trainer writes into ``progress.log``, and end a start-up that is asked to stop, until it is over.

    Here, because the trainer is not there yet, or waits for the engines.
    """
    log, is_over = folder / PROGRESS_FILE, False
    printed = log.stat().st_size if log.exists() else 0  # of earlier starts
    while not is_over:
        is_over = over.wait(0.5)
        printed = print_new(folder, printed, out)
        phase = read_phase(folder)
        if not (is_over or phase is None or phase.ending) and phase.is_start_up and stop_request(folder):
            ENDING.take(signal.SIGUSR1)


def _supervisor(config: DictConfig, runner: _KeptTaskRunner) -> Supervisor:
    """The supervisor of this start, which ends it soon after a failure, even if Ray itself is gone."""
    folder, after_s = Path(config.trainer.default_local_dir), config.run.hang_after_s
    warn = functools.partial(say, out=sys.stdout)  # as it is now: it is soon redirected
    hang = None if after_s is None else HangLimit(after_s, folder, warn)

    def record(failure: str) -> int:
        with contextlib.suppress(OSError):
            run_folder.end(folder, "failed", failure)
        return status_after_failure(folder)

    nodes = config.trainer.nnodes > 1 or only_generating(config.trainer, config.actor_rollout_ref.rollout) > 0
    return Supervisor(own_run_id(), folder, runner.kill, record, hang, other_nodes=nodes)
