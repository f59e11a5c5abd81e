"""What a run is doing now, in ``phase.json``: for a person who looks and for the message that ends a failed run."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, TextIO

from fspo.files import write_json

PHASE_FILE = "phase.json"
#: The lines for a person, which the trainer appends (:mod:`recipe.runner.progress`).
PROGRESS_FILE: Final = "progress.log"
#: A phase of the start-up: the first transfer of the weights to GPUs that only generate (``mode=separate_async``).
FIRST_SYNC = "first weight sync"
_OF_THE_START: Final = {"start-up": "start-up", FIRST_SYNC: f"the {FIRST_SYNC}"}


@dataclass(frozen=True)
class Phase:
    """What a run is doing."""

    step: int  #: 0 during start-up.
    #: ``start-up``, in it the first weight sync; then generation, log-probabilities, update, save, weight sync or
    #: validation.
    phase: str
    since: float = field(default_factory=time.time)  #: Unix time, in seconds.
    ending: bool = False  #: Whether the trainer has stopped, with or without an error, and is closing its processes.
    queue: str = ""  #: Of a generation or validation, such as "232 responses finished; prompts: 3 running".

    @property
    def is_start_up(self) -> bool:
        """Whether this start has not begun a step yet."""
        return self.step == 0 or self.phase in _OF_THE_START


def say(text: str, out: TextIO) -> None:
    """Print a line; where nobody reads them any more (``| tee`` has ended), nothing, now and at the end."""
    try:
        print(text, file=out, flush=True)
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), out.fileno())


def during(phase: Phase | None) -> str:
    """For a sentence: `` during start-up``, `` during the update of step 3``; empty where nothing is known."""
    if phase is None:
        return ""
    return " during " + (_OF_THE_START.get(phase.phase) or f"the {phase.phase} of step {phase.step}")


def write_phase(run_dir: str | Path, phase: Phase) -> Phase:
    """Replace ``phase.json``; the phase."""
    with contextlib.suppress(OSError):  # a full disk must not end the run here
        write_json(Path(run_dir) / PHASE_FILE, asdict(phase), durable=False)
    return phase


def read_phase(run_dir: str | Path) -> Phase | None:
    """What the run folder tells; None if it tells nothing."""
    try:
        return Phase(**json.loads(Path(run_dir, PHASE_FILE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
