"""``python -m benchmarks.league RECORDS``: the tables of docs/check-loss.md, from fspo.check_loss on every loss.

RECORDS is a folder or an archive of runs with recorded sequences; those of the fairness study are in benchmarks/study.
Takes some ten minutes. The tables between the page's markers are replaced; nothing else of it is touched.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.loss import alternated
from benchmarks.pages import markdown, write_section
from fspo.check_loss import Report, check
from fspo.check_loss.call import Batch, PolicyLoss, synthetic_batch
from fspo.check_loss.length_bias import DISPERSIONS, VIEWS, Clip, clip_by_length, find_weight, recorded, synthetic
from fspo.fairness import LengthReweightingError
from fspo.kept import UnclippedWeight
from fspo.losses import ALGORITHMS
from recipe.fspo.check_losses import actors, policy_loss

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "check-loss.md"
#: Mean share kept to which the clips are scaled in the league.
KEPT: Final = 0.9
#: What is divided by a factor, and what is multiplied, to make the clip of a loss narrower by it.
_WIDTHS: Final = ("clip_ratio_low", "clip_ratio_high", "clip_low", "clip_high", "clip_dual")
_RATES: Final = ("tau_pos", "tau_neg", "lambda_pos", "lambda_neg")
#: Losses whose clip stands still, in the order of the table.
LEAGUE: Final = (
    *("fspo", "rloo", "gspo", "luspo", "vespo", "ctpo_la"),
    *("gspo_verl", "grpo", "dapo", "sapo", "gmpo", "cispo", "dppo_tv", "dppo_kl"),
)
_AGGREGATIONS: Final = (
    *("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
)
_ROUNDS: Final = 15
_SECTIONS: Final = ("losses", "aggregations", "league")


def lre(error: LengthReweightingError) -> str:
    """Debiased LRE with its interval."""
    if math.isnan(error.lre):
        return "nothing kept"
    return f"{error.debiased.value:.3f} [{error.debiased.low:.3f}, {error.debiased.high:.3f}]"


def _name(known: Mapping[str, dict[str, Any]], name: str) -> str:
    mode = known[name]["policy_loss"]["loss_mode"]
    return f"`{name}`" if mode == name else f"`{name}` (`{mode}`)"


def _checks(report: Report) -> str:
    failed = [each.name for each in report.checks if not each.passed]
    return f"**fails** {', '.join(failed)}" if failed else "all pass"


def _exponent(report: Report) -> str:
    return f"L^{report.normalisation.exponent:.0f}".replace("L^-0", "1").replace("L^0", "1").replace("L^-1", "1/L")


def table_of_losses(known: Mapping[str, dict[str, Any]]) -> str:
    """Every loss: the checks, its normalisation, its weight, and what its clip keeps of synthetic log-ratios."""
    samples = {f"{sigma:g}": synthetic(sigma) for sigma in DISPERSIONS}
    rows = []
    for name in known:
        report = check(policy_loss(known[name]), samples)
        kept = [f"{clip.kept:.3f}, {lre(clip.errors['active'])}" for clip in report.clips.values()]
        weight = str(report.weight or "another").replace("_", "-")
        rows.append([_name(known, name), _checks(report), _exponent(report), weight, *kept])
    heads = ["loss", "checks", "gradient per token", "weight", *(f"kept, active LRE at {sigma}" for sigma in samples)]
    return markdown(heads, rows)


def table_of_aggregations(known: Mapping[str, dict[str, Any]]) -> str:
    """verl's vanilla loss under each ``loss_agg_mode``."""
    rows = []
    for mode in _AGGREGATIONS:
        report = check(policy_loss(known["grpo"] | {"loss_agg_mode": mode}), {})
        wrong = next((f": {each.says}" for each in report.checks if not each.passed), "")
        rows.append([f"`{mode}`", f"{_checks(report)}{wrong}", _exponent(report)])
    return markdown(["loss_agg_mode", "checks", "gradient per token"], rows)


