"""A run folder knows its settings: a resumed run goes on with them, and a change is refused or recorded.

``config.yaml`` keeps what the run's first command resolved to. A command that names the folder starts from it
(:class:`Resume`); what it would change is compared key by key before Ray starts (:func:`allowed_changes`).
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fspo.reading import read_yaml
from fspo.records import (
    CONFIG_FILE,
    INFO_FILE,
    METRICS_FILE,
    STEP_FILES,
    numbered_steps,
    read_info,
)
from fspo.table import FOLDER, holds_table
from recipe.runner.checkpoints.integrity import is_checkpoint_of, latest
from recipe.runner.faults.preemption import FAILED, PREEMPTED, STOP_FILE
from recipe.runner.launch.compose import (
    SEARCH_PATH,
    apply,
    composed_groups,
    has_key,
    is_below,
    key_of,
    leaves,
    of_groups,
    parsed,
    quoted,
    text_of,
)
from recipe.runner.launch.job import Job
from recipe.runner.launch.secrets import as_given, is_reference
from recipe.runner.launch.values import PreflightError

#: Files that a start replaces or appends to.
_FILES: Final = (
    *(CONFIG_FILE, INFO_FILE, *STEP_FILES, FOLDER, "launcher.log", "phase.json", "progress.log", "run.png"),
    *("checkpoints/global_step_*", "global_step_*", "generation_config.json", STOP_FILE),
)
#: Keys (and whatever lies below them) that may change when a run goes on: how long it runs, what it saves and logs, and
#: the machine it runs on. None of them changes what a step computes.
MAY_CHANGE: Final = (
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "data.dataloader_num_workers",
    "reward.num_workers",
    "run",
    "trainer",
    "transfer_queue",
)
#: Exceptions to MAY_CHANGE: these keys change what a step computes. So does the run's length where the learning rate
#: depends on it (:func:`_of_schedule`).
_MAY_NOT: Final = ("trainer.balance_batch", "trainer.critic_warmup", "trainer.device", "trainer.use_v1", "trainer.v1")
#: Settings of one start, which none takes from the run's folder: Ray's cluster, its workers' environment, the changes
#: that are allowed, and the checkpoint.
PER_START: Final = ("ray_kwargs", "run.allow_changed", "trainer.resume_mode", "trainer.resume_from_path")
#: A reference that no run writes: its settings are resolved, but for texts from the environment.
_STRAY: Final = re.compile(r"\$\{(?!oc\.env:\w+\})")
_RESTORE: Final = "restore it, or begin another run with another run.dir"
#: Values of ``status`` in run.json.
STATUSES: Final = ("running", "finished", "failed", "preempted", "interrupted", "killed")
_ABSENT: Final = "(not set)"


def run_info(folder: Path) -> dict[str, Any] | None:
    """``run.json`` of a run folder without fields of a wrong kind; None if it is missing, or not this recipe's."""
    return _of_recipe(read_info(folder))


def _of_recipe(info: dict[str, Any]) -> dict[str, Any] | None:
    return info if info.get("status") in STATUSES and {"versions", "overrides"} & info.keys() else None


def last_steps(config: DictConfig) -> tuple[int, int]:
    """The last step that a run has saved, and the last one that it has done; 0: none."""
    checkpoint = latest(Path(config.trainer.default_local_dir))
    saved = checkpoint.step if checkpoint else 0
    metrics = Path(config.run.dir) / METRICS_FILE
    # A validation has the number of the step before it; a step is logged after it has been saved.
    return saved, max([saved, *(line["step"] for _, line in numbered_steps(metrics, []))])


def status_after_failure(config: DictConfig) -> int:
    """Exit status after a process of a run has died or hung: where a step was done, another start may do more."""
    return PREEMPTED if last_steps(config)[1] else FAILED


def has_results(folder: Path) -> bool:
    """Whether a step, or a part of one, was recorded or saved."""
    records = [folder / name for name in STEP_FILES]
    saved = any(folder.glob("checkpoints/global_step_*")) or holds_table(folder / FOLDER)
    return saved or any(record.is_file() and record.stat().st_size for record in records)


# ---------------------------------------------------------------- the settings of a run


