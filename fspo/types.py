"""Settings, inputs and outputs of the sequence-level policy losses.

"Shapes" in CONTRIBUTING.md says what the suffixes of tensors' names mean.

Vocabulary:

* *sequence log-ratio*: ``S = sum_t (log pi(y_t) - log pi_old(y_t))`` over the response tokens;
* acceptance *band*: an interval ``[lower, upper]`` for S, which may depend on the length ``L``;
* *accepted*: S lies inside the (closed) band; *clipped*: outside it; *actively clipped*: the clip removes the gradient
  (S above the band with A > 0, or below it with A < 0);
* *weight*: ``exp(S)`` or ``exp(S / L)``;
* *drift*: the mean of S at length L; *dispersion*: the standard deviation of ``S / sqrt(L)`` about its drift;
* *rollout batch*: the sequences sampled by one policy, pi_old; they are used in several mini-batches, with an optimizer
  step after each.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import torch

Band = Literal["constant", "sqrt", "linear", "quantile"]
Drift = Literal["none", "kl"]
Weight = Literal["sequence", "length_normalised"]
GradScale = Literal["1", "1/L"]

_CALIBRATED: Final = ("quantile",)
#: From here on a clip value of a band c sqrt(L) is meant to be none: algo=unclipped.
NO_CLIP: Final = 1e9
_S_MAX_LIMIT: Final = 80.0  # exp(88.7) is the largest finite float32


@dataclass(frozen=True, slots=True)
class SequenceLossSettings:
    """One member of the family of sequence-level losses; see ``docs/algorithms.md`` for the formulas.

    The clip values have two units, which depend on the band (:attr:`clip_unit` says it in words):

    ======================== ==== ================================ ======================================
    band                     name unit                             meaning
    ======================== ==== ================================ ======================================
    ``constant``, ``linear`` eps  none; clip_low is below 1        bounds of the ratio: 1 - eps, 1 + eps
    ``sqrt``                 c    nats per square root of a token  half-width of the band over sqrt(L)
    the measured ones        c    nats per square root of a token  the same, for the first rollout batch
    ======================== ==== ================================ ======================================

    Attributes:
        band: How the half-width of the acceptance band on S grows with the length L; the formulas are those of
            :func:`fspo.losses.acceptance_band`.
        clip_low: Lower clip value, eps_low or c_low.
        clip_high: Upper clip value, eps_high or c_high.
        drift: Where the band is centred. ``none``: at 0 (FSPO from version 2 on, and the others). ``kl``: at
            ``-L * drift_per_token`` (FSPO v1; the estimator is defined here, see :class:`BandState`); not with a
            measured band.
        weight: ``sequence``: exp(S); ``length_normalised``: exp(S / L), the geometric mean over tokens.
        grad_scale: h(L) in the gradient ``A * w * h(L) * sum_t grad log pi(y_t)``: ``"1"`` or ``"1/L"``. It scales loss
            and gradient together, whatever the weight. GSPO is ``length_normalised`` with ``1/L``; LUSPO (arXiv
            2602.05261) is the same with ``1``.
        grad_multiplier: A constant factor on loss and gradient, for comparisons at matched gradient scale.
        s_max: Log-ratio clamp: the largest log-weight (S, or S / L when length-normalised). Beyond it the weight is the
            constant exp(s_max), the gradient is kept with that weight, and the sequence is counted. verl's gspo clamps
            at 10 too.
        target_acceptance: Acceptance rate that a measured band aims at; None for the others.

    Raises:
        ValueError: If a value is out of range or contradicts another; the message names the key, the value and what to
            set instead.
    """

    band: Band = "sqrt"
    clip_low: float = 0.03
    clip_high: float = 0.03
    drift: Drift = "none"
    weight: Weight = "sequence"
    grad_scale: GradScale = "1"
    grad_multiplier: float = 1.0
    s_max: float = 10.0
    target_acceptance: float | None = None

    def __post_init__(self) -> None:
        for key, choices in (("band", Band), ("drift", Drift), ("weight", Weight), ("grad_scale", GradScale)):
            known = get_args(choices)
            self._require(
                key, getattr(self, key) in known, f"is not known; choose one of {', '.join(map(repr, known))}"
            )
        for key in ("clip_low", "clip_high"):
            value = getattr(self, key)
            rule = f"must be a finite number >= 0: for band={self.band!r} it is {self.clip_unit}"
            self._require(key, math.isfinite(value) and value >= 0, rule)
        if self.band in ("constant", "linear"):
            rule = f"must be below 1 for band={self.band!r}: it is {self.clip_unit}, and 1 - clip_low is the smallest"
            self._require("clip_low", self.clip_low < 1, rule)
        multiplies = math.isfinite(self.grad_multiplier) and self.grad_multiplier > 0
        self._require("grad_multiplier", multiplies, "must be a finite number > 0; 1 leaves the scale")
        rule = f"must be above 0 and at most {_S_MAX_LIMIT:g}, so that exp stays finite"
        self._require("s_max", 0 < self.s_max <= _S_MAX_LIMIT, rule)
        target = self.target_acceptance
        if self.calibrated:
            rule = f"must lie between 0 and 1 for band={self.band!r}; 0.85 is a good start"
            self._require("target_acceptance", target is not None and 0 < target < 1, rule)
            rule = f"does not combine with band={self.band!r}, measured about 0: set it to 'none', or band to 'sqrt'"
            self._require("drift", self.drift == "none", rule)
        else:
            rule = f"has no effect with band={self.band!r}; leave it out, or choose band={' or '.join(_CALIBRATED)}"
            self._require("target_acceptance", target is None, rule)

    def _require(self, key: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{key}={getattr(self, key)!r} {rule}")

    @property
    def calibrated(self) -> bool:
        """Whether the half-width of the band is measured during training."""
        return self.band in _CALIBRATED

    @property
    def clip_unit(self) -> str:
        """What ``clip_low`` and ``clip_high`` are, with their unit."""
        if self.band in ("constant", "linear"):
            return "eps, a bound on the ratio without unit"
        return "c, in nats per square root of a token"

    @property
    def needs_state(self) -> bool:
        """Whether the band depends on a :class:`BandState` measured during training."""
        return self.calibrated or self.drift != "none"


@dataclass(frozen=True, slots=True)
class BandState:
    """What the driver has measured, and what every worker needs to place the bands of the next rollout batch.

    Made by :class:`fspo.calibration.BandController`; the default is the state before any data. All fields are plain
    values. The state is causal: nothing in it comes from the sequences it is applied to. Results therefore depend
    neither on the micro-batch split nor on the ranks.

    Attributes:
        drift_per_token: kl >= 0 in nats per token, of the mini-batch in progress; the drift of S at length L is
            ``-L * kl``.
        drift_by_mini_batch: The same by position of the mini-batch in its rollout batch. The policy moves away from
            pi_old with every optimizer step, so the drift is 0 in the first mini-batch and then grows.
        half_width_K: Half-width of the band for ``S / sqrt(L)`` by fine length bin; empty before any data.
        clip_scale: Factor on both bounds of a band that has clip values (:mod:`fspo.clip_values`); 1 leaves them.
    """

    drift_per_token: float = 0.0
    drift_by_mini_batch: tuple[float, ...] = ()
    half_width_K: tuple[float, ...] = field(default=(), repr=False)
    clip_scale: float = 1.0

    def scaled(self, clip_scale: float) -> BandState:
        """The state with another factor on the clip values."""
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

    Rows without a response token (padding) have loss 0, gradient 0, length 0 and ``valid_B`` false.

    Attributes:
        loss_B: Loss of each sequence. The caller averages over the mini-batch: ``loss_B.sum()`` divided by the *global*
            number of sequences does not depend on how the mini-batch was split.
        log_ratio_B: S, the sequence log-ratio, in nats.
        length_B: L, number of response tokens, int64.
        lower_B: Lower edge of the acceptance band on S.
        upper_B: Upper edge of the acceptance band on S.
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
