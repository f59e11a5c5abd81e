"""One start of a variant, watched until its last step: what a row of the results holds."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.versus_verl.sampler import Sampler
from benchmarks.versus_verl.variants import STEPS, Variant, command, fingerprint
from fspo.files import complete_lines

_POLL_S = 0.1
TIME_LIMIT_S = 900


class StartFailed(RuntimeError):
    """A start ended, or was ended, before its last step."""


def lines_written(path: Path) -> int:
    """Complete lines of a file; none if it is not there."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes().count(b"\n")
    return 0


def step_times(entries: Sequence[dict[str, Any]], ended_s: Sequence[float]) -> dict[str, Any]:
    """Start-up and step times from verl's log and the moments at which its lines were seen.

    The first step begins verl's own ``timing_s/step`` before it ends. A later step lasts from one line to the next, so
    that what is outside verl's timer (metrics, loggers) is counted.
    """
    first = entries[0]["data"]["timing_s/step"]
    names = sorted({name for entry in entries[1:] for name in entry["data"] if name.startswith("timing_s/")})
    return {
        "first_step_begins_s": round(ended_s[0] - first, 2),
        "first_step_ends_s": round(ended_s[0], 2),
        "first_step_s": round(first, 2),
        "steps_s": [round(b - a, 2) for a, b in itertools.pairwise(ended_s)],
        "timings_s": {name.removeprefix("timing_s/"): round(median(_values(entries[1:], name)), 3) for name in names},
        "first_timings_s": {
            name.removeprefix("timing_s/"): round(value, 3)
            for name, value in sorted(entries[0]["data"].items())
            if name.startswith("timing_s/")
        },
        "response_tokens": [round(entry["data"]["response_length/mean"], 1) for entry in entries],
    }


def _values(entries: Iterable[dict[str, Any]], name: str) -> list[float]:
    return [entry["data"][name] for entry in entries if name in entry["data"]]


def measure(variant: Variant, extra: Sequence[str] = (), steps: int = STEPS) -> dict[str, Any]:
    """Start ``variant`` and watch it to its end.

    Raises:
        StartFailed: with the end of its output, if it does not reach its last step.
    """
    with tempfile.TemporaryDirectory(prefix="versus-verl-") as folder:
        run_dir = Path(folder)
        words, environment = command(variant, run_dir, extra)
        log, ended = run_dir / "stdout.log", []
        load_before = os.getloadavg()[0]
        with log.open("wb") as out:
            process = subprocess.Popen(
                words, stdout=out, stderr=out, cwd=run_dir, env=environment, start_new_session=True
            )
        sampler = Sampler(process.pid)
        try:
            while process.poll() is None and sampler.now() < TIME_LIMIT_S and len(ended) < steps:
                sampler.sample()
                done = lines_written(run_dir / "steps.jsonl")
                ended += [sampler.now()] * (done - len(ended))
                time.sleep(_POLL_S)
            entries = complete_lines(run_dir / "steps.jsonl")
            if len(ended) < steps:
                tail = log.read_text(errors="replace")[-3000:]
                raise StartFailed(f"{variant.name}: {len(ended)} of {steps} steps in {sampler.now():.0f} s\n{tail}")
            times = step_times(entries[:steps], ended)
            seen = sampler.report(times["first_step_begins_s"])
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60 if len(ended) == steps else 1)
            sampler.kill_the_rest()
            process.wait()
    return {
        "variant": variant.name,
        "fingerprint": fingerprint(variant, extra),
        "extra": list(extra),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load_before, 1),
        **times,
        **seen,
    }
