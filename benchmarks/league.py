"""``python -m benchmarks.league RECORDS``: tables of docs/tables, from fspo.check_loss on every loss.

RECORDS is a folder or an archive of runs with recorded sequences; those of the fairness study are in benchmarks/study.
Writes check-losses.csv, check-aggregations.csv and check-league.csv in some ten minutes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.pages import Table, opened, write_tables
from fspo.acceptance import UnclippedWeight
from fspo.check_loss import Report, check
from fspo.check_loss.call import Batch
from fspo.check_loss.length_bias import DISPERSIONS, VIEWS, Clip, clip_by_length, find_weight
from fspo.check_loss.token_kinds import TokenKinds
from fspo.losses import ALGORITHMS
from fspo.records import Array, read_sequences
from fspo.report.tables import show_lre
from recipe.fspo.check_losses import actors, policy_loss

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
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm",
)  # fmt: skip
_NEWTON_STEPS: Final = 8


def _name(known: Mapping[str, dict[str, Any]], name: str) -> str:
    mode = known[name]["policy_loss"]["loss_mode"]
    return name if mode == name else f"{name} ({mode})"


def _checks(report: Report) -> str:
    failed = [each.name for each in report.checks if not each.passed]
    return f"fails {', '.join(failed)}" if failed else "all pass"


def _exponent(report: Report) -> str:
    return f"L^{report.exponent:.0f}".replace("L^-0", "1").replace("L^0", "1").replace("L^-1", "1/L")


def table_of_losses(known: Mapping[str, dict[str, Any]]) -> Table:
    """Every loss: the checks, its normalisation, its weight, and what its clip keeps of synthetic log-ratios."""
    rows = []
    for name in known:
        report = check(policy_loss(known[name]))
        kept = [f"{clip.kept:.3f}, {show_lre(clip.errors['active'])}" for clip in report.clips.values()]
        weight = str(report.weight or "another").replace("_", "-")
        rows.append([_name(known, name), _checks(report), _exponent(report), weight, *kept])
    clips = [f"kept, active LRE at {sigma:g}" for sigma in DISPERSIONS]
    return [["loss", "checks", "gradient per token", "weight", *clips], *rows]


def table_of_aggregations(known: Mapping[str, dict[str, Any]]) -> Table:
    """verl's vanilla loss under each ``loss_agg_mode``."""
    rows = []
    for mode in _AGGREGATIONS:
        report = check(policy_loss(known["grpo"] | {"loss_agg_mode": mode}))
        wrong = next((f": {each.says}" for each in report.checks if not each.passed), "")
        rows.append([mode, f"{_checks(report)}{wrong}", _exponent(report)])
    return [["loss_agg_mode", "checks", "gradient per token"], *rows]


def recorded(records: Path) -> list[Batch]:
    """The recorded mini-batches of runs, without responses with A = 0; the tokens are drawn, S, L and A are recorded.

    Records hold one S for each response. Its tokens are drawn from :class:`~fspo.check_loss.token_kinds.TokenKinds` of
    the dispersion of S / sqrt(L), and the logits of a response are moved together until they give its S. What a loss of
    sequences keeps is therefore that of the records; of a loss of tokens it depends on the drawn tokens too.
    """
    with opened(records) as folder:
        runs = [read_sequences(each.parent) for each in sorted(folder.rglob("sequences.jsonl"))]
    pairs = [
        (s[a != 0], length[a != 0].astype(np.int64), a[a != 0])
        for run in runs
        if run is not None
        for s, length, a in zip(run.s, run.length, run.advantage, strict=True)
        if (a != 0).any()
    ]
    rng = np.random.default_rng(0)
    dispersion = float(np.std(np.concatenate([s / np.sqrt(length) for s, length, _ in pairs])))
    kinds = TokenKinds.random(dispersion, rng)
    return [_with_tokens(s, length, a, kinds, rng) for s, length, a in pairs]


def _with_tokens(s_B: Array, length_B: np.ndarray, a_B: Array, kinds: TokenKinds, rng: np.random.Generator) -> Batch:
    """Drawn tokens; their logits are moved by one amount per response, the new up and the old down, to give its S."""
    new_BT, old_BT, mask_BT = kinds.log_probs(length_B, int(length_B.max()), rng)
    new_logit_BT, old_logit_BT = (each - torch.log(-torch.expm1(each.clamp(max=-1e-12))) for each in (new_BT, old_BT))
    move_B1, target_B1 = torch.zeros(len(s_B), 1, dtype=torch.float64), torch.from_numpy(s_B)[:, None]

    def moved(move_B1: torch.Tensor) -> list[torch.Tensor]:
        return [torch.nn.functional.logsigmoid(x) for x in (new_logit_BT + move_B1 / 2, old_logit_BT - move_B1 / 2)]

    for _ in range(_NEWTON_STEPS):
        new_BT, old_BT = moved(move_B1)
        slope_BT = (1 - (new_BT.exp() + old_BT.exp()) / 2) * mask_BT
        miss_B1 = target_B1 - ((new_BT - old_BT) * mask_BT).sum(-1, keepdim=True)
        move_B1 = move_B1 + miss_B1 / slope_BT.sum(-1, keepdim=True)
    new_BT, old_BT = moved(move_B1)
    advantages_BT = torch.from_numpy(a_B)[:, None].expand_as(new_BT)
    return Batch(new_BT, old_BT, advantages_BT, mask_BT).padding(0.0).to(torch.float32)


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


def league(known: Mapping[str, dict[str, Any]], samples: Sequence[Batch]) -> Table:
    """The losses on common records: with the clips of ``conf/algo``, and scaled by ``width`` to keep the same share."""
    losses = {name: policy_loss(known[name]) for name in LEAGUE}
    own, equal = [], []
    for name in LEAGUE:
        weight = find_weight(losses[name]) or "none"
        clip = clip_by_length(losses[name], weight, samples)
        own.append([_name(known, name), "1", f"{clip.kept:.3f}", *_by_length(clip)])
        factor = matched(known[name], weight, samples)
        clip = clip_by_length(policy_loss(scaled(known[name], factor)), weight, samples)
        equal.append([_name(known, name), f"{factor:.3g}", f"{clip.kept:.3f}", *_by_length(clip)])
    responses = sum(len(batch.mask_BT) for batch in samples)
    lengths = ", ".join(str(start) for start in clip.starts)
    heads = [f"loss, on {responses} responses", "width", "kept", *(f"LRE {view}" for view in VIEWS)]
    return [[*heads, f"kept, shortest and longest of the bins from {lengths}"], *own, *equal]


def _by_length(clip: Clip) -> list[str]:
    return [*(show_lre(clip.errors[view]) for view in VIEWS), f"{clip.kept_J[0]:.3f}, {clip.kept_J[-1]:.3f}"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.league", description=__doc__)
    parser.add_argument("records", type=Path, metavar="RECORDS", help="runs with sequences.jsonl, or .tar.xz of them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = actors()
    tables = {"check-losses": table_of_losses(known), "check-aggregations": table_of_aggregations(known)}
    write_tables(tables | {"check-league": league(known, recorded(arguments.records))})


if __name__ == "__main__":
    main()
