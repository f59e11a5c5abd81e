"""The report's table of acceptance by other attributes than length, from the ``fspo/by_*`` metrics of the runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from fspo.fairness import length_reweighting_error
from fspo.report.groups import RunGroup
from fspo.report.runs import Array
from fspo.report.tables import Table, group_heads, show_lre

_COUNT = re.compile(r"fspo/by_(?P<attribute>\w+)/count/(?P<label>.+)")


def attribute_table(groups: Sequence[RunGroup]) -> Table | None:
    """Debiased LRE over each attribute's bins, and the acceptance in each bin, by group.

    The runs of an group are pooled; the interval of an LRE resamples steps, because a step is what the metrics are of.

    Returns:
        The table; None where no run logged an attribute (``fspo.attributes``).
    """
    labels = _labels(groups)
    rows: list[tuple[str, str, list[str]]] = []
    for attribute, names in labels.items():
        counts = [_counts(group, attribute, names) for group in groups]
        rows.append((f"{attribute}: LRE", "debiased, symmetric acceptance", [_error(*pair) for pair in counts]))
        for index, name in enumerate(names):
            rows.append((name, attribute, [_rate(accepted[:, index], total[:, index]) for accepted, total in counts]))
    return Table(group_heads(groups), rows) if rows else None


def _labels(groups: Sequence[RunGroup]) -> dict[str, list[str]]:
    """Bins of each attribute in the order in which they are logged (which is that of the attribute's edges)."""
    found: dict[str, list[str]] = {}
    metrics = [values for group in groups for run in group.runs for values in run.steps.values()]
    for values in sorted(metrics, key=len, reverse=True):  # a step in which no bin is empty has them all in order
        for name in values:
            if match := _COUNT.fullmatch(name):
                names = found.setdefault(match["attribute"], [])
                if match["label"] not in names:
                    names.append(match["label"])
    return found


def _counts(group: RunGroup, attribute: str, labels: Sequence[str]) -> tuple[Array, Array]:
    """Accepted and all sequences, [steps of all runs, bins]: exact, since an acceptance is a ratio of counts."""
    accepted, total = [], []
    for run in group.runs:
        for values in run.steps.values():
            count = [values.get(f"fspo/by_{attribute}/count/{label}", 0.0) for label in labels]
            rate = [values.get(f"fspo/by_{attribute}/accept/{label}", 0.0) for label in labels]
            if any(count):
                total.append(count)
                accepted.append([round(n * share) for n, share in zip(count, rate, strict=True)])
    shape = (-1, len(labels))
    return np.array(accepted, dtype=np.float64).reshape(shape), np.array(total, dtype=np.float64).reshape(shape)


def _error(accepted: Array, total: Array) -> str:
    if not total.sum():
        return ""
    error = length_reweighting_error(accepted, total)
    return show_lre(error, f", noise floor {error.noise_floor:.3f}")


def _rate(accepted: Array, total: Array) -> str:
    return f"{accepted.sum() / total.sum():.1%} of {total.sum():.0f}" if total.sum() else ""
