"""The numbers of a report: measures of each run, means and paired differences over seeds, and what may be claimed.

A difference is claimed only where its 95% interval over the seeds that both groups have excludes 0. From fewer than
three such seeds nothing is claimed, and nothing from runs of one seed that ended at different steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from fspo.audit.show import verdict
from fspo.fairness.lre import Array, Interval, wilson_interval
from fspo.report.runs import Group, Run
from fspo.responses import Responses

_LAST_SHARE: Final = 0.1
_FEWEST_SEEDS: Final = 3
ABSENT: Final = "-"
_REWARDS: Final = ("critic/rewards/mean", "critic/score/mean")


@dataclass(frozen=True, slots=True)
class Table:
    """Column heads, and rows: a head, its explanation (may be empty) and the cells."""

    heads: list[str]
    rows: list[tuple[str, str, list[str]]]


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of each run, nan where it has none: label, meaning, format, function of the run."""

    label: str
    meaning: str
    form: str
    of: Callable[[Run], float]


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean over seeds, with Student's interval; of one seed there is none."""
    n, mean = len(values), float(np.mean(values))
    half = stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n) if n > 1 else math.nan
    return Interval(mean, float(mean - half), float(mean + half), n)


# ---------------------------------------------------------------- measures


def measures(runs: Sequence[Run]) -> list[Measure]:
    """What a report has of each run."""
    held_out = list(dict.fromkeys(name for run in runs for name in run.validation_metrics()))
    last = f"mean over the last {_LAST_SHARE:.0%} of the steps"
    length = "response_length/mean"
    rows = [logged(f"held-out {_short(name)}", "last value", "{:.3f}", lambda v: v[-1], name) for name in held_out]
    rows += [
        logged(f"gain in {_short(n)}", "last minus first value", "{:.3f}", lambda v: v[-1] - v[0], n)
        for n in held_out[:1]
    ]
    return [
        *rows,
        logged("reward in training", last, "{:.3f}", _tail, *_REWARDS),
        logged("largest reward drop", "from the best running mean so far", "{:.3f}", _drop, *_REWARDS),
        logged("response length", f"tokens, {last}", "{:.1f}", _tail, length),
        logged("response-length growth", "last over first tenth of the steps", "{:.2f}x", _growth, length),
        Measure("truncated", "share cut at the maximum length", "{:.1%}", _truncated),
        Measure("outside", "share outside the band, all steps", "{:.1%}", _share("outside")),
        Measure("gradient removed", "share of gradients that the clip removes", "{:.1%}", _share("removed")),
        logged("gradient norm, largest", "over the median", "{:.1f}x", _spike, "actor/grad_norm"),
    ]  # fmt: skip


def _short(name: str) -> str:
    return name.removeprefix("val-core/")


def logged(label: str, meaning: str, form: str, statistic: Callable[[Array], float], *names: str) -> Measure:
    """A statistic of what a run logged of the first of these metrics."""

    def of(run: Run) -> float:
        values = run.series(*names)[1]
        return float(statistic(values)) if len(values) else math.nan

    return Measure(label, meaning, form, of)


def _share(view: str) -> Callable[[Run], float]:
    """The share that a clip refuses; nan where nothing could be clipped, or where it is not known."""

    def of(run: Run) -> float:
        responses = run.responses
        return float(1 - responses.accepted_B(view).mean()) if len(responses) and responses.could_clip() else math.nan

    return of


def _truncated(run: Run) -> float:
    """Of all responses as logged; of an audit of those with S."""
    values = run.series("fspo/truncated_frac")[1]
    values = values if len(values) else run.responses.truncated_B
    return float(values.mean()) if len(values) else math.nan


def _tenth(values: Array) -> int:
    return max(1, round(len(values) * _LAST_SHARE))


def _tail(values: Array) -> float:
    return float(values[-_tenth(values) :].mean())


