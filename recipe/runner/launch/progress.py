"""Lines for the person who watches: written by the trainer's process, printed by the launching one.

Ray prefixes and interleaves what its workers print, so a run's own lines do not go through stdout: the trainer appends
them here, the launcher fetches them with a method call, and everything else stays in Ray's log files.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import TextIO


def say(text: str, out: TextIO) -> None:
    """Print a line; where nobody reads them any more (``| tee`` has ended), nothing, now and at the end."""
    try:
        print(text, file=out, flush=True)
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), out.fileno())


#: Numbers of a step's line: label, metrics (blanks between them), what writes them, and what stands for those that a
#: step does not have; empty: nothing.
Columns = tuple[tuple[str, str, Callable[..., str], str], ...]


class Progress:
    """An append-only list of lines that one thread writes and another reads: a list needs no lock for that."""

    def __init__(self) -> None:
        #: What the job adds to the numbers that are shown.
        self.headline: tuple[str, ...] = ()
        self.columns: Columns = ()
        self._lines: list[str] = []
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Add a line, stamped with the seconds since this process began."""
        self._lines.append(f"[{time.monotonic() - self._started:6.1f}s] {text}")

    def since(self, index: int) -> list[str]:
        """The lines from ``index`` on."""
        return self._lines[index:]


#: The progress of this process.
PROGRESS = Progress()

STEP_COLUMNS: Columns = (
    ("reward", "critic/rewards/mean", "{:.3f}".format, ""),
    ("length", "response_length/mean", "{:.0f}".format, ""),
    ("KL", "actor/kl_loss", "{:.4f}".format, ""),
    ("s", "timing_s/step", "{:.1f}".format, ""),
    ("tokens/s", "perf/throughput", "{:.0f}".format, ""),
)


def step_line(step: int, total_steps: int, metrics: Mapping[str, float | None]) -> str:
    """One line for a training step; of a metric that it does not have what its column says."""
    texts = []
    columns = (*STEP_COLUMNS[:2], *PROGRESS.columns, *STEP_COLUMNS[2:])
    for label, names, form, absent in {column[0]: column for column in columns}.values():  # of one label, the job's
        values = [metrics.get(name) for name in names.split()]
        texts.append((label, absent if None in values else form(*values)))
    return f"step {step}/{total_steps}  " + "  ".join(f"{label} {text}" for label, text in texts if text)


def validation_line(step: int, metrics: Mapping[str, float | None]) -> str:
    """One line with the held-out scores, ``val-core/<data source>/<score>/<statistic>``; empty if there are none."""
    scores = {name: value for name, value in metrics.items() if name.startswith("val-core/") and value is not None}
    shown = [f"{name.removeprefix('val-core/')} {value:.3f}" for name, value in scores.items()]
    return f"held-out after step {step}:  " + "  ".join(shown) if shown else ""
