"""What follows from recorded responses: how S spreads, which band is even, clip values, rounding or movement.

Defined here. The responses are S, L and A alone, of any loss. Intervals are 95%, by bootstrap over prompt groups where
the responses have them, else over mini-batches; fewer than :data:`fspo.clip.FEWEST_GROUPS` give no conclusion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fspo.clip import ACCEPT, FEWEST_GROUPS, needed_scale, resampled_clusters, scale_for, scale_with_interval, scaled
from fspo.fairness.lre import (
    Array,
    Interval,
    LengthReweightingError,
    lre_in_words,
    percentile_ends,
)
from fspo.losses import ALGORITHMS, BANDS, named_loss
from fspo.responses import VIEWS, Responses
from fspo.types import SequenceLossSettings, eps_of_c, shape, unit_of

#: Exponents that have a name, and the loss of each.
NAMED: Final[Mapping[float, str]] = {ALGORITHMS[loss].exponent: loss for loss in BANDS.values()}
#: Exponents among which the most even band is looked for.
_GRID: Final[Array] = np.round(np.arange(0.0, 1.5 + 1e-9, 0.01), 2)
#: So many responses at most look for it, evenly taken: all of a long run would take minutes.
_MOST_ROWS: Final = 100_000
_FEWEST_BINS: Final = 3
_RESAMPLES: Final = 1000
_LARGEST_LOG: Final = 700.0
#: No clip value is given where so many of the responses have |S| above s_max; a length-normalised weight may have
#: responses so long that S is, so there also above so many nats a token.
_DIVERGED_SHARE: Final = 0.05
_DIVERGED_TOKEN: Final = 0.5


def too_alike(responses: Responses) -> str | None:
    """Why nothing follows about length from responses of nearly one length; None if their lengths differ enough."""
    bins = len(np.unique(responses.bin_B))
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
    if (fewest := np.bincount(responses.bin_B).min()) < FEWEST_GROUPS:
        return f"too few responses for a conclusion: {fewest:.0f} in a bin of length, and it needs {FEWEST_GROUPS}"
    return None


def _resampled(statistic: Callable[..., float], moments: Sequence[Array], resamples: int = _RESAMPLES) -> Interval:
    """A statistic of sums over clusters, each [J], with its interval by resampled clusters."""
    clusters, size = moments[0].shape
    flat_MX = np.concatenate(moments, axis=1)

    def of(sums_X: Array) -> float:
        return statistic(*sums_X.reshape(-1, size))

    drawn = [of(sums_X) for sums_X in resampled_clusters(clusters, resamples) @ flat_MX]
    return Interval(of(flat_MX.sum(0)), *percentile_ends(drawn, clusters), clusters)


def spread_exponent(count_MJ: Array, tokens_MJ: Array, squares_MJ: Array) -> Interval:
    """a in std(S) ~ L**a: the slope of log std(S) on log L over bins of length.

    Args:
        count_MJ, tokens_MJ: Number of responses and sum of L, by cluster and bin.
        squares_MJ: Sum of :func:`squares_about_mean`.
    """

    def exponent(n_J: Array, tokens_J: Array, squares_J: Array) -> float:
        spread = squares_J > 0  # a bin of equal S says nothing of the slope
        if spread.sum() < _FEWEST_BINS:
            return float("nan")
        n_J, tokens_J, squares_J = n_J[spread], tokens_J[spread], squares_J[spread]
        return float(np.polyfit(np.log(tokens_J / n_J), np.log(squares_J / n_J) / 2, 1, w=np.sqrt(n_J))[0])

    return _resampled(exponent, (count_MJ, tokens_MJ, squares_MJ))


def squares_about_mean(values_B: Array, cell_B: npt.NDArray[np.int64]) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Squares about the mean of a cell of n, times n / (n - 1), so that their mean is the variance within cells.

    Args:
        values_B: Of each response.
        cell_B: Number of its cell, from 0.

    Returns:
        The squares, 0 for values that are equal but for rounding, and whether the cell has more than one response.
    """
    n, total = np.bincount(cell_B), np.bincount(cell_B, values_B)
    n_B = n[cell_B]
    about_B = values_B - total[cell_B] / n_B
    about_B[np.abs(about_B) <= 1e-12 * np.abs(values_B)] = 0.0
    return about_B**2 * n_B / np.maximum(n_B - 1, 1), n_B > 1


