"""The first screen of a report: what was compared, and what the runs say in sentences that their intervals carry.

A difference is claimed only where its 95% interval over the seeds that both groups have excludes 0. From fewer than
three such seeds nothing is claimed, and nothing from runs of one seed that ended at different steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fspo.fairness import Interval
from fspo.report.groups import (
    LengthProfile,
    Measure,
    RunGroup,
    group_interval,
    paired_interval,
    paired_runs,
    pooled_lre_difference,
    problems_interval,
)
from fspo.report.runs import LOSS_KEY
from fspo.report.style import lre_note
from fspo.report.tables import Table, group_heads, show_interval

_MOST_SETTINGS: Final = 20
_FEWEST_SEEDS: Final = 3


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
    """Seeds and steps of each group, and the settings in which the groups, or the runs of one, differ."""
    rows = [
        ("seeds", "", [", ".join("?" if r.seed is None else str(r.seed) for r in group.runs) for group in groups]),
        ("steps", "", [_range([max(run.steps, default=0) for run in group.runs]) for group in groups]),
    ]
    unfinished = [", ".join(f"{r.status}: seed {r.seed}" for r in g.runs if r.status != "finished") for g in groups]
    if any(unfinished):
        rows.append(("not finished", "", [cell or "none" for cell in unfinished]))
    differing = [(key, "", [" or ".join(value) for value in values]) for key, values in settings]
    rows += differing[:_MOST_SETTINGS]
    if len(differing) > _MOST_SETTINGS:
        rows.append((f"and {len(differing) - _MOST_SETTINGS} more", "in config.yaml", ["(not shown)"] * len(groups)))
    return Table(group_heads(groups), rows)


def mixed_settings(groups: Sequence[RunGroup], settings: Differing) -> list[str]:
    """A sentence about each group whose runs have different settings: its numbers are of all of them together."""
    said = []
    for index, group in enumerate(groups):
        mixed = [f"{key} ({' or '.join(values[index])})" for key, values in settings if len(values[index]) > 1]
        more = f" and {len(mixed) - _MOST_SETTINGS} more" if len(mixed) > _MOST_SETTINGS else ""
        if mixed:
            said.append(
                f"{group.comparison}, {group.algo}: its runs are taken together, and differ in "
                f"{', '.join(mixed[:_MOST_SETTINGS])}{more}: report on the runs of one setting alone"
            )
    return said


def differing_settings(groups: Sequence[RunGroup]) -> Differing:
    """The settings that are not the same in all runs; reads every run's config.yaml.

    Settings are compared as config.yaml has them; where a run lacks that file, only those of the loss. Seeds, paths and
    the algorithm's name are left out.
    """
    found = [[run.settings() for run in group.runs] for group in groups]
    whole = all(any(not key.startswith(LOSS_KEY) for key in one) for each in found for one in each)
    differing = []
    for key in dict.fromkeys(key for each in found for one in each for key in one):
        absent = "the loss's own, not described" if key == f"{LOSS_KEY}.band" else "not set"
        values = [list(dict.fromkeys(_shown(one.get(key, absent)) for one in each)) for each in found]
        differ = any(value != values[0] or len(value) > 1 for value in values)
        if differ and (whole or key.startswith(LOSS_KEY)) and _tells(key, found):
            differing.append((key, values))
    return differing


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _tells(key: str, found: Sequence[Sequence[dict[str, Any]]]) -> bool:
    """Whether a setting is one that a reader wants to see: no seed, no path or name of a run, nothing of its start."""
    if (
        "seed" in key
        or key.startswith("ray_kwargs.")
        or key in ("fspo.algo", "fspo.comparison", "trainer.experiment_name")
    ):
        return False
    folders = {str(one["fspo.run_dir"]) for each in found for one in each if "fspo.run_dir" in one}
    return not any(folder in str(one.get(key)) for each in found for one in each for folder in folders)


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def findings(
    groups: Sequence[RunGroup],
    profiles: Mapping[str, Mapping[str, LengthProfile | None]],
    measures: Sequence[Measure],
    starts: npt.NDArray[np.int64],
) -> list[Finding]:
    """Who accepts most evenly, what the clip removes, and held-out accuracy; of each what the runs have numbers for.

    LREs are of all runs of a group together, so that what noise adds to each run's LRE does not stay. Their differences
    must exclude 0 over mini-batches and over seeds, as in the fairness study.

    Args:
        groups: The groups of one comparison; each other one is compared with the first.
        profiles: Their :func:`fspo.report.groups.clip_profiles`.
        measures: :func:`fspo.report.groups.standard_measures`, of which held-out accuracies are used.
        starts: Length bins.
    """
    found, apart = [], {other.algo: paired_runs(groups[0], other)[1] for other in groups[1:]}
    for subject, view in (("Acceptance by length", "symmetric"), ("What the clip removes", "active")):
        if any(profiles[view].values()):
            numbers = [f"{algo}: {lre_note(p.error) if p else 'no sequences'}" for algo, p in profiles[view].items()]
            pairs = [(other.algo, pooled_lre_difference(groups[0], other, view, starts)) for other in groups[1:]]
            found.append(_finding(subject, f"{view.capitalize()} LRE", groups[0].algo, numbers, pairs, apart))
    held_out = [measure for measure in measures if measure.label.startswith("held-out ")]
    accuracies = [measure for measure in held_out if "/acc/mean@" in measure.label]
    for measure in accuracies or held_out[:1]:
        numbers = [_held_out(group, measure) for group in groups]
        differences = [(other.algo, paired_interval(groups[0], other, measure)) for other in groups[1:]]
        pairs = [(algo, None if each is None else (each, each)) for algo, each in differences]
        found.append(_finding("Learning", f"H{measure.label[1:]}", groups[0].algo, numbers, pairs, apart))
    return found


def _held_out(group: RunGroup, measure: Measure) -> str:
    interval = group_interval(group, measure)
    if interval is None:
        return f"{group.algo}: {measure.lacking}"
    name = f"val-core/{measure.label.removeprefix('held-out ')}"
    found = problems_interval(group.runs, name, interval.value)
    text = f"{group.algo}: {show_interval(interval, measure.form)}"
    if found is None:
        return f"{text}, problems not counted"
    return f"{text}, over {found[0]} problems [{found[1]:.3f}, {found[2]:.3f}]"


def _finding(
    subject: str,
    quantity: str,
    first: str,
    numbers: Sequence[str],
    pairs: Sequence[tuple[str, tuple[Interval, Interval] | None]],
    apart: Mapping[str, Sequence[int]],
) -> Finding:
    """The sentence about the first group against the others: differences in two intervals, the second over seeds.

    ``apart``: of each other group, the seeds whose runs ended at different steps and are not compared.
    """
    said: dict[str, list[str]] = {}
    differences = []
    for other, found in pairs:
        left_out = f"without seed {', '.join(map(str, apart[other]))}, whose runs ended at different steps"
        if found is None and apart[other]:
            verdict = f"no claim, since runs of one seed ended at different steps, about {first} and"
        elif found is None:
            verdict = f"no common seed has numbers of {first} and"
        elif found[1].n < _FEWEST_SEEDS:
            verdict = f"no claim from fewer than {_FEWEST_SEEDS} common seeds about {first} and"
        else:
            interval = found[1]
            verdict = f"no difference can be told between {first} and"
            if all(each.excludes_zero for each in found):
                verdict = f"{first} is {'lower' if interval.value < 0 else 'higher'} than"
            differences.append(
                f"{first} - {other} {show_interval(interval, '{:+.3f}')} over {interval.n} seeds"
                + (f", {left_out}" if apart[other] else "")
            )
        said.setdefault(verdict, []).append(other)
    parts = [f"{verdict} {(' or ' if ' and' in verdict else ' and ').join(names)}" for verdict, names in said.items()]
    sentence = "; ".join(parts) or f"only {first} was run, nothing to compare"
    return Finding(subject, f"{quantity}: {sentence}.", "; ".join(numbers), "; ".join(differences))