def scaled(actor: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The settings of an actor with the clip of its loss ``factor`` times as wide."""
    loss = dict(actor["policy_loss"])
    found = dict(actor)
    defaults = {"tau_pos": 1.0, "tau_neg": 1.05} if loss["loss_mode"] == "sapo" else {}
    if loss["loss_mode"] in ALGORITHMS:
        settings = ALGORITHMS[loss["loss_mode"]]
        defaults = {"clip_low": settings.clip_low, "clip_high": settings.clip_high}
        loss |= defaults
    else:
        found |= defaults
    for level in (found, loss):
        for key in level:
            if key == "clip_ratio_low" and loss["loss_mode"] == "cispo":
                continue  # 10 is none
            if key in _WIDTHS:
                level[key] *= factor
                if key in ("clip_low", "clip_ratio_low") and loss["loss_mode"] in ("seq_rloo", "seq_gspo", "luspo"):
                    level[key] = min(level[key], 1 - 1e-9)
            elif key in _RATES:
                level[key] /= factor
            elif key in ("k_pos", "k_neg"):
                level[key] = 1 + (level[key] - 1) / factor  # phi(w) / w is a power of what it was
    return found | {"policy_loss": loss}


def matched(actor: Mapping[str, Any], weight: UnclippedWeight, samples: Sequence[Batch]) -> float:
    """The factor at which the loss keeps KEPT of the weight of a response, on average, to 2%; at least 0.001."""
    low, high = math.log(1e-3), math.log(1e3)
    while high - low > 0.02:
        middle = (low + high) / 2
        kept = clip_by_length(policy_loss(scaled(actor, math.exp(middle))), weight, samples).kept
        low, high = (middle, high) if kept < KEPT else (low, middle)
    return math.exp((low + high) / 2)


def costs(losses: Mapping[str, PolicyLoss]) -> dict[str, float]:
    """Time of forward and backward pass over that of ``grpo``, median of alternating rounds at 64 x 2048, float32."""
    batch = synthetic_batch([2048] * 64, [0.03] * 64, [1.0, -1.0] * 32).to(torch.float32)
    times = alternated({name: partial(loss.gradient, batch) for name, loss in losses.items()}, _ROUNDS)
    return {name: float(np.median(np.divide(seconds, times["grpo"]))) for name, seconds in times.items()}


def league(known: Mapping[str, dict[str, Any]], samples: Sequence[Batch]) -> str:
    """The losses on common records: with the clips that they come with, and scaled to keep the same share."""
    losses = {name: policy_loss(known[name]) for name in LEAGUE}
    cost = costs(losses)
    own, equal = [], []
    for name in LEAGUE:
        weight = find_weight(losses[name]) or "none"
        clip = clip_by_length(losses[name], weight, samples)
        own.append([_name(known, name), f"{clip.kept:.3f}", *_views(clip), _ends(clip), f"{cost[name]:.2f}"])
        factor = matched(known[name], weight, samples)
        clip = clip_by_length(policy_loss(scaled(known[name], factor)), weight, samples)
        equal.append([_name(known, name), f"{factor:.3g}", f"{clip.kept:.3f}", *_views(clip), _ends(clip)])
    heads = [*(f"LRE {view}" for view in VIEWS), "kept, shortest and longest bin"]
    lengths = ", ".join(str(start) for start in clip.starts)
    return "\n\n".join(
        [
            f"{sum(len(batch.mask_BT) for batch in samples)} responses; bins begin at {lengths} tokens.",
            "With the clip values of `conf/algo`:",
            markdown(["loss", "kept", *heads, "time / grpo"], own),
            f"With all clips scaled to keep {KEPT:g}:",
            markdown(["loss", "width", "kept", *heads], equal),
        ]
    )


def _views(clip: Clip) -> list[str]:
    return [lre(clip.errors[view]) for view in VIEWS]


def _ends(clip: Clip) -> str:
    return f"{clip.kept_J[0]:.3f}, {clip.kept_J[-1]:.3f}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.league", description=__doc__)
    parser.add_argument("records", type=Path, metavar="RECORDS", help="runs with sequences.jsonl, or .tar.xz of them")
    parser.add_argument("--sections", nargs="+", choices=_SECTIONS, default=_SECTIONS, help="default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = actors()
    for section in arguments.sections:
        if section == "losses":
            text = table_of_losses(known)
        elif section == "aggregations":
            text = table_of_aggregations(known)
        else:
            text = league(known, recorded(arguments.records))
        write_section(PAGE, section, text)


if __name__ == "__main__":
    main()
