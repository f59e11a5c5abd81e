"""What a loss without a band on S keeps of each sequence: a share of its weight, its acceptance here. Defined here.

Let g_t be the gradient of a loss with respect to the log-probability of token t, h_t that gradient on policy (where all
ratios are 1) and w_t the importance weight that the loss would use without its clip. With A = 1 or A = -1 in place of
the advantage, the token keeps ``min(|g_t|, |h_t| w_t)`` of ``|h_t| w_t``, nothing if the sign of g_t has turned, and
the sequence keeps::

    kept = sum_t min(|g_t|, |h_t| w_t) / sum_t |h_t| w_t        in [0, 1]

For a band on S this is 1 or 0: *kept* is active acceptance, and the smaller of what is kept with A = 1 and with A = -1,
token by token, is *symmetric* acceptance. For a clip of single tokens they are shares of its tokens, weighted by their
ratio; for a soft clip, what it lets through. A loss that makes some weights larger than without its clip (CISPO below
its lower bound, VESPO below a ratio of 1) keeps all of them: kept measures what is lost. Scale, sign and normalisation
of the loss cancel, so that any two losses can be compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Final, Literal

import torch

from fspo.fairness.lre import Array
from fspo.losses import judge
from fspo.types import GradScale, SequenceLossOutput

RATIO_LOG_CAP: Final = 20.0
"""A weight without its clip counts as at most exp(20)."""

UnclippedWeight = Literal["none", "token", "prefix", "sequence", "length_normalised"]

Gradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``gradient(log_prob_BT, advantages_BT)``: the gradient of a loss with respect to ``log_prob_BT``, [B, T]."""


def unclipped_weight(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor, weight: UnclippedWeight) -> torch.Tensor:
    """Importance weight of each token, [B, T]; 0 outside the mask, and at most exp(20).

    With d_t = log pi(y_t) - log pi_old(y_t), in nats, it is 1 (``none``), exp(d_t) (``token``), exp(d_1 + ... + d_t)
    (``prefix``), exp(S) (``sequence``) or exp(S / L) (``length_normalised``).
    """
    d_BT = log_ratio_BT.masked_fill(~mask_BT, 0.0)
    if weight == "none":
        d_BT = torch.zeros_like(d_BT)
    elif weight == "prefix":
        d_BT = d_BT.cumsum(dim=-1)
    elif weight == "sequence":
        d_BT = d_BT.sum(dim=-1, keepdim=True).expand_as(d_BT)
    elif weight == "length_normalised":
        d_BT = (d_BT.sum(dim=-1, keepdim=True) / mask_BT.sum(dim=-1, keepdim=True).clamp(min=1)).expand_as(d_BT)
    return d_BT.clamp(max=RATIO_LOG_CAP).exp() * mask_BT


def kept_share(descent_BT: torch.Tensor, whole_BT: torch.Tensor) -> torch.Tensor:
    """``sum_t min(max(d_t, 0), |h_t| w_t) / sum_t |h_t| w_t``, [B]; NaN for a sequence without a gradient on policy.

    Args:
        descent_BT: Minus the gradient of the loss, times the sign of A; 0 outside the mask.
        whole_BT: ``|h_t| w_t``, what descent would be without the clip.
    """
    return descent_BT.clamp(min=0.0).minimum(whole_BT).sum(-1) / whole_BT.sum(-1)


def kept_output(
    gradient: Gradient,
    log_prob_BT: torch.Tensor,
    old_log_prob_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    weight: UnclippedWeight,
) -> SequenceLossOutput:
    """What a loss keeps of each sequence, in the terms of the sequence-level losses; nothing carries a gradient.

    Args:
        gradient: Of the loss, at any scale. It is taken on policy, and with A = 1 and A = -1 for all sequences.
        log_prob_BT, old_log_prob_BT: Log-probabilities of the tokens (nats), [B, T].
        advantages_BT: Constant over the tokens of a sequence; only its sign is used.
        response_mask_BT: Nonzero on response tokens; rows without any are padding.
        weight: What the loss weighs by without its clip; see :func:`unclipped_weight`.

    Returns:
        ``accepted_B``: kept whatever the sign of A (symmetric); ``clipped_high_B`` and ``clipped_low_B``: 1 - kept
        where A > 0 and where A < 0; all in [0, 1]. ``weight_B`` is the mean weight without a clip. A sequence with
        A = 0, or without a gradient on policy, keeps all; one with a gradient that is not finite keeps nothing.
    """
    mask_BT = response_mask_BT.to(torch.bool)
    log_prob_BT, old_log_prob_BT = log_prob_BT.detach(), old_log_prob_BT.detach()
    one_BT = mask_BT.to(advantages_BT.dtype)
    on_policy_BT = gradient(old_log_prob_BT, one_BT).abs().masked_fill(~mask_BT, 0.0)
    plus_BT = -gradient(log_prob_BT, one_BT)
    minus_BT = gradient(log_prob_BT, -one_BT)
    with torch.no_grad():
        dtype = torch.promote_types(log_prob_BT.dtype, torch.float32)
        weight_BT = unclipped_weight(log_prob_BT.to(dtype) - old_log_prob_BT, mask_BT, weight)
        whole_BT = on_policy_BT.to(dtype) * weight_BT

        def share(descent_BT: torch.Tensor) -> torch.Tensor:
            share_B = torch.where(whole_BT.sum(-1) == 0, 1.0, kept_share(descent_BT.to(dtype), whole_BT))
            return torch.where(torch.isfinite(share_B), share_B, 0.0).clamp(max=1.0)

        output = judge(log_prob_BT, old_log_prob_BT, advantages_BT, mask_BT, None)
        advantage_B = output.advantage_B
        return dataclasses.replace(
            output,
            weight_B=torch.where(output.valid_B, weight_BT.sum(-1) / output.length_B.clamp(min=1), 1.0),
            accepted_B=share(plus_BT.minimum(minus_BT)) * output.valid_B,
            clipped_high_B=(1 - share(plus_BT)) * (advantage_B > 0),
            clipped_low_B=(1 - share(minus_BT)) * (advantage_B < 0),
        )


def clipped_cosine(
    kept_B: Array, advantage_B: Array, weight_B: Array, length_B: Array, grad_scale: GradScale = "1"
) -> float:
    """Cosine of the clipped and the unclipped update: ``sqrt(sum kept (A w h)^2 L / sum (A w h)^2 L)``; nan without A.

    It is exact if the gradients of different responses are orthogonal and their squared norms grow like L. The paper
    bounds this cosine; the formula is defined here, and docs/fairness.md has the bound. The columns are those of the
    table of responses; ``grad_scale`` is h(L) of the loss.
    """
    square_B = (advantage_B * weight_B) ** 2 * length_B / (length_B**2 if grad_scale == "1/L" else 1.0)
    return math.sqrt((kept_B * square_B).sum() / square_B.sum()) if square_B.any() else math.nan
