"""From a composed configuration to a finished run: checks, Ray, verl's ``run_ppo``, and the lines people read."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import ray
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from fspo.files import local_path
from recipe.runner.checkpoints import integrity
from recipe.runner.faults.errors import Death, failure
from recipe.runner.faults.hang import HangWatch
from recipe.runner.faults.phase import Phase, read_phase, write_phase
from recipe.runner.faults.preemption import NOTHING_TO_SAVE, STOP, WARNED, Preempted, end_on_signals
from recipe.runner.faults.processes import (
    RUN_ID_VARIABLE,
    is_stopped,
    kill,
    own_run_id,
    processes_of,
    stopped_process,
)
from recipe.runner.faults.reaper import Reaper
from recipe.runner.faults.resources import needs_of, rollout_only_ranks
from recipe.runner.faults.watchdog import OtherNodes, Watchdog
from recipe.runner.launch import checks, inputs, run_folder, run_settings
from recipe.runner.launch.inputs import absolute_path
from recipe.runner.launch.job import Job
from recipe.runner.launch.machine import pass_to_ray_workers, starts_ray
from recipe.runner.launch.progress import PROGRESS, Shown, say
from recipe.runner.launch.run_settings import evaluates
from recipe.runner.launch.values import PreflightError, check_values

#: Arguments of ``ray.init`` that describe a cluster to start; it refuses them when it joins one.
_ONLY_TO_START_RAY = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")


class TaskRunner(TaskRunnerV1.__ray_actor_class__):  # type: ignore[misc,name-defined]
    """verl's task runner with the job's trainer registered, and progress that the launcher can fetch."""

    def __init__(self, modules: tuple[str, ...], shown: Shown) -> None:
        super().__init__()
        self._modules = modules
        PROGRESS.shown = shown

    def run(self, config: DictConfig) -> None:
        PROGRESS.say("the driver is up, importing the trainer")
        for module in self._modules:
            importlib.import_module(module)
        super().run(config)

    def progress(self, index: int) -> list[str]:
        """The lines since ``index``."""
        return PROGRESS.since(index)

    def request_stop(self) -> bool:
        """Save and end after the step in progress; False if training has not begun."""
        PROGRESS.say("warned: saving after the step in progress")
        return STOP.request()


class _Runner:
    """What verl's ``run_ppo`` takes for the runner's class: it starts the actor and keeps the handle."""

    def __init__(self, modules: tuple[str, ...], shown: Shown) -> None:
        self.handle: Any = None
        self.watchdog: Watchdog | None = None
        #: How many lines have been printed.
        self.printed = 0
        self._arguments = (modules, shown)
        self._stopped_before_training = False
        self._options: dict[str, Any] = {}

    def options(self, **given: Any) -> _Runner:
        """verl asks for Nsight Systems (``global_profiler.tool=nsys``) this way, on GPUs."""
        self._options = given
        return self

    def remote(self) -> Any:
        end_on_signals()  # Ray has been started
        # Two threads: one trains, one answers `progress` and `request_stop`.
        runner = ray.remote(TaskRunner).options(num_cpus=1, max_concurrency=2, **self._options)
        self.handle = runner.remote(*self._arguments)
        return self.handle

    def kill(self) -> None:
        """End the runner, if it was started and Ray is there."""
        if self.handle is not None and ray.is_initialized():
            with contextlib.suppress(Exception):  # Ray itself may be what died
                ray.kill(self.handle)

    def print_progress(self, stop: threading.Event, out: TextIO) -> None:
        """Print the runner's lines to ``out`` until told to stop, and then those that are left."""
        last, told = False, False
        while not last:
            last = stop.wait(0.5)
            if self.handle is None:
                continue
            if WARNED.is_set() and not told and not last:
                told = self._tell_to_stop()
            try:
                lines = ray.get(self.handle.progress.remote(self.printed), timeout=10)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                continue  # run_ppo reports what is wrong
            for line in lines:
                say(line, out)
            self.printed += len(lines)

    def _tell_to_stop(self) -> bool:
        """Hand the warning on; returns whether the runner has it."""
        try:
            if not ray.get(self.handle.request_stop.remote(), timeout=30):
                self._stopped_before_training = True
                if self.watchdog is not None:
                    self.watchdog.stop()  # what ends now is expected to
                ray.kill(self.handle)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return False
        return True

    def preempted_by(self, error: BaseException) -> Preempted | None:
        """The preemption behind an error of ``run_ppo``; None if there is another reason."""
        if self._stopped_before_training and isinstance(error, ray.exceptions.RayActorError):
            return Preempted(NOTHING_TO_SAVE)
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, Preempted) else None


