"""What follows from recorded responses: how S spreads, which band is even, its clip values, rounding or movement.

Defined here. The responses are S, L and A alone, of any loss. Intervals are 95%, by bootstrap over prompt groups where
the responses have them, else over mini-batches; fewer than :data:`fspo.clip_value.FEWEST_GROUPS` give no conclusion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import numpy as np

from fspo.clip_value import ACCEPT, FEWEST_GROUPS, needed_scale, scale_for, scale_with_interval, scaled
from fspo.fairness.lre import (
    Array,
    Interval,
    LengthReweightingError,
    cluster_interval,
    drawn_clusters,
    percentile_ends,
)
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
_LARGEST_LOG: Final = 700.0
#: No clip value is given where so many of the responses have |S| above s_max; a length-normalised weight may have
#: responses so long that S is, so there also above so many nats a token.
_DIVERGED_SHARE: Final = 0.05
_DIVERGED_TOKEN: Final = 0.5


def too_alike(responses: Responses) -> str | None:
    """Why nothing follows about length from responses of nearly one length; None if their lengths differ enough."""
    bins = len(responses.by_bin())
    if bins >= _FEWEST_BINS:
        return None
    return f"no conclusion about length: {bins} bins of length, and it needs {_FEWEST_BINS}"


def too_few(responses: Responses) -> str | None:
    """Why nothing follows from so few responses, in a sentence; None if there are enough."""
    clusters = len(np.unique(responses.cluster_B))
    if clusters < FEWEST_GROUPS:
        return f"too few responses for a conclusion: {clusters} {responses.unit}, and it needs {FEWEST_GROUPS}"
    if not responses.s_B.any():
        return "no conclusion: every S is 0"
    if (reason := too_alike(responses)) is not None:
        return reason
    if (fewest := responses.by_bin().min()) < FEWEST_GROUPS:
        return f"too few responses for a conclusion: {fewest:.0f} in a bin of length, and it needs {FEWEST_GROUPS}"
    return None


# ---------------------------------------------------------------- how S spreads


def within_mini_batches(responses: Responses, values_B: Array) -> tuple[Array, Array, Array]:
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
    number_CJ, tokens_CJ, squares_CJ = (responses.by_cluster(column_B) for column_B in columns)
    return number_CJ, tokens_CJ, squares_CJ


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
    return cluster_interval(slope, within_mini_batches(responses, responses.s_B * scale_M[responses.batch_B]))


# ---------------------------------------------------------------- movement or rounding


def rounding_share(responses: Responses) -> Interval:
    """log E[exp S] over log E[cosh S], by bin of length: 0 where S is a policy's movement, 1 where it is rounding.

    ``E_old[exp S] = 1`` holds for responses that pi_old has written and that no update was made on (``again_B``),
    however S is distributed. Rounding has no direction: S and -S are equally likely, so ``E[exp S] = E[cosh S]``, which
    for a normal S is exp(Var(S) / 2). Both hold for pooled mini-batches if they hold in each.

    A bin weighs by n c / (exp(2 c) - 1), c its log E[cosh S]: the mean of exp(S) of a bin that spreads far hangs on a
    few responses. For a normal S that moves, this is the weight of the smallest variance.
    """
    # The largest that exp takes; expm1 and sinh keep the digits of a small S.
    s_B = np.clip(responses.s_B, -_LARGEST_LOG, _LARGEST_LOG)

    def share(n_J: Array, exp_J: Array, cosh_J: Array) -> float:
        spread = cosh_J > 0
        n_J, exp_J, cosh_J = n_J[spread], exp_J[spread], cosh_J[spread]
        log_exp_J = np.log1p(np.maximum(exp_J / n_J, -1 + 1e-15))
        log_cosh_J = np.log1p(cosh_J / n_J)
        weight_J = n_J * log_cosh_J * np.exp(-2 * log_cosh_J) / -np.expm1(-2 * log_cosh_J)
        return float(weight_J @ log_exp_J / (weight_J @ log_cosh_J)) if weight_J.any() else float("nan")

    columns = (np.ones_like(s_B), np.expm1(s_B), 2 * np.sinh(s_B / 2) ** 2)
    return cluster_interval(share, [responses.by_cluster(column_B) for column_B in columns])


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
    if len(first) < len(responses) and (reason := too_few(first)) is not None:
        why = "an update was made on these responses before, in an earlier epoch"
        return f"the mean of exp(S) says nothing: {why}. Of those in the first epoch: {reason}"
    share = rounding_share(first)
    if not np.isfinite((share.value, share.low, share.high)).all():
        return "the mean of exp(S) says nothing: S hardly varies, or by hundreds of nats"
    verdict = _VERDICTS[movement_verdict(share)]
    assumed = "(movement 0, rounding 1; one update a response)"  # without ``row`` epochs are not known
    return f"the mean of exp(S) is {verdict}; share of rounding {_shown(share)} {assumed}"


# ---------------------------------------------------------------- which band is even


@dataclass(frozen=True)
class EvenBand:
    """Which exponent is the most even in one view, :func:`even_band`.

    Attributes:
        exponent: Of the most even band c L**exponent, with its interval.
        errors: LRE by exponent: of the most even one, of those with a name, and of the ``own`` one.
    """

    exponent: Interval
    errors: dict[float, LengthReweightingError]

    def near(self, exponent: float) -> bool:
        """Whether this exponent, or its LRE, is not told apart from the most even one."""
        lre, best = self.errors[exponent].debiased, self.errors[self.exponent.value].debiased
        return self.exponent.low <= exponent <= self.exponent.high or lre.low <= best.high


def in_view(responses: Responses, view: str) -> Responses:
    """The responses that a view is about: ``removed`` those with A other than 0."""
    return responses if view == "outside" else responses.select(responses.advantage_B != 0)


def needed_in_view(responses: Responses, settings: SequenceLossSettings, view: str) -> Array:
    """:func:`needed_scale` of each; in the view ``removed`` 0 where the clip removes nothing at any width.

    The clip removes a gradient where S is above the band and A > 0, or below it and A < 0.
    """
    needed_B = needed_scale(responses.s_B, responses.length_B, settings)
    return needed_B if view == "outside" else np.where(responses.advantage_B * responses.s_B > 0, needed_B, 0.0)


def accepted_at(responses: Responses, settings: SequenceLossSettings, accept: float, view: str) -> Array | None:
    """Which responses a band accepts with the clip values that accept this share; None if clip values of 0 do."""
    needed_B = needed_in_view(responses, settings, view)
    scale = scale_for(needed_B, accept)
    return (needed_B <= scale).astype(np.float64) if scale > 0 else None


def power_band(exponent: float) -> SequenceLossSettings:
    """The band L**exponent: of one with a name its published ratio of sides, else alike on both."""
    return ALGORITHMS.get(NAMED.get(exponent, ""), SequenceLossSettings(exponent=exponent, c_low=1.0, c_high=1.0))


def even_band(
    responses: Responses, accept: float = ACCEPT, view: str = "outside", own: SequenceLossSettings | None = None
) -> EvenBand | None:
    """The exponent whose band c L**exponent is the most even, with the share ``accept`` accepted.

    Both clip values are c. The most even exponent has the smallest mean square of a_b / abar - 1 over bins of equal
    mass, weighted by p_b, without what noise adds: unlike the LRE it has one minimum. Its interval is that of resampled
    clusters, c held.

    Args:
        responses: Of mini-batches before which a weight had moved.
        accept: Share that lies inside (outside), or whose gradient is kept (removed, of those with A != 0).
        view: A key of :data:`fspo.responses.VIEWS`.
        own: The band of a loss whose LRE is wanted, too.

    Returns:
        None if a clip value of 0 would accept so many, or if no response has an advantage.
    """
    responses = in_view(responses, view)
    if len(responses) == 0 or (view == "removed" and too_few(responses) is not None):
        return None
    some = responses
    if len(responses) > _MOST_ROWS:
        some = responses.select(np.arange(len(responses)) % math.ceil(len(responses) / _MOST_ROWS) == 0)
    equal = [SequenceLossSettings(exponent=float(exponent), c_low=1.0, c_high=1.0) for exponent in _GRID]
    by_exponent = [accepted_at(some, settings, accept, view) for settings in equal]
    grid = [some.by_cluster(accepted_B) for accepted_B in by_exponent if accepted_B is not None]
    if len(grid) < len(_GRID):
        return None
    total_CJ = some.by_cluster()
    clusters, bins = total_CJ.shape
    flat_CX = np.concatenate([*grid, total_CJ], axis=1)

    def unevenness(sums_X: Array) -> Array:
        accepted_EJ, total_J = sums_X[:-bins].reshape(-1, bins), sums_X[-bins:]
        deviation_EJ = accepted_EJ / np.maximum(total_J, 1) / (accepted_EJ.sum(1) / total_J.sum())[:, None] - 1
        return np.asarray(deviation_EJ**2 @ (total_J / total_J.sum()))

    drawn_RE = np.array([unevenness(sums_X) for sums_X in drawn_clusters(clusters) @ flat_CX])
    # The clusters' noise adds to the data once, and to a resample twice.
    measured_E = unevenness(flat_CX.sum(0))
    noise_E = drawn_RE.mean(0) - measured_E
    best = float(_GRID[(measured_E - noise_E).argmin()])
    exponent = Interval(best, *percentile_ends(_GRID[(drawn_RE - 2 * noise_E).argmin(1)], clusters), clusters)
    bands = {best: equal[int(_GRID.searchsorted(best))]} | {power: power_band(power) for power in NAMED}
    bands |= {} if own is None else {own.exponent: own}
    errors = {}
    for power, settings in bands.items():
        if (accepted_B := accepted_at(responses, settings, accept, view)) is None:
            return None
        errors[power] = responses.error(accepted_B)
    return EvenBand(exponent, errors)


# ---------------------------------------------------------------- in sentences

#: What the share that is accepted is a share of, by view.
_COUNTED: Final = {"outside": "of all responses inside", "removed": "of the gradients kept"}


def _shown(value: Interval, form: str = ".2f") -> str:
    return f"{value.value:{form}} [{value.low:{form}}, {value.high:{form}}]"


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


def recommended(band: EvenBand, own: float | None) -> float:
    """The exponent to take: one's own unless the most even one is told apart from it, else the most even with a name
    from which it is not, else the most even one.
    """
    if own is not None and band.near(own):
        return own
    named = [power for power in NAMED if band.near(power)]
    return min(named, key=lambda power: band.errors[power].debiased.value, default=band.exponent.value)


def _band_line(band: EvenBand, view: str, accept: float, own: float | None) -> str:
    chosen, best = recommended(band, own), band.exponent.value
    even = f"c L^{_shown(band.exponent)} is the most even, LRE {band.errors[best].words}"
    says = f"with {accept:.0%} {_COUNTED[view]}, {even}"
    for power, whose in {own: "yours", chosen: "yours" if chosen == own else NAMED.get(chosen)}.items():
        if power not in (None, best):
            says += f"; {shape(power)} ({whose}) has {band.errors[power].words}"
    apart = ": " if chosen == best else ", not told apart from it: "
    return f"{says}{apart}{'keep what you have' if chosen == own else f'take {shape(chosen)}'}"


def _diverged(responses: Responses, settings: SequenceLossSettings) -> str | None:
    """Why no clip value of this loss means anything, where S is far past what its weight is made for."""
    sequence = settings.weight == "sequence"
    limit_B = settings.s_max if sequence else np.maximum(settings.s_max, _DIVERGED_TOKEN * responses.length_B)
    share = np.mean(np.abs(responses.s_B) > limit_B)
    if share <= _DIVERGED_SHARE:
        return None
    limit = f"s_max={settings.s_max:g}" + ("" if sequence else f" and {_DIVERGED_TOKEN:g} a token")
    return f"no clip value: |S| is above {limit} in {share:.0%} of the responses: the policy has diverged from pi_old"


def _in_verl(settings: SequenceLossSettings, loss: str | None, mean_length: float) -> str:
    """Words that set a band in verl's command; where it replaces a loss that averages over tokens, with its factor.

    Of this package's losses those with 1/L average; any other is taken to, as by verl's default.
    """
    actor, own = "actor_rollout_ref.actor", named_loss(str(loss)) or ""
    name = own if own and ALGORITHMS[own].exponent == settings.exponent else NAMED.get(settings.exponent, "fspo")
    if (name, loss) == ("seq_gspo", "gspo"):
        low, high = eps_of_c(settings.c_low, settings.c_high)
        return f"in verl: {actor}.clip_ratio_low={low:.3g} {actor}.clip_ratio_high={high:.3g}"
    words = [
        f"{actor}.policy_loss.loss_mode={name}",
        f"{actor}.policy_loss._target_=fspo.verl.SequencePolicyLossConfig",
    ]
    values = {
        "exponent": f"{settings.exponent:g}",
        "c_low": f"{settings.c_low:.3g}",
        "c_high": f"{settings.c_high:.3g}",
    }
    sums = settings.grad_scale == "1" and (str(loss) not in ALGORITHMS or ALGORITHMS[str(loss)].grad_scale != "1")
    values |= {"grad_multiplier": f"{1 / mean_length:.2g}"} if sums else {}
    words += [f"+{actor}.policy_loss.{key}={value}" for key, value in values.items()]
    return f"in verl{' (grad_multiplier: with its own trainers only)' * sums}: {' '.join(words)}"


def _clip_line(
    responses: Responses, settings: SequenceLossSettings, view: str, accept: float
) -> tuple[str, SequenceLossSettings]:
    """The clip values of a band, in a sentence and set."""
    counted = in_view(responses, view)
    factor = scale_with_interval(needed_in_view(counted, settings, view), counted.cluster_B, accept)
    value, low, high = (scaled(settings, scale) for scale in (factor.value, factor.low, factor.high))
    sides = [
        f"{getattr(value, key):.3g} [{getattr(low, key):.3g}, {getattr(high, key):.3g}]" for key in ("c_low", "c_high")
    ]
    c = sides[1] if value.c_low == value.c_high else f"{sides[0]} below and {sides[1]} above"
    says = f"{shape(value.exponent)}: c = {c} {unit_of(value.exponent)}"
    if value.exponent in (0, 1):
        says += f", or eps = {' and '.join(f'{eps:.3g}' for eps in eps_of_c(value.c_low, value.c_high))} on the ratio"
    return f"{says}, for {accept:.0%} {_COUNTED[view]}", value


def conclude(
    responses: Responses,
    loss: str | None = None,
    accept: float = ACCEPT,
    wrong: str | None = None,
    settings: SequenceLossSettings | None = None,
    view: str = "outside",
    own_mask: bool = False,
) -> list[str]:
    """What follows, a sentence each; a single one that says what is missing where the responses are too few.

    Args:
        responses: Of mini-batches before which a weight had moved.
        loss: Name of the loss that made them.
        accept: Share of the responses that is to be accepted.
        wrong: What makes these log-ratios wrong, if something does; then nothing follows.
        settings: Of the loss, where they are not those that its name stands for: its exponent may be another one.
        view: A key of :data:`fspo.responses.VIEWS`.
        own_mask: Whether the rows are of a mask or a correction, whose S is not that of a loss.
    """
    if wrong is not None:
        return [f"no conclusion and no clip value: {wrong}"]
    # Clip values need no lengths that differ.
    alike = too_alike(responses)
    if (reason := too_few(responses)) is not None and reason != alike:
        return [reason]
    # How a gradient grows with L is known of a loss of this package; that of verl's hangs on loss_agg_mode.
    is_ours = settings is not None or str(loss) in ALGORITHMS
    settings = settings or ALGORITHMS.get(named_loss(str(loss)) or "")
    # A band that is measured, or none, has no exponent to keep.
    has_band = settings is not None and not settings.needs_state and min(settings.c_low, settings.c_high) > 0
    own = settings if has_band else None
    own_power = own.exponent if own else None
    bands = {} if alike else {one: even_band(responses, accept, one, own) for one in _COUNTED}
    chosen = {one: recommended(band, own_power) for one, band in bands.items() if band}
    lines = [alike or _spread_line(responses)]
    if alike:
        chosen = {view: 0.5 if own_power is None else own_power}
    elif band := bands[view]:
        lines.append(_band_line(band, view, accept, own_power))
    else:
        lines.append(f"no even band and no clip value: at least {accept:.0%} are accepted at any width")
    if view in chosen:
        of = own if own and chosen[view] == own_power else power_band(chosen[view])
        if diverged := _diverged(responses, of):
            lines.append(diverged)
        elif accepted_at(in_view(responses, view), of, accept, view) is not None:
            says, value = _clip_line(responses, of, view, accept)
            lines.append(says)
            if find_spec("verl") is not None and not own_mask:
                lines.append(_in_verl(value, loss, float(responses.length_B.mean())))
    lines.append(_mean_line(responses))
    cosine = math.nan
    if responses.rule_known and not own_mask and is_ours:
        columns = (responses.kept_B, responses.advantage_B, responses.weight_B, responses.length_B)
        cosine = clipped_cosine(*columns, settings.grad_scale if settings else "1/L")
    if math.isfinite(cosine):
        where = "if gradients of different responses are orthogonal and their squares grow like L"
        lines.append(f"cosine of the clipped and the unclipped update: {cosine:.2f}, {where}")
    (other,) = _COUNTED.keys() - {view}
    if view in chosen and chosen.get(other, chosen[view]) != chosen[view] and (band := bands[other]):
        even = f"with {accept:.0%} {_COUNTED[other]}, c L^{_shown(band.exponent)} is the most even"
        lines.append(f"--view {other} would name {shape(chosen[other])}: {even}")
    return lines
