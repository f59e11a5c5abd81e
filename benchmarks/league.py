"""``python -m benchmarks.league``: tables of docs/tables, from fspo.check_loss on every loss.

Writes check-losses.csv, check-aggregations.csv and check-league.csv; the last is of benchmarks/study/demo.parquet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from verl.trainer.ppo.core_algos import agg_loss

from benchmarks.pages import STUDY, Table, write_tables
from benchmarks.relatives import POLICY_LOSSES
from fspo.acceptance import UnclippedWeight
from fspo.check_loss import Report, check
from fspo.check_loss.call import Batch, Config, PolicyLoss
from fspo.check_loss.length_bias import DISPERSIONS, Clip, clip_by_length, weight_and_bound
from fspo.check_loss.token_kinds import TokenKinds
from fspo.fairness.lre import Array
from fspo.losses import ALGORITHMS
from fspo.report.tables import lre_interval
from fspo.responses import VIEWS
from fspo.table import read_table
from recipe.fspo.check_losses import actors, policy_loss

#: Mean share kept to which the clips are scaled in the league.
KEPT: Final = 0.9
#: What is divided by a factor, and what is multiplied, to make the clip of a loss narrower by it.
_WIDTHS: Final = ("clip_ratio_low", "clip_ratio_high", "c_low", "c_high", "clip_low", "clip_high", "clip_dual")
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


def _unpadded(
    new_BT: torch.Tensor, old_BT: torch.Tensor, mask_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log pi and log pi_old, at least float32 and 0 outside the mask, and the mask."""
    mask_BT, dtype = mask_BT.bool(), torch.promote_types(new_BT.dtype, torch.float32)
    return new_BT.to(dtype).masked_fill(~mask_BT, 0.0), old_BT.to(dtype).masked_fill(~mask_BT, 0.0), mask_BT


def cppo(log_prob: Any, old_log_prob: Any, advantages: Any, response_mask: Any, config: Any, **more: Any) -> Any:
    """CPPO with binary TV (arXiv 2606.10968): a budget for how far the probabilities of a prefix have moved.

    D_t = |p - p_old|, w_t = 0.8 + 0.2 (T - t) / (T - 1), Z_t = w_t D_t. A token is kept if A (r - 1) <= 0 or Z_t is at
    most delta + min(0, sum over earlier tokens of b w - Z), b the 0.9 quantile of D between clip_prefix and twice it.
    """
    new_BT, old_BT, mask_BT = _unpadded(log_prob, old_log_prob, response_mask)
    with torch.no_grad():
        moved_BT = (new_BT.exp() - old_BT.exp()).abs()
        length_B1 = mask_BT.sum(-1, keepdim=True)
        later_BT = (length_B1 - mask_BT.cumsum(-1)) / (length_B1 - 1).clamp(min=1)
        weight_BT = torch.where(length_B1 > 1, 0.8 + 0.2 * later_BT, 1.0) * mask_BT
        tokens_BT = moved_BT.masked_fill(~mask_BT, math.nan)
        budget_B1 = tokens_BT.nanquantile(0.9, -1, True).nan_to_num().clamp(config.clip_prefix, 2 * config.clip_prefix)
        saved_BT = (budget_B1 - moved_BT) * weight_BT
        limit_BT = config.clip_token + (saved_BT.cumsum(-1) - saved_BT).clamp(max=0)
        keep_BT = (advantages * (new_BT - old_BT) <= 0) | (weight_BT * moved_BT <= limit_BT)
        slope_BT = -advantages * (new_BT - old_BT).clamp(max=math.log(20)).exp() * keep_BT
    return agg_loss(slope_BT * new_BT, mask_BT, "token-mean", **config.global_batch_info)


def drpo(log_prob: Any, old_log_prob: Any, advantages: Any, response_mask: Any, config: Any, **more: Any) -> Any:
    """DRPO (arXiv 2606.09821): -A r + |A| p_old (r - 1)^2 / (2 eps)."""
    new_BT, old_BT, mask_BT = _unpadded(log_prob, old_log_prob, response_mask)
    ratio_BT = (new_BT - old_BT).clamp(-20, 20).exp()
    penalty_BT = advantages.abs() * old_BT.exp() * (ratio_BT - 1) ** 2 / (2 * config.eps)
    return agg_loss(penalty_BT - advantages * ratio_BT, mask_BT, "token-mean", **config.global_batch_info)