def prepare(config: DictConfig, elsewhere: bool = False) -> DictConfig:
    """The configuration with what only this machine knows: absolute paths and Ray's environment. Writes nothing.

    Args:
        config: Composed.
        elsewhere: The run will be on another machine; what this one's platform would need is left out.

    Raises:
        PreflightError: for a value of another kind, or out of range.
    """
    check_values(config)
    config = copy.deepcopy(config)
    with open_dict(config):
        config.run.dir = str(Path(config.run.dir).absolute())
        model = config.actor_rollout_ref.model
        for key in ("path", "tokenizer_path"):
            if given := model.get(key):
                folder = local_path(given)
                model[key] = absolute_path(folder) if Path(folder).expanduser().is_dir() else folder
        for key in ("train_files", "val_files"):
            config.data[key] = [absolute_path(file) for file in inputs.data_files(config, key)]
        if config.trainer.resume_from_path:
            config.trainer.resume_from_path = absolute_path(str(config.trainer.resume_from_path))
        inputs.make_absolute(config)
        if config.data.get("offline_task") and "folder" not in config.data.offline_task:
            with open_dict(config.data.offline_task):
                config.data.offline_task.folder = f"{config.run.dir}/data"
        ray_init = config.ray_kwargs.ray_init
        if starts_ray(config):
            # Without an address Ray joins the cluster that the temp folder names, be it one that was killed.
            ray_init.address = "local"
            if config.trainer.device == "cpu" and ray_init.get("num_gpus", 0) is None:
                ray_init.num_gpus = needs_of(config).gpus  # logical: one for each rank
        else:
            for key in _ONLY_TO_START_RAY:
                ray_init.pop(key, None)
    OmegaConf.resolve(config)
    if not elsewhere:
        pass_to_ray_workers(config)
    if not starts_ray(config) and RUN_ID_VARIABLE in os.environ:
        # The workers of a cluster that is joined do not inherit this environment.
        with open_dict(ray_init.runtime_env):
            ray_init.runtime_env.env_vars[RUN_ID_VARIABLE] = os.environ[RUN_ID_VARIABLE]
    return config


def write_offline_task(config: DictConfig) -> None:
    """Write the embedded task's files that ``data.train_files`` and ``data.val_files`` name, if any.

    Raises:
        PreflightError: if a file of another origin is in the way.
    """
    splits = inputs.generated_files(config)
    if splits:
        from fspo.data.offline_task import write_dataset

        task = dict(config.data.offline_task)
        try:
            write_dataset(Path(task.pop("folder")), **task, splits=tuple(splits.values()))
        except FileExistsError as error:
            raise PreflightError(f"data.offline_task: {error}") from error


def turn_into_evaluation(config: DictConfig) -> DictConfig:
    """The configuration of a run that validates once and ends; it writes to ``evaluation/`` in the run folder, the next
    one to ``evaluation_2/``.

    The weights are those of ``trainer.resume_from_path`` or of the run folder's latest checkpoint; without either, the
    model itself. ``actor_rollout_ref.rollout.val_kwargs`` says how many responses per problem, and how they are drawn.
    """
    # The training run's own files stay as they are, and what earlier evaluations have generated.
    run = Path(config.run.dir)
    folders = (run / (f"evaluation_{n}" if n > 1 else "evaluation") for n in itertools.count(1))
    folder = next(each for each in folders if not any(each.glob("validation/*.jsonl")))
    config = copy.deepcopy(config)
    with open_dict(config):
        config.run.dir = str(folder)
        config.trainer.val_before_train = True
        config.trainer.val_only = True
        config.trainer.validation_data_dir = str(folder / "validation")
    return config


