"""Runs in groups: their acceptance by length, and the final numbers of each run with intervals over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from fspo.acceptance import acceptance_counts
from fspo.fairness import (
    Interval,
    LengthReweightingError,
    debiased_lre,
    equal_mass_starts,
    merge_bins,
    wilson_interval,
)
from fspo.fairness.bootstrap import Counts, mean_interval, pooled_difference
from fspo.noise_floor import NoiseFloor, noise_floor
from fspo.report.runs import Array, Run
from fspo.sums import FIELDS, SequenceSums

_ALGO_ORDER: Final = (
    "fspo",
    "fspo_v1",
    "fspo_quantile",
    "fspo_active",
    "rloo",
    "seq_rloo",
    "gspo",
    "seq_gspo",
    "unclipped",
)
_LAST_SHARE: Final = 0.1


@dataclass(slots=True)
class RunGroup:
    """The runs of one algorithm within one comparison, by seed."""

    algo: str
    comparison: str
    runs: list[Run] = field(default_factory=list)

    def by_seed(self) -> dict[int, Run]:
        """Runs whose seed is known."""
        return {run.seed: run for run in self.runs if run.seed is not None}


def group_runs(runs: Sequence[Run]) -> list[RunGroup]:
    """Groups in a fixed order: default before matched clip values; FSPO, then the baselines, then the rest."""
    groups: dict[tuple[str, str], RunGroup] = {}
    for run in runs:
        groups.setdefault((run.comparison, run.algo), RunGroup(run.algo, run.comparison)).runs.append(run)
    rank = {algo: index for index, algo in enumerate(_ALGO_ORDER)}
    for group in groups.values():
        group.runs.sort(key=lambda run: (run.seed is None, run.seed or 0, str(run.path)))
    return sorted(groups.values(), key=lambda group: (group.comparison, rank.get(group.algo, len(rank)), group.algo))


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """Acceptance by length bin: ``length_K`` mean length of each bin, ``error`` rates, LRE and intervals."""

    length_K: Array
    error: LengthReweightingError


def length_profile(
    runs: Sequence[Run],
    view: str = "symmetric",
    starts: npt.NDArray[np.int64] | None = None,
    resamples: int = 1000,
) -> LengthProfile | None:
    """Pool the mini-batches of runs and compute acceptance by length.

    Args:
        runs: Runs of one group.
        view: Which acceptance (:data:`fspo.acceptance.VIEWS`).
        starts: First fine bin of each length bin, which groups share; None makes bins of equal mass of these runs.
        resamples: Bootstrap resamples over mini-batches.

    Returns:
        The profile; None where there are no sequences.
    """
    sums_MKF = np.concatenate([run.lengths.sums_MKF for run in runs]) if runs else np.zeros((0, 1, len(FIELDS)))
    count_K = sums_MKF[..., FIELDS.index("count")].sum(0)
    if count_K.sum() == 0:
        return None
    if starts is None:
        starts = equal_mass_starts(count_K)
    error = acceptance_counts(sums_MKF, view).error(starts, resamples)
    count_J = merge_bins(count_K, starts)
    length_J = merge_bins(sums_MKF[..., FIELDS.index("length")].sum(0), starts)
    length_J = np.divide(length_J, count_J, out=np.full_like(length_J, np.nan), where=count_J > 0)
    return LengthProfile(length_J, error)


def clip_profiles(
    groups: Sequence[RunGroup], starts: npt.NDArray[np.int64]
) -> dict[str, dict[str, LengthProfile | None]]:
    """Acceptance by length of each group, for the two views that a report shows side by side."""
    return {
        view: {group.algo: length_profile(group.runs, view, starts=starts) for group in groups}
        for view in ("symmetric", "active")
    }


def shared_starts(runs: Sequence[Run], bins: int = 8) -> npt.NDArray[np.int64]:
    """Bins of equal mass over all runs together, for comparisons on the same bins."""
    counts = [run.lengths.sums_MKF[..., FIELDS.index("count")].sum(0) for run in runs]
    return equal_mass_starts(np.sum(counts, axis=0), bins)


@dataclass(frozen=True, slots=True)
class Measure:
    """One number per run: label, meaning, format, function (None where a run lacks it), and why a run may lack it."""

    label: str
    meaning: str
    form: str
    of: Callable[[Run], float | None]
    lacking: str = "not logged"


def standard_measures(runs: Sequence[Run], starts: npt.NDArray[np.int64]) -> list[Measure]:
    """The rows of the table of final numbers, for the metrics that these runs have.

    Args:
        runs: All runs of the report; each of their held-out metrics gets a row.
        starts: Length bins shared by all groups, for the LREs.
    """
    held_out = dict.fromkeys(name for run in runs for name in run.validation_metrics())
    measures = [
        Measure(f"held-out {_short(name)}", "last value logged", "{:.3f}", partial(_last, name=name), "no validation")
        for name in held_out
    ]
    measures += [
        Measure(
            f"gain in {_short(name)}", "last minus first value", "{:+.3f}", partial(_gain, name=name), "one validation"
        )
        for name in list(held_out)[:1]
    ]

    def lre(view: str) -> Callable[[Run], float | None]:
        def debiased(run: Run) -> float | None:
            profile = length_profile([run], view, starts=starts, resamples=200)
            return None if profile is None or np.isnan(profile.error.lre) else profile.error.debiased.value

        return debiased

    def flat(run: Run) -> float | None:
        profile = length_profile([run], starts=starts, resamples=200)
        return None if profile is None or np.isnan(profile.error.lre) else profile.error.noise_floor

    no_sums = "no sequences after the first mini-batch"
    last = f"mean over the last {_LAST_SHARE:.0%} of the steps"
    return [
        *measures,
        Measure("reward in training", last, "{:.3f}", lambda r: _tail(r, "critic/rewards/mean", "critic/score/mean")),
        Measure("response length", f"tokens, {last}", "{:.1f}", lambda run: _tail(run, "response_length/mean")),
        Measure("response-length growth", "last over first tenth of the steps", "{:.2f}x", _growth),
        Measure(
            "clip rate",
            "share outside the band, all steps",
            "{:.1%}",
            lambda run: _share(run, "accepted", True),
            no_sums,
        ),
        Measure("gradient removed", "share actively clipped, all steps", "{:.1%}", _active, no_sums),
        Measure("LRE, symmetric", "debiased, own run", "{:.3f}", lre("symmetric"), no_sums),
        Measure("LRE, active", "debiased, own run", "{:.3f}", lre("active"), no_sums),
        Measure("LRE, weight mass", "debiased, own run", "{:.3f}", lre("mass"), no_sums),
        Measure("LRE noise floor", "mean LRE of flat rates with these counts", "{:.3f}", flat, no_sums),
        Measure(
            "truncated", "share cut at the maximum length", "{:.1%}", lambda run: _share(run, "truncated"), no_sums
        ),
        Measure(
            "zero advantage", "share of sequences with A = 0", "{:.1%}", lambda r: _share(r, "advantage_zero"), no_sums
        ),
        Measure("gradient norm, largest", "over the median", "{:.1f}x", _gradient_spike),
        Measure(
            "norm clip binds", "share of optimizer steps", "{:.0%}", lambda r: _mean(r, "fspo/grad_norm/clipped_share")
        ),
        Measure("distinct responses", f"within a group, {last}", "{:.1%}", lambda r: _tail(r, "fspo/outcome/distinct")),
        Measure(
            "distinct right responses",
            f"over right ones of each step, {last}",
            "{:.1%}",
            lambda r: _tail(r, "fspo/outcome/distinct_correct"),
        ),
        Measure("largest reward drop", "from the best running mean so far", "{:.3f}", _reward_drop),
    ]


def problems_interval(runs: Sequence[Run], name: str, value: float) -> tuple[int, float, float] | None:
    """Number of problems behind a held-out metric and the 95% interval of its mean over runs by the choice of problems.

    Wilson's, which is at least as wide as it must be where several runs or samples are averaged. None where the number
    of problems is not recorded or the metric is no share.
    """
    known = [n for run in runs if (n := run.validation_problems(name)) is not None]
    if len(known) < len(runs) or not known or not 0 <= value <= 1:
        return None
    low, high = wilson_interval(value, min(known))
    return min(known), float(low), float(high)


def group_noise_floor(group: RunGroup, starts: npt.NDArray[np.int64]) -> NoiseFloor | str:
    """Rounding of S by length over all steps of a group's runs, against its band; or in words why there is none."""
    sums = sum((run.lengths.unmoved for run in group.runs), SequenceSums.zeros())
    settings = next((s for run in group.runs if (s := run.loss_settings) is not None), None)
    if not sums.total("count"):
        return "the first mini-batches were not recorded"
    if not sums.total("S_squared"):
        return "exactly 0 at every length: both passes round alike"
    if settings is None:
        return "the loss has no band on S, or run.json does not say"
    if settings.needs_state:
        known = [float(values.min()) for run in group.runs if len(values := run.series("fspo/noise_floor/margin")[1])]
        smallest = (
            f"the smallest half-width over the floor that a step logged is {min(known):.3g}" if known else "no log"
        )
        return f"the band is measured during training; {smallest}"
    return noise_floor([sums], starts, settings)


