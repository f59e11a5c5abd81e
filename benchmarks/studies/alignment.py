"""Gradient alignment on many checkpoints; docs/results.md.

Trains without a clip, so that no band is at home, and measures each checkpoint into ``FOLDER/seedN_stepM.json``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
from scipy.stats import spearmanr

from benchmarks.pages import Table
from benchmarks.studies.runs import module
from fspo.fairness import Interval
from fspo.fairness.bootstrap import mean_interval
from fspo.files import atomic_path
from fspo.report.runs import load_run
from fspo.report.tables import show_interval

SEEDS: Final = (1, 2, 3, 4)
STEPS: Final = (3, 6, 9)
TRAINING: Final = (
    "experiment=demo",
    "algo=unclipped",
    "advantage=shared",
    "match_scale=matched",
    f"trainer.total_training_steps={STEPS[-1]}",
    f"trainer.save_freq={STEPS[0]}",
    f"trainer.max_actor_ckpt_to_keep={len(STEPS)}",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "fspo.kl_to_start=false",
)
#: Three updates come before, as in the last mini-batch of a step; then two steps' worth of prompts, twice.
MEASUREMENT: Final = ("algos=[fspo,rloo,gspo,luspo]", "rounds=2", "updates=3", "prompts=64", "bins=6", "folds=8")
#: What may order the algorithms as their cosines do.
PREDICTORS: Final = ("symmetric/lre", "active/lre", "active/lre_max", "active/eta")
#: Which differences decide the hypotheses.
PAIRS: Final = (("fspo", "rloo"), ("fspo", "gspo"), ("rloo", "gspo"), ("fspo", "luspo"))
OUTCOMES: Final = {"cosine": "the cosine", "held_out_change": "the change against held-out"}

Result = Mapping[str, Any]


def run_missing(folder: Path) -> int:
    """Train and measure what is not there; the exit status of the first command that fails, else 0."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        run = folder / f"seed{seed}"
        if not all((folder / f"seed{seed}_step{step}.json").is_file() for step in STEPS):
            train = ("recipe.fspo.main", *TRAINING, f"seed={seed}", f"run.dir={run}")
            if load_run(run).status != "finished" and (code := module(*train)):
                return code
        for step in STEPS:
            kept = folder / f"seed{seed}_step{step}.json"
            if kept.is_file():
                continue
            checkpoint = run / "checkpoints" / f"global_step_{step}"
            if code := module("benchmarks.alignment", str(checkpoint), *MEASUREMENT):
                return code
            with atomic_path(kept) as temporary:
                shutil.copyfile(run / "alignment" / "alignment.json", temporary)
    return 0