def up_gspo(log_prob: Any, old_log_prob: Any, advantages: Any, response_mask: Any, config: Any, **more: Any) -> Any:
    """UP-GSPO (arXiv 2607.06987): -A log pi where A > 0, GSPO elsewhere."""
    new_BT, old_BT, mask_BT = _unpadded(log_prob, old_log_prob, response_mask)
    with torch.no_grad():
        mean_B1 = (new_BT - old_BT).sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
        weight_B1 = mean_B1.clamp(max=10).exp() * (mean_B1 >= math.log1p(-config.clip_low))
        slope_BT = -advantages * torch.where(advantages > 0, 1.0, weight_B1)
    return agg_loss(slope_BT * new_BT, mask_BT, "seq-mean-token-mean", **config.global_batch_info)


def pnpo(log_prob: Any, old_log_prob: Any, advantages: Any, response_mask: Any, config: Any, **more: Any) -> Any:
    """PNPO (arXiv 2608.01418) as others describe it: weight and test on the prefix mean, exp((1/t) sum_{k<=t} d_k).

    A token whose weight is outside the band is rejected whatever its advantage. The clip values are GSPO's.
    """
    new_BT, old_BT, mask_BT = _unpadded(log_prob, old_log_prob, response_mask)
    with torch.no_grad():
        mean_BT = (new_BT - old_BT).cumsum(-1) / mask_BT.cumsum(-1).clamp(min=1)
        inside_BT = (mean_BT >= math.log1p(-config.clip_low)) & (mean_BT <= math.log1p(config.clip_high))
        slope_BT = -advantages * mean_BT.clamp(max=10).exp() * inside_BT
    return agg_loss(slope_BT * new_BT, mask_BT, "seq-mean-token-mean", **config.global_batch_info)


def sat(log_prob: Any, old_log_prob: Any, advantages: Any, response_mask: Any, config: Any, **more: Any) -> Any:
    """SAT on GRPO (arXiv 2607.18722) as others describe it: PPO's clip, narrower for tokens that have moved most.

    q is the 0.9 quantile of |d| over the micro-batch. Beyond it the clip value is multiplied by a Hill kernel of
    exponent 2, here 1 / (1 + (|d| / q)^2); the sources that were at hand leave its scale open.
    """
    new_BT, old_BT, mask_BT = _unpadded(log_prob, old_log_prob, response_mask)
    with torch.no_grad():
        d_BT = (new_BT - old_BT).clamp(-20, 20)
        q = float(np.quantile(d_BT[mask_BT].abs().numpy(), 0.9)) if mask_BT.any() else 0.0
        kernel_BT = torch.where(d_BT.abs() > q, 1 / (1 + (d_BT / max(q, 1e-30)) ** 2), 1.0)
        outside_BT = advantages.sign() * d_BT.expm1() > config.clip_ratio * kernel_BT
        slope_BT = -advantages * d_BT.exp() * ~outside_BT
    return agg_loss(slope_BT * new_BT, mask_BT, "token-mean", **config.global_batch_info)


#: Losses of 2026 that only the league has, with the settings that make their clip wider.
LATEST: Final[dict[str, tuple[Callable[..., Any], dict[str, float]]]] = {
    "cppo": (cppo, {"clip_token": 0.15, "clip_prefix": 0.02}),
    "drpo": (drpo, {"eps": 12.5}),
    "pnpo": (pnpo, {"clip_low": 3e-4, "clip_high": 4e-4}),
    "sat": (sat, {"clip_ratio": 0.2}),
    "up_gspo": (up_gspo, {"clip_low": 3e-4}),
}


def known_losses() -> dict[str, dict[str, Any]]:
    """Settings of the actor for every loss of verl's registry, those of :mod:`benchmarks.relatives` last."""
    known = actors()
    return known | {name: known[name] | {"policy_loss": loss} for name, loss in POLICY_LOSSES.items()}


