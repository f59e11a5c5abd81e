"""The numbers of a report: measures of runs, means and paired differences over seeds, and what may be claimed.

A difference is claimed only where its 95% interval over the seeds that both groups have excludes 0. From fewer than
three such seeds nothing is claimed, and nothing from runs of one seed that ended at different steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from fspo.audit.show import verdict
from fspo.conclusion import in_view
from fspo.fairness.lre import Array, Interval, wilson_interval
from fspo.report.runs import Group, Run
from fspo.responses import VIEWS

REWARDS: Final = ("critic/rewards/mean", "critic/score/mean")
_FEWEST_SEEDS: Final = 3


@dataclass(frozen=True, slots=True)
class Table:
    """Column heads, and rows: a head, its explanation (may be empty) and the cells."""

    heads: list[str]
    rows: list[tuple[str, str, list[str]]]


class Measure(NamedTuple):
    """A number of several runs, nan where they have none; ``view`` is that of an LRE of all responses together."""

    label: str
    meaning: str
    form: str
    of: Callable[[Sequence[Run]], float]
    view: str = ""


def measures(groups: Sequence[Group]) -> list[Measure]:
    """What a report has of runs: means over them, and the LREs of their responses together."""
    metrics = dict.fromkeys(name for group in groups for run in group.runs for name in run.validation_metrics())
    short = {name.removeprefix("val-core/"): name for name in metrics}
    last, length = "mean over the last tenth of the steps", "response_length/mean"
    gained = "last minus first value"
    return [
        *(_logged(f"held-out {it}", "last value", "{:.3f}", lambda x: x[-1], name) for it, name in short.items()),
        *(_logged(f"gain in {it}", gained, "{:.3f}", lambda x: x[-1] - x[0], short[it]) for it in [*short][:1]),
        _logged("reward in training", last, "{:.3f}", _tail, *REWARDS),
        _logged("largest reward drop", "from the best running mean so far", "{:.3f}", _drop, *REWARDS),
        _logged("response length", f"tokens, {last}", "{:.1f}", _tail, length),
        _logged("response-length growth", "last over first tenth of the steps", "{:.2f}x", _growth, length),
        _mean("truncated", "share cut at the maximum length", "{:.1%}", _truncated),
        _mean("outside", "share outside the band, all steps", "{:.1%}", partial(_share, view="outside")),
        _mean("gradient removed", "share that the clip removes, all steps", "{:.1%}", partial(_share, view="removed")),
        _logged(
            "gradient norm, largest", "over the median", "{:.1f}x", lambda x: x.max() / np.median(x), "actor/grad_norm"
        ),
        *(Measure(f"LRE, {view}", "of all runs together", "{:.3f}", partial(_lre, view=view), view) for view in VIEWS),
    ]


def _mean(label: str, meaning: str, form: str, of_run: Callable[[Run], float]) -> Measure:
    return Measure(label, meaning, form, lambda runs: float(np.mean([of_run(run) for run in runs])))


def _logged(label: str, meaning: str, form: str, statistic: Callable[[Array], Any], *names: str) -> Measure:
    """A statistic of what a run logged of the first of these metrics."""

    def of_run(run: Run) -> float:
        values = run.series(*names)[1]
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(statistic(values)) if len(values) else math.nan
        return value if math.isfinite(value) else math.nan

    return _mean(label, meaning, form, of_run)


def _share(run: Run, view: str) -> float:
    """The share that a clip refuses; nan where nothing could be clipped, or where it is not known."""
    if not len(run.responses) or not run.responses.could_clip():
        return math.nan
    counted = in_view(run.responses, view)
    return float(1 - counted.accepted_B(view).mean()) if len(counted) else math.nan


def _truncated(run: Run) -> float:
    """Of all responses as logged; of an audit of those with S."""
    logged = run.series("fspo/truncated_frac")[1]
    values = logged if len(logged) else run.responses.truncated_B
    return float(values.mean()) if len(values) else math.nan


def _lre(runs: Sequence[Run], view: str) -> float:
    """Of the responses of all runs: noise raises the LRE of each, and a mean over runs would keep that."""
    error = Group("", list(runs)).error(view)
    return error.debiased.value if error is not None and error.is_informative else math.nan


def _tenth(values: Array) -> int:
    return max(1, round(len(values) / 10))


def _tail(values: Array) -> Any:
    return values[-_tenth(values) :].mean()


def _growth(values: Array) -> Any:
    return _tail(values) / _tail(values[::-1])


def _drop(values: Array) -> Any:
    means = np.convolve(values, np.ones(_tenth(values)) / _tenth(values), "valid")
    return (np.maximum.accumulate(means) - means).max()


def over_seeds(statistic: Callable[[Sequence[Any]], float], units: Sequence[Any]) -> Interval | None:
    """A statistic of runs, or pairs of runs, of independent seeds with its interval by the jackknife.

    Of a mean this is Student's interval. Of one seed there is none. None where no seed has the statistic.
    """
    units = [unit for unit in units if not math.isnan(statistic([unit]))]
    n = len(units)
    if n == 0:
        return None
    value, half = statistic(units), math.nan
    if n > 1:
        pseudo = [n * value - (n - 1) * statistic([*units[:i], *units[i + 1 :]]) for i in range(n)]
        half = float(stats.t.ppf(0.975, n - 1) * np.std(pseudo, ddof=1) / math.sqrt(n))
    return Interval(value, value - half, value + half, n)


def paired_runs(first: Group, second: Group) -> tuple[list[tuple[Run, Run]], list[int]]:
    """Runs of the seeds that both groups have, and the seeds left out, whose runs ended at different steps."""
    a, b = ({run.seed: run for run in group.runs if run.seed is not None} for group in (first, second))
    common = sorted(a.keys() & b.keys())
    apart = [seed for seed in common if a[seed].last_step != b[seed].last_step]
    return [(a[seed], b[seed]) for seed in common if seed not in apart], apart


def difference(first: Group, second: Group, measure: Measure) -> Interval | None:
    """A measure of first - second over their :func:`paired_runs`; None if no pair has it."""

    def of(pairs: Sequence[tuple[Run, Run]]) -> float:
        return measure.of([a for a, _ in pairs]) - measure.of([b for _, b in pairs])

    return over_seeds(of, paired_runs(first, second)[0])


def problems_interval(runs: Sequence[Run], name: str, value: float) -> tuple[int, float, float] | None:
    """Number of held-out problems behind an accuracy, and its Wilson interval over them.

    None if a number is not recorded, or if the value is no share.
    """
    numbers = [run.validation_problems(name) or 0 for run in runs]
    if not min(numbers) or not 0 <= value <= 1:
        return None
    low, high = wilson_interval(value, min(numbers))
    return min(numbers), float(low), float(high)


def show(interval: Interval | None, form: str) -> str:
    """``value [low, high]``; the value alone for one or two seeds, whose interval is 12.7 standard errors wide."""
    if interval is None:
        return "-"
    value, low, high = (form.format(end) for end in (interval.value, interval.low, interval.high))
    return value if interval.n < _FEWEST_SEEDS else f"{value} [{low}, {high}]"


def heads(groups: Sequence[Group]) -> list[str]:
    """Column heads: each group's name and number of runs."""
    return [f"{group.name} (n = {len(group.runs)})" for group in groups]


