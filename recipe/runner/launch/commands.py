"""What the commands share: ``KEY=VALUE`` arguments, exit statuses, and how a command that starts the stack ends."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from fspo.records import grid_of
from recipe.runner.checkpoints.integrity import latest
from recipe.runner.faults.preemption import (
    ENDING,
    FAILED,
    INTERRUPTED,
    NOT_BEGUN,
    NOTHING_SAVED,
    Preempted,
    status_of,
)
from recipe.runner.launch.compose import parsed, quoted, text_of
from recipe.runner.launch.job import Job
from recipe.runner.launch.machine import forked_workers, private_run
from recipe.runner.launch.run_settings import Resume, has_results, last_steps, status_after_failure
from recipe.runner.launch.values import PreflightError

#: Exit status for bad input, as ``argparse`` uses it.
BAD_INPUT: Final = 2


#: Hydra's options that name another configuration.
_OF_HYDRA: Final = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")


class BadInput(ValueError):
    """The command line asks for something that cannot be done; the message names the argument and what to change."""


def _without_hydra_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without Hydra's options for another configuration, and what to give in place of these."""
    words, named, rest = [], [], iter(arguments)
    for word in rest:
        option, equals, _ = word.partition("=")
        if option in _OF_HYDRA:
            named.append(word if equals else f"{option}={next(rest, '')}")
        else:
            words.append(word)
    if not named:
        return words, []
    return words, [
        f"{', '.join(named)}: leave it out; the configuration is this program's, which begins with verl's "
        "ppo_trainer. Give what your file adds as KEY=VALUE, or put it as experiment/NAME.yaml into a folder and give "
        "hydra.searchpath=[FOLDER] experiment=NAME; see --help"
    ]


def split_arguments(
    arguments: Sequence[str],
    own: Collection[str],
    problems: list[str] | None = None,
    flags: argparse.ArgumentParser | None = None,
) -> tuple[dict[str, Any], list[Override]]:
    """The command's own settings, read as YAML values, and the other arguments, as Hydra reads them.

    What cannot be read is added to ``problems`` and left out. The ``flags`` of the command are among its settings.

    Raises:
        BadInput: without that list, for all arguments that cannot be read.
    """
    values: dict[str, Any] = {}
    overrides = list[Override]()
    arguments, wrong = _without_hydra_options(arguments)
    if flags is not None:  # here: it takes -cn for -c n
        known, arguments = flags.parse_known_args(arguments)
        values |= vars(known)
    for argument in arguments:
        if argument.lstrip("+").partition("=")[0] in own:  # with a + Hydra would take it for a new key
            argument = argument.lstrip("+")
        key, equals, value = argument.partition("=")
        if set("\r\n") & set(argument):
            wrong.append(f"{argument!r} has a line break in it, as a file written on Windows has (\\r): take it out")
        elif not argument.strip():
            wrong.append(f"{argument!r} is not KEY=VALUE: at the end of a line, take out the blank after the backslash")
        elif key.startswith("-"):
            instead = f"{name}=VALUE" if (name := key.lstrip("-")) else "leave it out"
            wrong.append(f"{argument!r} is no option: keys have no dashes before them, {instead}; see --help")
        elif not argument.startswith("~") and not (equals and key.strip() == key != ""):
            wrong.append(
                f"{argument!r} is not KEY=VALUE: there is no blank beside the =, and a value with blanks in it needs "
                "quotes; see --help"
            )
        elif key not in own:
            try:
                overrides += parsed([argument])
            except HydraException as error:
                wrong.append(_unreadable(argument, str(error).splitlines()[0]))
        else:
            try:  # out is a name as it stands: 2026_11_23 is a folder and not a number
                values[key] = value if key == "out" else yaml.safe_load(value)
            except yaml.YAMLError:
                wrong.append(f"{key}={value!r} is not a value: write numbers, or lists as [a,b]")
    if wrong and problems is None:
        raise BadInput("\n".join(wrong))
    if problems is not None:
        problems += wrong
    return values, overrides


def _unreadable(argument: str, why: str) -> str:
    """What is wrong with an override that Hydra's grammar does not take: its key, or else its value."""
    key, _, value = argument.partition("=")
    text = f"{key}={quoted(value)}"
    try:
        parsed([text])
    except HydraException:
        return f"{argument}: the key {key} cannot be read; its names have a single dot between them: GROUP.NAME=VALUE"
    return f"{argument}: the value cannot be read ({why}); a text is {shlex.quote(text)}, a list KEY=[A,B]"


def as_list(own: Mapping[str, Any], key: str, choices: Sequence[str] = ()) -> list[Any]:
    """A setting that is a list of different values, or a single one.

    Raises:
        BadInput: if it is something else, or a value is not among ``choices``.
    """
    values = own[key] if isinstance(own[key], list) else [own[key]]
    if values in ([], [None]) or len(set(map(str, values))) < len(values):
        raise BadInput(f"{key}={own[key]!r}: give a list of different values")
    for value in values:
        if choices and value not in choices:
            raise BadInput(f"{key}: {value!r} is not known; choose from {', '.join(choices)}")
    return values


