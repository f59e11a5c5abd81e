"""From a composed configuration to a finished run: checks, Ray, verl's ``run_ppo``, and the lines people read."""

from __future__ import annotations

import contextlib
import importlib.resources
import io
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, TextIO

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from recipe.fspo import checkpoints, preflight, run_info, run_settings, series
from recipe.fspo.config import apply_grad_scale
from recipe.fspo.environment import pass_to_ray_workers
from recipe.fspo.evaluation import print_evaluation, turn_into_evaluation
from recipe.fspo.failure import failure
from recipe.fspo.guardian import Guardian
from recipe.fspo.node_watch import OtherNodes
from recipe.fspo.phase import Phase, read_phase, write_phase
from recipe.fspo.preemption import STOP, WARNED, Preempted
from recipe.fspo.processes import MARK_VARIABLE, own_mark
from recipe.fspo.progress import PROGRESS
from recipe.fspo.summary import print_summary
from recipe.fspo.watch import Death, Watch

_PACKAGE_PREFIX = "pkg://"
#: Arguments of ``ray.init`` that describe a cluster to start; it refuses them when it joins one.
_ONLY_TO_START_RAY = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")


class FSPOTaskRunner(TaskRunnerV1.__ray_actor_class__):  # type: ignore[misc,name-defined]
    """verl's task runner with this recipe's trainer registered, and progress that the launcher can fetch."""

    def run(self, config: DictConfig) -> None:
        PROGRESS.say("the driver is up, importing the trainer")
        import recipe.fspo.trainer

        if config.fspo.get("audit"):
            import recipe.fspo.audit_trainer  # noqa: F401  (trainer_mode=fspo_audit)

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

    def __init__(self) -> None:
        self.handle: Any = None
        self.watch: Watch | None = None
        self._stopped_before_training = False

    def remote(self) -> Any:
        # Two threads: one trains, one answers `progress` and `request_stop`.
        self.handle = ray.remote(FSPOTaskRunner).options(num_cpus=1, max_concurrency=2).remote()
        return self.handle

    def print_progress(self, stop: threading.Event, out: TextIO) -> None:
        """Print the runner's lines to ``out`` until told to stop, and then those that are left."""
        printed, last_round, told = 0, False, False
        while not last_round:
            last_round = stop.wait(0.5)
            if self.handle is None:
                continue
            if WARNED.is_set() and not told and not last_round:
                told = self._tell_to_stop()
            try:
                lines = ray.get(self.handle.progress.remote(printed), timeout=10)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                continue  # run_ppo reports what is wrong
            for line in lines:
                print(line, file=out, flush=True)
            printed += len(lines)

    def _tell_to_stop(self) -> bool:
        """Hand the warning on; returns whether the runner has it."""
        try:
            if not ray.get(self.handle.request_stop.remote(), timeout=30):
                self._stopped_before_training = True
                if self.watch is not None:
                    self.watch.stop()  # what dies now is meant to
                ray.kill(self.handle)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return False
        return True

    def preempted_by(self, error: BaseException) -> Preempted | None:
        """The preemption behind an error of ``run_ppo``; None if there is another reason."""
        if self._stopped_before_training and isinstance(error, ray.exceptions.RayActorError):
            return Preempted("preempted before the first step: there was nothing to save")
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, Preempted) else None


def local_path(path: str) -> str:
    """``pkg://package/folder`` as a path of the installed package; any other path unchanged."""
    if not path.startswith(_PACKAGE_PREFIX):
        return path
    package, _, inside = path.removeprefix(_PACKAGE_PREFIX).partition("/")
    return str(importlib.resources.files(package).joinpath(inside))


def prepare(config: DictConfig) -> None:
    """Fill in what only this machine knows, in place: absolute paths and Ray's environment. Writes nothing."""
    with open_dict(config):
        config.fspo.run_dir = str(Path(config.fspo.run_dir).absolute())
        config.actor_rollout_ref.model.path = local_path(config.actor_rollout_ref.model.path)
        for key in ("train_files", "val_files"):
            config.data[key] = _absolute(config.data[key])
        if config.fspo.get("offline_task") and "folder" not in config.fspo.offline_task:
            config.fspo.offline_task.folder = f"{config.fspo.run_dir}/data"
        ray_init = config.ray_kwargs.ray_init
        if ray_init.get("address") not in (None, "local"):
            for key in _ONLY_TO_START_RAY:
                ray_init.pop(key, None)
    OmegaConf.resolve(config)
    pass_to_ray_workers(config)
    if ray_init.get("address") not in (None, "local") and MARK_VARIABLE in os.environ:
        # The workers of a cluster that is joined do not inherit this process's environment.
        with open_dict(ray_init.runtime_env):
            ray_init.runtime_env.env_vars[MARK_VARIABLE] = os.environ[MARK_VARIABLE]


def _absolute(files: Any) -> Any:
    """Paths that mean the same from another working folder, where the run may be resumed."""
    if isinstance(files, str):
        return files if "://" in files else str(Path(files).expanduser().absolute())
    return [_absolute(each) for each in files]


def write_offline_task(config: DictConfig) -> None:
    """Write the embedded task's files that ``data.train_files`` and ``data.val_files`` name, if any.

    Raises:
        PreflightError: if a file of another origin is in the way.
    """
    splits = preflight.generated_files(config)
    if splits:
        from fspo.data.offline_task import write_dataset

        task = dict(config.fspo.offline_task)
        try:
            write_dataset(Path(task.pop("folder")), **task, splits=tuple(splits.values()))
        except FileExistsError as error:
            raise preflight.PreflightError([f"fspo.offline_task: {error}"]) from error


