"""One sequence-level policy-gradient surrogate; FSPO, sequence-level RLOO, GSPO and LUSPO are settings of it.

For a sequence with log-ratio ``S = sum_t (log pi(y_t) - log pi_old(y_t))``, length L, advantage A, acceptance band
``[lower, upper]`` (:func:`acceptance_band`: ``[-c_low * L**exponent, c_high * L**exponent]``) and weight
``w(S) = exp(S)`` or ``exp(S / L)``::

    loss     = max(-A * w(S), -A * w(clip(S, lower, upper))) * scale(L)
    gradient = -A * w(S) * h(L) * sum_t grad log pi(y_t), and 0 where the clip is active

The gradient with respect to ``log_prob_BT`` is therefore the mask times *one coefficient per sequence*. The code is
built on that. Only :func:`sequence_log_ratio` is differentiated: a subtraction and a masked sum forward, one broadcast
backward, and nothing saved but the mask. All else is arithmetic per sequence, which computes the coefficient itself
instead of leaving it to autograd.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable

from fspo.types import BandState, SequenceLossOutput, SequenceLossSettings, c_of_eps


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """A named member of the family, with its published clip values."""

    settings: SequenceLossSettings
    #: Its name in conf/algo and in tables, and who published the clip values.
    algo: str
    source: str


_RLOO: Final = SequenceLossSettings(0.0, *c_of_eps(0.2, 0.2))
_GSPO: Final = SequenceLossSettings(1.0, *c_of_eps(3e-4, 4e-4), weight="length_normalised", grad_scale="1/L")
# At 4,000 tokens and sigma = 0.04 it leaves 72% outside, nearly all below, because the drift -L sigma^2 / 2 is larger
# than the half-width.
_FSPO_SOURCE: Final = "c = 0.03 is a third party's; the paper's values are not known here"
_GSPO_SOURCE: Final = "eps = 3e-4 and 4e-4 of GSPO's authors (verl#2775)"

LOSSES: Final[Mapping[str, NamedLoss]] = {
    "fspo": NamedLoss(SequenceLossSettings(), "fspo", _FSPO_SOURCE),
    "fspo_v1": NamedLoss(SequenceLossSettings(drift="kl"), "fspo_v1", _FSPO_SOURCE),
    "seq_rloo": NamedLoss(_RLOO, "rloo", "eps = 0.2, the default of TRL's RLOOTrainer"),
    "seq_gspo": NamedLoss(_GSPO, "gspo", _GSPO_SOURCE),
    "luspo": NamedLoss(dataclasses.replace(_GSPO, grad_scale="1"), "luspo", _GSPO_SOURCE),
}
"""The named members of the family, by ``loss_mode``: the one list of them."""

ALGORITHMS: Final[Mapping[str, SequenceLossSettings]] = {name: loss.settings for name, loss in LOSSES.items()}
"""The settings of :data:`LOSSES`."""

BANDS: Final[Mapping[str, str]] = {"fspo": "fspo", "rloo": "seq_rloo", "gspo": "seq_gspo"}
"""A loss of each published exponent, by its name in tables: what a comparison of bands compares."""


def named_loss(name: str) -> str | None:
    """The key in :data:`LOSSES` of a loss by that key or by its name in tables (verl calls its own GSPO ``gspo``)."""
    return next((key for key, loss in LOSSES.items() if name in (key, loss.algo)), None)


def resolve_settings(loss: Mapping[str, Any]) -> SequenceLossSettings | None:
    """The settings that a configuration asks for: those of its ``loss_mode``, overridden by its other keys.

    Args:
        loss: ``loss_mode`` and any fields of :class:`~fspo.types.SequenceLossSettings`. A value of None means the
            default of the named loss. Other keys are ignored.

    Returns:
        None if ``loss_mode`` is not one of :data:`ALGORITHMS`.

    Raises:
        ValueError: If a value is out of range.
    """
    named = ALGORITHMS.get(str(loss.get("loss_mode")))
    if named is None:
        return None
    fields = (field.name for field in dataclasses.fields(named))
    return dataclasses.replace(named, **{name: loss[name] for name in fields if loss.get(name) is not None})


def acceptance_band(
    length_B: torch.Tensor,
    settings: SequenceLossSettings,
    state: BandState | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The acceptance band on S in nats, lower and upper edge: ``mu - c_low L**exponent, mu + c_high L**exponent``.

    The centre mu is ``-L kl`` with ``drift="kl"``, otherwise 0. Sources: exponent 0.5 is FSPO's, arXiv 2509.09177; 0
    sequence-level RLOO's; 1 GSPO's, arXiv 2507.18071.

    Args:
        length_B: Lengths in tokens, at least 1, int64.
        settings: Which band.
        state: Measured drift and factor on the clip values; None: nothing measures.
        dtype: Floating type of the result.

    Raises:
        ValueError: If the settings need a state and there is none. Another band would act in silence.
    """
    if state is None and settings.needs_state:
        remedy = "give that of a fspo.measured.DriftMeasurement, or BandState() before any data"
        raise ValueError(f"drift={settings.drift!r} is measured during training, and no BandState came: {remedy}")
    state, length = state or BandState(), length_B.to(dtype)
    growth_B = length**settings.exponent * state.clip_scale  # torch takes sqrt for 0.5: the same bits
    centre_B = length * -state.drift_per_token if settings.drift == "kl" else torch.zeros_like(length)
    return centre_B - settings.c_low * growth_B, centre_B + settings.c_high * growth_B


