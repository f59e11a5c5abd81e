"""What a token-level clip does to whole sequences, in the terms of the sequence-level losses. Defined here.

Token-level losses (PPO's, GRPO, DAPO) clip single tokens, so a sequence is not accepted or rejected as a whole. Its
*accepted share* is the share of its tokens whose ratio lies inside the clip range. Sums of that share replace counts of
sequences, so that LRE, clip rates and drift by length can be compared with those of the other algorithms.
"""

from __future__ import annotations

import torch

from fspo.types import SequenceLossOutput


def token_level_output(
    log_prob_BT: torch.Tensor,
    old_log_prob_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> SequenceLossOutput:
    """Describe a micro-batch under a token-level clip; nothing in the result carries a gradient.

    With r_t the ratio of token t: ``accepted_B`` is the share of tokens with 1 - clip_low <= r_t <= 1 + clip_high,
    ``clipped_high_B`` the share with r_t above and A > 0, ``clipped_low_B`` the share with r_t below and A < 0, all in
    [0, 1]. Band edges on S are infinite, the weight is the mean ratio of the tokens, the loss is 0.

    Args:
        log_prob_BT, old_log_prob_BT: Log-probabilities of the tokens (nats), [B, T].
        advantages_BT: Advantage of each token, constant over the tokens of a sequence, [B, T].
        response_mask_BT: Nonzero on response tokens, [B, T]; rows without any are padding.
        clip_low, clip_high: eps, the bounds of the token ratio below and above 1.

    Raises:
        ValueError: if a clip value is negative.
    """
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip_low={clip_low!r} and clip_high={clip_high!r} must be at least 0")
    with torch.no_grad():
        mask_BT = response_mask_BT.to(torch.bool)
        difference_BT = torch.where(mask_BT, (log_prob_BT - old_log_prob_BT).to(torch.float32), 0.0)
        ratio_BT = difference_BT.exp()
        advantage_BT = torch.where(mask_BT, advantages_BT.to(torch.float32), 0.0)
        above_BT, below_BT = ratio_BT > 1 + clip_high, ratio_BT < 1 - clip_low
        length_B = mask_BT.sum(-1)
        n_B = length_B.clamp(min=1)

        def share(tokens_BT: torch.Tensor) -> torch.Tensor:
            return (tokens_BT & mask_BT).sum(-1) / n_B

        log_ratio_B = difference_BT.sum(-1)
        infinite_B = torch.full_like(log_ratio_B, torch.inf)
        never_B = torch.zeros_like(mask_BT[:, 0])
        return SequenceLossOutput(
            loss_B=torch.zeros_like(log_ratio_B),
            log_ratio_B=log_ratio_B,
            length_B=length_B,
            lower_B=-infinite_B,
            upper_B=infinite_B,
            weight_B=(ratio_BT * mask_BT).sum(-1) / n_B,
            advantage_B=advantage_BT.sum(-1) / n_B,
            accepted_B=share(~above_BT & ~below_BT),
            clipped_high_B=share(above_BT & (advantage_BT > 0)),
            clipped_low_B=share(below_BT & (advantage_BT < 0)),
            overflow_B=never_B,
            dual_clipped_B=never_B,
            valid_B=length_B > 0,
        )