def at_width(known: Mapping[str, dict[str, Any]], name: str, factor: float = 1.0) -> PolicyLoss:
    """A loss with its clip ``factor`` times as wide."""
    if name not in LATEST:
        return policy_loss(known[name] if factor == 1 else scaled(known[name], factor))
    function, clips = LATEST[name]
    wide = {key: min(value * factor, 1 - 1e-9) if key == "clip_low" else value * factor for key, value in clips.items()}
    return PolicyLoss(function, Config(wide | {"global_batch_info": {}}))


def weight_of(loss: PolicyLoss, name: str) -> UnclippedWeight:
    """What the loss weighs by, and DRPO, SAT and VESPO but for what they remove near the old policy, too."""
    hidden: dict[str, UnclippedWeight] = {"drpo": "token", "sat": "token", "vespo": "sequence"}
    return hidden.get(name) or weight_and_bound(loss)[0] or "none"


def _name(known: Mapping[str, dict[str, Any]], name: str) -> str:
    mode = name if name in LATEST else known[name]["policy_loss"]["loss_mode"]
    return name if mode == name else f"{name} ({mode})"


def _checks(report: Report) -> str:
    failed = [one.name for one in report.checks if not one.passed]
    return f"fails {', '.join(failed)}" if failed else "all pass"


def _exponent(report: Report) -> str:
    return f"L^{report.exponent:.0f}".replace("L^-0", "1").replace("L^0", "1").replace("L^-1", "1/L")


def table_of_losses(known: Mapping[str, dict[str, Any]]) -> Table:
    """Every loss: the checks, its normalisation, its weight, and what its clip keeps of synthetic log-ratios."""
    rows = []
    for name in (*known, *LATEST):
        report = check(at_width(known, name))
        kept = [f"{clip.kept:.3f}, {lre_interval(clip.errors['active'])}" for clip in report.clips.values()]
        weight = str(report.weight or "another").replace("_", "-")
        rows.append([_name(known, name), _checks(report), _exponent(report), weight, *kept])
    clips = [f"kept, active LRE at {sigma:g}" for sigma in DISPERSIONS]
    return [["loss", "checks", "gradient per token", "weight", *clips], *rows]


def table_of_aggregations(known: Mapping[str, dict[str, Any]]) -> Table:
    """verl's vanilla loss under each ``loss_agg_mode``."""
    rows = []
    for mode in _AGGREGATIONS:
        report = check(policy_loss(known["grpo"] | {"loss_agg_mode": mode}))
        wrong = next((f": {one.says}" for one in report.checks if not one.passed), "")
        rows.append([mode, f"{_checks(report)}{wrong}", _exponent(report)])
    return [["loss_agg_mode", "checks", "gradient per token"], *rows]


def recorded(records: Path) -> list[Batch]:
    """The recorded mini-batches of a parquet file (:func:`fspo.table.read_table`), without responses with A = 0.

    The tokens are drawn, S, L and A are recorded: records hold one S for each response. Its tokens are drawn from
    :class:`~fspo.check_loss.token_kinds.TokenKinds` of the dispersion of S / sqrt(L), and the logits of a response are
    moved together until they give its S. What a loss of sequences keeps is therefore that of the records; of a loss of
    tokens it depends on the drawn tokens too.
    """
    table = read_table(records).columns
    used_B = (table["minibatch"] > 0) & (table["A"] != 0)
    s_B, length_B, a_B = (table[name][used_B].astype(np.float64) for name in ("S", "L", "A"))
    numbers = np.stack([table[name][used_B] for name in ("seed", "step", "minibatch")])
    batch_B = np.unique(numbers, axis=1, return_inverse=True)[1].reshape(-1)
    rows = [np.flatnonzero(batch_B == batch) for batch in range(int(batch_B.max()) + 1)]
    pairs = [(s_B[row], length_B[row].astype(np.int64), a_B[row]) for row in rows]
    rng = np.random.default_rng(0)
    dispersion = float(np.std(np.concatenate([s / np.sqrt(length) for s, length, _ in pairs])))
    kinds = TokenKinds.random(dispersion, rng)
    return [_with_tokens(s, length, a, kinds, rng) for s, length, a in pairs]


