"""From a composed configuration to the one of this start: what the machine, the run folder and its kind of run add.

Each step returns a configuration and writes nothing: :func:`prepare`, then :func:`settle`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from fspo.files import local_path
from recipe.runner.checkpoints.integrity import resumed_from
from recipe.runner.faults.resources import needs_of
from recipe.runner.launch import inputs, run_settings
from recipe.runner.launch.end_of_turn import STOPS, with_end_of_turn
from recipe.runner.launch.inputs import absolute_path
from recipe.runner.launch.job import Job
from recipe.runner.launch.machine import pass_to_ray_workers, starts_ray
from recipe.runner.launch.run_settings import evaluates
from recipe.runner.launch.values import PreflightError, value_problems

#: Arguments of ``ray.init`` that describe a cluster to start; it refuses them when it joins one.
_ONLY_TO_START_RAY = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")


def prepare(config: DictConfig, elsewhere: bool = False) -> DictConfig:
    """The configuration with what only this machine knows: absolute paths and Ray's environment.

    With ``elsewhere`` the run will be on another machine, and what this one's platform would need is left out.

    Raises:
        PreflightError: for a value of another kind, or out of range.
    """
    if problems := list(value_problems(config)):
        raise PreflightError(*problems)
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
        for holder in (config.reward.custom_reward_function, config.reward.reward_manager.module):
            if holder.get("path"):
                holder.path = absolute_path(holder.path)
        if config.data.get("offline_task"):
            config.data.offline_task.setdefault("folder", f"{config.run.dir}/data")
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
    return config


def resumes(config: DictConfig, job: Job) -> bool:
    """Whether a start goes on in its folder; an evaluation has settings of its own, in a folder inside the run's."""
    return job.resumes and not evaluates(config)


def settle(config: DictConfig, job: Job, elsewhere: bool = False) -> tuple[DictConfig, str]:
    """A prepared configuration with what its folder and its model add: the checkpoint that the run begins with, its
    stop tokens, an evaluation's folder. And a note on the stop tokens, or an empty text.

    ``elsewhere`` is as for :func:`prepare`.

    Raises:
        PreflightError: if the folder cannot be this run's, or a run is to be evaluated that has no checkpoint.
    """
    kept = None
    if job.resumes:
        config = run_settings.with_beginning(config)
        with contextlib.suppress(PreflightError):  # a damaged file is named where the settings are compared
            if (before := run_settings.recorded_settings(config)) is not None:
                kept = OmegaConf.select(OmegaConf.create(before), STOPS) or []
    config, note = with_end_of_turn(config, kept, elsewhere)
    if evaluates(config):
        config = turn_into_evaluation(config)
    run_settings.check_folder(config, resumes(config, job))
    return config, note


def turn_into_evaluation(config: DictConfig) -> DictConfig:
    """The configuration of a run that validates once and ends; it writes to ``evaluation/`` in the run folder, the next
    one to ``evaluation_2/``.

    The weights are those of ``trainer.resume_from_path`` or of the run folder's latest checkpoint; without either, the
    model itself. ``actor_rollout_ref.rollout.val_kwargs`` says how many responses per problem, and how they are drawn.

    Raises:
        PreflightError: if it is a run's folder without a checkpoint.
    """
    run = Path(config.run.dir)
    if run_settings.run_info(run) is not None and resumed_from(config) is None:
        raise PreflightError(
            f"{run} has saved no checkpoint that could be evaluated: train on, or score the model that it began with, "
            "with another run.dir"
        )
    # The training run's own files stay as they are, and what earlier evaluations have generated.
    folders = (run / (f"evaluation_{n}" if n > 1 else "evaluation") for n in itertools.count(1))
    folder = next(each for each in folders if not any(each.glob("validation/*.jsonl")))
    config = copy.deepcopy(config)
    with open_dict(config):
        config.run.dir = str(folder)
        config.trainer.val_before_train = True
        config.trainer.val_only = True
        config.trainer.validation_data_dir = str(folder / "validation")
    return config


def write_offline_task(config: DictConfig) -> None:
    """Write the embedded task's files that ``data.train_files`` and ``data.val_files`` name, if any.

    Raises:
        PreflightError: if a file of another origin is in the way.
    """
    if splits := inputs.generated_files(config):
        from fspo.data.offline_task import write_dataset

        task = dict(config.data.offline_task)
        try:
            write_dataset(Path(task.pop("folder")), **task, splits=tuple(splits.values()))
        except FileExistsError as error:
            raise PreflightError(f"data.offline_task: {error}") from error
