"""From a composed configuration to a finished run: prepared, checked, begun, trained, ended."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import ray
from hydra.errors import InstantiationException
from omegaconf import DictConfig
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from recipe.runner.checkpoints import integrity
from recipe.runner.faults.hang import HangLimit
from recipe.runner.faults.phase import Phase, write_phase
from recipe.runner.faults.processes import own_run_id
from recipe.runner.faults.resources import rollout_only_ranks
from recipe.runner.faults.supervisor import Supervisor
from recipe.runner.launch import checks, run_folder
from recipe.runner.launch.compose import unexpected_key
from recipe.runner.launch.driver import Driver
from recipe.runner.launch.job import Job
from recipe.runner.launch.prepare import prepare, resumes, settle, write_offline_task
from recipe.runner.launch.progress import say
from recipe.runner.launch.run_settings import allowed_changes, evaluates, has_results
from recipe.runner.launch.values import MachineProblem, PreflightError
from recipe.runner.launch.without_effect import ROWS, Given, given, judged


def examine(config: DictConfig, job: Job, overrides: Sequence[str] = ()) -> tuple[DictConfig, str, list[str]]:
    """A run composed with ``overrides`` that is not started, and may be for another machine.

    Returns:
        As :func:`check`.

    Raises:
        PreflightError: as :func:`launch`, but for what only that machine can tell.
    """
    config = prepare(config, elsewhere=True)
    gives = _given(config, job, overrides)
    config, of_stops = settle(config, job, elsewhere=True)
    config, notes, unsettled = check(config, job, elsewhere=True, gives=gives)
    if resumes(config, job):
        allowed_changes(config)
    if isinstance(of_stops, MachineProblem):
        unsettled.append(of_stops)
    else:
        _note(of_stops)
    return config, notes, unsettled


def launch(config: DictConfig, job: Job, overrides: Sequence[str] = ()) -> None:
    """Run one job to its end, from a prepared configuration; the run folder keeps the overrides that composed it.

    Raises:
        PreflightError: if the configuration or the machine cannot serve the run; Ray has not been started then.
        Preempted: if SIGUSR1 came; the state is saved, unless no step was done.
        TrainingFailed: if a process of the run failed or died.
    """
    run_id = own_run_id()
    # Before anything asks where the run would go on; only in a folder of a run.
    if run_folder.run_info(Path(config.run.dir)) and (repaired := integrity.repair_tracker(config)):
        print(f"note: {repaired}", flush=True)
    gives = _given(config, job, overrides)
    config, of_stops = settle(config, job)
    config, notes, _ = check(config, job, gives=gives)
    _note(of_stops)
    changed = allowed_changes(config) if resumes(config, job) else []
    with run_folder.held(config.run.dir):
        config = _begin(config, job, overrides, changed)
        _run(config, job, run_id, notes)
    job.conclude(config)


def _note(*notes: str) -> None:
    for note in filter(None, notes):
        print(f"note: {note}", file=sys.stderr, flush=True)


def _given(config: DictConfig, job: Job, overrides: Sequence[str]) -> Given:
    """What the command gives, before the run folder changes what the run begins with."""
    folder = Path(config.run.dir)
    trained = (run_folder.run_info(folder) or {}).get("overrides", []) if has_results(folder) else []
    return given(config, job, overrides, trained)


def check(
    config: DictConfig, job: Job, elsewhere: bool = False, gives: Given | None = None
) -> tuple[DictConfig, str, list[str]]:
    """All that can be said of a prepared configuration before anything is started; keys without effect are noted.

    ``elsewhere`` is as for :func:`recipe.runner.launch.checks.check`.

    Returns:
        The completed configuration, what verl notes about it, and what only the machine of the run can settle.

    Raises:
        PreflightError: if this recipe or verl refuses it.
    """
    ineffective: list[str] = []

    def further(config: DictConfig) -> Iterator[str]:
        yield from job.problems(config)
        if gives is not None:
            refused, notes = judged(gives, (*job.without_effect(), *ROWS))
            ineffective.extend(notes)
            yield from refused

    unsettled = checks.check(config, further, elsewhere)
    _note(*ineffective)
    config = copy.deepcopy(config)
    job.complete(config)
    notes = io.StringIO()
    # verl says so for every estimator but GAE.
    warnings.filterwarnings("ignore", message="Disabled critic")
    try:
        with contextlib.redirect_stdout(notes):
            validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    except (AssertionError, ValueError, TypeError, InstantiationException) as error:
        # Hydra wraps what one of verl's dataclasses refuses, some without a word: then it names the dataclass.
        text = str(error.__cause__ or "") or str(error)
        raise PreflightError(f"verl refuses the configuration: {text}{unexpected_key(config, text)}") from error
    return config, notes.getvalue(), unsettled


def _begin(config: DictConfig, job: Job, overrides: Sequence[str], changed: run_folder.Changes) -> DictConfig:
    """Write what a run folder has before Ray starts; the configuration that the run has."""
    write_offline_task(config)
    checkpoint = integrity.resumed_from(config)
    if resumes(config, job) and checkpoint and integrity.is_own(config, checkpoint):
        # It may be an earlier one: later starts continue from there, too, until a newer one is saved.
        integrity.name_latest(checkpoint)
    run_folder.begin(config, job.facts(config), overrides, changed)
    if not evaluates(config) and run_folder.goes_on_by_itself(config):
        config = copy.deepcopy(config)
        config.trainer.val_before_train = False  # nobody asked for one more; at scale it takes longer than the restart
    write_phase(config.run.dir, Phase(0, "start-up"))
    return config


def _run(config: DictConfig, job: Job, run_id: str, notes: str) -> None:
    """Start Ray, train, and end whatever was started."""
    print(f"run folder: {config.run.dir}\nstarting Ray", flush=True)
    driver_log = Path(config.run.dir) / "driver.log"
    driver, stop = Driver(job), threading.Event()
    supervisor = driver.supervisor = _supervisor(config, driver, run_id)
    supervisor.start()
    printer = threading.Thread(target=driver.print_progress, args=(stop, sys.stdout), daemon=True)
    printer.start()
    status, why = "failed", None
    try:
        # What verl prints in this process goes to the log; progress has its own way to the terminal.
        with _printed_to(driver_log):
            print(notes, end="")
            run_ppo(config, task_runner_class=driver)
        status = "finished"
    except Exception as error:
        why = str(error)
        if supervisor.failure is None and not isinstance(error, ray.exceptions.RayError):
            raise
        if (preempted := driver.preempted_by(error)) is not None:
            status, why = "preempted", None
            raise preempted from None
        failed = supervisor.explain(error, driver_log)
        why = str(failed)
        raise failed from None
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        supervisor.stand_down()
        stop.set()
        printer.join(timeout=30)
        supervisor.close()
        with contextlib.suppress(OSError) if status == "failed" else contextlib.nullcontext():
            run_folder.end(config.run.dir, status, why)


@contextlib.contextmanager
def _printed_to(path: Path) -> Iterator[None]:
    log = path.open("a", encoding="utf-8")
    try:
        with contextlib.redirect_stdout(log):
            yield
    finally:
        with contextlib.suppress(OSError):  # the disk may be full, which is said by what fails of it
            log.close()


def _supervisor(config: DictConfig, driver: Driver, run_id: str) -> Supervisor:
    """Ends the run soon after a failure, even if Ray itself is gone."""
    folder, after_s = config.run.dir, config.run.hang_after_s
    warn = functools.partial(say, out=sys.stdout)  # as it is now: it is soon redirected
    hang = None if after_s is None else HangLimit(after_s, folder, lambda: driver.printed, warn)
    record = functools.partial(run_folder.end, folder, "failed")
    nodes = config.trainer.nnodes > 1 or rollout_only_ranks(config) > 0
    return Supervisor(run_id, folder, driver.kill, record, hang, other_nodes=nodes)
