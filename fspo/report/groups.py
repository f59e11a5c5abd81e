"""Runs in groups: their acceptance by length, and the final numbers of each run with intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from fspo.fairness.bootstrap import Counts, mean_interval, pooled_difference
from fspo.fairness.lre import (
    Interval,
    LengthReweightingError,
    debiased_lre,
    equal_mass_starts,
    is_informative,
    merge_bins,
    wilson_interval,
)
from fspo.losses import LOSSES
from fspo.report.runs import Array, Run
from fspo.responses import VIEWS, Responses

_ALGO_ORDER: Final = (*(loss.algo for loss in LOSSES.values()), "unclipped")
_LAST_SHARE: Final = 0.1


@dataclass(slots=True)
class RunGroup:
    """The runs of one algorithm whose clip values come from one place, by seed."""

    algo: str
    clip_values: str
    runs: list[Run] = field(default_factory=list)

    def by_seed(self) -> dict[int, Run]:
        """Runs whose seed is known."""
        return {run.seed: run for run in self.runs if run.seed is not None}


def group_runs(runs: Sequence[Run]) -> list[RunGroup]:
    """Groups in a fixed order: published clip values before others; FSPO, then the baselines, then the rest."""
    groups: dict[tuple[str, str], RunGroup] = {}
    for run in runs:
        groups.setdefault((run.clip_values, run.algo), RunGroup(run.algo, run.clip_values)).runs.append(run)
    for group in groups.values():
        group.runs.sort(key=lambda run: (run.seed is None, run.seed or 0, str(run.path)))
    rank = {algo: index for index, algo in enumerate(_ALGO_ORDER)}

    def place(group: RunGroup) -> tuple[object, ...]:
        return group.clip_values != "published", group.clip_values, rank.get(group.algo, len(rank)), group.algo

    return sorted(groups.values(), key=place)


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """Acceptance by length bin: ``length_K`` mean length of each bin, ``error`` rates, LRE and intervals."""

    length_K: Array
    error: LengthReweightingError


def length_profile(runs: Sequence[Run], view: str = "symmetric") -> LengthProfile | None:
    """Acceptance by length, the mini-batches of all runs together; None where there are no sequences.

    The bins are :func:`shared_starts` of these runs, so that a run has one LRE, whatever is reported beside it.
    ``view`` is a key of :data:`fspo.responses.VIEWS`.
    """
    starts, responses = shared_starts(runs), Responses.join([run.responses for run in runs])
    if len(responses) == 0 or np.isnan(responses.accepted_B(view)).any():
        return None
    length_J = responses.by_bin(responses.length_B, starts) / merge_bins(responses.count_K, starts)
    return LengthProfile(length_J, responses.error(view, starts))


Profiles = dict[str, dict[str, LengthProfile | None]]
"""Length profiles by view and algorithm."""


def clip_profiles(groups: Sequence[RunGroup]) -> Profiles:
    """Acceptance by length of each group, in both views."""
    return {view: {group.algo: length_profile(group.runs, view=view) for group in groups} for view in VIEWS}


def shared_starts(runs: Sequence[Run]) -> npt.NDArray[np.int64]:
    """At most eight bins of equal mass over all runs together."""
    return equal_mass_starts(np.sum([run.responses.count_K for run in runs], axis=0))


@dataclass(frozen=True, slots=True)
class Measure:
    """One number per run: label, meaning, format, and function; None where a run did not record it, nan where there is
    nothing to measure.
    """

    label: str
    meaning: str
    form: str
    of: Callable[[Run], float | None]


def standard_measures(runs: Sequence[Run]) -> list[Measure]:
    """The rows of the table of final numbers, for the metrics that any run of a report has."""
    held_out = dict.fromkeys(name for run in runs for name in run.validation_metrics())
    short = {name: name.removeprefix("val-core/") for name in held_out}
    last = f"mean over the last {_LAST_SHARE:.0%} of the steps"
    length, rewards = "response_length/mean", ("critic/rewards/mean", "critic/score/mean")
    right = "fspo/outcome/distinct_correct"
    margin = "smallest half-width over the numerical noise floor of S"
    return [
        *(
            _logged(f"held-out {short[name]}", "last value logged", "{:.3f}", lambda v: v[-1], name)
            for name in held_out
        ),
        *(_logged(f"gain in {short[n]}", "last minus first value", "{:+.3f}", _gain, n) for n in list(held_out)[:1]),
        _logged("reward in training", last, "{:.3f}", _tail, *rewards),
        _logged("response length", f"tokens, {last}", "{:.1f}", _tail, length),
        _logged("response-length growth", "last over first tenth of the steps", "{:.2f}x", _growth, length),
        _share("clip rate", "share outside the band, all steps", lambda r: 1 - r.inside_B, of_clip=True),
        _share("gradient removed", "share actively clipped, all steps", lambda r: 1 - r.kept_B, of_clip=True),
        _lre("LRE, symmetric", "debiased; each run alone", "symmetric"),
        _lre("LRE, active", "debiased; each run alone", "active"),
        _lre("LRE noise floor", "mean LRE of flat rates with these counts", "symmetric", "noise_floor"),
        _of_all("truncated", "share cut at the maximum length", "fspo/truncated_frac", lambda r: r.truncated_B),
        _of_all(
            "zero advantage",
            "share of sequences with A = 0",
            "fspo/advantage_zero_frac",
            lambda r: np.where(np.isnan(a := r.advantage_B), a, a == 0),
        ),
        _logged("gradient norm, largest", "over the median", "{:.1f}x", _spike, "actor/grad_norm"),
        _logged("norm clip binds", "share of optimizer steps", "{:.0%}", np.mean, "fspo/grad_norm/clipped_share"),
        _logged("distinct responses", f"within a group, {last}", "{:.1%}", _tail, "fspo/outcome/distinct"),
        _logged("distinct right responses", f"over right ones of each step, {last}", "{:.1%}", _tail, right),
        _logged("largest reward drop", "from the best running mean so far", "{:.3f}", _drop, *rewards),
        _logged("band over rounding", margin, "{:.1f}x", np.min, "fspo/noise_floor/margin"),
    ]


def _logged(label: str, meaning: str, form: str, statistic: Callable[[Array], float], *names: str) -> Measure:
    """A statistic of what a run logged of the first of these metrics; nan stands for undefined."""

    def of(run: Run) -> float | None:
        values = run.series(*names)[1]
        return None if not len(values) or np.isnan(value := statistic(values)) else value

    return Measure(label, meaning, form, of)


def _share(label: str, meaning: str, value: Callable[[Responses], Array], of_clip: bool = False) -> Measure:
    """A share of the responses of all mini-batches: the mean of a value that is nan where it is not known."""

    def of(run: Run) -> float | None:
        responses = run.responses
        if not len(responses) or np.isnan(share := float(value(responses).mean())):
            return None
        return math.nan if of_clip and not responses.could_clip() else share

    return Measure(label, meaning, "{:.1%}", of)


def _of_all(label: str, meaning: str, name: str, value: Callable[[Responses], Array]) -> Measure:
    """The mean of a metric that counts responses without S, too; of a run that logged none, the share of others."""
    logged, share = _logged(label, meaning, "{:.1%}", np.mean, name), _share(label, meaning, value)
    return Measure(
        label, meaning, "{:.1%}", lambda run: share.of(run) if (of_all := logged.of(run)) is None else of_all
    )


def _lre(label: str, meaning: str, view: str, number: str = "debiased.value") -> Measure:
    def of(run: Run) -> float | None:
        profile = length_profile([run], view=view)  # as in the findings: of one run the two are one number
        if profile is None:
            return None
        return float(attrgetter(number)(profile.error)) if profile.error.is_informative else math.nan

    return Measure(label, meaning, "{:.3f}", of)


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


def group_interval(group: RunGroup, measure: Measure) -> Interval | None:
    """Mean of a measure over the group's runs with a bootstrap interval; None if no run has it."""
    values = [value for run in group.runs if (value := measure.of(run)) is not None and not math.isnan(value)]
    return mean_interval(values) if values else None


