"""Runs the small job for real, and judges what it has written."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fspo.records import METRICS_FILE, step_lines
from recipe.runner.checkpoints.integrity import latest
from recipe.runner.rehearse.shrink import STEPS

#: Seconds that the run may take.
LIMIT_S: Final = 900
#: Probabilities of a token differ by about 1e-3 in bf16 between vLLM and the actor; above this they are two policies.
LARGEST_DIFFERENCE: Final = 0.05
_DIFFERENCE: Final = "training/rollout_probs_diff_mean"
_NORM: Final = "actor/grad_norm"


class Failed(Exception):
    """The job would fail; every line of the message names what, and what to change or what was printed."""


def run(command: str, overrides: Sequence[str], folder: Path) -> str:
    """Train the small job to its end: ``python -m COMMAND OVERRIDES``, with ``folder`` as its run folder.

    Returns:
        What was seen, as a sentence.

    Raises:
        Failed: if the run fails, does not end in time, or leaves something undone.
    """
    folder.mkdir(parents=True)
    others = ("VERL_PLATFORM", "RAY_ADDRESS")  # of the job, not of a rehearsal
    environment = {name: value for name, value in os.environ.items() if name not in others}
    log, problem = folder / "stdout.log", ""
    with log.open("wb") as printed:
        try:  # whichever way the command ends, the run's reaper ends its other processes
            status = subprocess.run(
                [sys.executable, "-m", command, *overrides],
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                timeout=LIMIT_S,
                check=False,
            ).returncode
            problem = f"it ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"it was not done after {LIMIT_S} s"
    if problem:
        text = log.read_text(encoding="utf-8", errors="replace")
        end = text[max(0, text.find("error:")) :][-3000:].strip()
        raise Failed(f"{problem}; it printed: {end}\n(all of it: {log})")
    return verdict(folder)


def verdict(folder: Path) -> str:
    """What the finished run has written, as a sentence.

    Raises:
        Failed: if something is missing or impossible.
    """
    entries = step_lines(folder / METRICS_FILE)
    metrics = {name: value for entry in entries for name, value in entry["metrics"].items()}
    scores = [name for name in metrics if name.startswith("val-core/")]
    norms = {entry["step"]: entry["metrics"][_NORM] for entry in entries if _NORM in entry["metrics"]}
    difference = metrics.get(_DIFFERENCE, math.inf)
    for wrong, says in (
        (latest(folder / "checkpoints") is None, "no checkpoint was saved"),
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
