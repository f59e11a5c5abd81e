"""A rule of verl's rollout correction that grows like sqrt(length): ``rollout_rs=seq_sqrt_k1``. Defined here.

verl's ``seq_sum_k1`` keeps a response whose sum of token log-ratios S lies in a constant interval, ``seq_mean_k1`` one
whose S / L does. Between them, for a response of L tokens and S = sum_t (log pi_old(y_t) - log pi_rollout(y_t))::

    kept  if  log(lower) <= -S / sqrt(L) <= log(upper)

Thresholds are exponentials of nats per square root of a token, because verl's k1 rules take ratios: ``1.1`` and
``0.909_1.1`` are -+0.095 sqrt(L) nats.
"""

from __future__ import annotations

import itertools
from functools import wraps
from typing import Any, Final

import torch
from recipe.runner.when_imported import WhenImported

RULE: Final = "seq_sqrt_k1"
#: The rule that verl applies in its place, to log-ratios over sqrt(L).
_SUM: Final = "seq_sum_k1"


def add_rule(helper: Any) -> None:
    """Add the rule to ``compute_rollout_rejection_mask`` of verl's module ``rollout_corr_helper``."""
    # upstream: verl.trainer.ppo.rollout_corr_helper:compute_rollout_rejection_mask(log_ratio, rollout_rs)
    original = helper.compute_rollout_rejection_mask

    @wraps(original)
    def compute(
        log_ratio: torch.Tensor,
        response_mask: torch.Tensor,
        rollout_rs: str = "token_k1",
        rollout_rs_threshold: str | float | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        rules, thresholds = (
            [part.strip() for part in str(text).split(",") if part.strip()]
            for text in (rollout_rs, rollout_rs_threshold)
        )
        if RULE not in rules or rollout_rs_threshold is None or len(log_ratio) == 0:
            return original(log_ratio, response_mask, rollout_rs, rollout_rs_threshold)  # type: ignore[no-any-return]
        given = f"rollout_rs={rollout_rs}, rollout_rs_threshold={rollout_rs_threshold}"
        if len(thresholds) not in (1, len(rules)):
            raise ValueError(f"{given}: give one threshold, or one for each rule")
        kept_BT, metrics = response_mask.bool(), {}
        root_B1 = response_mask.sum(dim=-1, keepdim=True).clamp(min=1).sqrt()
        for rule, threshold in zip(rules, itertools.cycle(thresholds)):
            scaled = (log_ratio / root_B1, response_mask, _SUM) if rule == RULE else (log_ratio, response_mask, rule)
            try:
                mask_BT, of_rule = original(*scaled, threshold)
            except ValueError as error:
                raise ValueError(f"{given}: {error}") from None
            kept_BT = kept_BT & mask_BT.bool()
            metrics |= {name.replace(_SUM, RULE) if rule == RULE else name: x for name, x in of_rule.items()}
        removed_BT = response_mask.bool() & ~kept_BT
        metrics["rollout_rs_masked_fraction"] = float(removed_BT.sum() / response_mask.sum().clamp(min=1))
        metrics["rollout_rs_seq_masked_fraction"] = float(removed_BT.any(dim=-1).double().mean())
        return kept_BT.to(response_mask.dtype), metrics

    helper.compute_rollout_rejection_mask = compute


WhenImported("verl.trainer.ppo.rollout_corr_helper", add_rule)
