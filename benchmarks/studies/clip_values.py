"""Measured clip values beside published ones, in three settings (docs/studies/clip-values.md); else ``not run``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.pages import STUDY, Table
from fspo.acceptance import acceptance_counts
from fspo.clip_values import BATCHES, estimate, needed_scale
from fspo.fairness.bootstrap import mean_interval
from fspo.losses import ALGORITHMS
from fspo.records import read_parquet
from fspo.report.groups import shared_starts
from fspo.report.runs import Run, load_run
from fspo.report.tables import NOT_RUN, lre_interval, show_interval
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


def second_over_first(runs: Sequence[Run]) -> float:
    """Ratio of the runs' second clip values to their first, both summed, as factors on the upper bound of S."""
    bounds = [[one["c_high"] for one in measured] for run in runs for measured in [run.info["clip_values_measured"]]]
    first, second = np.sum(bounds, axis=0)
    return float(second / first)


def _lre(runs: Sequence[Run], starts: np.ndarray) -> str:
    """Symmetric LRE of the steps under the second value, all runs together, with noise floor and rate."""
    later = [run.lengths.sums_MKF[run.lengths.step_M >= PARTS[2][0]] for run in runs]
    error = acceptance_counts(np.concatenate(later)).error(starts)
    return f"{lre_interval(error)} (floor {error.noise_floor:.3f}, kept {error.rate:.3f})"


def _row(runs: Sequence[Run], starts: np.ndarray | None) -> list[str]:
    if not runs or starts is None:
        return [NOT_RUN] * (len(PARTS) + 3)
    shares = [show_interval(mean_interval([outside(run, *part) for run in runs]), "{:.3f}") for part in PARTS]
    change = f"{second_over_first(runs):.2f}" if runs[0].clip_values == "measured" else "-"
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
    import pandas as pd

    rows = [["setting", "band", "batches", "factor", "standard error, relative", "outside, steps 6 to 10"]]
    for setting in SETTINGS:
        records = pd.DataFrame(read_parquet(STUDY / f"{setting}.parquet"))
        for name in ("fspo", "seq_rloo", "seq_gspo"):
            records["needed"] = needed_scale(records["S"], records["L"], ALGORITHMS[name])
            for batches in range(1, BATCHES + 1):
                estimates, outside_later = [], []
                for _, run in records.groupby("seed"):
                    first = run[run["step"] <= batches]
                    measured = estimate(first["needed"].to_numpy(), first.groupby(["step", "prompt"]).ngroup(), 0.85)
                    assert measured is not None
                    estimates.append(measured)
                    outside_later.append((run.loc[run["step"] > BATCHES, "needed"] > measured.scale).mean())
                means = [np.mean([getattr(one, field) for one in estimates]) for field in ("scale", "error")]
                rows.append(
                    [setting, name, str(batches), f"{means[0]:.3g}", f"{means[1]:.2f}", f"{np.mean(outside_later):.3f}"]
                )
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
            "second value / first",
            "LRE, steps 11 to 20, symmetric",
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
            if not len(run.lengths.step_M):
                raise SystemExit(f"{run.problems[-1]}: make the table in the checkout that made the run")
        starts = shared_starts(finished) if finished else None
        rows += [
            [setting, origin, algo, str(len(of_cell)), *_row(of_cell, starts)]
            for (origin, algo), of_cell in runs.items()
        ]
    return rows


def tables(folder: Path) -> dict[str, Table]:
    """:func:`shares_table` of a folder of runs, and :func:`batches_table`."""
    return {"shares": shares_table(folder), "batches": batches_table()}