def _with_tokens(s_B: Array, length_B: np.ndarray, a_B: Array, kinds: TokenKinds, rng: np.random.Generator) -> Batch:
    """Drawn tokens; their logits are moved by one amount per response, the new up and the old down, to give its S."""
    new_BT, old_BT, mask_BT = kinds.log_probs(length_B, int(length_B.max()), rng)
    new_logit_BT, old_logit_BT = (one - torch.log(-torch.expm1(one.clamp(max=-1e-12))) for one in (new_BT, old_BT))
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
    return Batch(new_BT, old_BT, advantages_BT, mask_BT).padding().to(torch.float32)


def scaled(actor: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The settings of an actor with the clip of its loss ``factor`` times as wide."""
    loss = dict(actor["policy_loss"])
    changed = dict(actor)
    defaults = {"tau_pos": 1.0, "tau_neg": 1.05} if loss["loss_mode"] == "sapo" else {}
    if loss["loss_mode"] in ALGORITHMS:
        settings = ALGORITHMS[loss["loss_mode"]]
        defaults = {"c_low": settings.c_low, "c_high": settings.c_high}
        loss |= defaults
    else:
        changed |= defaults
    for level in (changed, loss):
        for key in level:
            if key == "clip_ratio_low" and loss["loss_mode"] == "cispo":
                continue  # 10 is none
            if key in _WIDTHS:
                level[key] *= factor
            elif key in _RATES:
                level[key] /= factor
            elif key in ("k_pos", "k_neg"):
                level[key] = 1 + (level[key] - 1) / factor  # phi(w) / w is a power of what it was
    return changed | {"policy_loss": loss}


def matched(known: Mapping[str, dict[str, Any]], name: str, weight: UnclippedWeight, samples: Sequence[Batch]) -> float:
    """The factor at which the loss keeps KEPT of the weight of a response, on average, to 2%; at least 0.001."""
    low, high = math.log(1e-3), math.log(1e3)
    while high - low > 0.02:
        middle = (low + high) / 2
        kept = clip_by_length(at_width(known, name, math.exp(middle)), weight, samples).kept
        low, high = (middle, high) if kept < KEPT else (low, middle)
    return math.exp((low + high) / 2)


def league(known: Mapping[str, dict[str, Any]], samples: Sequence[Batch]) -> Table:
    """The losses on common records: with the clips of ``conf/algo``, and scaled by ``width`` to keep the same share."""
    own, equal = [], []
    for name in (*LEAGUE, *LATEST):
        loss = at_width(known, name)
        weight = weight_of(loss, name)
        clip = clip_by_length(loss, weight, samples)
        own.append([_name(known, name), "1", f"{clip.kept:.3f}", *_by_length(clip)])
        factor = matched(known, name, weight, samples)
        clip = clip_by_length(at_width(known, name, factor), weight, samples)
        equal.append([_name(known, name), f"{factor:.3g}", f"{clip.kept:.3f}", *_by_length(clip)])
    responses = sum(len(batch.mask_BT) for batch in samples)
    lengths = ", ".join(str(start) for start in clip.starts)
    heads = [f"loss, on {responses} responses", "width", "kept", *(f"LRE {view}" for view in VIEWS)]
    return [[*heads, f"kept, shortest and longest of the bins from {lengths}"], *own, *equal]


def _by_length(clip: Clip) -> list[str]:
    return [*(lre_interval(clip.errors[view]) for view in VIEWS), f"{clip.kept_J[0]:.3f}, {clip.kept_J[-1]:.3f}"]


def main() -> None:
    """Command line."""
    torch.set_num_threads(1)
    known = known_losses()
    tables = {"check-losses": table_of_losses(known), "check-aggregations": table_of_aggregations(known)}
    write_tables(tables | {"check-league": league(known, recorded(STUDY / "demo.parquet"))})


if __name__ == "__main__":
    main()