def final_numbers(groups: Sequence[Group]) -> Table:
    """Each measure of each group: means with their interval over seeds, LREs with theirs over all responses."""

    def cell(group: Group, measure: Measure) -> str:
        error = group.error(measure.view) if measure.view else None
        return error.words if error else show(over_seeds(measure.of, group.runs), measure.form)

    return _table(heads(groups), groups, lambda measure: [cell(group, measure) for group in groups])


def paired_differences(groups: Sequence[Group]) -> Table:
    """First group minus each other one over their paired runs."""
    first, others = groups[0], groups[1:]
    titles = [f"{first.name} - {one.name} ({len(paired_runs(first, one)[0])} paired)" for one in others]

    def cells(measure: Measure) -> list[str]:
        return [show(difference(first, one, measure), measure.form.replace("{:", "{:+")) for one in others]

    return _table(titles, groups, cells)


def _table(heads: list[str], groups: Sequence[Group], cells: Callable[[Measure], list[str]]) -> Table:
    """A row for each measure that has a number."""
    rows = [(measure.label, measure.meaning, cells(measure)) for measure in measures(groups)]
    return Table(heads, [row for row in rows if not {*row[2]} <= {"-"}])


def verdicts(groups: Sequence[Group]) -> dict[str, list[str]]:
    """What the runs say in sentences that their intervals carry, by subject."""
    subjects = {"outside": "Even?", "removed": "What does the clip remove?"}
    said: dict[str, list[str]] = {subject: [] for subject in (*subjects.values(), "Learning?")}
    of_all = measures(groups)
    accuracies = [measure for measure in of_all if measure.label.startswith("held-out ")]
    for measure in of_all:
        if measure.view:
            subject = subjects[measure.view]
            said[subject] += [f"{g.name}: {verdict(g.responses, measure.view)}" for g in groups if len(g.responses)]
            said[subject] += _claims(groups, "LRE", measure)
    for measure in [one for one in accuracies if "/acc/mean@" in one.label] or accuracies[:1]:
        for group in groups:
            if (mean := over_seeds(measure.of, group.runs)) is not None:
                over = problems_interval(group.runs, measure.label.replace("held-out ", "val-core/"), mean.value)
                shown = f" ([{over[1]:.3f}, {over[2]:.3f}] over {over[0]} problems)" if over else ""
                said["Learning?"].append(f"{group.name}: {measure.label} {show(mean, measure.form)}{shown}")
        said["Learning?"] += _claims(groups, measure.label, measure)
    return {subject: lines for subject, lines in said.items() if lines}


def _claims(groups: Sequence[Group], quantity: str, measure: Measure) -> list[str]:
    """The first group against each other one, a sentence each."""
    sentences, first = [], groups[0]
    for other in groups[1:]:
        if None in (first.runs[0].seed, other.runs[0].seed):
            continue  # of an audit or a file, where nothing is paired
        interval, apart = difference(first, other, measure), paired_runs(first, other)[1]
        if interval is None or interval.n < _FEWEST_SEEDS:
            why = f"fewer than {_FEWEST_SEEDS} common seeds that ended at one step have it"
            sentences.append(f"{quantity}: no claim about {first.name} and {other.name}, because {why}")
            continue
        than = "lower than" if interval.high < 0 else "higher than" if interval.low > 0 else "not told apart from"
        without = f", without {', '.join(map(str, apart))}, which ended at different steps" * bool(apart)
        says = f"{show(interval, '{:+.3f}')} over {interval.n} seeds{without}"
        sentences.append(f"{quantity}: {first.name} is {than} {other.name}: {says}")
    return sentences