def within_mini_batches(responses: Responses, values_B: Array) -> tuple[Array, Array, Array]:
    """Number, tokens and :func:`squares_about_mean` of the values, by cluster and bin, [M, J] each.

    A cell is a mini-batch and bin: a policy moves farther in one mini-batch than in another, and the mean of S with it.
    That is no spread of S.
    """
    cell_B = responses.batch_B * (int(responses.bin_B.max()) + 1) + responses.bin_B
    squares_B, several_B = squares_about_mean(values_B, cell_B)
    columns = (np.ones_like(values_B), responses.length_B, squares_B)
    number_MJ, tokens_MJ, squares_MJ = (responses.by_cluster(column * several_B) for column in columns)
    return number_MJ, tokens_MJ, squares_MJ


def exponent_of(responses: Responses) -> Interval:
    """:func:`spread_exponent` of recorded responses.

    Each S is divided by the root mean square of S / sqrt(L) in its mini-batch, so that all count alike.
    """
    batch_B, s_B = responses.batch_B, responses.s_B
    rms_M = np.sqrt(np.bincount(batch_B, responses.z_B**2) / np.bincount(batch_B))
    scale_M = np.divide(1.0, rms_M, out=np.zeros_like(rms_M), where=rms_M > 0)
    return spread_exponent(*within_mini_batches(responses, s_B * scale_M[batch_B]))


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
        if len(n_J) == 0:
            return float("nan")
        log_exp_J = np.log1p(np.maximum(exp_J / n_J, -1 + 1e-15))
        log_cosh_J = np.log1p(cosh_J / n_J)
        weight_J = n_J * log_cosh_J * np.exp(-2 * log_cosh_J) / -np.expm1(-2 * log_cosh_J)
        if not weight_J.any():
            return float("nan")
        return float(weight_J @ log_exp_J / (weight_J @ log_cosh_J))

    columns = (np.ones_like(s_B), np.expm1(s_B), 2 * np.sinh(s_B / 2) ** 2)
    return _resampled(share, [responses.by_cluster(column) for column in columns])


@dataclass(frozen=True)
class EvenBand:
    """Which exponent is the most even in one view, :func:`even_band`.

    Attributes:
        exponent: Of the most even band c L**exponent, with its interval.
        named: The exponent with a name in that interval that is nearest; None if there is none.
        errors: LRE by exponent: of the most even one and of those with a name.
    """

    exponent: Interval
    named: float | None
    errors: dict[float, LengthReweightingError]


def needed_in_view(responses: Responses, settings: SequenceLossSettings, view: str) -> Array:
    """:func:`fspo.clip.needed_scale` of each; in the active view 0 where the clip removes nothing, whatever its width.

    The clip removes a gradient where S is above the band and A > 0, or below it and A < 0.
    """
    needed_B = needed_scale(responses.s_B, responses.length_B, settings)
    return needed_B if view == "symmetric" else np.where(responses.advantage_B * responses.s_B > 0, needed_B, 0.0)


def even_band(responses: Responses, accept: float = ACCEPT, view: str = "symmetric") -> EvenBand | None:
    """The exponent whose band c L**exponent is the most even, with the share ``accept`` accepted.

    Both clip values are c. The most even exponent has the smallest mean square of a_b / abar - 1 over bins of equal
    mass, weighted by p_b, without what noise adds: unlike the LRE it has one minimum. Its interval is that of resampled
    clusters, c held.

    Args:
        responses: Of mini-batches before which a weight had moved.
        accept: Share that lies inside (symmetric), or whose gradient is kept (active, of those with A != 0).
        view: A key of :data:`fspo.responses.VIEWS`.

    Returns:
        None if a clip value of 0 would accept so many.
    """
    if view == "active":
        responses = responses.select(responses.advantage_B != 0)
        if len(responses) == 0 or too_few(responses) is not None:
            return None

    def accepted(of: Responses, settings: SequenceLossSettings) -> Array | None:
        needed_B = needed_in_view(of, settings, view)
        scale = scale_for(needed_B, accept)
        return (needed_B <= scale).astype(np.float64) if scale > 0 else None

    some = responses
    if len(responses) > _MOST_ROWS:
        some = responses.select(np.arange(len(responses)) % math.ceil(len(responses) / _MOST_ROWS) == 0)
    by_exponent = [accepted(some, power_band(float(exponent))) for exponent in _GRID]
    if any(accepted_B is None for accepted_B in by_exponent):
        return None
    grid_CEJ = np.stack([some.by_cluster(accepted_B) for accepted_B in by_exponent], axis=1)  # type: ignore[arg-type]
    total_CJ = some.by_cluster(np.ones_like(some.s_B))

    def unevenness(accepted_EJ: Array, total_J: Array) -> Array:
        share_J = total_J / total_J.sum()
        rate_EJ = accepted_EJ / np.maximum(total_J, 1)
        return np.asarray((share_J * (rate_EJ / (accepted_EJ.sum(1) / total_J.sum())[:, None] - 1) ** 2).sum(1))

    clusters, bins = total_CJ.shape
    flat_CX = np.concatenate([grid_CEJ.reshape(clusters, -1), total_CJ], axis=1)
    sums_RX = resampled_clusters(clusters, _RESAMPLES) @ flat_CX
    drawn_RE = np.array([unevenness(sums_X[:-bins].reshape(-1, bins), sums_X[-bins:]) for sums_X in sums_RX])
    # The clusters' noise adds to the data once, and to a resample twice.
    measured_E = unevenness(grid_CEJ.sum(0), total_CJ.sum(0))
    noise_E = drawn_RE.mean(0) - measured_E
    best = int((measured_E - noise_E).argmin())
    drawn = _GRID[(drawn_RE - 2 * noise_E).argmin(1)]
    exponent = Interval(float(_GRID[best]), *percentile_ends(drawn, clusters), clusters)
    inside = [named for named in NAMED if exponent.low <= named <= exponent.high]
    named = min(inside, key=lambda power: abs(power - exponent.value)) if inside else None
    # A named one has its own sides.
    bands = {exponent.value: power_band(exponent.value)} | {power: ALGORITHMS[loss] for power, loss in NAMED.items()}
    errors = {}
    for power, settings in bands.items():
        if (accepted_B := accepted(responses, settings)) is None:
            return None
        errors[power] = responses.error_by_cluster(accepted_B)
    return EvenBand(exponent, named, errors)


