"""Where training needs a clip, and clips there; docs/results.md.

First training without a clip at harsher and harsher settings, until it fails; then all clips at those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from benchmarks.pages import Table
from benchmarks.studies import fairness
from benchmarks.studies.asynchronous import ACCURACY
from fspo.fairness import Interval, debiased_lre, merge_bins
from fspo.fairness.bootstrap import mean_interval, noise_variance
from fspo.report.groups import RunGroup, group_runs, shared_starts
from fspo.report.runs import Run, expand_paths, load_run
from fspo.report.tables import NOT_RUN, show_interval

_LR: Final = "actor_rollout_ref.actor.optim.lr"
_PROMPTS: Final = "actor_rollout_ref.actor.ppo_mini_batch_size"
#: From mild to harsh; the first is the reference.
CANDIDATES: Final = {
    "lr 1e-4, 4 updates a step": (),
    "lr 3e-4, 4 updates": (f"{_LR}=3e-4",),
    "lr 2e-4, 16 updates": (f"{_LR}=2e-4", f"{_PROMPTS}=2"),
    "lr 5e-4, 4 updates": (f"{_LR}=5e-4",),
    "lr 7e-4, 4 updates": (f"{_LR}=7e-4",),
    "lr 1e-3, 4 updates": (f"{_LR}=1e-3",),
    "lr 5e-4, 16 updates": (f"{_LR}=5e-4", f"{_PROMPTS}=2"),
    "lr 3e-3, 4 updates": (f"{_LR}=3e-3",),
}
SEARCH_SEEDS: Final = (1, 2)
#: The first of them at which training without a clip failed: the comparison is made there.
REGIME: Final = "lr 7e-4, 4 updates"
ALGOS: Final = ("fspo", "unclipped", "fspo_quantile", "fspo_active", "rloo", "gspo", "luspo")
SEEDS: Final = (1, 2, 3, 4, 5, 6, 7, 8)
#: How far below the reference's mean accuracy both seeds must end.
LOSS: Final = 0.10
_NAMES: Final = list(CANDIDATES)


def _grid(folder: Path) -> Path:
    return folder / f"comparison-{_NAMES.index(REGIME)}"


def _place(folder: Path, name: str, seed: int) -> Path:
    return folder / "search" / f"{_NAMES.index(name)}-{seed}"


def _run(place: Path) -> Run:
    return load_run(next(iter(place.glob("default/unclipped/seed*")), place))


def _ended(run: Run) -> bool:
    return run.status in ("finished", "failed")


def searched(folder: Path) -> dict[str, list[Run]]:
    """The runs of every candidate that has come to their end, also with an error."""
    found = {name: [_run(_place(folder, name, seed)) for seed in SEARCH_SEEDS] for name in CANDIDATES}
    return {name: runs for name, runs in found.items() if all(map(_ended, runs))}


def accuracy(run: Run) -> float:
    """After the last step; 0 for a run that ended with an error."""
    return float(run.series(ACCURACY)[1][-1]) if run.status == "finished" else 0.0


def rewards(run: Run) -> tuple[float, float]:
    """Mean of the first three steps, and of the last three."""
    values = run.series("critic/rewards/mean")[1]
    return (float(values[:3].mean()), float(values[-3:].mean())) if len(values) else (0.0, 0.0)


def _goal(reference: Sequence[Run]) -> float:
    return sum(map(accuracy, reference)) / len(reference) - LOSS


def fails(runs: Sequence[Run], reference: Sequence[Run]) -> bool:
    """Whether training without a clip fails: both seeds end below the reference, or below where they began."""
    goal = _goal(reference)
    return all(accuracy(run) <= goal for run in runs) or all(rewards(run)[1] < rewards(run)[0] for run in runs)


def search_table(searched: Mapping[str, Sequence[Run]]) -> Table:
    """The table of the search."""
    rows = [["without a clip", "held-out accuracy, seeds 1 and 2", "reward, steps 1-3 and 13-15", "verdict"]]
    for name in CANDIDATES:
        if (runs := searched.get(name)) is None:
            needed = _NAMES.index(name) <= _NAMES.index(REGIME)
            rows.append([name, NOT_RUN if needed else "not needed", "", ""])
            continue
        reward = ", ".join(f"{first:.2f} -> {last:.2f}" for first, last in map(rewards, runs))
        failed = name != _NAMES[0] and fails(runs, searched[_NAMES[0]])
        rows.append([name, ", ".join(f"{accuracy(run):.3f}" for run in runs), reward, "fails" if failed else ""])
    return rows


#: What the clip removes where it can; the measured bands have something to go by from the second step on.
_VIEW, _FIRST = "active_nonzero_advantage", 2


def difference(first: RunGroup, second: RunGroup) -> Interval | None:
    """Of the accuracies, over the seeds that both have; a run that failed counts, too."""
    a, b = first.by_seed(), second.by_seed()
    pairs = [accuracy(a[seed]) - accuracy(b[seed]) for seed in sorted(a.keys() & b.keys())]
    return mean_interval(pairs) if pairs else None


def compared(grid: Path) -> list[Run]:
    """The runs of the comparison that have come to their end."""
    runs = map(load_run, expand_paths([grid])[0])
    return [run for run in runs if run.clip_values == "matched_active" and _ended(run)]


def comparison_tables(runs: Sequence[Run], reference: Sequence[Run]) -> dict[str, Table]:
    """For each clip: accuracy, its paired differences to none and to FSPO's, and what it removes by length."""
    groups = {group.algo: group for group in group_runs(runs)}
    starts = shared_starts([run for run in runs if len(run.lengths.step_M)])
    goal = _goal(reference)
    rows = [
        ["clip", "held-out accuracy", "less unclipped", "less fspo", "collapsed", "active LRE among A != 0, debiased"]
    ]
    for algo in filter(groups.__contains__, ALGOS):
        group = groups[algo]
        pairs = [
            show_interval(difference(group, groups[other]), "{:+.3f}") if other in groups and other != algo else ""
            for other in ("unclipped", "fspo")
        ]
        counts = [fairness.own_counts(run, _VIEW, _FIRST) for run in group.runs if len(run.lengths.step_M)]
        rows.append(
            [
                f"{algo} (n = {len(group.runs)})",
                show_interval(mean_interval([accuracy(run) for run in group.runs]), "{:.3f}"),
                *pairs,
                str(sum(accuracy(run) <= goal for run in group.runs)),
                fairness.lre_cell(counts, starts),
            ]
        )
    clips = [group for algo, group in groups.items() if algo != "unclipped"]
    ranks = [[view, _rank_correlation(clips, view, starts)] for view in (_VIEW, "active", "symmetric")]
    return {
        "accuracy": rows,
        "ranks": [["LRE", f"rank correlation with accuracy over {len(clips)} clips"], *ranks],
        "spread": fairness.spread_table([*groups.values()], starts),
    }


