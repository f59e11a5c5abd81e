"""How S grows inside a response: its value after the first 1, 2, 4, ... tokens. Defined here.

S by *final* length and S by *position* answer different questions. Long responses may consist of more certain tokens
than short ones; then S spreads less with final length than it does along a response.
"""

from __future__ import annotations

import torch

from fspo.table import OCTAVES


def prefix_sums(
    log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor
) -> tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]:
    """S_t = d_1 + ... + d_t and Q_t = d_1**2 + ... + d_t**2 at t = 1, 2, 4, ..., and over the whole response.

    Args:
        log_ratio_BT: d_t, nats; what stands outside the mask is not read.
        mask_BT: Nonzero on the response tokens. Tokens of a tool or an environment have no position.

    Returns:
        The t that fit into T, at most 2**17, [P]; S_t and Q_t, float64 [2, P, B], NaN where t > L; Q, the sum over the
        whole response, float64 [B]; L, int64 [B].
    """
    mask_BT = mask_BT.to(torch.bool)
    rows, width = mask_BT.shape
    t_P = [2**k for k in range(OCTAVES) if 2**k <= width]
    d_BT = log_ratio_BT.detach().to(torch.float64).masked_fill(~mask_BT, 0.0)
    if width == 0:
        empty_B = d_BT.new_zeros(rows)
        return t_P, d_BT.new_zeros((2, 0, rows)), empty_B, empty_B.long()
    position_BT = mask_BT.cumsum(dim=-1, dtype=torch.int32)
    length_B = position_BT[:, -1].long()
    t_BP = torch.tensor(t_P, dtype=torch.int32, device=mask_BT.device).expand(rows, -1).contiguous()
    column_BP = torch.searchsorted(position_BT, t_BP).clamp(max=width - 1)
    reached_BP = length_B[:, None] >= t_BP
    at_t = [terms_BT.cumsum(dim=-1) for terms_BT in (d_BT, d_BT.square())]
    sums_BP = [torch.where(reached_BP, sum_BT.gather(1, column_BP), torch.nan) for sum_BT in at_t]
    return t_P, torch.stack(sums_BP).transpose(1, 2), at_t[1][:, -1], length_B