def check(config: DictConfig, job: Job, without: Sequence[checks.Rule] = ()) -> tuple[DictConfig, str]:
    """All that can be said of a prepared configuration before anything is started.

    Args:
        config: Prepared.
        job: What to run.
        without: As for :func:`recipe.runner.launch.checks.check`.

    Returns:
        The completed configuration, and what verl notes about it.

    Raises:
        PreflightError: if this recipe or verl refuses it.
    """
    checks.check(config, job.problems, without)
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
        said = str(error.__cause__ or "") or error
        raise PreflightError(f"verl refuses the configuration: {said}") from error
    return config, notes.getvalue()


def _changed_settings(config: DictConfig, job: Job) -> list[dict[str, Any]]:
    """What a resumed run changes, for its run.json.

    Raises:
        PreflightError: if a change is not allowed.
    """
    changed = run_settings.changed_settings(config, job)
    run_settings.check_changes(config, changed)
    checkpoint = integrity.resumed_from(config)
    step = integrity.step_of(checkpoint) if checkpoint else 0
    for key, old, new in changed:
        print(f"note: {key} was {old!r}, from step {step + 1} on it is {new!r}", flush=True)
    return [{"after_step": step, "key": key, "old": old, "new": new} for key, old, new in changed]


def _start_watchdog(config: DictConfig, runner: _Runner, reaper: Reaper, run_id: str) -> Watchdog:
    """Ends the run soon after one of its processes has died, even if Ray itself is gone."""

    def leave() -> None:
        with contextlib.suppress(OSError):
            run_folder.end(config.run.dir, "failed", watchdog.death.sentence() if watchdog.death else None)
        os._exit(1)  # the reaper prints the sentence and ends what is left

    def on_death(death: Death) -> None:
        reaper.tell(death.sentence())

    def phase() -> Phase | None:
        return read_phase(config.run.dir)

    out = sys.stdout  # as it is now: the launching process's own output is soon redirected

    watchdog = Watchdog(run_id, phase, on_death, runner.kill, leave)
    watchdog.start()
    if config.trainer.nnodes > 1 or rollout_only_ranks(config):
        OtherNodes(run_id, phase, watchdog.report, watchdog.over).start()
    if (after_s := config.run.hang_after_s) is not None:
        HangWatch(
            run_id,
            Path(config.run.dir),
            after_s,
            phase,
            lambda: runner.printed,
            lambda text: say(text, out),
            watchdog.report,
            watchdog.over,
        ).start()
    return watchdog


def _settled(config: DictConfig, job: Job) -> DictConfig:
    """A prepared configuration with what its folder adds: what the start before began with, an evaluation's folder.

    Raises:
        PreflightError: if the folder cannot be this run's.
    """
    if job.resumes:
        config = run_settings.recall_beginning(config)
    if evaluates(config):
        config = turn_into_evaluation(config)
    run_settings.check_folder(config, resumes=_resumes(config, job))
    return config


def _resumes(config: DictConfig, job: Job) -> bool:
    """Whether a start goes on in its folder; an evaluation has settings of its own, in a folder inside the run's."""
    return job.resumes and not evaluates(config)


def _begun_with_path(config: DictConfig, job: Job) -> DictConfig:
    """The same with the checkpoint to begin with.

    Raises:
        PreflightError: if a run is to be evaluated that has no checkpoint.
    """
    if job.resumes:
        config = copy.deepcopy(config)
        integrity.begin_with_path(config)
    run = Path(config.run.dir).parent  # of an evaluation
    if evaluates(config) and integrity.resumed_from(config) is None and run_settings.run_info(run) is not None:
        raise PreflightError(
            f"{run} has saved no checkpoint that could be evaluated: train on, or score the model that it began with, "
            "with another run.dir"
        )
    return config