def _growth(values: Array) -> float:
    first = values[: _tenth(values)].mean()
    return float(_tail(values) / first) if len(values) > 1 and first > 0 else math.nan


def _spike(values: Array) -> float:
    return float(values.max() / np.median(values)) if np.median(values) > 0 else math.nan


def _drop(values: Array) -> float:
    means = np.convolve(values, np.ones(_tenth(values)) / _tenth(values), "valid")
    return float((np.maximum.accumulate(means) - means).max())


# ---------------------------------------------------------------- over seeds


def group_interval(group: Group, measure: Measure) -> Interval | None:
    """Mean of a measure over the group's runs with its interval; None if no run has it."""
    values = [value for run in group.runs if not math.isnan(value := measure.of(run))]
    return mean_interval(values) if values else None


def paired_runs(first: Group, second: Group) -> tuple[list[tuple[Run, Run]], list[int]]:
    """Runs of the seeds that both groups have, and the seeds left out, whose runs ended at different steps."""
    a, b = ({run.seed: run for run in group.runs if run.seed is not None} for group in (first, second))
    common = sorted(a.keys() & b.keys())
    apart = [seed for seed in common if a[seed].last_step != b[seed].last_step]
    return [(a[seed], b[seed]) for seed in common if seed not in apart], apart


def paired_interval(first: Group, second: Group, measure: Measure) -> Interval | None:
    """Mean of first - second over their :func:`paired_runs`; None if no pair has the measure."""
    differences = [measure.of(a) - measure.of(b) for a, b in paired_runs(first, second)[0]]
    known = [difference for difference in differences if not math.isnan(difference)]
    return mean_interval(known) if known else None


def lre_difference(first: Group, second: Group, view: str) -> Interval | None:
    """LRE of first - second, over their :func:`paired_runs` together, with a jackknife interval over seeds.

    Runs are taken together first: noise raises the LRE of each, and a mean over seeds would keep that. None where it is
    undefined, or one of the two has clipped nothing.
    """
    pairs = [pair for pair in paired_runs(first, second)[0] if all(run.responses.rule_known for run in pair)]

    def difference(pairs: Sequence[tuple[Run, Run]]) -> float:
        errors = [Responses.join([run.responses for run in of]).error(view) for of in zip(*pairs, strict=True)]
        a, b = (error.debiased.value if error.is_informative else math.nan for error in errors)
        return a - b

    if not pairs or math.isnan(value := difference(pairs)):
        return None
    n = len(pairs)
    if n == 1:
        return Interval(value, math.nan, math.nan, 1)
    without = [difference([pair for j, pair in enumerate(pairs) if j != i]) for i in range(n)]
    over = mean_interval([n * value - (n - 1) * one for one in without])
    return Interval(value, value + over.low - over.value, value + over.high - over.value, n)


def problems_interval(runs: Sequence[Run], name: str, value: float) -> tuple[int, float, float] | None:
    """(number of problems, low, high): Wilson's 95% interval over problems of a held-out metric's mean ``value``.

    It may be wider than needed where several runs or samples are averaged. None if the number of problems is not
    recorded, or if the metric is not a share.
    """
    known = [n for run in runs if (n := run.validation_problems(name)) is not None]
    if len(known) < len(runs) or not known or not 0 <= value <= 1:
        return None
    low, high = wilson_interval(value, min(known))
    return min(known), float(low), float(high)


# ---------------------------------------------------------------- tables and verdicts


def show(interval: Interval | None, form: str) -> str:
    """``value [low, high]``; the value alone for one or two seeds, whose interval is 12.7 standard errors wide."""
    if interval is None:
        return ABSENT
    value = form.format(interval.value)
    if math.isnan(interval.low) or interval.n == 2:
        return value
    return f"{value} [{form.format(interval.low)}, {form.format(interval.high)}]"


def heads(groups: Sequence[Group]) -> list[str]:
    """Column heads: each group's name and number of runs."""
    return [f"{group.name} (n = {len(group.runs)})" for group in groups]


