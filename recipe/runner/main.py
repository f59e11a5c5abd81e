"""The command of a job: ``python -m MODULE [KEY=VALUE ...]``, composed once, then run to its end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fspo.records import CONFIG_FILE
from recipe.runner.faults.processes import own_run_id
from recipe.runner.launch.commands import BadInput, launch_or_exit, of_settings, of_system, refuse, split_arguments
from recipe.runner.launch.compose import Refused, compose, is_no_group, key_of, text_of
from recipe.runner.launch.job import Job
from recipe.runner.launch.machine import WrongMachineError, export_platform
from recipe.runner.launch.run_settings import Resume, in_folder, resume_of
from recipe.runner.launch.secrets import as_given, literal_problems, references
from recipe.runner.launch.values import PreflightError

if TYPE_CHECKING:
    from recipe.runner.launch.run_folder import Start

#: Settings of the command itself: default and meaning of each (docs/settings.md).
SETTINGS: Final = {
    "resume": ("", "a run's folder, which must be there: go on with its settings (docs/runs.md#continuing-a-run)"),
    "dry_run": ("false", "true: check the command, and write nothing"),
}


def main(job: Job, usage: Callable[[], str], several: str, arguments: Sequence[str]) -> None:
    """Run a job as its command line asks, and leave the process unless the run has finished.

    ``usage`` returns the text of ``--help``. ``several`` names the command for several runs, which the refusal of
    Hydra's sweeps recommends.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {job.command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--package", "-p")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    # Settings of the command: with a + Hydra would take them for new keys of the configuration.
    words = [
        word.lstrip("+") if word.lstrip("+").startswith(tuple(f"{key}=" for key in SETTINGS)) else word
        for word in arguments
    ]
    problems = list[str]()
    settings, overrides = split_arguments(words, ["dry_run"], problems, parser)
    if settings["help"]:
        print(usage(), end="")
        return
    _main(job, several, settings, overrides, problems)


def _main(job: Job, several: str, settings: Mapping[str, Any], overrides: list[Override], problems: list[str]) -> None:
    resume, flags = None, argparse.Namespace(**settings)
    values = [(key_of(override), override.value()) for override in overrides if not override.is_sweep_override()]
    if literal := [problem for key, value in values for problem in literal_problems(value, key)]:
        refuse(*literal)  # alone: other sentences show the words
    try:
        dry_run = settings.get("dry_run", False)
        if type(dry_run) is not bool:
            problems.append(f"dry_run={dry_run}: give true or false")
        sweeps = [override for override in overrides if override.is_sweep_override()]
        if flags.multirun or sweeps:
            what = text_of(sweeps[0]) if sweeps else "--multirun"
            problems.append(f"{what}: one command is one run; for several use {several}; a list is KEY=[A,B]")
            overrides = [override for override in overrides if override not in sweeps]
        resume = resume_of(overrides, job)
        try:
            config, new = _composed(job, overrides, resume)
            named = [] if resume else _with_folder(config, overrides)
            if named and (resume := resume_of(named, job)) is not None:
                config, new = _composed(job, named, resume)
        except Refused as error:
            raise Refused([*problems, *error.problems], error.config) from error
        overrides = new
        if literal := list(literal_problems(OmegaConf.to_container(config))):  # of a file of the user's
            raise BadInput("\n".join(literal))
        if problems:
            raise Refused(problems, config)
        if not OmegaConf.is_dict(config.run):
            raise BadInput(f"run={config.run}: run is a group of settings; give run.dir=FOLDER, for example")
        if flags.cfg or flags.package or flags.resolve:
            part = config if flags.package in (None, "_global_") else OmegaConf.select(config, flags.package)
            if not OmegaConf.is_config(part):
                raise BadInput(f"--package {flags.package}: give a group of the configuration, such as trainer")
            key = "" if part is config else flags.package
            plain = as_given(OmegaConf.to_container(part, resolve=flags.resolve), key, references(config))
            print(OmegaConf.to_yaml(plain), end="")
            return
        os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")  # this process only; workers log to their files as they do
        export_platform(config, elsewhere=bool(dry_run))
        if dry_run:
            print(_tried_out(config, job, overrides, resume), end="", flush=True)
            return
    except PreflightError as error:
        refuse(*problems, *error.problems)
    except Refused as error:
        refuse(*dict.fromkeys([*error.problems, *problems_of(error.config, job, overrides, resume)]))
    except (HydraException, OmegaConfBaseException) as error:
        refuse(*problems, of_settings(error, overrides))
    except (BadInput, ModuleNotFoundError, WrongMachineError) as error:
        refuse(error)
    except OSError as error:
        refuse(of_system(error))
    own_run_id()  # before anything is started: whatever is, inherits it
    launch_or_exit(config, job, overrides, resume)


