"""Settings, state and output of the sequence-level policy losses; CONTRIBUTING.md says what suffixes of tensors mean.

Vocabulary: S, the *sequence log-ratio*, is the sum of log pi(y_t) - log pi_old(y_t) over the response tokens. A
sequence is *accepted* if S lies inside the closed *band* [lower, upper], which may depend on the length L. The clip
*removes* its gradient if S is above the band with A > 0, or below it with A < 0. The *drift* is the mean of S at length
L. pi_old has sampled a *rollout batch*, which is used in several mini-batches, with an optimizer step after each.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

Drift = Literal["none", "kl"]
Weight = Literal["sequence", "length_normalised"]
GradScale = Literal["1", "1/L"]

#: From here on a clip value is meant to be none: algo=unclipped, or a mask without a limit on one side.
NO_CLIP: Final = 1e9


def c_of_eps(eps_low: float, eps_high: float) -> tuple[float, float]:
    """Clip values in nats of bounds on a ratio: ``(-log(1 - eps_low), log(1 + eps_high))``.

    Papers and verl state a clip as bounds ``1 - eps_low`` and ``1 + eps_high``: of exp(S) for RLOO (exponent 0), of
    exp(S / L) for GSPO (exponent 1).

    Raises:
        ValueError: If ``eps_low`` is not in [0, 1), or ``eps_high`` no finite number >= 0.
    """
    if not 0 <= eps_low < 1:
        raise ValueError(f"eps_low={eps_low!r} must be in [0, 1): the ratio is at least 1 - eps_low")
    if not 0 <= eps_high < math.inf:
        raise ValueError(f"eps_high={eps_high!r} must be a finite number >= 0: the ratio is at most 1 + eps_high")
    return -math.log1p(-eps_low), math.log1p(eps_high)


def eps_of_c(c_low: float, c_high: float) -> tuple[float, float]:
    """The inverse of :func:`c_of_eps`: ``(1 - exp(-c_low), exp(c_high) - 1)``; infinite where exp overflows."""
    try:
        return -math.expm1(-c_low), math.expm1(c_high)
    except OverflowError:
        return -math.expm1(-c_low), math.inf


@dataclass(frozen=True, slots=True)
class SequenceLossSettings:
    """One member of the family of sequence-level losses; see ``docs/algorithms.md`` for the formulas.

    Attributes:
        exponent: Of L in the half-width c L**exponent of the band on S: 0 is RLOO's, 0.5 FSPO's, 1 GSPO's; at most 2.
        c_low: Lower clip value, in nats per token**exponent. :func:`c_of_eps` makes it of a bound on the ratio.
        c_high: Upper clip value.
        drift: Where the band is centred. ``none``: at 0 (FSPO from version 2 on, and the others). ``kl``: at
            ``-L * drift_per_token`` (FSPO v1; the estimator is defined here, see :class:`BandState`).
        weight: ``sequence``: exp(S); ``length_normalised``: exp(S / L), the geometric mean over tokens.
        grad_scale: h(L) in the gradient ``A * w * h(L) * sum_t grad log pi(y_t)``: ``"1"`` or ``"1/L"``. It scales loss
            and gradient together, whatever the weight. GSPO is ``length_normalised`` with ``1/L``; LUSPO (arXiv
            2602.05261) is the same with ``1``.
        grad_multiplier: A constant factor on loss and gradient, for comparisons at matched gradient scale.
        s_max: Log-ratio clamp: the largest log-weight (S, or S / L when length-normalised). Beyond it the weight is the
            constant exp(s_max), and the gradient is kept with that weight. verl's gspo clamps at 10 too.

    Raises:
        ValueError: If a value is out of range; the message names the key, the value and what to set instead.
    """

    exponent: float = 0.5
    c_low: float = 0.03
    c_high: float = 0.03
    drift: Drift = "none"
    weight: Weight = "sequence"
    grad_scale: GradScale = "1"
    grad_multiplier: float = 1.0
    s_max: float = 10.0

    def __post_init__(self) -> None:
        for key, choices in (("drift", Drift), ("weight", Weight), ("grad_scale", GradScale)):
            self._require(key, getattr(self, key) in get_args(choices), f"must be one of {get_args(choices)}")
        self._require("exponent", 0 <= self.exponent <= 2, "must be from 0 to 2: 0 is RLOO's, 0.5 FSPO's, 1 GSPO's")
        for key in ("c_low", "c_high"):
            rule = "must be a finite number >= 0, in nats per token**exponent"
            self._require(key, 0 <= getattr(self, key) < math.inf, rule)
        self._require("grad_multiplier", 0 < self.grad_multiplier < math.inf, "must be a finite number > 0; 1 is none")
        # exp(88.7) is the largest finite float32.
        self._require("s_max", 0 < self.s_max <= 80, "must be above 0 and at most 80, so that exp stays finite")

    def _require(self, key: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{key}={getattr(self, key)!r} {rule}")

    @property
    def needs_state(self) -> bool:
        """Whether the band depends on a :class:`BandState` measured during training."""
        return self.drift != "none"


def shape(exponent: float) -> str:
    """How a half-width c L**exponent grows, in words: ``constant``, ``sqrt(L)``, ``linear``, or ``L^0.43``."""
    return {0.0: "constant", 0.5: "sqrt(L)", 1.0: "linear"}.get(exponent, f"L^{exponent:g}")


def unit_of(exponent: float) -> str:
    """The unit of a clip value: nats per token**exponent, in words."""
    per = {0.0: "", 0.5: " per sqrt(token)", 1.0: " per token"}.get(exponent, f" per token^{exponent:g}")
    return f"nats{per}"


@dataclass(frozen=True, slots=True)
class BandState:
    """What the driver has measured, and what every worker needs to place the bands of the next rollout batch.

    The default is the state before any data. Nothing in it comes from the sequences that it is applied to.

    Attributes:
        drift_per_token: kl >= 0 in nats per token, of the mini-batch in progress; the drift of S at length L is
            ``-L * kl`` (:class:`fspo.measured.DriftMeasurement`).
        drift_by_mini_batch: The same by position of the mini-batch in its rollout batch.
        clip_scale: Factor on both clip values (:mod:`fspo.measured`); 1 leaves them.
    """

    drift_per_token: float = 0.0
    drift_by_mini_batch: tuple[float, ...] = ()
    clip_scale: float = 1.0

    def scaled(self, clip_scale: float) -> BandState:
        """The state with another factor on the clip values; an infinite one is no clip, not with a clip value of 0."""
        return dataclasses.replace(self, clip_scale=clip_scale)

    def at_mini_batch(self, index: int) -> BandState:
        """The state with the drift of one mini-batch, given by its position in the rollout batch, from 0.

        Positions that were never measured take the drift of the last one that was.
        """
        if not self.drift_by_mini_batch:
            return self
        drift = self.drift_by_mini_batch[min(index, len(self.drift_by_mini_batch) - 1)]
        return dataclasses.replace(self, drift_per_token=drift)


@dataclass(frozen=True, slots=True)
class SequenceLossOutput:
    """Per-sequence loss and everything that diagnostics need; only ``loss_B`` carries a gradient.

    Rows without a response token (padding) have loss, gradient and length 0.

    Attributes:
        loss_B: Loss of each sequence. The caller averages: ``loss_B.sum()`` divided by the *global* number of sequences
            does not depend on how the mini-batch was split.
        log_ratio_B: S, in nats.
        length_B: L, int64.
        lower_B, upper_B: Edges of the acceptance band on S.
        weight_B: Unclipped importance weight, at most exp(s_max).
        advantage_B: A.
        accepted_B: S inside the closed band, whatever the sign of A.
        clipped_high_B: S above the band and A > 0: the gradient is removed.
        clipped_low_B: S below the band and A < 0: the gradient is removed.
        overflow_B: Log-weight above the log-ratio clamp ``s_max``.
        valid_B: The row has at least one response token.
    """

    loss_B: torch.Tensor
    log_ratio_B: torch.Tensor
    length_B: torch.Tensor
    lower_B: torch.Tensor
    upper_B: torch.Tensor
    weight_B: torch.Tensor
    advantage_B: torch.Tensor
    accepted_B: torch.Tensor
    clipped_high_B: torch.Tensor
    clipped_low_B: torch.Tensor
    overflow_B: torch.Tensor
    valid_B: torch.Tensor

    def judgement(self) -> dict[str, torch.Tensor]:
        """Columns ``inside``, ``kept`` and ``weight`` of the table of responses, [B] each."""
        kept_B = 1.0 - self.clipped_high_B.double() - self.clipped_low_B.double()
        kept_B = kept_B.masked_fill(self.advantage_B.isnan(), math.nan)  # A of an audit may not be known
        return {"inside": self.accepted_B, "kept": kept_B, "weight": self.weight_B}