def final_numbers(groups: Sequence[Group]) -> Table:
    """Mean over the runs of each group with its interval over seeds; the LRE of all runs together."""
    rows = []
    for measure in measures([run for group in groups for run in group.runs]):
        cells = [show(group_interval(group, measure), measure.form) for group in groups]
        rows.append((measure.label, measure.meaning, cells))
    for view in ("outside", "removed"):
        errors = [group.error(view) for group in groups]
        rows.append((f"LRE, {view}", "of all runs together", [error.words if error else ABSENT for error in errors]))
    return Table(heads(groups), [row for row in rows if set(row[2]) != {ABSENT}])


def paired_differences(groups: Sequence[Group]) -> Table | None:
    """First group minus each other one over their paired runs; None where no two groups share a seed."""
    first, others = groups[0], groups[1:]
    counts = [len(paired_runs(first, other)[0]) for other in others]
    if not any(counts):
        return None
    rows = []
    for measure in measures([run for group in groups for run in group.runs]):
        cells = [show(paired_interval(first, other, measure), measure.form.replace("{:", "{:+")) for other in others]
        rows.append((measure.label, measure.meaning, cells))
    for view in ("outside", "removed"):
        cells = [show(lre_difference(first, other, view), "{:+.3f}") for other in others]
        rows.append((f"LRE, {view}", "of all runs together", cells))
    titles = [f"{first.name} - {other.name} ({count} paired)" for other, count in zip(others, counts, strict=True)]
    return Table(titles, [row for row in rows if set(row[2]) != {ABSENT}])


def verdicts(groups: Sequence[Group]) -> dict[str, list[str]]:
    """What the runs say in sentences that their intervals carry, by subject."""
    said = {}
    for subject, view in (("Even?", "outside"), ("What does the clip remove?", "removed")):
        sentences = [f"{group.name}: {verdict(group.responses, view)}" for group in groups if len(group.responses)]
        said[subject] = sentences + _claims(groups, "LRE", lambda a, b, view=view: lre_difference(a, b, view))  # type: ignore[misc]
    held_out = [m for m in measures([run for g in groups for run in g.runs]) if m.label.startswith("held-out ")]
    sentences = []
    for measure in [m for m in held_out if "/acc/mean@" in m.label] or held_out[:1]:
        for group in groups:
            if (interval := group_interval(group, measure)) is not None:
                over = problems_interval(
                    group.runs, f"val-core/{measure.label.removeprefix('held-out ')}", interval.value
                )
                shown = f" ([{over[1]:.3f}, {over[2]:.3f}] over {over[0]} problems)" if over else ""
                sentences.append(f"{group.name}: {measure.label} {show(interval, measure.form)}{shown}")
        sentences += _claims(groups, measure.label, lambda a, b, measure=measure: paired_interval(a, b, measure))  # type: ignore[misc]
    said["Learning?"] = sentences
    return {subject: lines for subject, lines in said.items() if lines}


def _claims(groups: Sequence[Group], quantity: str, difference: Callable[[Group, Group], Interval | None]) -> list[str]:
    """The first group against each other one, a sentence each."""
    sentences = []
    for other in groups[1:]:
        first, interval, apart = groups[0], difference(groups[0], other), paired_runs(groups[0], other)[1]
        if interval is None or interval.n < _FEWEST_SEEDS:
            why = f"fewer than {_FEWEST_SEEDS} common seeds that ended at one step have it"
            sentences.append(f"{quantity}: no claim about {first.name} and {other.name}, because {why}")
            continue
        than = "not told apart from"
        if interval.excludes_zero:
            than = "lower than" if interval.value < 0 else "higher than"
        without = f", without {', '.join(map(str, apart))}, which ended at different steps" * bool(apart)
        says = f"{show(interval, '{:+.3f}')} over {interval.n} seeds{without}"
        sentences.append(f"{quantity}: {first.name} is {than} {other.name}: {says}")
    return sentences