def refuse(*problems: object) -> NoReturn:
    """Print each problem as an error, and leave the process with the status of bad input."""
    print(*(f"error: {problem}" for problem in problems), sep="\n", file=sys.stderr)
    sys.exit(BAD_INPUT)


def of_system(error: OSError) -> str:
    """An error of the system before anything was started, as one sentence with its remedy."""
    place = f"{error.filename}: " if error.filename else ""
    return (
        f"{place}{error.strerror or error}; nothing was started: make room or mend the place, or give another "
        "one (run.dir, or the variables HOME, TMPDIR and HF_HOME)"
    )


def of_settings(error: Exception, overrides: Sequence[Override]) -> str:
    """An error of Hydra or OmegaConf in one sentence; where the command deletes keys, these are to blame."""
    if deleted := [text_of(override) for override in overrides if override.is_delete()]:
        why = str(error).partition("\n")[0]
        return f"{', '.join(deleted)}: a run reads this ({why}); leave it out, or give KEY=VALUE"
    return str(error)


def launch_or_exit(
    config: DictConfig, job: Job, overrides: Sequence[Override] = (), resume: Resume | None = None
) -> None:
    """Train. If the run does not finish, print why and exit.

    ``config`` must come from ``overrides`` on the settings of the run ``resume``, and the platform must be exported.
    """

    def commands(finished: bool = False) -> list[str]:
        return next_commands(config, job, finished) if job.resumes and not config.get("evaluate") else []

    def leave(why: str, status: int) -> None:
        print(why, *commands(), sep="\n", file=sys.stderr)
        sys.exit(status)

    def how_far() -> str:
        return "\n".join([_how_far(config), *commands()]) if Path(config.run.dir).exists() else NOT_BEGUN

    ENDING.how_far = how_far
    try:
        with private_run(config), forked_workers(config, job.modules):
            # Here, beside the workers: `start` imports verl, which must wait until the platform is exported.
            from recipe.runner.faults.errors import TrainingFailed
            from recipe.runner.launch.prepare import prepare
            from recipe.runner.launch.start import launch

            try:
                start = prepare(config, job, overrides, resume=resume)
                config = start.config
                launch(start)
            except TrainingFailed as failed:
                leave(f"error: {failed}", status_after_failure(config) if failed.of_process else FAILED)
    except PreflightError as error:
        refuse(*error.problems)
    except OmegaConfBaseException as error:
        of_command = isinstance(error, InterpolationResolutionError)  # of ${...} in an override
        if not (of_command or any(override.is_delete() for override in overrides)):
            raise
        refuse(of_settings(error, overrides))
    except OSError as error:  # once Ray runs, its errors say where they come from
        refuse(of_system(error))
    except Preempted as ended:
        status = status_of(ENDING.signals)
        leave(f"interrupted {_how_far(config)}" if status == INTERRUPTED else str(ended), status)
    if after := commands(finished=True):
        print(*after, sep="\n", flush=True)


def _how_far(config: DictConfig) -> str:
    """How far a run came that was ended early, and what of it is saved: the end of a sentence."""
    if config.get("evaluate"):
        return "before the evaluation was complete"
    saved, done = last_steps(config)
    if not done:
        return NOTHING_SAVED
    if saved == done:
        return f"after step {done}, which is saved"
    if saved:
        return f"after step {done}; the last checkpoint is that of step {saved}"
    every = config.trainer.save_freq
    first = f"the first checkpoint comes after step {every}" if every > 0 else "no step is saved"
    return f"after step {done}; nothing is saved, because {first} (trainer.save_freq={every})"


def next_commands(config: DictConfig, job: Job, finished: bool) -> list[str]:
    """The commands that continue, export and report a run that has ended, as far as they would find something.

    A run of a grid goes on, and is reported on, with the others: alone it might get another length than theirs.
    """
    if (grid := grid_of(Path(config.run.dir).absolute())) is not None:
        again = f"continue: the command that began the grid in {grid}; it goes on where this run has stopped"
        return [] if finished else [again]
    name = str(config.run.dir)
    folder = shlex.quote(name)
    # Two read it, the shell and then Hydra; most names need no quotes for either.
    named = f"resume={name if re.fullmatch('[A-Za-z0-9_./-]+', name) else quoted(name)}"
    resume = f"python -m {job.command} {shlex.quote(named)}"
    commands = []
    if latest(Path(config.trainer.default_local_dir)) is not None:
        commands.append(f"continue: {resume}" + (" trainer.total_training_steps=N" if finished else ""))
        commands.append(f"export: python -m recipe.runner.export {folder} --out DIR")
    elif not finished:
        commands.append(f"begin again (nothing was saved): {resume}")
    if job.name and has_results(Path(config.run.dir)):
        commands.append(f"report: python -m {job.name}.report {folder} --out DIR")
    return commands
