"""The length funnel in a report: where the responses of each group ended, by length (:mod:`fspo.report.funnel_steps`).

Runs of a group are pooled, and every number is a ratio of sums; intervals are by bootstrap over steps. A group whose
responses were all trained on, as in synchronous training without filters, has nothing to show.
"""

from __future__ import annotations

from collections.abc import Sequence

from fspo.fairness.bootstrap import ratio_interval
from fspo.fairness.lre import equal_mass_starts
from fspo.report.funnel_steps import STAGES, Bins, FunnelSteps, stage_fairness
from fspo.report.groups import RunGroup
from fspo.report.tables import Table, group_heads, show_interval, show_lre


def funnel_table(groups: Sequence[RunGroup]) -> Table | None:
    """Counts and LRE of each stage, lengths and tokens of what was lost, staleness; None if nothing was lost."""
    joined = {group.algo: FunnelSteps.join([run.funnel for run in group.runs]) for group in groups}
    lossy = {algo: steps for algo, steps in joined.items() if steps.ended_MSK[:, :-1].any()}
    if not lossy:
        return None
    starts = equal_mass_starts(sum(steps.ended_MSK[..., :-1].sum((0, 1)) for steps in lossy.values()))
    columns = [_numbers(lossy[group.algo], starts) if group.algo in lossy else {} for group in groups]
    labels = dict.fromkeys(label for column in columns for label in column)
    return Table(
        group_heads(groups),
        [(*label, [column.get(label, "(none lost)") for column in columns]) for label in labels],
    )


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
            cells[f"{stage}: LRE", why] = show_lre(errors[stage])
    if "kept" in errors:
        cells["trained on: LRE", "the whole: trained on among finished"] = show_lre(errors["kept"])
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
