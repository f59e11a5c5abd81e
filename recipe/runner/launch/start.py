"""Runs a prepared start: writes the run folder, trains, and records the end."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import ray
from omegaconf import DictConfig, open_dict
from verl.trainer.main_ppo import run_ppo

from fspo.records import INFO_FILE
from recipe.runner.checkpoints.integrity import is_checkpoint_of, name_latest
from recipe.runner.faults.errors import TrainingFailed
from recipe.runner.faults.hang import HangLimit
from recipe.runner.faults.phase import Phase, read_phase, write_phase
from recipe.runner.faults.preemption import (
    ENDING,
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
from recipe.runner.launch.inputs import write_offline_task
from recipe.runner.launch.machine import ray_folder
from recipe.runner.launch.run_folder import Start
from recipe.runner.launch.run_settings import status_after_failure
from recipe.runner.launch.trainer_process import TrainerHandle
from recipe.runner.progress import length, print_new, say
from recipe.runner.ranks import only_generating


def launch(start: Start) -> None:
    """Run one start to its end.

    Raises:
        PreflightError: if another start has the folder; Ray has not been started then.
        Preempted: if it was asked to stop, or its time ended; the state is saved, unless no step was done.
        TrainingFailed: if a process of the run failed or died.
        OSError: if a file cannot be written, before Ray is started.
    """
    run_id = own_run_id()
    with run_folder.locked(start.config.run.dir):
        _begin(start)
        _run(start, run_id)
    try:
        start.job.conclude(start.config)
    except OSError as error:
        if not start.goes_on:
            raise TrainingFailed(f"what the evaluation has found cannot be written: {error}; evaluate again") from error
        _note(f"the run has finished, but not all of what it ends with is written: {error}")


def _note(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone, too
        print(f"note: {text}", flush=True)


def _begin(start: Start) -> None:
    """Write the files of the run folder that must be there before Ray starts."""
    write_offline_task(start.job, start.config.data)
    if start.goes_on and start.checkpoint and is_checkpoint_of(start.config.trainer, start.checkpoint.folder):
        # It may be an earlier one: later starts continue from there, too, until a newer one is saved.
        name_latest(start.checkpoint)
    run_folder.begin(start)
    write_phase(start.config.run.dir, Phase(0, "start-up"))
    if remove_old_request(start.config.run.dir):
        _note(f"{start.config.run.dir}/{STOP_FILE} was of an earlier start, and is removed")


def _run(start: Start, run_id: str) -> None:
    """Start Ray, train, and end whatever was started."""
    config = start.config
    print(f"run folder: {config.run.dir}\nstarting Ray", flush=True)
    log = Path(config.run.dir) / "launcher.log"
    trainer, over = TrainerHandle(start), threading.Event()
    supervisor = _supervisor(config, trainer, run_id)
    supervisor.start()

    def let_go() -> None:
        supervisor.let_go(ENDING.folder)
        run_folder.end(config.run.dir, _how_ended())

    ENDING.run_dir, ENDING.let_go = config.run.dir, let_go
    arguments = (config.run.dir, length(config.run.dir), over, sys.stdout)
    follower = threading.Thread(target=_follow, args=arguments, daemon=True)
    follower.start()
    if (folder := ray_folder()) is not None:
        with open_dict(config):
            config.ray_kwargs.ray_init._temp_dir = str(folder)
    status, why = "failed", None
    try:
        # What verl prints in this process goes to the log; progress has its own way to the terminal.
        with _printed_to(log):
            print(start.notes, end="")
            run_ppo(config, task_runner_class=trainer)
        status = "finished"
    except Exception as error:
        why = str(error)
        of_run = isinstance(error, ray.exceptions.RayError) or (isinstance(error, OSError) and ray.is_initialized())
        if supervisor.failure is None and not of_run:
            raise
        if isinstance(preempted := getattr(error, "cause", None), Preempted):
            status, why = _how_ended(), None
            raise preempted from None
        failed = supervisor.explain(error, log)
        why = str(failed)
        raise failed from None
    finally:
        supervisor.stand_down()  # while the follower still asks the trainer
        over.set()
        follower.join(timeout=30)
        supervisor.close()
        try:
            run_folder.end(config.run.dir, status, why)
        except (OSError, ValueError) as error:  # whoever requeues the run looks at its exit status
            _note(f"{INFO_FILE} does not say that the run is {status}: {error}")


def _how_ended() -> str:
    """What run.json says of a run that was ended before its time."""
    return "preempted" if status_of(ENDING.signals) == PREEMPTED else "interrupted"


def _follow(run_dir: str, printed: int, over: threading.Event, out: TextIO) -> None:
    """Print what the trainer writes into ``progress.log``, and end a start-up that is asked to stop, until it is over.

    Here, because the trainer is not there yet, or waits for the engines.
    """
    is_over = False
    while not is_over:
        is_over = over.wait(0.5)
        printed = print_new(run_dir, printed, out)
        phase = read_phase(run_dir)
        if not (is_over or phase is None or phase.ending) and phase.is_start_up and stop_request(run_dir):
            ENDING.take(signal.SIGUSR1)


@contextlib.contextmanager
def _printed_to(path: Path) -> Iterator[None]:
    log = path.open("a", encoding="utf-8")
    try:
        with contextlib.redirect_stdout(log):
            yield
    finally:
        with contextlib.suppress(OSError):  # the disk may be full; whatever fails because of it says so
            log.close()


def _supervisor(config: DictConfig, trainer: TrainerHandle, run_id: str) -> Supervisor:
    """The supervisor of this start, which ends it soon after a failure, even if Ray itself is gone."""
    folder, after_s = config.run.dir, config.run.hang_after_s
    warn = functools.partial(say, out=sys.stdout)  # as it is now: it is soon redirected
    hang = None if after_s is None else HangLimit(after_s, folder, warn)

    def record(failure: str) -> int:
        with contextlib.suppress(OSError):
            run_folder.end(folder, "failed", failure)
        return status_after_failure(config)

    nodes = config.trainer.nnodes > 1 or only_generating(config) > 0
    return Supervisor(run_id, folder, trainer.kill, record, hang, other_nodes=nodes)