def _composed(job: Job, overrides: list[Override], resume: Resume | None) -> tuple[DictConfig, list[Override]]:
    """The configuration, and the overrides that it has beside the settings of the run ``resume``."""
    if resume is None:
        return compose(job, overrides), overrides
    if resume.measured:
        print(f"note: the settings are those of {resume.folder / CONFIG_FILE}", file=sys.stderr)
    new = resume.new(overrides)
    return compose(job, new, resume.base), new


def _with_folder(config: DictConfig, overrides: Sequence[Override]) -> list[Override]:
    """The overrides with the run folder written out, where a file of the user's or a reference names it; else none."""
    try:
        folder = str(OmegaConf.select(config, "run.dir") or "")
    except (OmegaConfBaseException, TypeError):  # run is no group, or refers to nothing: the checks say so
        return []
    if not folder or any(key_of(override) == "run.dir" and str(override.value()) == folder for override in overrides):
        return []
    return in_folder(overrides, folder)


def problems_of(
    config: DictConfig | None, job: Job, overrides: Sequence[Override], resume: Resume | None = None
) -> Sequence[str]:
    """What a dry run refuses of a configuration, also of one without the refused overrides: one start names all."""
    if config is None or not OmegaConf.is_dict(config.run):
        return ()
    from recipe.runner.launch.prepare import prepare

    try:
        export_platform(config, elsewhere=True)
        applied = [override for override in overrides if not is_no_group(config, override)]
        prepare(config, job, applied, elsewhere=True, resume=resume)
    except (PreflightError, Refused) as error:
        return error.problems
    except (HydraException, OmegaConfBaseException) as error:
        return (of_settings(error, overrides),)
    except (BadInput, ModuleNotFoundError, WrongMachineError) as error:
        return (str(error),)
    except OSError as error:
        return (of_system(error),)
    return ()


def _tried_out(config: DictConfig, job: Job, overrides: Sequence[Override], resume: Resume | None) -> str:
    """What ``dry_run=true`` prints: where it begins, what could not be checked, what differs from the given keys.

    Writes nothing.

    Raises:
        PreflightError: if this recipe or verl refuses the configuration or a file that is here.
    """
    from recipe.runner.launch.prepare import prepare

    start = prepare(config, job, overrides, elsewhere=True, resume=resume)
    lines = list(_beginning(start, resume))
    lines += [f"not checked on this machine: {problem}" for problem in start.unsettled]
    lines += _differing(start.config, overrides)
    lines.append(start.notes)
    lines.append("the configuration: --cfg job")
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())


def _beginning(start: Start, resume: Resume | None) -> Iterator[str]:
    """The step that a start would begin with, and the checkpoint that it would load; nothing of a new run."""
    from recipe.runner.launch.inputs import last_step

    last = last_step(start.config)
    if start.checkpoint is not None and start.goes_on and last is not None and start.step >= last:
        yield f"no step is left: the run ends with step {last}, and {start.checkpoint} has done step {start.step}"
    elif start.checkpoint is not None:
        what = f"begins with step {start.step + 1}" if start.goes_on else f"evaluates step {start.step}"
        yield f"{what}: it loads {start.checkpoint}"
    elif resume is not None and start.goes_on:
        yield f"begins with step 1: {start.config.trainer.default_local_dir} holds no checkpoint to go on from"


def _differing(config: DictConfig, overrides: Sequence[Override]) -> Iterator[str]:
    """Keys of the command that have another value in the run; a path that was made absolute counts as equal."""
    for override in overrides:
        key, wanted = key_of(override), override.value()
        is_of_the_run = "." in key and key.partition(".")[0] in config  # Hydra's own keys are not
        value = OmegaConf.select(config, key) if is_of_the_run and not override.is_delete() else wanted
        if str(value) != str(wanted) and "${" not in str(wanted) and not str(value).endswith(str(wanted).lstrip("./")):
            yield f"given {key}={wanted}, in the run {value}"