def in_folder(overrides: Sequence[Override], folder: str | Path) -> list[Override]:
    """The overrides of a command with its run folder written out, however they name it."""
    others = (override for override in overrides if key_of(override) not in ("resume", "run.dir"))
    return [*others, *parsed([f"run.dir={quoted(folder)}"])]


@dataclass(frozen=True)
class Resume:
    """A run that a command goes on with; made once, by :func:`resume_of`, and handed on.

    Attributes:
        job: The kind of run.
        folder: The run's, absolute.
        settings: Those of its ``config.yaml``, nested, with the folder's present place.
        checkpoint: The one that its last start was told to begin with.
        overrides: Those of its commands, as ``run.json`` lists them.
        measured: Whether a step, or a part of one, was recorded or saved; a run without one may change.
    """

    job: Job
    folder: Path
    settings: Mapping[str, Any]
    checkpoint: str | None
    overrides: tuple[Override, ...]
    measured: bool

    def all_overrides(self, overrides: Sequence[Override]) -> list[Override]:
        """Those of its commands and those of a new one, which replace them."""
        replaced = [*map(key_of, overrides), *PER_START]
        return [*(earlier for earlier in self.overrides if not is_below(key_of(earlier), replaced)), *overrides]

    def new(self, overrides: Sequence[Override]) -> list[Override]:
        """What a command adds to the settings: its overrides that ``run.json`` does not list.

        A requeue repeats its command. A run without a result is begun again, with all overrides, and may change.
        """
        if not self.measured:
            return self.all_overrides(in_folder(overrides, self.folder))
        listed = set(map(text_of, self.overrides))
        return [
            override
            for override in overrides
            if key_of(override) != "resume"
            and (text_of(override) not in listed or is_below(key_of(override), PER_START))
        ]

    def base(self, groups: Sequence[Override]) -> tuple[DictConfig, list[str]]:
        """The settings over the configuration of the run's groups, and what is wrong with the ``groups`` of a command.

        Of the run's groups it has what is of one start, keys that are newer than the run, and the references between
        settings.
        """
        if not self.measured:
            return composed_groups(self.job, list(groups))
        paths = [override for override in groups if key_of(override) == SEARCH_PATH]
        config, problems = composed_groups(self.job, of_groups(self.job, self.all_overrides(paths)))
        for override in groups:
            if override not in paths:
                other, wrong = composed_groups(self.job, of_groups(self.job, self.all_overrides([*paths, override])))
                is_other = OmegaConf.to_container(other) != OmegaConf.to_container(config)
                why = f"{text_of(override)}: {key_of(override)} cannot change: {self.folder} keeps the settings of "
                problems += [*wrong, *[f"{why}another one; leave it out, or give another run.dir"] * is_other]
        differing = changes(OmegaConf.to_container(config), self.settings)
        if lost := [key for key, old, new in differing if isinstance(old, dict) and new not in (None, _ABSENT)]:
            raise PreflightError(f"{self.folder / CONFIG_FILE}: {lost[0]} must be a group of settings: {_RESTORE}")
        with open_dict(config):
            merged: Any = OmegaConf.merge(config, dict(self.settings))
        for override in self.overrides:
            if override.is_delete() and has_key(merged, key_of(override)):
                apply(override, merged)
        for key in PER_START:
            OmegaConf.update(merged, key, OmegaConf.select(config, key), merge=False)
        _refer_again(merged, config)
        OmegaConf.set_struct(merged, True)
        return merged, problems

    def choose_checkpoint(self, trainer: DictConfig, evaluates: bool, saved: bool) -> None:
        """Choose between the run's own checkpoints and the one that it was told to begin with; changes ``trainer``.

        A run resumes its own newest checkpoint. Until it has saved one, it starts again from that of another run that
        its first start was given. So does a command that names the same path once more: a requeue would else lose what
        was done since. An evaluation uses the checkpoint that it names. ``saved``: its tracker names one of its own.
        """
        first, mode = self.checkpoint, trainer.resume_mode
        if mode == "disable" or (mode == "resume_path" and (evaluates or trainer.resume_from_path != first)):
            return
        if mode == "auto":  # the tracker knows the run's own checkpoints
            trainer.resume_from_path = None if is_checkpoint_of(trainer, first) else first
        elif saved:
            print(f"note: the start before began with {first}, too: what was saved since comes first", flush=True)
        trainer.resume_mode = "auto" if saved or not trainer.resume_from_path else "resume_path"


