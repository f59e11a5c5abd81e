"""How S grows inside a response: exact, addable sums by position. Defined here.

Sums by *final* length (:mod:`fspo.sums`) and sums by *position* answer different questions. Long responses may
consist of more certain tokens than short ones; then S spreads less with final length than it does along a response.
Both kinds of sums are needed to tell these cases apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from fspo.reading import check_fields, rows_of

OCTAVES: Final = 18
"""Octave k holds the numbers 2**k <= n < 2**(k + 1); the last one is open-ended."""

PREFIX_FIELDS: Final = ("responses", "S", "S_squared")
"""Of the prefix log-ratio S_t at t = 2**k: responses with L >= t, sum of S_t, sum of S_t**2."""

TOKEN_FIELDS: Final = ("tokens", "d", "d_squared")
"""Of the tokens at positions in octave k: their number, sum of d_t, sum of d_t**2."""


@dataclass(frozen=True, slots=True)
class PositionSums:
    """Sums over a set of responses by octave of the final length L and octave of the position t = 1, 2, ....

    Attributes:
        prefix_LPF: float64 [18, 18, 3], :data:`PREFIX_FIELDS` of S_t = d_1 + ... + d_t at t = 2**P.
        token_LPF: float64 [18, 18, 3], :data:`TOKEN_FIELDS` of the tokens whose position lies in octave P.

    d_t = log pi(y_t) - log pi_old(y_t), in nats. Tokens of a tool or an environment have no position. Sets of responses
    are joined with ``+``.
    """

    prefix_LPF: torch.Tensor
    token_LPF: torch.Tensor

    @classmethod
    def zeros(cls) -> PositionSums:
        """The sums of no response."""
        shape = (OCTAVES, OCTAVES, 3)
        return cls(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))

    def add_(self, log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> PositionSums:
        """Add the responses of one micro-batch in place.

        Args:
            log_ratio_BT: d_t, nats; what stands outside the mask is not read.
            mask_BT: Nonzero on the response tokens; a row without any is padding.
        """
        mask_BT = mask_BT.to(torch.bool)
        if mask_BT.shape[-1] == 0:
            return self
        d_BT = log_ratio_BT.detach().to(torch.float64).masked_fill(~mask_BT, 0.0)
        t_P, length_B, column_BP, reached_BP = _positions(mask_BT)
        prefixes = [reached_BP.to(torch.float64)]
        tokens = [_by_octave((t_P - 1).minimum(length_B[:, None]), length_B)]
        for power, terms_BT in ((1, d_BT), (2, d_BT**2)):
            sum_BT = terms_BT.cumsum(dim=-1)
            up_to_BP = sum_BT.gather(1, column_BP)
            before_BP = torch.where(reached_BP, up_to_BP - terms_BT.gather(1, column_BP), sum_BT[:, -1:])
            if power == 1:
                s_BP = torch.where(reached_BP, up_to_BP, 0.0)
                prefixes += [s_BP, s_BP**2]
            tokens.append(_by_octave(before_BP, sum_BT[:, -1]))
        row_B, keep_B = _octave(length_B).cpu(), (length_B > 0).cpu()
        for sums_LPF, columns in ((self.prefix_LPF, prefixes), (self.token_LPF, tokens)):
            sums_LPF.index_add_(0, row_B[keep_B], torch.stack(columns, dim=-1).cpu()[keep_B])
        return self

    def __add__(self, other: PositionSums) -> PositionSums:
        return PositionSums(self.prefix_LPF + other.prefix_LPF, self.token_LPF + other.token_LPF)

    def rows(self) -> list[list[float]]:
        """The filled cells for a file: [octave of L, octave of t, the PREFIX_FIELDS, the TOKEN_FIELDS]."""
        both_LPF = torch.cat([self.prefix_LPF, self.token_LPF], dim=-1)
        filled = (both_LPF != 0).any(dim=-1).nonzero()
        return [[*cell, *both_LPF[tuple(cell)].tolist()] for cell in filled.tolist()]


def by_position(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """The cells of :meth:`PositionSums.rows`, added over all lengths: PREFIX_FIELDS, TOKEN_FIELDS, float64 [P, 6].

    Raises:
        ValueError: If these are none.
    """
    fields = len(PREFIX_FIELDS) + len(TOKEN_FIELDS)
    check_fields({"positions": rows}, {"positions": rows_of(2 + fields)})
    rows_NX = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2 + fields)
    octave_N2 = rows_NX[:, :2]
    if not bool(((octave_N2 >= 0) & (octave_N2 < OCTAVES)).all()):
        raise ValueError("an octave of positions is out of range")
    return rows_NX.new_zeros(OCTAVES, fields).index_add_(0, rows_NX[:, 1].long(), rows_NX[:, 2:])


def _positions(mask_BT: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """t = 2**P [P]; L [B]; the column of position t [B, P], and whether the response has one."""
    position_BT = mask_BT.cumsum(dim=-1)
    length_B = position_BT[:, -1].contiguous()
    t_P = 2 ** torch.arange(OCTAVES, device=mask_BT.device)
    column_BP = torch.searchsorted(position_BT, t_P.expand(len(mask_BT), -1).contiguous())
    return t_P, length_B, column_BP.clamp(max=mask_BT.shape[-1] - 1), length_B[:, None] >= t_P


def _by_octave(before_BP: torch.Tensor, total_B: torch.Tensor) -> torch.Tensor:
    """Sums over the positions of each octave, float64 [B, P], from the sums over all positions before it."""
    return torch.cat([before_BP, total_B[:, None]], dim=1).to(torch.float64).diff(dim=1)


def _octave(number: torch.Tensor) -> torch.Tensor:
    """floor(log2(n)) of integers, at most the last octave; 0 for n = 0."""
    edges = 2 ** torch.arange(1, OCTAVES, device=number.device)
    return torch.bucketize(number, edges, right=True)