def paired_runs(first: RunGroup, second: RunGroup) -> tuple[list[tuple[Run, Run]], list[int]]:
    """Runs of the seeds that both groups have, and the seeds left out of them.

    A pair whose runs ended at different steps is left out: it differs in the length of training too.
    """
    a, b = first.by_seed(), second.by_seed()
    common = sorted(a.keys() & b.keys())
    apart = [seed for seed in common if a[seed].last_step != b[seed].last_step]
    return [(a[seed], b[seed]) for seed in common if seed not in apart], apart


def paired_interval(first: RunGroup, second: RunGroup, measure: Measure) -> Interval | None:
    """Mean of first - second over their :func:`paired_runs`; None if no pair has the measure."""
    pairs = [(measure.of(a), measure.of(b)) for a, b in paired_runs(first, second)[0]]
    known = [x - y for x, y in pairs if x is not None and y is not None]
    known = [difference for difference in known if not math.isnan(difference)]
    return mean_interval(known) if known else None


def pooled_lre_difference(first: RunGroup, second: RunGroup, view: str) -> tuple[Interval, Interval] | None:
    """Debiased LRE of first - second, all sequences of their :func:`paired_runs` together, each over its own bins.

    Returns:
        The difference with its interval over mini-batches, and with that over seeds; None if it is undefined, or if one
        of the two groups has clipped nothing.
    """
    pairs = [pair for pair in paired_runs(first, second)[0] if all(run.responses.rule_known for run in pair)]
    if not pairs:
        return None

    def counts(runs: Sequence[Run]) -> list[Counts]:
        starts = shared_starts(runs)
        return [run.responses.counts(view, starts) for run in runs]

    both = counts([a for a, _ in pairs]), counts([b for _, b in pairs])
    if not all(is_informative(sum(a.sum() for a, _ in of) / sum(t.sum() for _, t in of)) for of in both):
        return None
    intervals = pooled_difference(*both, debiased_lre), pooled_difference(*both, debiased_lre, over="seeds")
    return intervals if np.isfinite(intervals[0].value) else None


def _tenth(values: Array) -> int:
    return max(1, round(len(values) * _LAST_SHARE))


def _gain(values: Array) -> float:
    return float(values[-1] - values[0]) if len(values) > 1 else np.nan


def _tail(values: Array) -> float:
    return float(values[-_tenth(values) :].mean())


def _growth(values: Array) -> float:
    first = values[: _tenth(values)].mean()
    return float(_tail(values) / first) if len(values) > 1 and first > 0 else np.nan


def _spike(values: Array) -> float:
    return float(values.max() / np.median(values)) if np.median(values) > 0 else np.nan


def _drop(values: Array) -> float:
    n = _tenth(values)
    means = np.convolve(values, np.ones(n) / n, "valid")
    return float((np.maximum.accumulate(means) - means).max()) if len(values) > 1 else np.nan