def examine(config: DictConfig, job: Job) -> tuple[DictConfig, str]:
    """A run that is not started, and may be for another machine: its configuration, and what verl notes about it.

    Args:
        config: Composed.
        job: What to run.

    Raises:
        PreflightError: as :func:`launch`, but for what only that machine can tell.
    """
    config = _begun_with_path(_settled(prepare(config, elsewhere=True), job), job)
    config, notes = check(config, job, (*checks.GPUS_AND_DISK, *checks.MODEL_AND_DATA))
    if _resumes(config, job):
        _changed_settings(config, job)
    return config, notes


def launch(config: DictConfig, job: Job, overrides: Sequence[str] = ()) -> None:
    """Run one job to its end.

    Args:
        config: Prepared.
        job: What to run.
        overrides: That the configuration was composed with, for the run folder.

    Raises:
        PreflightError: if the configuration or the machine cannot serve the run; Ray has not been started then.
        Preempted: if SIGUSR1 came; the state is saved, unless no step was done.
        TrainingFailed: if a process of the run failed or died.
    """
    run_id = own_run_id()
    config = _settled(config, job)
    if repaired := integrity.repair_tracker(config):
        print(f"note: {repaired}", flush=True)
    config, notes = check(_begun_with_path(config, job), job)
    changed = _changed_settings(config, job) if _resumes(config, job) else []
    with run_folder.held(config.run.dir):
        config = _begin(config, job, overrides, changed)
        _run(config, job, run_id, notes)
    job.conclude(config)


@contextlib.contextmanager
def _printed_to(path: Path) -> Iterator[None]:
    log = path.open("a", encoding="utf-8")
    try:
        with contextlib.redirect_stdout(log):
            yield
    finally:
        with contextlib.suppress(OSError):  # the disk may be full, which is said by what fails of it
            log.close()


def _begin(config: DictConfig, job: Job, overrides: Sequence[str], changed: Sequence[Mapping[str, Any]]) -> DictConfig:
    """Write what a run folder has before Ray starts; the configuration that the run has."""
    write_offline_task(config)
    checkpoint = integrity.resumed_from(config)
    if _resumes(config, job) and checkpoint and integrity.is_own(config, str(checkpoint)):
        # It may be an earlier one: later starts continue from there, too, until a newer one is saved.
        integrity.restore_tracker(checkpoint.parent, checkpoint)
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
    runner, stop = _Runner(job.modules, Shown(job.headline, job.columns)), threading.Event()
    reaper = Reaper(run_id, config.run.dir, config.run.hang_after_s)
    watchdog = runner.watchdog = _start_watchdog(config, runner, reaper, run_id)
    printer = threading.Thread(target=runner.print_progress, args=(stop, sys.stdout), daemon=True)
    printer.start()
    status, why = "failed", None
    try:
        # What verl prints in this process goes to the log; progress has its own way to the terminal.
        with _printed_to(driver_log):
            print(notes, end="")
            run_ppo(config, task_runner_class=runner)
        status = "finished"
    except Exception as error:
        why = str(error)
        if watchdog.death is None and not isinstance(error, ray.exceptions.RayError):
            raise
        preempted = runner.preempted_by(error)
        if preempted is None:
            phase = watchdog.phase()
            if watchdog.death is None and (stopped := stopped_process(run_id)):
                when = f" {phase.words()}" if phase else ""
                watchdog.report(Death("", None, None, phase, told=f"{stopped}, so that the run failed{when}"))
            failed = failure(error, driver_log, watchdog.death, phase)
            why = str(failed)
            raise failed from None
        status = "preempted"
        raise preempted from None
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        if watchdog.death is None:
            watchdog.stop()
        stop.set()
        printer.join(timeout=30)
        # A stopped Ray node never answers ray.shutdown(), which keeps Python's lock meanwhile.
        kill([pid for pid in processes_of(run_id) if is_stopped(pid)])
        ray.shutdown()  # may not return where a part of Ray has died; the watchdog ends this process then
        watchdog.stop()
        reaper.bye()
        with contextlib.suppress(OSError) if status == "failed" else contextlib.nullcontext():
            run_folder.end(config.run.dir, status, why if status == "failed" else None)
