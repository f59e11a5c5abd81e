"""What a recipe hands to the runner, which itself knows nothing of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig


@dataclass(frozen=True)
class Passes:
    """What a job's trainer computes otherwise than verl's, for the planner.

    Attributes:
        reference_at_validations: The reference model has a pass at the steps that validate.
        keeps_old_weights: While it generates beside the update, it keeps the weights that a step began with.
    """

    reference_at_validations: bool = False
    keeps_old_weights: bool = False


@dataclass(frozen=True)
class Job:
    """One kind of run.

    Attributes:
        command: Module that starts it as ``python -m MODULE KEY=VALUE ...``.
        config: Root file of its configuration; what its defaults list names lies beside it, in verl's folder, in
            ``recipe/runner/conf`` or in those of ``hydra.searchpath``.
        name: Of its group of settings and of the package with its method, whose version a run records and whose
            ``python -m NAME.report`` reports on one; empty: there is none.
        modules: Imported by the process that trains, so that they register the trainer that the configuration names;
            on CPUs the workers are forked with them.
        problems: Further problems of a configuration, each a sentence.
        no_effect: File with further rows of the table of keys without effect
            (:mod:`recipe.runner.launch.no_effect`); they come first.
        complete: Fills in what follows from other settings, in place, once there are no problems; returns further
            entries of ``run.json``.
        passes: What the planner has to know of its trainer.
        outlook: Further lines of a plan and a dry run: of a configuration and, in a dry run, the overrides of it and
            the folder of the checkpoint that it resumes, or None.
        write_data: Writes the data that ``data.offline_task`` describes, if a run makes its own: it is called with the
            keys of that group (``folder``, ``n_train``, ``n_test`` and what else it takes) and ``splits``, those of
            "train" and "test" that the run reads, and writes SPLIT.parquet into the folder. FileExistsError: a file of
            another origin is in the way.
        conclude: Called with the configuration of a run that has finished.
        resumes: Whether the run goes on in its folder, so that its settings must be those of the folder.
        old_keys: Keys that earlier releases of verl had and that nothing reads now, and what to give instead, as a
            sentence. A key stands for all that lies below it, too.
        instead: Keys that verl reads if they are added with a plus, and what this job has in their place.
        former_keys: Keys that the job once had. Such an override is composed as if it added the key, so that
            ``problems`` refuse it with what they know of the other settings.
        recorded: Why a run whose folder holds these settings cannot go on, each a sentence.
        headline: Metrics that ``run.log=headline`` sends to the loggers, as patterns, besides the runner's own.
        columns: Numbers of a step's line, further ones or in place of the runner's of that label: label, metrics
            (blanks between them), format, and what stands for those that a step does not have; empty: nothing.
    """

    command: str
    config: Path
    name: str = ""
    modules: tuple[str, ...] = ("recipe.runner.trainer",)
    problems: Callable[[DictConfig], Iterator[str]] = lambda config: iter(())
    no_effect: Path | None = None
    complete: Callable[[DictConfig], Mapping[str, Any]] = lambda config: {}
    passes: Callable[[DictConfig], Passes] = lambda config: Passes()
    outlook: Callable[..., Iterator[str]] = lambda config, overrides, checkpoint=None: iter(())
    write_data: Callable[..., object] | None = None
    conclude: Callable[[DictConfig], None] = lambda config: None
    resumes: bool = True
    old_keys: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    former_keys: tuple[str, ...] = ()
    recorded: Callable[[Mapping[str, Any]], Iterator[str]] = lambda settings: iter(())
    headline: tuple[str, ...] = ()
    columns: tuple[tuple[str, str, str, str], ...] = ()
