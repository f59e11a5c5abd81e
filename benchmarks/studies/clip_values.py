"""Measured clip values beside published ones, in three settings (docs/studies/clip-values.md); else ``not run``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.pages import STUDY, Table
from fspo.clip import BATCHES, FIXED_AFTER, needed_scale, scale_with_interval
from fspo.fairness.bootstrap import mean_interval
from fspo.losses import ALGORITHMS
from fspo.report.groups import shared_starts
from fspo.report.runs import Run, load_run
from fspo.report.tables import NOT_RUN, lre_interval, show_interval
from fspo.responses import Responses
from fspo.table import FOLDER, read_table

SETTINGS: Final = ("demo", "words", "fast")
ALGOS: Final = ("fspo", "rloo", "gspo")
SEEDS: Final = (1, 2, 3)
#: First and last step of each part of a run: before the first value, while it is set again, under the last one, all.
PARTS: Final = ((1, 1), (2, 5), (6, FIXED_AFTER), (FIXED_AFTER + 1, 20), (1, 20))


def outside(run: Run, first: int, last: int) -> float:
    """Share of a run's responses outside the band in these steps, without mini-batches of an unmoved policy."""
    step_B = run.responses.step_B
    return float(1 - run.responses.inside_B[(step_B >= first) & (step_B <= last)].mean())


def _accuracy(run: Run) -> float:
    _, values = run.series(*run.validation_metrics()[:1])
    return float(values[-1])


def last_over_first(runs: Sequence[Run]) -> float:
    """Ratio of the runs' last clip values to their first, both summed."""
    first, last = (sum(run.info["clip_values_measured"][place]["c_high"] for run in runs) for place in (0, -1))
    return float(last / first)


def _lre(runs: Sequence[Run], starts: np.ndarray) -> str:
    """Symmetric LRE of the steps under the last value, all runs together, with noise floor and rate."""
    later = [run.responses.select(run.responses.step_B > FIXED_AFTER) for run in runs]
    error = Responses.join(later).error(starts=starts)
    return f"{lre_interval(error)} (floor {error.noise_floor:.3f}, kept {error.rate:.3f})"


def _row(runs: Sequence[Run], starts: np.ndarray | None) -> list[str]:
    if not runs or starts is None:
        return [NOT_RUN] * (len(PARTS) + 3)
    shares = [show_interval(mean_interval([outside(run, *part) for run in runs]), "{:.3f}") for part in PARTS]
    change = f"{last_over_first(runs):.2f}" if runs[0].clip_values == "measured" else "-"
    return [
        *shares,
        change,
        _lre(runs, starts),
        show_interval(mean_interval(list(map(_accuracy, runs))), "{:.3f}"),
    ]


def batches_table() -> Table:
    """How certain a factor is after 1 to 5 rollout batches, and what it leaves outside in the steps after them.

    From the records benchmarks/study/SETTING.parquet, clipped at the published values. Means over seeds.
    """
    rows = [["setting", "band", "batches", "factor", "half its interval, relative", "outside, steps 6 to 10"]]
    for setting in SETTINGS:
        records = read_table(STUDY / f"{setting}.parquet", columns=("seed",)).columns  # all after a moved weight
        for name in ("fspo", "seq_rloo", "seq_gspo"):
            needed_B = needed_scale(records["S"], records["L"], ALGORITHMS[name])
            for batches in range(1, BATCHES + 1):
                measured, outside_later = [], []
                for seed in np.unique(records["seed"]):
                    own_B = records["seed"] == seed
                    first_B = own_B & (records["step"] <= batches)
                    measured.append(scale_with_interval(needed_B[first_B], records["step"][first_B] - 1))
                    outside_later.append((needed_B[own_B & (records["step"] > BATCHES)] > measured[-1].value).mean())
                factor = np.mean([one.value for one in measured])
                error = np.mean(
                    [(one.high - one.low) / 2 / one.value for one in measured]
                )  # of one batch there is none
                shown = "-" if batches == 1 else f"{error:.2f}"
                rows.append([setting, name, str(batches), f"{factor:.3g}", shown, f"{np.mean(outside_later):.3f}"])
    return rows


def shares_table(folder: Path) -> Table:
    """The table of the runs FOLDER/SETTING/CLIP_VALUES/ALGO/seedN: shares outside, LRE, held-out accuracy."""
    parts = [f"outside, steps {first} to {last}" for first, last in PARTS]
    rows = [
        [
            "setting",
            "clip values",
            "algo",
            "runs",
            *parts,
            "last value / first",
            f"LRE, steps {FIXED_AFTER + 1} to 20, symmetric",
            "held-out accuracy",
        ]
    ]
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
        for run in finished:
            if not len(run.responses):
                raise SystemExit(f"{run.path / FOLDER}: no responses: make the table in the checkout that made the run")
        starts = shared_starts(finished) if finished else None
        rows += [
            [setting, origin, algo, str(len(of_cell)), *_row(of_cell, starts)]
            for (origin, algo), of_cell in runs.items()
        ]
    return rows


def tables(folder: Path) -> dict[str, Table]:
    """:func:`shares_table` of a folder of runs, and :func:`batches_table`."""
    return {"shares": shares_table(folder), "batches": batches_table()}