def _rank_correlation(clips: Sequence[RunGroup], view: str, starts: np.ndarray, resamples: int = 2000) -> str:
    """Of accuracy and one view's LRE over the clips, with seeds resampled, the same ones for all; empty if too few."""
    seeds = sorted(set.intersection(*(set(group.by_seed()) for group in clips))) if clips else []
    if len(clips) < 3 or len(seeds) < 3:
        return ""
    chosen_RS = np.random.default_rng(0).integers(0, len(seeds), (resamples, len(seeds)))
    chosen_RS = np.concatenate([np.arange(len(seeds))[None], chosen_RS])  # the first: as they are
    accuracies, errors = [], []
    for group in clips:
        runs = [group.by_seed()[seed] for seed in seeds]
        counts = [fairness.own_counts(run, view, _FIRST) for run in runs]
        merged = [(merge_bins(each.accepted, starts), merge_bins(each.total, starts)) for each in counts]
        accepted_SK, total_SK = (np.stack([each.sum(0) for each in column]) for column in zip(*merged, strict=True))
        errors.append(debiased_lre(accepted_SK[chosen_RS].sum(1), total_SK[chosen_RS].sum(1), noise_variance(merged)))
        accuracies.append(np.array([accuracy(run) for run in runs])[chosen_RS].mean(1))
    ranks = [stats.rankdata(np.round(columns, 6), axis=0) for columns in (accuracies, errors)]
    centred = [rank - rank.mean(0) for rank in ranks]
    with np.errstate(invalid="ignore"):  # all equal
        found_R = (centred[0] * centred[1]).sum(0) / np.sqrt((centred[0] ** 2).sum(0) * (centred[1] ** 2).sum(0))
    low, high = np.nanquantile(found_R[1:], [0.025, 0.975])
    return f"{found_R[0]:+.2f} [{low:+.2f}, {high:+.2f}]"


def tables(folder: Path) -> dict[str, Table]:
    """The search, and the comparison at what it found."""
    runs = searched(folder)
    named = {"search": search_table(runs)}
    if (grid := _grid(folder)).exists() and (there := compared(grid)):
        named |= comparison_tables(there, runs[_NAMES[0]]) | fairness.tables(grid, common=False)
    return named