def power_band(exponent: float) -> SequenceLossSettings:
    """The band L**exponent, alike on both sides."""
    return SequenceLossSettings(exponent=exponent, c_low=1.0, c_high=1.0)


def _shown(value: Interval, form: str = ".2f") -> str:
    return f"{value.value:{form}} [{value.low:{form}}, {value.high:{form}}]"


def _spread_line(responses: Responses) -> str:
    exponent = exponent_of(responses)
    if not np.isfinite(exponent.value):
        return f"no exponent: S spreads in fewer than {_FEWEST_BINS} bins of length"
    named = {"more slowly than sqrt(L)": exponent.high < 0.5, "faster than sqrt(L)": exponent.low > 0.5}
    words = next((words for words, holds in named.items() if holds), "not shown to differ from sqrt(L)")
    return f"S spreads like L^{_shown(exponent)}, {words} ({exponent.n} {responses.unit} resampled)"


def _band_line(band: EvenBand, view: str, accept: float) -> str:
    verdict = f"a band c L^{_shown(band.exponent)} is the most even"
    if band.named is not None:
        verdict += f", not told apart from {shape(band.named)}"
    by_lre = sorted((lre.debiased.value, exponent, lre.debiased) for exponent, lre in band.errors.items())
    values = ", ".join(f"{shape(e)} {lre_in_words(lre.value, lre.low, lre.high)}" for _, e, lre in by_lre)
    return f"with {accept:.0%} of {_COUNTED[view]}, {verdict}; LRE: {values}"


#: What the share that is accepted is a share of, by view.
_COUNTED: Final = {"symmetric": "all responses inside", "active": "the gradients kept"}


@dataclass(frozen=True)
class ClipValue:
    """A loss with clip values that follow from recorded responses.

    Attributes:
        loss: Its name (:data:`fspo.losses.LOSSES`).
        settings: With the clip values.
        audited: Name of the loss that made the responses; None if it is not known.
        mean_length: Of the responses, in tokens.
    """

    loss: str
    settings: SequenceLossSettings
    audited: str | None
    mean_length: float


#: For which programs that train, and what sets a clip value in them, behind a comma; None if nothing can.
Override = Callable[[ClipValue], str | None]


