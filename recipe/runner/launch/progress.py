"""Lines for the person who watches: ``progress.log`` in the run folder, which the launching process prints.

Ray prefixes and interleaves what its workers print, so a run's own lines do not go through stdout: the trainer appends
them to the file, and everything else stays in Ray's log files.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from recipe.runner.faults.phase import PROGRESS_FILE


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
    """What the trainer's process tells the person who watches."""

    def __init__(self) -> None:
        #: What the job adds to the numbers of a step's line.
        self.columns: Columns = ()
        self._file: Path | None = None
        self._started = time.monotonic()

    def write_to(self, run_dir: str | Path) -> None:
        """Append to ``progress.log`` of this folder from now on; before that, nothing is written."""
        self._file = Path(run_dir) / PROGRESS_FILE

    def say(self, text: str) -> None:
        """Append a line, stamped with the seconds since this process began."""
        line = f"[{time.monotonic() - self._started:6.1f}s] {text}\n"
        # A full disk does not end the run here. Opened anew each time: so NFS shows the line to other machines.
        with contextlib.suppress(OSError):
            if self._file is not None:
                with self._file.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(line)


#: The progress of this process.
PROGRESS = Progress()


def print_new(run_dir: str | Path, begin: int, out: TextIO) -> int:
    """Print the whole lines of ``progress.log`` from byte ``begin`` on; returns the byte after them."""
    with contextlib.suppress(OSError), Path(run_dir, PROGRESS_FILE).open("rb") as file:
        file.seek(begin)
        lines, newline, _ = file.read().rpartition(b"\n")
        if newline:
            say(lines.decode(errors="replace"), out)
        return begin + len(lines + newline)
    return begin


def length(run_dir: str | Path) -> int:
    """How many bytes ``progress.log`` has: those of earlier starts, before one begins."""
    path = Path(run_dir, PROGRESS_FILE)
    return path.stat().st_size if path.exists() else 0


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