def check(config: DictConfig) -> str:
    """All that can be said of a prepared configuration before anything is started; fills in ``grad_scale``.

    Returns:
        What verl notes about it.

    Raises:
        PreflightError: if this recipe or verl refuses it.
    """
    preflight.check(config)
    apply_grad_scale(config)
    notes = io.StringIO()
    try:
        with contextlib.redirect_stdout(notes):
            validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    except (AssertionError, ValueError, TypeError) as error:
        raise preflight.PreflightError([f"verl refuses the configuration: {error}"]) from error
    return notes.getvalue()


def _make_ready(config: DictConfig) -> None:
    """Do for a run that comes later in the same processes what is done for the first."""
    prepare(config)
    check(config)
    _changed_settings(config)
    write_offline_task(config)


def _changed_settings(config: DictConfig) -> list[dict[str, Any]]:
    """What a resumed run changes, for its run.json.

    Raises:
        PreflightError: if nobody has allowed a change.
    """
    if config.evaluate or config.fspo.get("audit"):
        return []  # they have settings of their own, and a folder inside the run's
    problems = list(run_settings.settings_problems(config))
    if problems:
        raise preflight.PreflightError(problems)
    checkpoint = checkpoints.latest(Path(config.trainer.default_local_dir))
    step = int(checkpoint.name.removeprefix("global_step_")) if checkpoint else 0
    changed = run_settings.changed_settings(config)
    for key, old, new in changed:
        print(f"note: {key} was {old!r}, from step {step + 1} on it is {new!r}", flush=True)
    return [{"after_step": step, "key": key, "old": old, "new": new} for key, old, new in changed]


def _watch(config: DictConfig, runner: _Runner, guardian: Guardian, mark: str) -> Watch:
    """Ends the run soon after one of its processes has died, even if Ray itself is gone."""
    folders = [config.fspo.run_dir, *(Path(path).parent for path in config.fspo.then)]

    def stop() -> None:
        if runner.handle is not None and ray.is_initialized():
            with contextlib.suppress(Exception):  # Ray itself may be what died
                ray.kill(runner.handle)

    def leave() -> None:
        with contextlib.suppress(OSError):
            run_info.end(config.fspo.run_dir, "failed")
        os._exit(1)  # the guardian prints the sentence and ends what is left

    def on_death(death: Death) -> None:
        guardian.tell(death.sentence())

    def phase() -> Phase | None:
        return read_phase(folders)

    watch = Watch(mark, phase, on_death, stop, leave)
    watch.start()
    if config.trainer.nnodes > 1:
        OtherNodes(mark, phase, watch.report, watch.over).start()
    return watch


def launch(config: DictConfig) -> None:
    """Run one training job to its end.

    Raises:
        PreflightError: if the configuration or the machine cannot serve the run; Ray has not been started then.
        Preempted: if SIGUSR1 came; the state is saved, unless no step was done.
        TrainingFailed: if a process of the run failed or died.
    """
    mark = own_mark()
    # verl says so for every estimator but GAE.
    warnings.filterwarnings("ignore", message="Disabled critic")
    prepare(config)
    if config.evaluate:
        turn_into_evaluation(config)
    repaired = checkpoints.repair_tracker(config)
    if repaired:
        print(f"note: {repaired}", flush=True)
    notes = check(config)
    changed = _changed_settings(config)
    series.plan_later(config, _make_ready)
    write_offline_task(config)
    run_info.begin(config, changed)
    write_phase(config.fspo.run_dir, 0, "start-up")
    print(f"run folder: {config.fspo.run_dir}\nstarting Ray", flush=True)
    driver_log = Path(config.fspo.run_dir) / "driver.log"
    runner, stop, guardian = _Runner(), threading.Event(), Guardian(mark, config.fspo.run_dir)
    runner.watch = _watch(config, runner, guardian, mark)
    printer = threading.Thread(target=runner.print_progress, args=(stop, sys.stdout), daemon=True)
    printer.start()
    status = "failed"
    try:
        # What verl prints in this process goes to the log; progress has its own way to the terminal.
        with driver_log.open("a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            print(notes, end="")
            run_ppo(config, task_runner_class=runner)
        status = "finished"
    except Exception as error:
        if runner.watch.death is None and not isinstance(error, ray.exceptions.RayError):
            raise
        preempted = runner.preempted_by(error)
        if preempted is None:
            raise failure(error, driver_log, runner.watch.death, runner.watch.phase()) from None
        status = "preempted"
        raise preempted from None
    finally:
        if runner.watch.death is None:
            runner.watch.stop()
        stop.set()
        printer.join(timeout=30)
        ray.shutdown()  # may not return where a part of Ray has died; the watch ends this process then
        runner.watch.stop()
        guardian.bye()
        with contextlib.suppress(OSError) if status == "failed" else contextlib.nullcontext():
            if run_info.status(config.fspo.run_dir) == "running":  # with runs after it, the trainer has said so
                run_info.end(config.fspo.run_dir, status)
    if config.evaluate:
        print_evaluation(config)
    elif not config.fspo.get("audit"):
        print_summary(config)
