"""The length funnel in a report: where the responses of each group ended, by length (:mod:`fspo.funnel`).

Runs of a group are pooled, and every number is a ratio of sums; intervals are by bootstrap over steps. A group whose
responses were all trained on, as in synchronous training without filters, has nothing to show.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fspo.fairness import equal_mass_starts
from fspo.fairness.bootstrap import ratio_interval
from fspo.fairness.lre import MIN_CLUSTERS
from fspo.funnel import STAGES, Bins, FunnelSteps, stage_fairness
from fspo.report.findings import Finding
from fspo.report.groups import RunGroup
from fspo.report.style import lre_note
from fspo.report.tables import Table, group_heads, show_interval, show_lre


def _funnels(groups: Sequence[RunGroup], bins: int) -> tuple[dict[str, FunnelSteps], Bins]:
    """The steps of all runs of each group that lost a response, by algorithm; length bins of equal mass over these."""
    joined = {group.algo: FunnelSteps.join([run.funnel for run in group.runs]) for group in groups}
    found = {algo: steps for algo, steps in joined.items() if steps.ended_MSK[:, :-1].any()}
    known_K = sum((steps.ended_MSK[..., :-1].sum((0, 1)) for steps in found.values()), np.zeros(1))
    return found, equal_mass_starts(known_K, bins)


def funnel_table(groups: Sequence[RunGroup], bins: int) -> Table | None:
    """Counts and LRE of each stage, lengths and tokens of what was lost, staleness; None if nothing was lost."""
    found, starts = _funnels(groups, bins)
    columns = [_numbers(found[group.algo], starts) if group.algo in found else {} for group in groups]
    labels = dict.fromkeys(label for numbers in columns for label in numbers)
    rows = [(*label, [numbers.get(label, "(none lost)") for numbers in columns]) for label in labels]
    return Table(group_heads(groups), rows) if found else None


def _numbers(steps: FunnelSteps, starts: Bins) -> dict[tuple[str, str], str]:
    ended_MSK = steps.ended_MSK
    known_MSK, total = ended_MSK[..., :-1], ended_MSK.sum()
    errors = stage_fairness(known_MSK, starts)
    why = "debiased LRE of passing it; 95% interval over steps"
    cells = {}
    for index, stage in enumerate(STAGES):
        count = ended_MSK[:, index].sum()
        cells[stage, "responses, share of all that ended"] = f"{count:.0f} ({count / total:.1%})"
        if stage in errors:
            cells[f"{stage}: LRE", why] = show_lre(errors[stage], "")
    if "kept" in errors:
        cells["trained on: LRE", "the whole: trained on among finished"] = show_lre(errors["kept"], "")
    count_MS, tokens_MS = known_MSK.sum(-1), steps.tokens_MS
    lost, lost_tokens, trained = count_MS[:, :-1].sum(1), tokens_MS[:, :-1].sum(1), count_MS[:, -1]
    for label, unit, form, above, below in (
        ("mean length, trained on", "tokens", "{:.1f}", tokens_MS[:, -1], trained),
        ("mean length, lost", "tokens, of finished responses", "{:.1f}", lost_tokens, lost),
        ("tokens lost", "share of finished responses' tokens", "{:.1%}", lost_tokens, tokens_MS.sum(1)),
        ("staleness", "steps since the prompt was issued", "{:.2f}", steps.staleness_MK.sum(1), trained),
        ("versions", "policy versions of a response", "{:.2f}", steps.versions_MK.sum(1), trained),
    ):
        cells[label, unit] = show_interval(ratio_interval(above, below), form) if below.sum() else "(no response)"
    return cells


def funnel_finding(groups: Sequence[RunGroup], bins: int) -> list[Finding]:
    """Whether short and long responses reach the update alike; a claim only where the LRE's interval excludes 0."""
    said, numbers = [], []
    found, starts = _funnels(groups, bins)
    for algo, steps in found.items():
        known_MSK = steps.ended_MSK[..., :-1]
        whole = stage_fairness(known_MSK, starts).get("kept")
        if whole is None:  # of what was lost no length is known
            continue
        verdict = "no difference between lengths can be told"
        if whole.debiased.n < MIN_CLUSTERS:
            verdict = f"no claim from fewer than {MIN_CLUSTERS} steps"
        elif whole.debiased.excludes_zero:
            count_S, tokens_S = known_MSK.sum((0, 2)), steps.tokens_MS.sum(0)
            length = tokens_S[-1] / count_S[-1], tokens_S[:-1].sum() / count_S[:-1].sum()
            verdict = f"lengths fare differently, {length[0]:.0f} tokens on average trained on and {length[1]:.0f} lost"
        said.append(f"{algo}: {verdict}")
        numbers.append(f"{algo}: {lre_note(whole)}")
    sentence = f"What reaches the update: {'; '.join(said)}."
    return [Finding("The length funnel", sentence, "; ".join(numbers), "")] if said else []
