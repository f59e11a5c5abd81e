"""Measured clip values beside published ones, in three settings; docs/results.md. What has no run is ``not run``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.pages import Table
from benchmarks.studies.fairness import lre_cell, own_counts
from fspo.fairness.bootstrap import mean_interval
from fspo.report.groups import shared_starts
from fspo.report.runs import Run, load_run
from fspo.report.tables import NOT_RUN, show_interval
from fspo.sums import FIELDS

SETTINGS: Final = ("demo", "words", "fast")
ALGOS: Final = ("fspo", "rloo", "gspo")
SEEDS: Final = (1, 2, 3)
#: First and last step of each part of a run: before the first value, under it, under the second one, all.
PARTS: Final = ((1, 5), (6, 10), (11, 20), (1, 20))


def outside(run: Run, first: int, last: int) -> float:
    """Share of a run's responses outside the band in these steps, without mini-batches of an unmoved policy."""
    steps = run.lengths.step_M
    count, accepted = (
        run.lengths.sums_MKF[(steps >= first) & (steps <= last)][..., FIELDS.index(name)].sum()
        for name in ("count", "accepted")
    )
    return float(1 - accepted / count)


def _accuracy(run: Run) -> float:
    _, values = run.series(*run.validation_metrics()[:1])
    return float(values[-1])


def _row(runs: Sequence[Run], starts: np.ndarray | None) -> list[str]:
    if not runs or starts is None:
        return [NOT_RUN] * (len(PARTS) + 2)
    shares = [show_interval(mean_interval([outside(run, *part) for run in runs]), "{:.3f}") for part in PARTS]
    counts = [own_counts(run, "symmetric", PARTS[2][0]) for run in runs]
    return [*shares, lre_cell(counts, starts), show_interval(mean_interval(list(map(_accuracy, runs))), "{:.3f}")]


def tables(folder: Path) -> dict[str, Table]:
    """The table of FOLDER/SETTING/CLIP_VALUES/ALGO/seedN: shares outside, LRE, held-out accuracy."""
    parts = [f"outside, steps {first} to {last}" for first, last in PARTS]
    rows = [["setting", "clip values", "algo", "runs", *parts, "LRE, steps 11 to 20, symmetric", "held-out accuracy"]]
    for setting in SETTINGS:
        places = {
            (origin, algo): [folder / setting / origin / algo / f"seed{seed}" for seed in SEEDS]
            for origin in ("measured", "published")
            for algo in ALGOS
        }
        runs = {
            cell: [run for run in map(load_run, filter(Path.is_dir, paths)) if run.status == "finished"]
            for cell, paths in places.items()
        }
        finished = [run for of_cell in runs.values() for run in of_cell]
        starts = shared_starts(finished) if finished else None
        rows += [
            [setting, origin, algo, str(len(of_cell)), *_row(of_cell, starts)]
            for (origin, algo), of_cell in runs.items()
        ]
    return {"shares": rows}
