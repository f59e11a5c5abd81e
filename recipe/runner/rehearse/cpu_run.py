"""Runs the small job for real, kills it after its first checkpoint, resumes it, and judges what it has written."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from recipe.runner.checkpoints.integrity import latest, step_of
from recipe.runner.launch.compose import quoted
from recipe.runner.launch.run_folder import logged
from recipe.runner.rehearse.shrink import STEPS

#: Seconds that one of the two starts may take.
LIMIT_S: Final = 900
#: Probabilities of a token differ by about 1e-3 in bf16 between vLLM and the actor; above this they are two policies.
LARGEST_DIFFERENCE: Final = 0.05
_DIFFERENCE: Final = "training/rollout_probs_diff_mean"
_NORM: Final = "actor/grad_norm"


class Failed(Exception):
    """The job would fail; every line of the message names what, and what to change or what was printed."""


def run(command: str, overrides: Sequence[str], folder: Path) -> str:
    """Two steps with a checkpoint each; the start is killed after the first, and the next one resumes the folder.

    Args:
        command: Module that starts the job.
        overrides: Of the small job.
        folder: Of its run.

    Returns:
        What was seen, as a sentence.

    Raises:
        Failed: if a start fails, does not end in time, or leaves something undone.
    """
    folder.mkdir(parents=True)
    with _started(command, overrides, folder) as first:
        _wait(first, folder, lambda: latest(folder / "checkpoints") is not None)
    saved = latest(folder / "checkpoints")
    if saved is None:
        raise Failed(f"it ended without a checkpoint; it printed: {_tail(folder)}")
    with _started(command, [f"resume={quoted(folder)}"], folder) as second:
        _wait(second, folder, lambda: False)
    return f"killed after the checkpoint of step {step_of(saved)}, resumed; {verdict(folder)}"


@contextlib.contextmanager
def _started(command: str, arguments: Sequence[str], folder: Path) -> Iterator[psutil.Popen]:
    """The job's command; what is left of it at the end is killed, as the system does where memory is short."""
    others = ("VERL_PLATFORM", "RAY_ADDRESS")  # of the job, not of a rehearsal
    environment = {name: value for name, value in os.environ.items() if name not in others}
    with (folder / "stdout.log").open("ab") as log:
        process = psutil.Popen(
            [sys.executable, "-m", command, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            family = [process, *process.children(recursive=True)]
            process.send_signal(signal.SIGKILL)
            psutil.wait_procs(family, timeout=60)  # the run's reaper ends the others


def _wait(process: psutil.Popen, folder: Path, enough: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while process.poll() is None and not enough():
        if time.monotonic() > limit:
            raise Failed(f"not done after {LIMIT_S} s; it printed: {_tail(folder)}")
        time.sleep(0.2)
    if process.returncode:
        raise Failed(f"it ended with status {process.returncode}; it printed: {_tail(folder)}")


def _tail(folder: Path) -> str:
    text = (folder / "stdout.log").read_text(encoding="utf-8", errors="replace")
    return f"{text[max(0, text.find('error:')) :][-3000:].strip()}\n(all of it: {folder / 'stdout.log'})"


def verdict(folder: Path) -> str:
    """What the finished run has written, as a sentence.

    Raises:
        Failed: if something is missing or impossible.
    """
    entries = logged(folder)
    metrics = {name: value for entry in entries for name, value in entry["metrics"].items()}
    status = json.loads((folder / "run.json").read_text(encoding="utf-8"))["status"]
    last = latest(folder / "checkpoints")
    scores = [name for name in metrics if name.startswith("val-core/")]
    norms = {entry["step"]: entry["metrics"][_NORM] for entry in entries if _NORM in entry["metrics"]}
    difference = metrics.get(_DIFFERENCE, math.inf)
    for wrong, says in (
        (status != "finished", f"run.json says {status}"),
        (last is None or step_of(last) != STEPS, f"the last checkpoint is {last}"),
        ("resumed from" not in (folder / "stdout.log").read_text(encoding="utf-8"), "the second start did not resume"),
        (not scores, "no validation was recorded"),
        (sorted(norms) != list(range(1, STEPS + 1)), f"steps {sorted(norms)} were recorded"),
        (not all(norm and math.isfinite(norm) for norm in norms.values()), f"gradient norms by step: {norms}"),
        (difference > LARGEST_DIFFERENCE, f"{_DIFFERENCE}={difference}"),
    ):
        if wrong:
            raise Failed(f"{says}; see {folder}")
    return (
        f"{len(scores)} validation scores; gradient norms {', '.join(f'{norm:.3g}' for norm in norms.values())}; "
        f"vLLM's and the actor's probabilities differ by {difference:.1e}"
    )