def group_interval(group: RunGroup, measure: Measure) -> Interval | None:
    """Mean of a measure over the group's runs with a bootstrap interval; None if no run has it."""
    values = [value for run in group.runs if (value := measure.of(run)) is not None]
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
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    return mean_interval([x - y for x, y in known]) if known else None


def pooled_lre_difference(
    first: RunGroup, second: RunGroup, view: str, starts: npt.NDArray[np.int64]
) -> tuple[Interval, Interval] | None:
    """Debiased LRE of first - second, all sequences of their :func:`paired_runs` together.

    Returns:
        The difference with its interval over mini-batches, and with that over seeds; None if it is undefined.
    """
    pairs = [pair for pair in paired_runs(first, second)[0] if all(len(run.lengths.step_M) for run in pair)]
    if not pairs:
        return None

    def counts(run: Run) -> Counts:
        found = acceptance_counts(run.lengths.sums_MKF, view)
        return merge_bins(found.accepted, starts), merge_bins(found.total, starts)

    both = [counts(a) for a, _ in pairs], [counts(b) for _, b in pairs]
    found = pooled_difference(*both, debiased_lre), pooled_difference(*both, debiased_lre, over="seeds")
    return found if np.isfinite(found[0].value) else None


def _short(name: str) -> str:
    return name.removeprefix("val-core/")


