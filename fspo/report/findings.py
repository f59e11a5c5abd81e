"""The first screen of a report: what was compared, and what the runs say in sentences that their intervals carry.

A difference is claimed only where its 95% interval over the seeds that both groups have excludes 0. From fewer than
three such seeds nothing is claimed, and nothing from runs of one seed that ended at different steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fspo.fairness.lre import Interval
from fspo.report.groups import (
    Measure,
    Profiles,
    RunGroup,
    group_interval,
    paired_interval,
    paired_runs,
    pooled_lre_difference,
    problems_interval,
)
from fspo.report.runs import LOSS_KEY
from fspo.report.tables import Table, group_heads, show_interval, show_lre

_FEWEST_SEEDS: Final = 3
#: Shares outside the band that are farther apart than this are not comparable.
_APART: Final = 0.05


@dataclass(frozen=True, slots=True)
class Finding:
    """One of the findings: its subject, the sentence, each group's number, and the differences behind the sentence."""

    subject: str
    sentence: str
    numbers: str
    differences: str


Differing = list[tuple[str, list[list[str]]]]
"""Settings that are not the same in all runs, each with its values in each group."""


def compared(groups: Sequence[RunGroup], settings: Differing) -> Table:
    """Seeds and steps of each group, if recorded, and the settings in which the groups, or the runs of one, differ."""
    seeds, steps = [], []
    for group in groups:
        names = ["?" if run.seed is None else str(run.seed) for run in group.runs]
        ends = ["" if run.status == "finished" else f" ({run.status})" for run in group.runs]
        seeds.append(", ".join(name + end for name, end in zip(names, ends, strict=True)))
        last = [max(run.steps, default=0) for run in group.runs]
        steps.append(str(last[0]) if min(last) == max(last) else f"{min(last)} to {max(last)}")
    rows = []
    if any(run.seed is not None for group in groups for run in group.runs):
        rows.append(("seeds", "", seeds))
    if any(run.steps for group in groups for run in group.runs):
        rows.append(("steps", "", steps))
    shown = [(key.rpartition(".")[2], key, [" or ".join(v) for v in values]) for key, values in settings]
    return Table(group_heads(groups), rows + shown)


def clip_values_in_words(groups: Sequence[RunGroup], clip_rate: Measure) -> str:
    """What the runs have recorded of their clip values, and whether their clip rates can be compared.

    They cannot where the shares outside differ by more than :data:`_APART`, or where a run that was to measure its clip
    values has measured none.
    """
    runs = [run for group in groups for run in group.runs]
    asked, measured = groups[0].clip_values, [run for run in runs if run.info.get("clip_values_measured")]
    # A plan says "measured" of every run of a grid, also of a loss that has nothing to measure.
    recorded = [run.info.get("clip_values_asked", run.clip_values) for run in runs]
    could = [
        run
        for run, own in zip(runs, recorded, strict=True)
        if own == "measured" or run.info.get("clip_values_measured")
    ]
    words = {"matched": "Clip values scaled so that all clip the same share of the same sequences. "}.get(asked, "")
    if could:
        words = f"{len(measured)} of {len(could)} run{'s' * (len(could) > 1)} measured clip values. "
    rates = {group.algo: group_interval(group, clip_rate) for group in groups}
    known = {algo: rate.value for algo, rate in rates.items() if rate is not None}
    if len(known) < 2:
        return words.strip()
    shares = ", ".join(f"{algo} {rate:.1%}" for algo, rate in known.items())
    reasons = []
    if max(known.values()) - min(known.values()) > _APART:
        reasons.append(f"the shares are more than {100 * _APART:.0f} points apart")
    if len(measured) < len(could):
        reasons.append("not every run measured its clip values")
    verdict = f". Not comparable: {', and '.join(reasons)}" if reasons else ""
    return f"{words}Outside the band, of all steps: {shares}{verdict}."