def _refer_again(settings: DictConfig, groups: DictConfig) -> None:
    """Give settings the references of their groups, wherever these stand for the same value; changes ``settings``.

    So an override changes what refers to its key, too.
    """

    def value_of(key: str) -> Any:
        value = OmegaConf.select(settings, key)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    for key, reference in leaves(OmegaConf.to_container(groups)):
        if not (isinstance(reference, str) and "${" in reference and has_key(settings, key)):
            continue
        value = value_of(key)
        OmegaConf.update(settings, key, reference, merge=False)
        with contextlib.suppress(OmegaConfBaseException):
            if value_of(key) == value:
                continue
        OmegaConf.update(settings, key, value, merge=False)


def resume_of(overrides: Sequence[Override], job: Job) -> Resume | None:
    """The run in the folder that ``resume=FOLDER`` or ``run.dir=FOLDER`` names; None for a new one.

    Raises:
        PreflightError: if ``resume`` names a folder without a run, or one of a run that ``job`` cannot go on with; if a
            file of the run is damaged.
    """
    new = {key_of(override): override for override in overrides}
    named = [new[key] for key in ("resume", "run.dir") if key in new]
    for override in named:
        if not str(override.value() or "").strip():
            raise PreflightError(f"{text_of(override)}: a run needs a folder; is a variable of the shell not set?")
    if len({os.path.abspath(str(override.value())) for override in named}) > 1:
        raise PreflightError(
            "resume=FOLDER is another way to write run.dir=FOLDER: give one of them. To begin another run with a "
            "checkpoint: trainer.resume_mode=resume_path trainer.resume_from_path=RUN/global_step_N"
        )
    if not named or "${" in text_of(named[0]) or not job.resumes:
        return None
    folder, must_be = Path(str(named[0].value())).absolute(), "resume" in new
    problems = list[str]()
    info = _of_recipe(read_info(folder, problems))
    if info is None:
        if not must_be:
            return None
        why = "; ".join(problems) or f"{INFO_FILE} does not say how it ended"
        raise PreflightError(f"resume={folder}: there is no run in it ({why}); give the folder of one")
    for problem in problems:
        if problem.startswith(f"{folder / INFO_FILE}: overrides "):
            raise PreflightError(f"{problem}: mend it, or begin again with another run.dir")
        print(f"note: {problem}: left out", file=sys.stderr)
    begun_with = _begun_with(folder, info)
    measured = has_results(folder)
    try:
        settings: Any = read_yaml(folder / CONFIG_FILE)
        settings = moved(settings, settings["run"]["dir"], str(folder))
        checkpoint = settings["trainer"]["resume_from_path"] or ""
        if stray := _STRAY.search(text := str(settings)):
            raise ValueError(f"a reference, {text[stray.start() :][:40]}: write out what it stands for")
    except Exception as error:
        if not measured and not must_be:
            return None  # it was killed while it began: the command says what it is
        raise PreflightError(f"{folder / CONFIG_FILE} cannot be read ({error}): {_RESTORE}") from error
    return Resume(job, folder, settings, str(checkpoint) or None, begun_with, measured)


def _begun_with(folder: Path, info: Mapping[str, Any]) -> tuple[Override, ...]:
    """The overrides that ``run.json`` lists; PreflightError for damage."""
    try:
        overrides = parsed(info.get("overrides", ()))
    except HydraException as error:
        why = f"overrides cannot be read ({str(error).splitlines()[0]})"
        raise PreflightError(f"{folder / INFO_FILE}: {why}: mend it, or begin again with another run.dir") from error
    return tuple(overrides)


# ---------------------------------------------------------------- what a start changes


