"""A run's folder as its trainer writes it: lines for the person who watches, metrics, and facts that it has measured.

Ray prefixes and interleaves what its workers print, so a run's own lines stand in ``progress.log``, which the launching
process of a run prints.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from fspo.files import INFO_FILE, METRICS_FILE, read_object, write_json
from recipe.runner.faults.phase import PROGRESS_FILE, say

#: Numbers of a step's line: label, metrics (blanks between them), what writes them, and what stands for those that a
#: step does not have; empty: nothing.
Columns = tuple[tuple[str, str, Callable[..., str], str], ...]
STEP_COLUMNS: Columns = (
    ("reward", "critic/rewards/mean", "{:.3f}".format, ""),
    ("length", "response_length/mean", "{:.0f}".format, ""),
    ("KL", "actor/kl_loss", "{:.4f}".format, ""),
    ("s", "timing_s/step", "{:.1f}".format, ""),
    ("tokens/s", "perf/throughput", "{:.0f}".format, ""),
)


class Progress:
    """What the trainer's process tells the person who watches."""

    def __init__(self) -> None:
        self.columns = STEP_COLUMNS  #: The numbers of a step's line.
        self._file: Path | None = None
        self._started = time.monotonic()

    def write_to(self, run_dir: str | Path) -> None:
        """Append to ``progress.log`` of this folder from now on; before that, nothing is written."""
        self._file = Path(run_dir) / PROGRESS_FILE

    def say(self, text: str) -> None:
        """Append a line, stamped with the seconds since this process began; and print it, for verl's own command."""
        line = f"[{time.monotonic() - self._started:6.1f}s] {text}\n"
        say(line.rstrip("\n").encode(errors="backslashreplace").decode(), sys.stdout)
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


def step_line(step: int, total_steps: int, metrics: Mapping[str, float | None]) -> str:
    """One line for a training step; of a metric that it does not have what its column says."""
    texts = [f"step {step}/{total_steps}"]
    for label, names, form, absent in PROGRESS.columns:
        values = [metrics.get(name) for name in names.split()]
        if text := absent if None in values else form(*values):
            texts.append(f"{label} {text}")
    return "  ".join(texts)


def validation_line(step: int, metrics: Mapping[str, float | None]) -> str:
    """One line with the held-out scores, ``val-core/<data source>/<score>/<statistic>``; empty if there are none."""
    scores = {name: value for name, value in metrics.items() if name.startswith("val-core/") and value is not None}
    shown = [f"{name.removeprefix('val-core/')} {value:.3f}" for name, value in scores.items()]
    return f"held-out after step {step}:  " + "  ".join(shown) if shown else ""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Around a write to a file or folder of the run. Raises ExplainedError if the disk is full or fails."""
    try:
        yield path
    except OSError as error:
        from recipe.runner.faults.errors import ExplainedError  # imports Ray

        raise ExplainedError(
            f"{path} cannot be written ({error.strerror or error}): make room, or mend the file system, before you "
            "continue"
        ) from error


def append_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append records to a JSON Lines file, a line each, by one write: a kill costs at most the last line.

    That line has no end then, and gets one here; readers name and skip it.
    """
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else f"\n{text}"
        file.write(text.encode())


def note(folder: str | Path, **facts: Any) -> None:
    """Add facts to ``run.json`` that are known only once the run is under way."""
    with writing(Path(folder, INFO_FILE)) as path:
        write_json(path, read_object(path) | facts, allow_nan=True)


def _json_number(value: Any) -> float | int | None:
    """A number that JSON can hold: NaN and infinities become null."""
    value = value.item() if isinstance(value, np.generic) else value
    return value if not isinstance(value, float) or math.isfinite(value) else None


class RunLog:
    """A logger beside verl's own (it has their ``log(data, step)``), whose file goes on where a resumed run does.

    verl's ``file`` logger opens its file anew at each start.
    """

    def __init__(self, folder: str | Path, total_steps: int) -> None:
        self._folder, self._total_steps = Path(folder), total_steps

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Append one line of metrics and tell the person who watches."""
        metrics = {name: _json_number(value) for name, value in data.items()}
        with writing(self._folder / METRICS_FILE) as path:
            append_records(path, [{"step": step, "metrics": metrics}])
        if "timing_s/step" in metrics:
            PROGRESS.say(step_line(step, self._total_steps, metrics))
        if validation := validation_line(step, metrics):
            PROGRESS.say(validation)