def differing_settings(groups: Sequence[RunGroup]) -> Differing:
    """The settings that are not the same in all runs; reads every run's config.yaml.

    Settings are compared as config.yaml has them; where a run lacks that file, only those of the loss. Seeds, what
    belongs to a start, the algorithm's name, and whatever names the run's folder are left out.
    """
    by_group = [[run.settings() for run in group.runs] for group in groups]
    every = [settings for group in by_group for settings in group]
    whole = all(any(not key.startswith(LOSS_KEY) for key in settings) for settings in every)
    folders = [str(settings[key]) for settings in every if (key := "trainer.default_local_dir") in settings]
    differing = []
    for key in dict.fromkeys(key for settings in every for key in settings):
        absent = "the loss's own, not described" if key == f"{LOSS_KEY}.band" else "not set"
        values = [list(dict.fromkeys(_shown(one.get(key, absent)) for one in group)) for group in by_group]
        if (
            len({value for group in values for value in group}) > 1
            and (whole or key.startswith(LOSS_KEY))
            and "seed" not in key
            and not key.startswith("ray_kwargs.")
            and key not in ("fspo.clip_values", "trainer.experiment_name")
            and not any(folder in str(settings.get(key)) for settings in every for folder in folders)
        ):
            differing.append((key, values))
    return differing


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def findings(groups: Sequence[RunGroup], profiles: Profiles, measures: Sequence[Measure]) -> list[Finding]:
    """Three findings: evenness of acceptance, evenness of the removed gradient, held-out accuracy.

    A finding without data is left out. Each group is compared with the first. A LRE is computed over all runs of a
    group together, because noise adds to the LRE of each single run. A difference of LREs counts if its intervals over
    mini-batches and over seeds exclude 0.
    """
    first, others, results = groups[0], groups[1:], []
    for subject, view in (("Acceptance by length", "symmetric"), ("What the clip removes", "active")):
        if any(profiles[view].values()):
            numbers = [f"{algo}: LRE {show_lre(p.error) if p else 'unknown'}" for algo, p in profiles[view].items()]
            lre = [pooled_lre_difference(first, other, view) for other in others]
            results.append(_finding(subject, f"{view.capitalize()} LRE", groups, numbers, lre))
    held_out = [measure for measure in measures if measure.label.startswith("held-out ")]
    accuracies = [measure for measure in held_out if "/acc/mean@" in measure.label]
    for measure in accuracies or held_out[:1]:
        numbers = [_held_out(group, measure) for group in groups]
        gains = [paired_interval(first, other, measure) for other in others]
        differences = [None if gain is None else (gain,) for gain in gains]
        results.append(_finding("Learning", f"H{measure.label[1:]}", groups, numbers, differences))
    return results


def _held_out(group: RunGroup, measure: Measure) -> str:
    interval = group_interval(group, measure)
    if interval is None:
        return f"{group.algo}: not recorded"
    problems = problems_interval(group.runs, f"val-core/{measure.label.removeprefix('held-out ')}", interval.value)
    over = f"over {problems[0]} problems [{problems[1]:.3f}, {problems[2]:.3f}]" if problems else "problems not counted"
    return f"{group.algo}: {show_interval(interval, measure.form)}, {over}"


def _finding(
    subject: str,
    quantity: str,
    groups: Sequence[RunGroup],
    numbers: Sequence[str],
    differences_by_group: Sequence[tuple[Interval, ...] | None],
) -> Finding:
    """The sentence about the first group against each other one; of a group's intervals the last one is over seeds."""
    first = groups[0].algo
    verdicts: dict[str, list[str]] = {}
    differences = []
    for other, intervals in zip(groups[1:], differences_by_group, strict=True):
        apart = paired_runs(groups[0], other)[1]
        if intervals is None or intervals[-1].n < _FEWEST_SEEDS:
            why = f"fewer than {_FEWEST_SEEDS} common seeds"
            if intervals is None and len(paired_runs(groups[0], other)[0]) >= _FEWEST_SEEDS:
                why = "undefined numbers"
            elif apart:
                why = "runs of one seed that ended at different steps"
            verdicts.setdefault(f"no claim from {why} about {first} and", []).append(other.algo)
            continue
        verdict = f"no difference can be told between {first} and"
        if all(interval.excludes_zero for interval in intervals):
            verdict = f"{first} is {'lower' if intervals[-1].value < 0 else 'higher'} than"
        verdicts.setdefault(verdict, []).append(other.algo)
        text = f"{first} - {other.algo} {show_interval(intervals[-1], '{:+.3f}')} over {intervals[-1].n} seeds"
        without = f", without seed {', '.join(map(str, apart))}, whose runs ended at different steps"
        differences.append(text + (without if apart else ""))
    parts = [f"{text} {(' or ' if ' and' in text else ' and ').join(names)}" for text, names in verdicts.items()]
    sentence = "; ".join(parts) or f"only {first} was run, nothing to compare"
    return Finding(subject, f"{quantity}: {sentence}.", "; ".join(numbers), "; ".join(differences))
