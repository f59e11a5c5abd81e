"""What a recipe hands to the runner, which itself knows nothing of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig


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
        complete: Fills in what follows from other settings, in place, once there are no problems; returns further
            entries of ``run.json``.
        write_data: Writes the data that ``data.offline_task`` describes, if a run makes its own: it is called with the
            keys of that group (``folder``, ``n_train``, ``n_test`` and what else it takes) and ``splits``, those of
            "train" and "test" that the run reads, and writes SPLIT.parquet into the folder. FileExistsError: a file of
            another origin is in the way.
        conclude: Called with the configuration of a run that has finished.
        resumes: Whether the run goes on in its folder, so that its settings must be those of the folder.
    """

    command: str
    config: Path
    name: str = ""
    modules: tuple[str, ...] = ()
    problems: Callable[[DictConfig], Iterator[str]] = lambda config: iter(())
    complete: Callable[[DictConfig], Mapping[str, Any]] = lambda config: {}
    write_data: Callable[..., object] | None = None
    conclude: Callable[[DictConfig], None] = lambda config: None
    resumes: bool = True
