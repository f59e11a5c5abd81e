"""What follows from recorded responses: how S spreads, which band is even, its clip values, rounding or movement.

Defined here. The responses are S, L and A alone, of any loss. Intervals are 95%, by bootstrap over prompt groups where
the responses have them, else over mini-batches; fewer than :data:`fspo.clip_value.FEWEST_GROUPS` give no conclusion.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import numpy as np

from fspo.clip_value import ACCEPT, FEWEST_GROUPS, needed_scale, scale_for, scale_with_interval, scaled
from fspo.fairness import lre
from fspo.fairness.lre import Array, Interval, LengthReweightingError
from fspo.kept import clipped_cosine
from fspo.losses import ALGORITHMS, BANDS, named_loss
from fspo.responses import Responses
from fspo.types import SequenceLossSettings, eps_of_c, shape, unit_of

#: Exponents that have a name, and the loss of each.
NAMED: Final[Mapping[float, str]] = {ALGORITHMS[loss].exponent: loss for loss in BANDS.values()}
#: Exponents among which the most even band is looked for.
_GRID: Final[Array] = np.round(np.arange(0.0, 1.5 + 1e-9, 0.01), 2)
#: So many responses at most look for it, evenly taken: all of a long run would take minutes.
_MOST_ROWS: Final = 100_000
_FEWEST_BINS: Final = 3
#: No clip value is given where |S| is above s_max in so many of the responses.
_DIVERGED: Final = 0.05


def too_few(responses: Responses) -> str | None:
    """Why nothing follows from these responses, in a sentence; None if there are enough."""
    clusters, count_J = int(responses.cluster_B.max(initial=-1)) + 1, responses.by_bin()
    for number, of, needed in (
        (clusters, responses.unit, FEWEST_GROUPS),
        (len(count_J), "bins of length", _FEWEST_BINS),
        (count_J.min(initial=math.inf), "in a bin of length", FEWEST_GROUPS),
    ):
        if number < needed:
            return f"too few responses for a conclusion: {number:.0f} {of}, and it needs {needed}"
    return None if responses.s_B.any() else "no conclusion: every S is 0"


def within_mini_batches(responses: Responses, values_B: Array) -> list[Array]:
    """Number, tokens and squares about the mean of the values' mini-batch and bin, by cluster and bin, [C, J] each.

    A policy moves farther in one mini-batch than in another, and the mean of S with it: that is no spread of S. Squares
    are times n / (n - 1), n the responses of a mini-batch and bin, so that their mean is the variance.
    """
    cell_B = responses.batch_B * (int(responses.bin_B.max(initial=0)) + 1) + responses.bin_B
    n_B = np.bincount(cell_B)[cell_B]
    about_B = values_B - np.bincount(cell_B, values_B)[cell_B] / n_B
    about_B[np.abs(about_B) <= 1e-12 * np.abs(values_B)] = 0.0  # equal but for rounding
    several_B = (n_B > 1).astype(np.float64)
    squares_B = about_B**2 * n_B / np.maximum(n_B - 1, 1)
    columns = (several_B, responses.length_B * several_B, squares_B * several_B)
    return [responses.by_cluster(column_B) for column_B in columns]


def exponent_of(responses: Responses) -> Interval:
    """a in std(S) ~ L**a: the slope of log std(S) on log L over bins of length, :func:`within_mini_batches`.

    Each S is divided by the root mean square of S / sqrt(L) in its mini-batch, so that all count alike.
    """

    def slope(n_J: Array, tokens_J: Array, squares_J: Array) -> float:
        spread = squares_J > 0  # a bin of equal S says nothing of the slope
        if spread.sum() < _FEWEST_BINS:
            return float("nan")
        n_J, tokens_J, squares_J = n_J[spread], tokens_J[spread], squares_J[spread]
        return float(np.polyfit(np.log(tokens_J / n_J), np.log(squares_J / n_J) / 2, 1, w=np.sqrt(n_J))[0])

    rms_M = np.sqrt(np.bincount(responses.batch_B, responses.z_B**2) / np.bincount(responses.batch_B))
    scale_M = np.divide(1.0, rms_M, out=np.zeros_like(rms_M), where=rms_M > 0)
    return lre.cluster_interval(slope, within_mini_batches(responses, responses.s_B * scale_M[responses.batch_B]))


def rounding_share(responses: Responses) -> Interval:
    """log E[exp S] over log E[cosh S], by bin of length: 0 where S is a policy's movement, 1 where it is rounding.

    ``E_old[exp S] = 1`` holds for responses that pi_old has written and that no update was made on (``again_B``),
    however S is distributed. Rounding has no direction: S and -S are equally likely, so ``E[exp S] = E[cosh S]``, which
    for a normal S is exp(Var(S) / 2). Both hold for pooled mini-batches if they hold in each.

    A bin weighs by n c / (exp(2 c) - 1), c its log E[cosh S]: the mean of exp(S) of a bin that spreads far hangs on a
    few responses. For a normal S that moves, this is the weight of the smallest variance.
    """
    s_B = np.clip(responses.s_B, -700, 700)  # what exp takes; expm1 and sinh keep the digits of a small S

    def share(n_J: Array, exp_J: Array, cosh_J: Array) -> float:
        spread = cosh_J > 0
        n_J, exp_J, cosh_J = n_J[spread], exp_J[spread], cosh_J[spread]
        log_exp_J = np.log1p(np.maximum(exp_J / n_J, -1 + 1e-15))
        log_cosh_J = np.log1p(cosh_J / n_J)
        weight_J = n_J * log_cosh_J * np.exp(-2 * log_cosh_J) / -np.expm1(-2 * log_cosh_J)
        return float(weight_J @ log_exp_J / (weight_J @ log_cosh_J)) if weight_J.any() else float("nan")

    columns = (np.ones_like(s_B), np.expm1(s_B), 2 * np.sinh(s_B / 2) ** 2)
    return lre.cluster_interval(share, [responses.by_cluster(column_B) for column_B in columns])


def movement_verdict(share: Interval) -> str:
    """``movement`` or ``rounding`` if the interval of :func:`rounding_share` holds that one, else both or neither."""
    movement, rounding = (share.low <= value <= share.high for value in (0, 1))
    if movement == rounding:
        return "both" if movement else "neither"
    return "movement" if movement else "rounding"


_VERDICTS: Final = {
    "movement": "that of movement",
    "rounding": "that of rounding",
    "both": "not told apart from that of movement or of rounding, which needs more responses",
    "neither": "neither that of movement nor of rounding: pi_old is another policy than the one that wrote the "
    "responses (a temperature or top_p other than 1, another engine or precision), or groups were left out by reward",
}


def _mean_line(responses: Responses) -> str:
    first = responses.select(~responses.again_B)
    if reason := too_few(first):
        return (
            f"the mean of exp(S) says nothing of responses that an update was made on before; of the others: {reason}"
        )
    share = rounding_share(first)
    if not np.isfinite((share.value, share.low, share.high)).all():
        return "the mean of exp(S) says nothing: S hardly varies, or by hundreds of nats"
    assumed = "(movement 0, rounding 1; one update a response)"  # without ``row`` epochs are not known
    return f"the mean of exp(S) is {_VERDICTS[movement_verdict(share)]}; share of rounding {_shown(share)} {assumed}"


def in_view(responses: Responses, view: str) -> Responses:
    """The responses that a view is about: of ``removed`` those with A other than 0, S as 0 where no clip removes them.

    A clip removes a gradient where S is above the band and A > 0, or below it and A < 0.
    """
    if view == "outside":
        return responses
    some = responses.with_advantage()
    return dataclasses.replace(some, s_B=np.where(some.advantage_B * some.s_B > 0, some.s_B, 0.0))


def accepted_at(counted: Responses, settings: SequenceLossSettings, accept: float) -> Array:
    """Which responses of a view a band accepts with the clip values that accept this share."""
    needed_B = needed_scale(counted.s_B, counted.length_B, settings)
    return (needed_B <= scale_for(needed_B, accept)).astype(np.float64)


def power_band(exponent: float) -> SequenceLossSettings:
    """The band L**exponent: of one with a name its published ratio of sides, else alike on both."""
    return ALGORITHMS.get(NAMED.get(exponent, ""), SequenceLossSettings(exponent=exponent, c_low=1.0, c_high=1.0))


@dataclass(frozen=True)
class EvenBand:
    """The exponent of the most even band with its interval, and the LRE by exponent: of it, the named and the own."""

    exponent: Interval
    errors: dict[float, LengthReweightingError]

    def recommended(self, own: float | None = None) -> float:
        """The exponent to take: one's own unless it is shown to be less even than the most even one; else the most even
        of those with a name that are not shown to be; else the most even one.
        """
        best, even = self.exponent, {power: error.debiased for power, error in self.errors.items()}
        near = [x for x in even if best.low <= x <= best.high or even[x].low <= even[best.value].high]
        if own in near:
            return own
        return min((x for x in near if x in NAMED), key=lambda x: even[x].value, default=best.value)


def even_band(
    responses: Responses, accept: float = ACCEPT, view: str = "outside", own: SequenceLossSettings | None = None
) -> EvenBand | None:
    """The exponent whose band c L**exponent is the most even, with the share ``accept`` accepted.

    Both clip values are c. The most even exponent has the smallest mean square of a_b / abar - 1 over bins of equal
    mass, weighted by p_b, without what noise adds: unlike the LRE it has one minimum. Its interval is that of resampled
    clusters, c held. None if the responses are :func:`too_few`, or if clip values of 0 would accept so many.

    Args:
        responses: Of mini-batches before which a weight had moved.
        accept: Share that lies inside (outside), or whose gradient is kept (removed, of those with A != 0).
        view: A key of :data:`fspo.responses.VIEWS`.
        own: The band of a loss whose LRE is wanted, too.
    """
    counted = in_view(responses, view)
    if too_few(counted) or (counted.s_B == 0).mean() >= accept:
        return None
    some = counted
    if len(counted) > _MOST_ROWS:
        some = counted.select(np.arange(len(counted)) % math.ceil(len(counted) / _MOST_ROWS) == 0)
    equal = (SequenceLossSettings(exponent, c_low=1.0, c_high=1.0) for exponent in _GRID.tolist())
    grid = [some.by_cluster(accepted_at(some, settings, accept)) for settings in equal]
    total_CJ = some.by_cluster()
    clusters, bins = total_CJ.shape
    flat_CX = np.concatenate([*grid, total_CJ], axis=1)

    def unevenness(sums_X: Array) -> Array:
        accepted_EJ, total_J = sums_X[:-bins].reshape(-1, bins), sums_X[-bins:]
        deviation_EJ = accepted_EJ / np.maximum(total_J, 1) / (accepted_EJ.sum(1) / total_J.sum())[:, None] - 1
        return np.asarray(deviation_EJ**2 @ (total_J / total_J.sum()))

    drawn_RE = np.array([unevenness(sums_X) for sums_X in lre.drawn_clusters(clusters) @ flat_CX])
    # The clusters' noise adds to the data once, and to a resample twice.
    measured_E = unevenness(flat_CX.sum(0))
    noise_E = drawn_RE.mean(0) - measured_E
    best = float(_GRID[(measured_E - noise_E).argmin()])
    low, high = lre.percentile_ends(_GRID[(drawn_RE - 2 * noise_E).argmin(1)], clusters)
    bands = {power: power_band(power) for power in (best, *NAMED)} | ({} if own is None else {own.exponent: own})
    errors = {power: counted.error(accepted_at(counted, settings, accept)) for power, settings in bands.items()}
    return EvenBand(Interval(best, low, high, clusters), errors)


#: What the share that is accepted is a share of, by view.
_COUNTED: Final = {"outside": "of all responses inside", "removed": "of the gradients kept"}
_ACTOR: Final = "actor_rollout_ref.actor"


def _shown(value: Interval) -> str:
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def _spread_line(responses: Responses) -> str:
    exponent = exponent_of(responses)
    if not np.isfinite(exponent.value):
        return f"no exponent: S spreads in fewer than {_FEWEST_BINS} bins of length"
    words = "not shown to differ from sqrt(L)"
    if exponent.high < 0:
        words = "it falls with length, as no sum over tokens does: is it a mean over tokens, in place of their sum?"
    elif exponent.high < 0.5 or exponent.low > 0.5:
        words = "more slowly than sqrt(L)" if exponent.high < 0.5 else "faster than sqrt(L)"
    return f"S spreads like L^{_shown(exponent)}, {words} ({exponent.n} {responses.unit} resampled)"


def _band_line(band: EvenBand, view: str, accept: float, own: float | None) -> str:
    chosen, best = band.recommended(own), band.exponent.value
    even = f"c L^{_shown(band.exponent)} is the most even, LRE {band.errors[best].words}"
    says = f"with {accept:.0%} {_COUNTED[view]}, {even}"
    for power, whose in {own: "yours", chosen: "yours" if chosen == own else NAMED.get(chosen)}.items():
        if power not in (None, best):
            says += f"; {shape(power)} ({whose}) has {band.errors[power].words}"
    less_even = "" if chosen == best else ", not shown to be less even"
    return f"{says}{less_even}: {'keep what you have' if chosen == own else f'take {shape(chosen)}'}"


def _has_diverged(responses: Responses, settings: SequenceLossSettings) -> bool:
    """Whether S is far past what the weight of a loss is made for, so that no clip value of it means anything."""
    # Responses may be so long that S is above s_max: a length-normalised weight is made for half a nat a token.
    by_token = 0.0 if settings.weight == "sequence" else 0.5
    limit_B = np.maximum(settings.s_max, by_token * responses.length_B)
    return float(np.mean(np.abs(responses.s_B) > limit_B)) > _DIVERGED


def _clip_values(band: SequenceLossSettings, factor: Interval) -> str:
    value, low, high = (scaled(band, scale) for scale in (factor.value, factor.low, factor.high))
    c = f"{value.c_high:.3g} [{low.c_high:.3g}, {high.c_high:.3g}]"
    if value.c_low != value.c_high:
        c = f"{value.c_low:.3g} [{low.c_low:.3g}, {high.c_low:.3g}] below and {c} above"
    says = f"{shape(value.exponent)}: c = {c} {unit_of(value.exponent)}"
    if value.exponent in (0, 1):
        says += f", or eps = {' and '.join(f'{eps:.3g}' for eps in eps_of_c(value.c_low, value.c_high))} on the ratio"
    return says


def _in_verl(band: SequenceLossSettings, loss: str, mean_length: float) -> str:
    """What sets a band in verl's command; where it replaces a loss that averages over tokens, with its factor.

    Of this package's losses those with 1/L average; any other is taken to, as by verl's default.
    """
    own = named_loss(loss) or ""
    name = own if own and ALGORITHMS[own].exponent == band.exponent else NAMED.get(band.exponent, "fspo")
    if (name, loss) == ("seq_gspo", "gspo"):
        low, high = eps_of_c(band.c_low, band.c_high)
        return f"in verl:\n  {_ACTOR}.clip_ratio_low={low:.3g} {_ACTOR}.clip_ratio_high={high:.3g}"
    exponent = f"exponent:{band.exponent:g}," * (band.exponent != ALGORITHMS[name].exponent)
    values = f"{exponent}c_low:{band.c_low:.3g},c_high:{band.c_high:.3g}"
    means = ""
    if band.grad_scale == "1" and (loss not in ALGORITHMS or ALGORITHMS[loss].grad_scale != "1"):
        values += f",grad_multiplier:{1 / mean_length:.2g}"
        means = " (grad_multiplier is 1 over the mean length: leave it out with this recipe's trainers)"
    words = f"{{loss_mode:{name},_target_:fspo.verl.SequencePolicyLossConfig,{values}}}"
    return f"in verl, in place of your loss{means}:\n  '+{_ACTOR}.policy_loss={words}'"


def conclude(
    responses: Responses,
    loss: str = "",
    accept: float = ACCEPT,
    settings: SequenceLossSettings | None = None,
    view: str = "outside",
    own_mask: bool = False,
) -> list[str]:
    """What follows, a sentence each; a single one that says what is missing where the responses are too few.

    Args:
        responses: Of mini-batches before which a weight had moved.
        loss: Name of the loss that made them.
        accept: Share of the responses that is to be accepted.
        settings: Of the loss, where they are not those that its name stands for: its exponent may be another one.
        view: A key of :data:`fspo.responses.VIEWS`.
        own_mask: Whether the rows are of a mask or a correction, whose S is not that of a loss.
    """
    counted = in_view(responses, view)
    if reason := too_few(counted):
        return [reason]
    # How a gradient grows with L is known of a loss of this package; that of verl's hangs on loss_agg_mode.
    ours = settings or ALGORITHMS.get(loss)
    own = ours or ALGORITHMS.get(named_loss(loss) or "")
    if own is not None and (own.needs_state or min(own.c_low, own.c_high) <= 0):
        own = None  # a band that is measured, or none, has no exponent to keep
    own_power = own.exponent if own else None
    bands = {one: even_band(responses, accept, one, own) for one in _COUNTED}
    chosen = {one: band.recommended(own_power) for one, band in bands.items() if band}
    lines = [_spread_line(responses)]
    if band := bands[view]:
        lines.append(_band_line(band, view, accept, own_power))
        of = own if own and chosen[view] == own_power else power_band(chosen[view])
        if _has_diverged(responses, of):
            how = f"|S| is above s_max={of.s_max:g} in more than {_DIVERGED:.0%} of the responses"
            lines.append(f"no clip value: the policy has diverged from pi_old, {how}")
        else:
            factor = scale_with_interval(needed_scale(counted.s_B, counted.length_B, of), counted.cluster_B, accept)
            lines.append(f"{_clip_values(of, factor)}, for {accept:.0%} {_COUNTED[view]}")
            if find_spec("verl") is not None and not own_mask:
                lines.append(_in_verl(scaled(of, factor.value), loss, float(responses.length_B.mean())))
    else:
        lines.append(f"no even band and no clip value: at least {accept:.0%} are accepted at any width")
    lines.append(_mean_line(responses))
    some = responses.with_advantage()
    if ours is not None and some.rule_known and not own_mask:
        columns = (some.kept_B, some.advantage_B, some.weight_B, some.length_B)
        cosine = f"cosine of the clipped and the unclipped update: {clipped_cosine(*columns, ours.grad_scale):.2f}"
        lines.append(f"{cosine}, if gradients of different responses are orthogonal and their squares grow like L")
    (other,) = _COUNTED.keys() - {view}
    if view in chosen and chosen.get(other, chosen[view]) != chosen[view] and (band := bands[other]):
        even = f"with {accept:.0%} {_COUNTED[other]}, c L^{_shown(band.exponent)} is the most even"
        lines.append(f"by the other view (--view {other}), {even}: that would be {shape(chosen[other])}")
    return lines
