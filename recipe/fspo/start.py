"""The one step from a composed configuration to a start of a run."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from recipe.fspo import TRAINER_MODES
from recipe.runner.checkpoints import integrity
from recipe.runner.faults.preemption import FAILED
from recipe.runner.launch import end_of_turn, machine, resume, secrets
from recipe.runner.launch.problems import MachineProblem, Refused
from recipe.runner.launch.settings import on_this_machine
from recipe.runner.launch.sweep import Arm


@dataclass
class Start:
    """One start of a run, ready for verl.

    Attributes:
        config: Final: resolved, complete and checked.
        words: Of its command.
        checkpoint: What it resumes from; None for a run that begins anew.
        step: After which it goes on.
        changed: Settings that it changes of the run that its folder holds.
        facts: What ``run.json`` says of its method.
        references: To the environment, by key.
        stop_tokens: ``eos_token_id`` of the run's own generation_config.json, if it gets one.
        notes: What there is to say; ``unsettled``: what only the machine of the run can settle.
    """

    config: DictConfig
    words: tuple[str, ...]
    checkpoint: integrity.Checkpoint | None = None
    step: int = 0
    changed: list[tuple[str, Any, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    references: Mapping[str, str] = field(default_factory=dict)
    stop_tokens: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unsettled: list[str] = field(default_factory=list)

    def written(self) -> dict[str, Any]:
        """The configuration as files and loggers get it: with its references to the environment."""
        plain = OmegaConf.to_container(self.config, resolve=True)
        return secrets.as_given(plain, references=self.references)  # type: ignore[no-any-return]


def prepared(arm: Arm, elsewhere: bool = False) -> Start:
    """The one step from a composed configuration to a start: what machine, folder and method add, and all checks.

    Writes nothing. With ``elsewhere`` the run will be on another machine, and what only that can settle is no error.

    Raises:
        Refused: if the command, the machine or the folder cannot serve the run.
    """
    from recipe.fspo import checks
    from recipe.fspo import config as method
    from recipe.runner.launch import checks as of_a_run
    from recipe.runner.launch.check_values import value_problems

    config, start = arm.config, Start(arm.config, arm.words)
    if wrong := list(value_problems(config, {"fspo": method.FspoSettings})):
        raise Refused(*wrong)
    if literal := list(secrets.literal_problems(OmegaConf.to_container(config))):
        raise Refused(*literal)  # alone: other sentences show the values
    if not method.is_ours(config):
        raise Refused(
            f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}: recipe.fspo.main runs the trainers "
            f"{', '.join(TRAINER_MODES)} (mode=sync, colocate_async, separate_async); for verl's own take its command"
        )
    on_this_machine(config, elsewhere)
    start.references = secrets.references(config)
    OmegaConf.resolve(config)
    trainer, folder = config.trainer, Path(config.trainer.default_local_dir)
    contents = OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.load_contents")
    refused = list(filter(None, [resume.foreign_files(folder)]))
    settings = resume.settings_of_the_run(folder)
    refused += filter(None, [resume.path_without_effect(trainer, settings)])
    if not (config.evaluate and trainer.resume_mode == "resume_path"):  # it scores the checkpoint that is named
        resume.choose_checkpoint(trainer, settings)
    start.checkpoint = integrity.resumed_from(trainer)
    if settings is not None and (repaired := integrity.tracker_repair(trainer, contents)) is not None:
        note, start.checkpoint = repaired  # the tracker is written within the folder's lock
        start.notes.append(note)
    start.step = start.checkpoint.step if start.checkpoint else 0
    refused += integrity.resume_problems(trainer, contents, start.checkpoint)
    if config.evaluate:
        resume.turn_into_evaluation(config, start.checkpoint)
        refused += filter(None, [resume.foreign_files(Path(trainer.default_local_dir))])
    joins = not machine.starts_ray(config.ray_kwargs.ray_init)
    found = [*refused, *secrets.printed_problems(start.references, joins)]
    found += [*checks.method_problems(config), *of_a_run.problems(config)]
    start.unsettled += [problem for problem in found if elsewhere and isinstance(problem, MachineProblem)]
    if refused := [problem for problem in dict.fromkeys(found) if problem not in start.unsettled]:
        raise Refused(*refused)
    start.stop_tokens, note = end_of_turn.add_stop_token(config, settings, elsewhere)  # loads what is checked above
    start.notes.append(note)
    start.notes += [*checks.notes(config), *method.complete(config)]  # the former of what was given
    start.facts = method.facts_of(config, arm.name)
    _ask_verl(config)
    if settings is not None and not config.evaluate:
        before = (resume.run_info(folder) or {}).get("algo", start.facts["algo"])
        also = [("algo", before, start.facts["algo"])]
        start.changed = resume.changed_settings(config, settings, start.references, also)
    start.notes, start.unsettled = list(filter(None, start.notes)), list(filter(None, start.unsettled))
    if not elsewhere:
        print(*(f"note: {note}\n" for note in start.notes), sep="", end="", file=sys.stderr, flush=True)
    return start


def _ask_verl(config: DictConfig) -> None:
    """Let verl refuse a configuration, in its own words and with its status, 1."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    warnings.filterwarnings("ignore", message="Disabled critic")  # verl says so for every estimator but GAE
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
            omega_conf_to_dataclass(config.actor_rollout_ref.rollout)  # as every worker does
    except (AssertionError, ValueError, TypeError, InstantiationException) as error:
        print(f"error: verl refuses the configuration: {error.__cause__ or error}", file=sys.stderr)
        sys.exit(FAILED)