class UnusableRowsError(ValueError):
    """Rows of a micro-batch that have no sequence-level loss; the message names the first of them."""


class _SequenceLogRatio(torch.autograd.Function):
    """Row sum of a masked difference; only the mask is saved for backward. See :func:`sequence_log_ratio`."""

    @staticmethod
    def forward(
        ctx: Any, log_prob_BT: torch.Tensor, old_log_prob_BT: torch.Tensor, mask_BT: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(mask_BT)
        ctx.grad_dtype = log_prob_BT.dtype
        dtype = torch.promote_types(torch.promote_types(log_prob_BT.dtype, old_log_prob_BT.dtype), torch.float32)
        # Upcast first: bf16 would keep 8 bits of the differences and of their sum.
        difference_BT = log_prob_BT.to(dtype) - old_log_prob_BT
        return difference_BT.masked_fill_(~mask_BT, 0.0).sum(dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask_BT,) = ctx.saved_tensors
        grad_B = grad_outputs[0].to(ctx.grad_dtype)
        # Unlike a product, torch.where gives padding an exact 0 whatever its value and needs no float copy of the mask.
        return torch.where(mask_BT, grad_B.unsqueeze(-1), 0.0), None, None


def sequence_log_ratio(
    log_prob_BT: torch.Tensor, old_log_prob_BT: torch.Tensor, response_mask_BT: torch.Tensor
) -> torch.Tensor:
    """``S_i = sum_t mask_it * (log pi(y_it) - log pi_old(y_it))``, differentiable in ``log_prob_BT`` only.

    Values outside the mask affect neither the result nor the gradient, even if they are NaN or infinite; without any
    token S is 0. The sum is taken in float32 for half-precision inputs, otherwise in the wider of the input types.

    Args:
        log_prob_BT, old_log_prob_BT: Log-probabilities under the current policy and pi_old, in nats.
        response_mask_BT: Non-zero for response tokens.
    """
    result: torch.Tensor = _SequenceLogRatio.apply(log_prob_BT, old_log_prob_BT, response_mask_BT.to(torch.bool))  # type: ignore[no-untyped-call]
    return result


def sequence_policy_loss(
    log_prob_BT: torch.Tensor,
    old_log_prob_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    settings: SequenceLossSettings,
    band_state: BandState | None = None,
    rollout_is_weights_BT: torch.Tensor | None = None,
) -> SequenceLossOutput:
    r"""Per-sequence clipped surrogate loss, with everything that diagnostics need.

    Let n = 1 for ``weight="sequence"`` and n = L for ``"length_normalised"``, ``w(x) = exp(min(x / n, s_max))``,
    h = ``grad_multiplier`` * (1 or 1/L), v the rollout correction, and ``[lower, upper]`` the :func:`acceptance_band`:

    .. math::
        \text{loss} &= v\,h\,n\,\max\{-A\,w(S),\; -A\,w(\mathrm{clip}(S, lower, upper))\} \\
        \partial\,\text{loss} / \partial \log\pi(y_t) &= -v\,h\,A\,w(S) \quad\text{(0 where clipped)}

    *Clipped* means S strictly above ``upper`` with A > 0, or strictly below ``lower`` with A < 0. The band is closed:
    S = 0 on a band of width 0 keeps its gradient, as with ``torch.clamp``. Above the log-ratio clamp ``s_max`` the
    weight has the constant value exp(s_max), and the gradient is kept with that weight.

    Args:
        log_prob_BT: Log-probabilities under the current policy, in nats; the only input that gets a gradient.
        old_log_prob_BT: The same under pi_old.
        advantages_BT: Constant over the response tokens of a sequence.
        response_mask_BT: Non-zero for response tokens; other positions have no effect.
        settings: Which loss.
        band_state: That of this mini-batch; None if the settings need none.
        rollout_is_weights_BT: v = pi_old / pi_rollout of the whole sequence (truncated or not), the same for all its
            tokens. It multiplies loss and gradient of the sequence, and nothing else.

    Raises:
        ValueError: If shapes differ, or the settings need a state and there is none.
        UnusableRowsError: If a log-probability of a response token is not finite, or if advantages or rollout weights
            are not finite or not constant over a sequence. The message names the row. One reduction over the rows tests
            all of this, so that there is one device synchronisation per call.
    """
    check_shapes(log_prob_BT, old_log_prob_BT, advantages_BT, response_mask_BT, rollout_is_weights_BT)
    mask_BT = response_mask_BT.to(torch.bool)
    live_log_ratio_B = sequence_log_ratio(log_prob_BT, old_log_prob_BT, mask_BT)
    with torch.no_grad():
        log_ratio_B = live_log_ratio_B.detach()
        dtype = log_ratio_B.dtype
        length_B = mask_BT.sum(dim=-1, dtype=torch.int32).to(torch.int64)
        valid_B = length_B > 0
        advantage_B, bad_B = _value_of_row(advantages_BT, mask_BT, valid_B, dtype)
        bad_B |= ~torch.isfinite(log_ratio_B)
        rollout_weight_B = None
        if rollout_is_weights_BT is not None:
            rollout_weight_B, bad_weight_B = _value_of_row(rollout_is_weights_BT, mask_BT, valid_B, dtype)
            bad_B |= bad_weight_B
        if bool(bad_B.any()):
            tensors = (log_prob_BT, old_log_prob_BT, advantages_BT, rollout_is_weights_BT)
            raise UnusableRowsError(_problem_of_row(int(bad_B.nonzero()[0]), mask_BT, tensors))

        output = judged(log_ratio_B, length_B, advantage_B, settings, band_state)
        # The maximum in the loss clamps S on one side only: from above for A > 0, from below for A < 0.
        surrogate_B = torch.where(output.clipped_high_B, output.upper_B, log_ratio_B)
        surrogate_B = torch.where(output.clipped_low_B, output.lower_B, surrogate_B)

        length = length_B.clamp(min=1).to(dtype)
        per_weight = length if settings.weight == "length_normalised" else torch.ones_like(length)
        slope_B = -settings.grad_multiplier * advantage_B * (surrogate_B / per_weight).clamp(max=settings.s_max).exp()
        if settings.grad_scale == "1/L":
            slope_B = slope_B / length
        if rollout_weight_B is not None:
            slope_B = slope_B * rollout_weight_B
        value_B = slope_B * per_weight
        slope_B = slope_B.masked_fill(output.clipped_high_B | output.clipped_low_B, 0.0)
    return dataclasses.replace(output, loss_B=value_B + slope_B * (live_log_ratio_B - log_ratio_B))


@torch.no_grad()
def judged(
    log_ratio_B: torch.Tensor,
    length_B: torch.Tensor,
    advantage_B: torch.Tensor,
    settings: SequenceLossSettings | None,
    band_state: BandState | None = None,
) -> SequenceLossOutput:
    """What a band makes of S (nats), L (0 for padding) and A: the output of the loss, with a loss of 0.

    Without ``settings`` no rule is known: the band is infinite, and every weight is 1.
    """
    valid_B, length = length_B > 0, length_B.clamp(min=1)
    if settings is None:
        upper_B = torch.full_like(log_ratio_B, torch.inf)
        lower_B, log_weight_B, s_max = -upper_B, torch.zeros_like(log_ratio_B), math.inf
    else:
        lower_B, upper_B = acceptance_band(length, settings, band_state, log_ratio_B.dtype)
        log_weight_B = log_ratio_B / length if settings.weight == "length_normalised" else log_ratio_B
        s_max = settings.s_max
    above_B, below_B = log_ratio_B > upper_B, log_ratio_B < lower_B
    return SequenceLossOutput(
        loss_B=torch.zeros_like(log_ratio_B),
        log_ratio_B=log_ratio_B,
        length_B=length_B,
        lower_B=lower_B,
        upper_B=upper_B,
        weight_B=log_weight_B.clamp(max=s_max).exp(),
        advantage_B=advantage_B,
        accepted_B=valid_B & ~above_B & ~below_B,
        clipped_high_B=above_B & (advantage_B > 0),
        clipped_low_B=below_B & (advantage_B < 0),
        overflow_B=valid_B & (log_weight_B > s_max),
        valid_B=valid_B,
    )


@torch.no_grad()
def judge(
    log_prob_BT: torch.Tensor,
    old_log_prob_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    response_mask_BT: torch.Tensor,
    settings: SequenceLossSettings | None,
) -> SequenceLossOutput:
    """:func:`judged` of each sequence; A is the mean over its tokens. S is nan or inf where a log-probability is."""
    mask_BT = response_mask_BT.to(torch.bool)
    log_ratio_B, length_B = sequence_log_ratio(log_prob_BT, old_log_prob_BT, mask_BT), mask_BT.sum(-1)
    total_B = torch.where(mask_BT, advantages_BT.to(log_ratio_B.dtype), 0.0).sum(-1)
    return judged(log_ratio_B, length_B, total_B / length_B.clamp(min=1), settings)


def _value_of_row(
    values_BT: torch.Tensor, mask_BT: torch.Tensor, valid_B: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The value at the first response token of each row (0 for empty rows), and the rows that are not constant."""
    if mask_BT.shape[-1] == 0:
        return torch.zeros(valid_B.shape, dtype=dtype, device=valid_B.device), torch.zeros_like(valid_B)
    first_B1 = mask_BT.view(torch.uint8).argmax(dim=-1, keepdim=True)
    value_B1 = values_BT.gather(-1, first_B1)
    # NaN differs from itself, so a row with a NaN counts as not constant.
    # The sum tells the same as any() and is several times faster on a CPU.
    bad_B = ((values_BT != value_B1) & mask_BT).sum(dim=-1, dtype=torch.int32) > 0
    value_B = torch.where(valid_B, value_B1.squeeze(-1).to(dtype), 0.0)
    return value_B, bad_B | ~torch.isfinite(value_B)


def check_shapes(reference_BT: torch.Tensor, *others: torch.Tensor | None) -> None:
    """ValueError if old_log_prob, advantages, response_mask, rollout_is_weights are not of log_prob's shape, [B, T]."""
    names = ("old_log_prob_BT", "advantages_BT", "response_mask_BT", "rollout_is_weights_BT")
    if reference_BT.dim() != 2:
        remedy = "fspo.audit.from_packed(values, cu_seqlens) makes that of packed ones"
        raise ValueError(f"log_prob_BT has shape {tuple(reference_BT.shape)}, expected (sequences, tokens); {remedy}")
    for name, tensor in zip(names, others, strict=True):
        if tensor is not None and tensor.shape != reference_BT.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected that of log_prob_BT, {tuple(reference_BT.shape)}: "
                "slice all to the response positions; .view(-1, 1).expand_as(log_prob) of one value per sequence"
            )


#: By tensor: what its values at response tokens have to be, and where to look if they are not.
_RULES: Final = {
    "log_prob_BT": ("finite", "look for a diverged update, or a token masked out of the logits"),
    "old_log_prob_BT": ("finite", "look for a diverged update, or a token masked out of the logits"),
    "advantages_BT": ("finite and one value per sequence", "use a group advantage such as grpo or rloo"),
    "rollout_is_weights_BT": ("finite and one value per sequence", "take the ratio of the whole sequence"),
}


def _problem_of_row(row: int, mask_BT: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> str:
    """The first value for which a row has no loss, with the remedy; ``tensors`` in the order of _RULES."""
    for (name, (rule, remedy)), tensor in zip(_RULES.items(), tensors, strict=True):
        values = mask_BT.new_empty(0) if tensor is None else tensor[row][mask_BT[row]]
        bad = ~torch.isfinite(values) | ((values != values[:1]) & (rule != "finite"))
        if bool(bad.any()):
            token = int(bad.nonzero()[0])
            says = f"{name} is {float(values[token]):g} at response token {token} (the first has {float(values[0]):g})"
            return f"row {row} of the micro-batch: {says}, and has to be {rule}: {remedy}"
    return f"row {row} of the micro-batch: S is not finite though its terms are: the sum over the tokens overflows"