def finished(folder: Path) -> list[Result]:
    """The measured checkpoints."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("seed*_step*.json"))]


def figures(result: Result, clips: str) -> dict[str, dict[str, float | None]]:
    """By algorithm: every figure at these clip values."""
    return {
        each["algo"]: {name: figure["value"] for name, figure in each["figures"].items()}
        for each in result["objectives"]
        if each["clips"] == clips
    }


def cell(found: Sequence[Result], values: Sequence[float | None], form: str = "{:.3f}") -> str:
    """Mean over checkpoints of a figure in [-1, 1]; the interval is over seeds, whose checkpoints are of one run."""
    of_seed: dict[int, list[float]] = {}
    for result, value in zip(found, values, strict=True):
        if value is not None:
            of_seed.setdefault(result["seed"], []).append(value)
    if not of_seed:
        return "-"
    mean = mean_interval([fmean(each) for each in of_seed.values()])
    within = Interval(mean.value, *np.clip([mean.low, mean.high], -1, 1).tolist(), mean.n)
    return show_interval(within, form)


def _minus(first: Sequence[float | None], second: Sequence[float | None]) -> list[float | None]:
    return [None if a is None or b is None else a - b for a, b in zip(first, second, strict=True)]


def direction_table(found: Sequence[Result], clips: str) -> Table:
    """What clipping does to the gradient, by algorithm."""
    each = [figures(result, clips) for result in found]
    names = ("active/acceptance", "cosine", "norm_ratio", "symmetric/lre", "active/lre")
    rows = [
        [algo, *(cell(found, [one[algo][name] for one in each]) for name in names), slack(found, clips, algo)]
        for algo in each[0]
    ]
    head = ("algo", "kept", "cos(clipped, unclipped)", "norm ratio", "LRE, symmetric", "LRE, active")
    return [[*head, "slack of the mean bound"], *rows]


def slack(found: Sequence[Result], clips: str, algo: str) -> str:
    """How far the cosine lies above the mean bound, over the measurements in which that says something."""
    said: list[list[float]] = []
    for result in found:
        each = next(one["figures"] for one in result["objectives"] if (one["algo"], one["clips"]) == (algo, clips))
        pairs = zip(each["cosine"]["rounds"], each["active/mean_bound"]["rounds"], strict=True)
        said.append([cosine - bound for cosine, bound in pairs if None not in (cosine, bound) and bound > -1])
    rounds = sum(len(result["rounds"]) for result in found)
    values = [fmean(slacks) if slacks else None for slacks in said]
    return f"{cell(found, values)} in {sum(map(len, said))} of {rounds}"


def pair_table(found: Sequence[Result], clips: str) -> Table:
    """Differences between two algorithms, paired by checkpoint."""
    each = [figures(result, clips) for result in found]
    names = {"cosine": "cosine", "symmetric/lre": "LRE, symmetric", "active/lre": "LRE, active"}
    rows = []
    for first, second in PAIRS:
        less = [_minus(*([one[algo][name] for one in each] for algo in (first, second))) for name in names]
        rows.append([f"{first} - {second}", *(cell(found, values, "{:+.3f}") for values in less)])
    return [["difference", *names.values()], *rows]


def share_table(found: Sequence[Result], clips: str) -> Table:
    """What each length bin adds to the gradient: its share after the clip, less its share before."""
    each = [figures(result, clips) for result in found]
    bins = max(sum(name.startswith("share/") for name in one["fspo"]) for one in each)

    def over(algo: str, name: str) -> list[list[float | None]]:
        return [[one[algo].get(f"{name}/{k}") for one in each] for k in range(bins)]

    rows = [["unclipped, exp(S)", *(cell(found, values, "{:.2f}") for values in over("fspo", "share_unclipped"))]]
    for algo in each[0]:
        change = map(_minus, over(algo, "share"), over(algo, "share_unclipped"))
        rows.append([f"{algo}: change", *(cell(found, values, "{:+.2f}") for values in change)])
    return [["share of the gradient", *(f"bin {k + 1}" for k in range(bins))], *rows]


def rank_table(found: Sequence[Result], clips: str) -> Table:
    """Spearman's correlation, within each checkpoint over the algorithms, of what may predict the direction with it.

    Without LUSPO: it has the band of GSPO, so their LREs are ties.
    """
    known: dict[str, list[list[float | None]]] = {}
    for name in PREDICTORS:
        for outcome in OUTCOMES:
            correlations: list[float | None] = []
            for result in found:
                one = figures(result, clips)
                pairs = [(one[algo].get(outcome), one[algo][name]) for algo in ("fspo", "rloo", "gspo")]
                orders = all(None not in column and len(set(column)) > 1 for column in zip(*pairs, strict=True))
                correlations.append(float(spearmanr(pairs).statistic) if orders else None)
            known.setdefault(name, []).append(correlations)
    symmetric, active, *_ = PREDICTORS
    known["active less symmetric LRE"] = list(map(_minus, known[active], known[symmetric]))
    rows = [[name, *(cell(found, values, "{:+.2f}") for values in columns)] for name, columns in known.items()]
    return [["predictor", *(f"rank correlation with {words}" for words in OUTCOMES.values())], *rows]


def tables(folder: Path) -> dict[str, Table]:
    """Every table of the measured checkpoints, with both kinds of clip values one below the other."""
    if not (found := finished(folder)):
        return {}
    kinds = {"direction": direction_table, "pairs": pair_table, "shares": share_table, "ranks": rank_table}
    joined = {}
    for name, table in kinds.items():
        by_clips = {clips: table(found, clips) for clips in ("matched_active", "default")}
        rows = [[clips, *row] for clips, (_, *body) in by_clips.items() for row in body]
        joined[name] = [["clip values", *by_clips["default"][0]], *rows]
    return joined
