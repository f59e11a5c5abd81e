"""``python -m benchmarks.losses``: docs/tables/check-losses.csv and check-aggregations.csv, of every loss by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from benchmarks.pages import Table, write_tables
from fspo.check_loss import Report, check
from fspo.check_loss.by_length import DISPERSIONS
from fspo.report.tables import lre_interval
from recipe.fspo.check_losses import actors, policy_loss

AGGREGATIONS: Final = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm",
)  # fmt: skip


def _name(known: Mapping[str, dict[str, Any]], name: str) -> str:
    mode = known[name]["policy_loss"]["loss_mode"]
    return name if mode == name else f"{name} ({mode})"


def _checks(report: Report) -> str:
    failed = [one.name for one in report.checks if not one.passed]
    return f"fails {', '.join(failed)}" if failed else "all pass"


def _exponent(report: Report) -> str:
    return f"L^{report.exponent:.0f}".replace("L^-0", "1").replace("L^0", "1").replace("L^-1", "1/L")


def table_of_losses(known: Mapping[str, dict[str, Any]]) -> Table:
    """Every loss: the checks, its normalisation, its weight, and what its clip keeps of synthetic log-ratios."""
    rows = []
    for name in known:
        report = check(policy_loss(known[name]))
        kept = [f"{clip.error.rate:.3f}, {lre_interval(clip.error)}" for clip in report.clips.values()]
        weight = str(report.weight or "another").replace("_", "-")
        rows.append([_name(known, name), _checks(report), _exponent(report), weight, *kept])
    clips = [f"kept, active LRE at {sigma:g}" for sigma in DISPERSIONS]
    return [["loss", "checks", "gradient per token", "weight", *clips], *rows]


def table_of_aggregations(known: Mapping[str, dict[str, Any]]) -> Table:
    """verl's vanilla loss under each ``loss_agg_mode``."""
    rows = []
    for mode in AGGREGATIONS:
        report = check(policy_loss(known["grpo"] | {"loss_agg_mode": mode}))
        wrong = next((f": {one.says}" for one in report.checks if not one.passed), "")
        rows.append([mode, f"{_checks(report)}{wrong}", _exponent(report)])
    return [["loss_agg_mode", "checks", "gradient per token"], *rows]


def main() -> None:
    """Command line."""
    torch.set_num_threads(1)
    known = actors()
    write_tables({"check-losses": table_of_losses(known), "check-aggregations": table_of_aggregations(known)})


if __name__ == "__main__":
    main()