def _last(run: Run, name: str) -> float | None:
    _, values = run.series(name)
    return float(values[-1]) if len(values) else None


def _gain(run: Run, name: str) -> float | None:
    _, values = run.series(name)
    return float(values[-1] - values[0]) if len(values) > 1 else None


def _tail(run: Run, *names: str) -> float | None:
    _, values = run.first_series(*names)
    return float(values[-_tenth(len(values)) :].mean()) if len(values) else None


def _mean(run: Run, name: str) -> float | None:
    _, values = run.series(name)
    return float(values.mean()) if len(values) else None


def _growth(run: Run) -> float | None:
    _, values = run.series("response_length/mean")
    n = _tenth(len(values))
    return float(values[-n:].mean() / values[:n].mean()) if len(values) > 1 and values[:n].mean() > 0 else None


def _tenth(n: int) -> int:
    return max(1, round(n * _LAST_SHARE))


def _share(run: Run, name: str, complement: bool = False) -> float | None:
    count = float(run.lengths.sums_MKF[..., FIELDS.index("count")].sum())
    if count == 0:
        return None
    share = float(run.lengths.sums_MKF[..., FIELDS.index(name)].sum()) / count
    return 1 - share if complement else share


def _active(run: Run) -> float | None:
    high, low = _share(run, "clipped_high"), _share(run, "clipped_low")
    return None if high is None or low is None else high + low


def _gradient_spike(run: Run) -> float | None:
    _, values = run.series("actor/grad_norm")
    return float(values.max() / np.median(values)) if len(values) and np.median(values) > 0 else None


def _reward_drop(run: Run) -> float | None:
    _, values = run.first_series("critic/rewards/mean", "critic/score/mean")
    if len(values) < 2:
        return None
    n = _tenth(len(values))
    means = np.convolve(values, np.ones(n) / n, "valid")
    return float((np.maximum.accumulate(means) - means).max())