def _clip_line(
    responses: Responses,
    name: str,
    settings: SequenceLossSettings,
    view: str,
    accept: float,
    propose: Callable[[str, SequenceLossSettings], str],
) -> str | None:
    """The clip values of a band, or why there are none, with what sets them; None where most S are at the centre."""
    if (reason := _diverged(responses, settings)) is not None:
        return f"no clip value for {name}: {reason}"
    counted = responses if view == "symmetric" else responses.select(responses.advantage_B != 0)
    factor = scale_with_interval(needed_in_view(counted, settings, view), counted.cluster_B, accept)
    if factor.value <= 0:
        return None
    value, low, high = (scaled(settings, scale) for scale in (factor.value, factor.low, factor.high))

    def side(key: str) -> str:
        return f"{getattr(value, key):.3g} [{getattr(low, key):.3g}, {getattr(high, key):.3g}]"

    own = settings.exponent == ALGORITHMS[name].exponent
    whose = f"{name}'s band" if own else f"a band c L^{settings.exponent:g}"
    both = f"{side('c_low')} below and {side('c_high')} above"
    sides = f"c = {side('c_high') if value.c_low == value.c_high else both}, in {unit_of(value.exponent)}"
    if value.exponent in (0, 1):
        sides += f" (eps {' and '.join(f'{eps:.3g}' for eps in eps_of_c(value.c_low, value.c_high))})"
    done = "of these responses lie inside" if view == "symmetric" else "of the gradients are kept by"
    return f"{accept:.0%} {done} {whose} with {sides}{propose(name, value)}"


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
        return (
            "the mean of exp(S) says nothing: an update was made on these responses before, in an earlier epoch. Of "
            f"those in the first epoch: {reason}"
        )
    share = rounding_share(first)
    if not np.isfinite((share.value, share.low, share.high)).all():
        return "the mean of exp(S) says nothing: S hardly varies, or by hundreds of nats"
    verdict = _VERDICTS[movement_verdict(share)]
    return f"the mean of exp(S) is {verdict}; share of rounding {_shown(share)} (movement 0, rounding 1)"


def _diverged(responses: Responses, settings: SequenceLossSettings) -> str | None:
    """Why no clip value of this loss means anything, where S is far past what its weight is made for."""
    sequence = settings.weight == "sequence"
    limit_B = settings.s_max if sequence else np.maximum(settings.s_max, _DIVERGED_TOKEN * responses.length_B)
    share = np.mean(np.abs(responses.s_B) > limit_B)
    if share <= _DIVERGED_SHARE:
        return None
    limit = f"s_max={settings.s_max:g}" + ("" if sequence else f" and {_DIVERGED_TOKEN:g} a token")
    return f"|S| is above {limit} in {share:.0%} of the responses: the policy has diverged from pi_old"


def conclude(
    responses: Responses,
    loss: str | None = None,
    accept: float = ACCEPT,
    wrong: str | None = None,
    override: Override | None = None,
    settings: SequenceLossSettings | None = None,
) -> list[str]:
    """What follows, a sentence each; a single one that says what is missing where the responses are too few.

    Args:
        responses: Of mini-batches before which a weight had moved.
        loss: Whose clip values are wanted; of one without a band FSPO's.
        accept: Share of the responses that is to lie inside.
        wrong: What makes these log-ratios wrong, if something does; then nothing follows.
        override: Writes clip values as settings of a program that trains; without it only their values are given.
        settings: Of the loss, where they are not those that its name stands for: its exponent may be another one.
    """
    if wrong is not None:
        return [f"no conclusion and no clip value: {wrong}"]
    # Clip values need no lengths that differ.
    alike = too_alike(responses)
    if (reason := too_few(responses)) is not None and reason != alike:
        return [reason]

    def propose(name: str, band: SequenceLossSettings) -> str:
        value = ClipValue(name, band, loss, float(responses.length_B.mean()))
        setting = None if override is None else override(value)
        return "" if setting is None else f", {setting}"

    lines: list[str | None] = [alike or _spread_line(responses)]
    even = {} if alike else {view: even_band(responses, accept, view) for view in VIEWS}
    if even and even["symmetric"] is None:
        lines.append(f"no even band and no clip value: at least {accept:.0%} of the recorded S are 0")
    elif even and even["active"] is None and (responses.advantage_B > 0).any():
        lines.append(f"no even band by removed gradients: {accept:.0%} of them are kept at any width")
    proposed = set()
    for view, of_view in even.items():
        if of_view is None:
            continue
        lines.append(_band_line(of_view, view, accept))
        name = "fspo" if of_view.named is None else NAMED[of_view.named]
        band = power_band(of_view.exponent.value) if of_view.named is None else ALGORITHMS[name]
        lines.append(_clip_line(responses, name, band, view, accept, propose))
        if view == "symmetric" and of_view.named is not None:
            proposed.add((name, band.exponent))
    # The audited loss's own value; and FSPO's, to which whoever audits another band may want to change.
    own = named_loss(str(loss)) or "fspo"
    bands = ((own, settings or ALGORITHMS[own]), ("fspo", ALGORITHMS["fspo"]))
    for name, band in bands if alike or even["symmetric"] is not None else ():
        if (name, band.exponent) not in proposed and not band.needs_state:
            proposed.add((name, band.exponent))
            lines.append(_clip_line(responses, name, band, "symmetric", accept, propose))
    return [line for line in (*lines, _mean_line(responses)) if line is not None]