def check_folder(folder: Path, trainer: DictConfig, goes_on: bool, resume: Resume | None = None) -> None:
    """Refuse a run folder that holds something else than this run, with these settings ``trainer.*``.

    A run that ``goes_on`` adds to the records of the run that the folder holds, ``resume``.

    Raises:
        PreflightError: if files of these names are not a run's, or if the run would begin again beside the records of
            its first beginning.
    """
    foreign = [str(path.relative_to(folder)) for name in _FILES for path in folder.glob(name)]
    if foreign and resume is None and run_info(folder) is None:
        raise PreflightError(
            f"run.dir={folder} holds {', '.join(foreign)}, but is not the folder of a run: give another one, "
            "so that nothing of yours is replaced"
        )
    if (stop := folder / STOP_FILE).is_dir():
        raise PreflightError(f"{stop} is a folder, and a file of that name asks the run to end: remove or rename it")
    mode, begins = trainer.resume_mode, trainer.resume_from_path
    first = resume and resume.checkpoint
    other = mode == "resume_path" and not is_checkpoint_of(trainer, begins) and begins != first
    if goes_on and resume and resume.measured and (mode == "disable" or other):
        key = f"resume_mode={mode}" + (f" trainer.resume_from_path={begins}" if other else "")
        raise PreflightError(
            f"trainer.{key} would put another run's metrics beside those in {folder}: give another run.dir"
        )


def changes(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Key, old and new value of every leaf in which two configurations differ. Lists are leaves."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            below = f"{key}.{name}" if key else str(name)
            yield from changes(old.get(name, _ABSENT), new.get(name, _ABSENT), below)
    elif old != new:
        yield key, old, new


def moved(value: Any, old: str, new: str) -> Any:
    """``value`` with the run folder's old place replaced by its new one: a run folder may be moved."""
    if isinstance(value, dict):
        return {name: moved(part, old, new) for name, part in value.items()}
    if isinstance(value, list):
        return [moved(part, old, new) for part in value]
    return re.sub(rf"^{re.escape(old)}(?=/|$)", lambda _: new, value) if isinstance(value, str) else value


def changed_settings(
    config: DictConfig, resume: Resume | None, references: Mapping[str, str] | None = None
) -> list[tuple[str, Any, Any]]:
    """What a start would change of the settings of the run that it resumes: key, old, new value.

    Texts that come from the environment (``references``, by key) are not compared.
    """
    if resume is None or not resume.measured:
        return []
    differing = changes(resume.settings, as_given(OmegaConf.to_container(config, resolve=True), "", references))
    return [
        (key, old, new)
        for key, old, new in differing
        if not (is_below(key, PER_START) or is_reference(old) or is_reference(new))
    ]


def allowed_changes(
    config: DictConfig, resume: Resume | None, references: Mapping[str, str] | None = None
) -> list[tuple[str, Any, Any]]:
    """:func:`changed_settings`, if all of them are allowed.

    Raises:
        PreflightError: if one is neither in MAY_CHANGE nor in ``run.allow_changed``.
    """
    changed = changed_settings(config, resume, references)
    fixed, allowed = [*_MAY_NOT, *_of_schedule(config)], config.run.allow_changed

    def is_allowed(key: str) -> bool:
        return is_below(key, allowed) or (is_below(key, MAY_CHANGE) and not is_below(key, fixed))

    refused = [change for change in changed if not is_allowed(change[0])]
    if refused:
        raise PreflightError(
            f"{config.run.dir} holds a run with other settings: "
            + "; ".join(f"{key} was {old!r} and would be {new!r}" for key, old, new in refused)
            + ". Go on with the run's own settings (give run.dir alone), take another run.dir, or allow the "
            f"change with 'run.allow_changed=[{','.join(key for key, _, _ in refused)}]'"
        )
    return changed


def _of_schedule(config: DictConfig) -> list[str]:
    """The keys of the run's length, if the learning rate depends on them: a cosine, or a warm-up given as a share."""
    optim = config.actor_rollout_ref.actor.optim
    kinds = {optim.lr_scheduler_type, optim.get("warmup_style") or "constant"}  # verl's older key replaces the other
    if kinds == {"constant"} and (optim.lr_warmup_steps > 0 or optim.lr_warmup_steps_ratio <= 0):
        return []
    return ["trainer.total_training_steps", "trainer.total_epochs"]
