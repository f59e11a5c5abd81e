"""What a command asks of the launcher, which itself knows nothing of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from omegaconf import DictConfig


@dataclass(frozen=True)
class Job:
    """One kind of run.

    Attributes:
        modules: Imported by the process that trains, so that they register the trainer that the configuration names;
            on CPUs the workers are forked with them.
        problems: Further problems of a configuration, each a sentence.
        complete: Fills in what follows from other settings, in place, once there are no problems.
        conclude: Called with the configuration of a run that has finished.
        resumes: Whether the run goes on in its folder, so that its settings must be those of the folder.
    """

    modules: tuple[str, ...]
    problems: Callable[[DictConfig], Iterator[str]]
    complete: Callable[[DictConfig], None]
    conclude: Callable[[DictConfig], None]
    resumes: bool = True
