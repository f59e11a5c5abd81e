"""A rule of verl's rollout correction that grows like sqrt(length): ``rollout_rs=seq_sqrt_k1``. Defined here.

verl's ``seq_sum_k1`` keeps a response whose sum of token log-ratios S lies in a constant interval, ``seq_mean_k1`` one
whose S / L does. Between them, for a response of L tokens and S = sum_t (log pi_old(y_t) - log pi_rollout(y_t))::

    kept  if  log(lower) <= -S / sqrt(L) <= log(upper)

Thresholds are exponentials of nats per square root of a token, because verl's k1 rules take ratios: ``1.1`` and
``0.909_1.1`` are -+0.095 sqrt(L) nats. It stands alone: verl knows no list of rules with this one.
"""

from __future__ import annotations

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
        if rollout_rs != RULE:
            return original(log_ratio, response_mask, rollout_rs, rollout_rs_threshold)  # type: ignore[no-any-return]
        root_B1 = response_mask.sum(dim=-1, keepdim=True).clamp(min=1).sqrt()
        try:
            kept_BT, metrics = original(log_ratio / root_B1, response_mask, _SUM, rollout_rs_threshold)
        except ValueError as error:
            raise ValueError(f"rollout_rs={RULE}, rollout_rs_threshold={rollout_rs_threshold}: {error}") from None
        return kept_BT, {name.replace(_SUM, RULE): value for name, value in metrics.items()}

    helper.compute_rollout_rejection_mask = compute


WhenImported("verl.trainer.ppo.rollout_corr_helper", add_rule)
