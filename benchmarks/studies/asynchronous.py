"""Asynchronous training under several remedies for old responses; docs/results.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.pages import Table
from benchmarks.studies.fairness import joined, lre_cell, own_counts, paired_cells
from fspo.acceptance import Counts
from fspo.fairness import equal_mass_starts, merge_bins
from fspo.fairness.bootstrap import mean_interval
from fspo.funnel import STAGES, FunnelSteps, stage_fairness
from fspo.records import LENGTH_STATS_FILE, from_record, step_lines
from fspo.report.runs import Run, load_run
from fspo.report.tables import show_interval, show_lre
from fspo.sums import FINE_LENGTH_EDGES

SEEDS: Final = (1, 2, 3, 4, 5)
#: Condition and algorithm, the most informative first, and how many seeds; each seed of all comes before the next.
CELLS: Final = {
    ("sync", "fspo"): 5,
    ("separate_drop3", "fspo"): 5,
    ("separate_drop3", "gspo"): 3,
    ("separate_evenly3", "fspo"): 5,
    ("separate_wait3", "fspo"): 5,
    ("separate_drop2", "fspo"): 1,
    ("separate_rollout3", "fspo"): 1,
    ("colocate_drop3", "fspo"): 5,
}
ACCURACY: Final = "val-core/fspo/remainder/acc/mean@1"
PHASES: Final = ("gen", "old_log_prob", "update_actor", "update_weights", "step")
BINS: Final = 5

Cells = dict[tuple[str, str], list[Run]]


def finished(folder: Path) -> Cells:
    """The finished runs of every cell that has some."""
    cells: Cells = {}
    for name, algo in CELLS:
        runs = [load_run(folder / name / "default" / algo / f"seed{seed}") for seed in SEEDS]
        if done := [run for run in runs if run.status == "finished"]:
            cells[name, algo] = done
    return cells


def mean_cell(values: Sequence[float | None], form: str) -> str:
    """Mean of what is known, with its interval."""
    known = [value for value in values if value is not None and np.isfinite(value)]
    return show_interval(mean_interval(known), form) if known else "-"


def _metric(run: Run, name: str) -> float | None:
    _, values = run.series(name)
    return float(values.mean()) if len(values) else None


def _length(run: Run, stage: str) -> float:
    index, steps = STAGES.index(stage), run.funnel
    count = steps.ended_MSK[:, index, :-1].sum()
    return float(steps.tokens_MS[:, index].sum() / count) if count else float("nan")


def funnel_row(runs: Sequence[Run]) -> list[str]:
    """Where the responses of one cell ended, and what it cost and gave; intervals are over seeds."""
    shares = [run.funnel.ended_MSK.sum((0, 2)) / run.funnel.ended_MSK.sum() for run in runs]
    tokens = [run.funnel.tokens_MS.sum(0) / run.funnel.tokens_MS.sum() for run in runs]
    return [
        mean_cell([share[STAGES.index("stale")] for share in shares], "{:.1%}"),
        mean_cell([1 - share[STAGES.index("trained")] for share in tokens], "{:.1%}"),
        mean_cell([_length(run, "stale") / _length(run, "trained") for run in runs], "{:.2f}"),
        mean_cell([_metric(run, "fspo/funnel/staleness") for run in runs], "{:.2f}"),
        mean_cell([_metric(run, "fspo/funnel/versions") for run in runs], "{:.2f}"),
        mean_cell([_length(run, "trained") for run in runs], "{:.0f}"),
        mean_cell([_metric(run, ACCURACY) for run in runs], "{:.3f}"),
    ]


def accepted_by_length(parts: Sequence[Counts], starts: np.ndarray) -> np.ndarray:
    """Share accepted of the responses of each length bin."""
    accepted_J = merge_bins(sum(part.accepted.sum(0) for part in parts), starts)
    total_J = merge_bins(sum(part.total.sum(0) for part in parts), starts)
    return np.divide(accepted_J, total_J, out=np.ones_like(total_J), where=total_J > 0)


def lre_row(runs: Sequence[Run], starts: np.ndarray) -> list[str]:
    """LRE of the dropping, of the clip by two definitions, and of both (clip: symmetric) in a row.

    For both: of the responses that a step does not drop, it keeps the share that the clip accepts in their length bin.
    That share is one of all steps, and taken as known. The clip's own counts hold off-policy responses only.
    """
    ended_MSK = FunnelSteps.join([run.funnel for run in runs]).ended_MSK[..., :-1]
    dropped = stage_fairness(ended_MSK, starts).get("kept")
    symmetric = [own_counts(run, "symmetric") for run in runs]
    ended_MSJ = merge_bins(ended_MSK, starts)
    both = Counts(ended_MSJ[:, -1] * accepted_by_length(symmetric, starts), ended_MSJ.sum(1))
    return [
        show_lre(dropped) if dropped is not None else "none dropped",
        lre_cell(symmetric, starts),
        lre_cell([own_counts(run, "active") for run in runs], starts),
        lre_cell([both], np.arange(len(starts))) if dropped is not None else "as the clip",
    ]


def length_rows(name: str, runs: Sequence[Run], starts: np.ndarray) -> list[list[str]]:
    """Share kept by the dropping and share accepted by the clip, by length."""
    ended_MSK = FunnelSteps.join([run.funnel for run in runs]).ended_MSK[..., :-1]
    kept_J = accepted_by_length([Counts(ended_MSK[:, -1], ended_MSK.sum(1))], starts)
    accepted_J = accepted_by_length([own_counts(run, "symmetric") for run in runs], starts)
    rows = (("not dropped", kept_J), ("accepted by the clip", accepted_J), ("both", kept_J * accepted_J))
    return [[name, what, *(f"{x:.3f}" for x in each)] for what, each in rows]


def difference_row(runs: Sequence[Run], others: Sequence[Run], starts: np.ndarray) -> list[str] | None:
    """A condition minus ``sync``, seeds paired: LRE of the clip, and held-out accuracy."""
    a, b = ({run.seed: run for run in each} for each in (runs, others))
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    cells = paired_cells(a, b, ("symmetric", "active"), starts)
    gain = [(_metric(a[s], ACCURACY), _metric(b[s], ACCURACY)) for s in seeds]
    cells.append(mean_cell([x - y for x, y in gain if x is not None and y is not None], "{:+.3f}"))
    return [str(len(seeds)), *cells]


def tables(folder: Path) -> dict[str, Table]:
    """Every table of the study."""
    filled, named = finished(folder), dict[str, Table]()
    if not filled:
        return named
    everything = FunnelSteps.join([run.funnel for runs in filled.values() for run in runs])
    starts = equal_mass_starts(everything.ended_MSK[..., :-1].sum((0, 1)), BINS)

    def add(name: str, columns: Sequence[str], row: Callable[[Sequence[Run]], list[str]]) -> None:
        body = [[condition, algo, str(len(runs)), *row(runs)] for (condition, algo), runs in filled.items()]
        named[name] = [["condition", "algo", "runs", *columns], *body]

    columns = ["dropped", "tokens lost", "length dropped / trained", "staleness", "versions", "length", "accuracy"]
    add("ends", columns, funnel_row)
    stages = ["dropping", "clip, symmetric", "clip, active", "dropping and clip"]
    add("lre", stages, lambda runs: lre_row(runs, starts))
    seconds = [f"timing_s/{phase}" for phase in PHASES]
    add("seconds", PHASES, lambda runs: [mean_cell([_metric(run, key) for run in runs], "{:.1f}") for key in seconds])
    edges = [f"L {int(FINE_LENGTH_EDGES[start])}..." for start in starts]
    by_length = [
        row for (name, algo), runs in filled.items() if algo == "fspo" for row in length_rows(name, runs, starts)
    ]
    named["lengths"] = [["condition", "share", *edges], *by_length]
    pairs = [
        [name, algo, *row]
        for (name, algo), runs in filled.items()
        if name != "sync" and (row := difference_row(runs, filled.get(("sync", algo), []), starts)) is not None
    ]
    columns = ["condition - sync", "algo", "paired seeds", "LRE clip, symmetric", "LRE clip, active", "accuracy"]
    return named | {"differences": [columns, *pairs]}


#: Of docs/async.md, "Defaults": FOLDER/MODE/DEFAULT/seedN.
DEFAULTS: Final = {"old": "no correction", "mask": "seq_sqrt_k1, 0.1"}


def defaults(folder: Path) -> dict[str, Table]:
    """What the mask and the clip keep by length in each asynchronous mode, and what the runs learn."""
    cells = {
        (mode, name): [load_run(path.parent) for path in sorted((folder / mode / name).glob("seed*/metrics.jsonl"))]
        for mode in ("colocate_async", "separate_async")
        for name in DEFAULTS
    }
    every = [run for runs in cells.values() for run in runs]
    trained_SK = FunnelSteps.join([run.funnel for run in every]).ended_MSK[:, -1, :-1]
    starts = equal_mass_starts(trained_SK.sum(0), BINS)
    edges = [f"both, L {int(FINE_LENGTH_EDGES[start])}..." for start in starts]
    heads = [
        "mode",
        "correction",
        "seeds",
        "kept by the mask",
        "LRE of the mask",
        "kept by the clip",
        "LRE of the clip",
    ]
    rows = [[*heads, *edges, "held-out accuracy", "staleness"]]
    for (mode, name), runs in cells.items():
        masks, clips = [], []
        for run in runs:
            trained_MK = run.funnel.ended_MSK[:, -1, :-1]
            kept_MK = np.zeros_like(trained_MK)  # of all mini-batches, the first ones included
            for line in step_lines(run.path / LENGTH_STATS_FILE):
                kept_MK[line["step"] - 1] += from_record(line).column("count").numpy()
            masks.append(Counts(kept_MK, trained_MK))
            clips.append(own_counts(run, "symmetric"))
        mask, clip = (joined(parts).error(starts) for parts in (masks, clips))
        both_J = mask.rate_K * clip.rate_K
        accuracy = mean_cell([_metric(run, ACCURACY) for run in runs], "{:.3f}")
        staleness = mean_cell([_metric(run, "fspo/funnel/staleness") for run in runs], "{:.2f}")
        kept = [f"{mask.rate:.3f}", show_lre(mask), f"{clip.rate:.3f}", show_lre(clip)]
        rows.append([mode, DEFAULTS[name], str(len(runs)), *kept, *(f"{x:.3f}" for x in both_J), accuracy, staleness])
    return {"defaults": rows}
