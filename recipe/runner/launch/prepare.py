"""The one step from a composed configuration to a start of a run.

:func:`prepare` adds what the machine, the run folder and the job know, checks everything, and makes the :class:`Start`
that the rest of the launch hands on. Here a configuration becomes final.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import InstantiationException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf, open_dict

from fspo.files import local_path
from recipe.runner.checkpoints import integrity
from recipe.runner.faults.resources import needs_of
from recipe.runner.launch import checks, model_files, rewards, run_settings, secrets
from recipe.runner.launch.compose import absolute_path, defaults, key_of
from recipe.runner.launch.data_files import data_files
from recipe.runner.launch.end_of_turn import SETTING, add_stop_token
from recipe.runner.launch.job import Job
from recipe.runner.launch.machine import pass_to_ray_workers, starts_ray
from recipe.runner.launch.run_folder import Start
from recipe.runner.launch.run_settings import Resume
from recipe.runner.launch.values import (
    MachineProblem,
    PreflightError,
    folder_problem,
    named_key,
    set_default,
    value_problems,
)

#: Arguments of ``ray.init`` that describe a cluster to start; it refuses them when it joins one.
_ONLY_TO_START_RAY = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")


def prepare(
    config: DictConfig,
    job: Job,
    overrides: Sequence[Override] = (),
    elsewhere: bool = False,
    resume: Resume | None = None,
) -> Start:
    """Make a start of the configuration that was composed with ``overrides``, on the settings of the run ``resume``.

    Writes nothing but a tracker of the run's checkpoints that a killed save has left unreadable. With ``elsewhere`` the
    run will be on another machine: then not even that, and what only that machine can settle is no error.

    Raises:
        PreflightError: if the configuration, the machine or the folder cannot serve the run.
    """
    references: dict[str, str] = {}
    overrides = resume.all_overrides(overrides) if resume else overrides
    of_groups = defaults(job, overrides)
    # A copy, which the rest of this step completes in place.
    wrong = list[str]()
    config = on_this_machine(config, elsewhere, references, of_groups, wrong)
    trainer, evaluates = config.trainer, bool(config.get("evaluate"))
    # Many scripts give another one: what else is wrong with them is said in the same go.
    saves_elsewhere = folder_problem(config)
    trainer.default_local_dir = str(config.run.dir)
    goes_on = job.resumes and not evaluates
    measured = resume if resume and resume.measured else None
    mended: integrity.Checkpoint | None = None
    with _beside(wrong):
        refused = []
        given = any(key_of(override) == "trainer.resume_from_path" for override in overrides)
        if given and trainer.resume_from_path and trainer.resume_mode != "resume_path":
            # The run would begin with the model, or with what its own folder holds.
            path = f"trainer.resume_from_path={trainer.resume_from_path}"
            refused.append(f"{path} has no effect with resume_mode={trainer.resume_mode}: give resume_mode=resume_path")
        if resume is not None:
            contents = OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.load_contents")
            if elsewhere or wrong:  # the tracker stays as it is
                _, mended = integrity.tracker_repair(trainer, contents) or ("", None)
            elif repaired := integrity.repair_tracker(trainer, contents):
                print(f"note: {repaired}", flush=True)
            tracker = Path(trainer.default_local_dir) / integrity.TRACKER_FILE
            resume.choose_checkpoint(trainer, evaluates, saved=mended is not None or tracker.exists())
        checkpoint = integrity.resumed_from(trainer)
        if mended is not None and trainer.resume_mode == "auto":
            checkpoint = mended
        if evaluates:
            turn_into_evaluation(config, checkpoint)
        stop_tokens, note = add_stop_token(config, measured is not None, elsewhere)
        run_settings.check_folder(Path(config.run.dir), trainer, goes_on, resume)
        refused += filter(None, [saves_elsewhere])
        notes, facts, unsettled = check(config, job, elsewhere, refused, checkpoint, references)
    if isinstance(note, MachineProblem):
        unsettled.append(note)
    else:
        _note(note)
    if not elsewhere:
        _note(model_files.download_note(config.actor_rollout_ref.model.path))
    changed = run_settings.allowed_changes(config, resume, references) if goes_on else []
    return Start(
        config,
        job,
        tuple(overrides),
        goes_on=goes_on,
        checkpoint=checkpoint,
        changed=tuple(changed),
        notes=notes,
        unsettled=tuple(unsettled),
        facts=facts,
        references=references,
        stop_tokens=tuple(stop_tokens),
    )


@contextlib.contextmanager
def _beside(wrong: Sequence[str]) -> Iterator[None]:
    """Refuse wrong values beside what the checks refuse, which see the defaults in their place.

    What the checks say of the same keys is left out: the command does not give these defaults.
    """
    problems: Sequence[str] = ()
    try:
        yield
    except PreflightError as error:
        problems = error.problems
        if not wrong:
            raise
    if wrong:
        keys = "|".join(re.escape(named_key(problem)) for problem in wrong)
        of_defaults = re.compile(rf"(?<![\w.])(?:{keys})(?!\w)")
        raise PreflightError(*wrong, *(problem for problem in problems if not of_defaults.search(problem)))


def on_this_machine(
    config: DictConfig,
    elsewhere: bool = False,
    references: dict[str, str] | None = None,
    defaults: DictConfig | None = None,
    wrong: list[str] | None = None,
) -> DictConfig:
    """The configuration with what only this machine knows: absolute paths and Ray's environment.

    With ``elsewhere`` the run will be on another machine, and what this one's platform would need is left out. What
    :func:`recipe.runner.launch.secrets.references` gives is added to ``references``. ``defaults`` are those of
    :func:`recipe.runner.launch.values.value_problems`. Problems of values are added to ``wrong``, and the values are
    the defaults then, so that the other checks can be made.

    Raises:
        PreflightError: for a value of another kind, or out of range, where nothing is to be added to.
    """
    config = copy.deepcopy(config)
    _note(rewards.migrate_rewards(config))
    problems = list(value_problems(config, defaults))
    if wrong is not None and defaults is not None:
        wrong += (one for one in problems if one != folder_problem(config))  # that one is in no other's way (prepare)
        for key in map(named_key, wrong):
            set_default(config, key, defaults)
        problems += value_problems(config, defaults) if wrong else ()
    if set(problems) - {folder_problem(config), *(wrong or ())}:
        raise PreflightError(*dict.fromkeys(problems))
    with open_dict(config):
        config.run.dir = str(Path(config.run.dir).absolute())
        model = config.actor_rollout_ref.model
        for key in ("path", "tokenizer_path"):
            if place := model.get(key):
                folder = local_path(place)
                model[key] = absolute_path(folder) if Path(folder).expanduser().is_dir() else folder
        for key in ("train_files", "val_files"):
            config.data[key] = [absolute_path(file) for file in data_files(config.data, key)]
        for key in (SETTING, *checks.PATHS):
            if (own := OmegaConf.select(config, key)) and Path(local_path(str(own))).expanduser().exists():
                OmegaConf.update(config, key, absolute_path(local_path(str(own))))
        if config.trainer.resume_from_path:
            config.trainer.resume_from_path = absolute_path(str(config.trainer.resume_from_path))
        reward = config.reward
        for holder in (reward.custom_reward_function, reward.reward_manager.module, config.data.get("custom_cls")):
            if holder and holder.get("path"):
                holder.path = absolute_path(str(holder.path))
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
    if references is not None:
        references.update(secrets.references(config))
    OmegaConf.resolve(config)
    if not elsewhere:
        pass_to_ray_workers(config)
    return config


def turn_into_evaluation(config: DictConfig, checkpoint: integrity.Checkpoint | None) -> None:
    """Make it the configuration of a run that validates once and ends; in place.

    It writes to ``evaluation/`` in the run folder, the next one to ``evaluation_2/``. The weights are those of
    ``checkpoint``; without one, the model itself. ``actor_rollout_ref.rollout.val_kwargs`` says how many responses per
    problem, and how they are drawn.

    Raises:
        PreflightError: if it is a run's folder without a checkpoint.
    """
    run = Path(config.run.dir)
    if run_settings.run_info(run) is not None and checkpoint is None:
        raise PreflightError(
            f"{run} has saved no checkpoint that could be evaluated: train on, or score the model that it began with, "
            "with another run.dir"
        )
    # The training run's own files stay as they are, and what earlier evaluations have generated.
    folders = (run / (f"evaluation_{n}" if n > 1 else "evaluation") for n in itertools.count(1))
    folder = next(path for path in folders if not any(path.glob("validation/*.jsonl")))
    with open_dict(config):
        config.run.dir = config.trainer.default_local_dir = str(folder)
        if checkpoint is not None:
            config.trainer.update(resume_mode="resume_path", resume_from_path=str(checkpoint.folder))
        config.trainer.val_before_train = True
        config.trainer.val_only = True
        config.trainer.validation_data_dir = str(folder / "validation")


def check(
    config: DictConfig,
    job: Job,
    elsewhere: bool = False,
    refused: Sequence[str] = (),
    checkpoint: integrity.Checkpoint | None = None,
    references: Mapping[str, str] | None = None,
) -> tuple[str, Mapping[str, Any], list[str]]:
    """Make all checks before anything is started, and complete the configuration, in place.

    Args:
        config: With what the machine and the run folder add.
        job: The kind of run.
        elsewhere: As for :func:`recipe.runner.launch.checks.check`.
        refused: Problems that are known already.
        checkpoint: What the run would resume.
        references: To the environment, by key (:func:`recipe.runner.launch.secrets.references`).

    Returns:
        What verl notes about the configuration; what ``run.json`` says of the method; and what only the machine of the
        run can settle.

    Raises:
        PreflightError: if this recipe or verl refuses it.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    def further(config: DictConfig) -> Iterator[str]:
        contents = OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.load_contents")
        yield from integrity.resume_problems(config.trainer, contents, checkpoint)
        yield from secrets.printed_problems(config, references or {}, joins=not starts_ray(config))
        yield from job.problems(config)
        if config.data.get("offline_task") and job.write_data is None:
            yield f"data.offline_task: {job.command} writes no data of its own; leave it out, and give data.train_files"
        yield from refused

    unsettled = checks.check(config, further, elsewhere)
    facts = job.complete(config)
    notes = io.StringIO()
    # verl says so for every estimator but GAE.
    warnings.filterwarnings("ignore", message="Disabled critic")
    try:
        with contextlib.redirect_stdout(notes):
            validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
            omega_conf_to_dataclass(config.actor_rollout_ref.rollout)  # as every worker does
            model = config.actor_rollout_ref.model  # its class reads the model's files: only the names are tried
            inspect.signature(get_class(model._target_)).bind(**{name: None for name in model if name != "_target_"})
    except (AssertionError, ValueError, TypeError, InstantiationException, ImportError) as error:
        # Hydra wraps what one of verl's dataclasses refuses, some without a word: then it names the dataclass.
        text = str(error.__cause__ or "") or str(error)
        if not (elsewhere and isinstance(error.__cause__, OSError)):
            raise PreflightError(f"verl refuses the configuration: {text}") from error
        # It reads a model's files, a critic's for example, which may be on that machine only.
        unsettled.append(MachineProblem(f"verl's own checks, for want of a file: {text.splitlines()[0]}"))
    return notes.getvalue(), facts, unsettled


def _note(*notes: str) -> None:
    for note in filter(None, notes):
        print(f"note: {note}", file=sys.stderr, flush=True)
