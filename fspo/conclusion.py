"""What follows from recorded responses: how S spreads, which band is even, clip values, rounding or movement.

Defined here. The responses are S and L alone, of any loss. Intervals are 95%, by bootstrap over prompt groups where the
responses have them, else over mini-batches; fewer than :data:`fspo.clip_values.FEWEST_GROUPS` give no conclusion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from fspo.clip_values import FEWEST_GROUPS, estimate, needed_scale, scaled
from fspo.fairness.lre import (
    Array,
    Interval,
    LengthReweightingError,
    debiased_lre,
    equal_mass_starts,
    length_reweighting_error,
    lre_in_words,
    percentile_ends,
)
from fspo.losses import ALGORITHMS, BANDS, named_loss
from fspo.matching import POINTS_PER_CELL, Sequences
from fspo.sums import FINE_LENGTH_EDGES, SequenceSums
from fspo.types import SequenceLossSettings, eps_of_c, shape, unit_of

#: Share of the responses that is to lie inside the band.
ACCEPT: Final = 0.85
#: The loss of each shape of a band.
_SHAPES: Final = {shape(ALGORITHMS[loss].exponent): loss for loss in BANDS.values()}
_BINS: Final = 8
_FEWEST_BINS: Final = 3
_RESAMPLES: Final = 1000
#: So many clusters at most, for the time that the resampling takes: of more mini-batches neighbours are one cluster.
_MOST_CLUSTERS: Final = 100
_SEED: Final = 0
_LARGEST_LOG: Final = 700.0
#: Of a long run's histograms, about: the resampling goes through all of them a few thousand times.
_MOST_POINTS: Final = 500_000
#: No clip value is given where so many of the responses have |S| above s_max; a length-normalised weight may have
#: responses so long that S is, so there also above so many nats a token.
_DIVERGED_SHARE: Final = 0.05
_DIVERGED_TOKEN: Final = 0.5


@dataclass(frozen=True)
class Responses:
    """Recorded responses, whose clusters are resampled as a whole.

    Attributes:
        log_ratio_B, length_B: S in nats and L in tokens.
        count_B: Responses that an entry stands for.
        batch_B: Mini-batch of each, from 0: its responses share one policy.
        cluster_B: Prompt group or mini-batch, from 0.
        unit: What a cluster is, in the plural.
    """

    log_ratio_B: Array
    length_B: Array
    count_B: Array
    batch_B: npt.NDArray[np.int64]
    cluster_B: npt.NDArray[np.int64]
    unit: str

    @classmethod
    def of_rows(
        cls,
        log_ratio_B: npt.ArrayLike,
        length_B: npt.ArrayLike,
        batch_B: npt.ArrayLike,
        group_B: npt.ArrayLike | None = None,
    ) -> Responses:
        """One row for each response, with the number of its mini-batch, and of its prompt group if it has one."""
        s, length = (np.asarray(x, dtype=np.float64) for x in (log_ratio_B, length_B))
        batch = np.unique(np.asarray(batch_B), return_inverse=True)[1]
        cluster = batch if group_B is None else np.unique(np.asarray(group_B), return_inverse=True)[1]
        return cls(s, length, np.ones_like(s), batch, cluster, "mini-batches" if group_B is None else "prompt groups")

    @classmethod
    def of_sums(cls, parts: Sequence[SequenceSums]) -> Responses:
        """From the histograms of mini-batches; within a cell evenly in log |S|, so within a per cent."""
        parts = [part for part in parts if part.total("count")]
        whole = sum(parts, SequenceSums.zeros())
        length_K = np.rint((whole.column("length") / whole.column("count").clamp(min=1)).numpy())
        columns, cells = [], [part.cells().numpy() for part in parts]
        per_cell = max(1, min(POINTS_PER_CELL, _MOST_POINTS // max(1, sum(map(len, cells)))))
        for number, filled in enumerate(cells):
            points, _ = Sequences.from_cells(filled, length_K, per_cell)
            columns.append((points.log_ratio_B, points.length_B, points.count_B, np.full(len(points.count_B), number)))
        if not columns:
            return cls(*(np.zeros(0),) * 3, *(np.zeros(0, np.int64),) * 2, "mini-batches")
        s, length, count, batch = (np.concatenate(column) for column in zip(*columns, strict=True))
        if len(parts) <= _MOST_CLUSTERS:
            return cls(s, length, count, batch, batch, "mini-batches")
        cluster = batch * _MOST_CLUSTERS // len(parts)
        return cls(s, length, count, batch, cluster, "groups of neighbouring mini-batches")

    def too_few(self) -> str | None:
        """Why nothing follows from so few responses, in a sentence; None if there are enough."""
        clusters = len(np.unique(self.cluster_B))
        if clusters < FEWEST_GROUPS:
            return f"too few responses for a conclusion: {clusters} {self.unit}, and it needs {FEWEST_GROUPS}"
        if not self.log_ratio_B.any():
            return "no conclusion: every S is 0"
        number_J = self.by_bin(np.ones_like(self.count_B)).sum(0)
        if len(number_J) < _FEWEST_BINS:
            return f"no conclusion about length: {len(number_J)} bins of length, and it needs {_FEWEST_BINS}"
        if (fewest := number_J.min()) < FEWEST_GROUPS:
            return f"too few responses for a conclusion: {fewest:.0f} in a bin of length, and it needs {FEWEST_GROUPS}"
        return None

    @cached_property
    def bin_B(self) -> npt.NDArray[np.int64]:
        """Bin of length of each; eight bins of equal mass."""
        size = len(FINE_LENGTH_EDGES) - 1
        k_B = np.searchsorted(FINE_LENGTH_EDGES.numpy(), self.length_B, side="right") - 1
        starts = equal_mass_starts(np.bincount(k_B, self.count_B, size), _BINS)
        return np.searchsorted(starts, k_B, side="right") - 1

    def by_bin(self, values_B: Array) -> Array:
        """Sums by cluster and bin of length, [M, J]."""
        clusters, bins = int(self.cluster_B.max()) + 1, int(self.bin_B.max()) + 1
        flat = np.bincount(self.cluster_B * bins + self.bin_B, values_B * self.count_B, clusters * bins)
        return np.asarray(flat.reshape(clusters, bins))


def _resampled(statistic: Callable[..., float], moments: Sequence[Array], resamples: int = _RESAMPLES) -> Interval:
    """A statistic of sums over clusters, each [J], with its interval by resampled clusters."""
    clusters, size = moments[0].shape
    flat_MX, rng = np.concatenate(moments, axis=1), np.random.default_rng(_SEED)

    def of(weight_M: Array) -> float:
        return statistic(*(weight_M @ flat_MX).reshape(-1, size))

    draws = (rng.integers(0, clusters, clusters) for _ in range(resamples))
    drawn = [of(np.bincount(draw, minlength=clusters).astype(np.float64)) for draw in draws]
    return Interval(of(np.ones(clusters)), *percentile_ends(drawn, clusters), clusters)


def spread_exponent(count_MJ: Array, tokens_MJ: Array, squares_MJ: Array) -> Interval:
    """a in std(S) ~ L**a: the slope of log std(S) on log L over bins of length. Defined here.

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


def squares_about_mean(
    values_B: Array, cell_B: npt.NDArray[np.int64], count_B: Array | None = None
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Squares about the mean of a cell of n, times n / (n - 1), so that their mean is the variance within cells.

    Args:
        values_B: Of each response.
        cell_B: Number of its cell, from 0.
        count_B: Responses that an entry stands for; one by default.

    Returns:
        The squares, 0 for values that are equal but for rounding, and whether the cell has more than one response.
    """
    count_B = np.ones_like(values_B) if count_B is None else count_B
    n, total = np.bincount(cell_B, count_B), np.bincount(cell_B, values_B * count_B)
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
    squares_B, several_B = squares_about_mean(values_B, cell_B, responses.count_B)
    columns = (np.ones_like(values_B), responses.length_B, squares_B)
    number_MJ, tokens_MJ, squares_MJ = (responses.by_bin(column * several_B) for column in columns)
    return number_MJ, tokens_MJ, squares_MJ


def exponent_of(responses: Responses) -> Interval:
    """:func:`spread_exponent` of recorded responses.

    Each S is divided by the root mean square of S / sqrt(L) in its mini-batch, so that all count alike.
    """
    batch_B, s_B = responses.batch_B, responses.log_ratio_B
    number_M = np.bincount(batch_B, responses.count_B)
    rms_M = np.sqrt(np.bincount(batch_B, s_B**2 / responses.length_B * responses.count_B) / number_M)
    scale_M = np.divide(1.0, rms_M, out=np.zeros_like(rms_M), where=rms_M > 0)
    return spread_exponent(*within_mini_batches(responses, s_B * scale_M[batch_B]))


def rounding_share(responses: Responses) -> Interval:
    """log E[exp S] over log E[cosh S], by bin of length: 0 where S is a policy's movement, 1 where it is rounding.

    ``E_old[exp S] = 1`` holds for responses that pi_old has written, however S is distributed. Rounding has no
    direction: S and -S are equally likely, so ``E[exp S] = E[cosh S]``, which for a normal S is exp(Var(S) / 2). Both
    hold of mini-batches together where they hold in each. Defined here.

    A bin weighs by n c / (exp(2 c) - 1), c its log E[cosh S]: the mean of exp(S) of a bin that spreads far hangs on a
    few responses. For a normal S that moves, this is the weight of the smallest variance.
    """
    # The largest that exp takes; expm1 and sinh keep the digits of a small S.
    s_B = np.clip(responses.log_ratio_B, -_LARGEST_LOG, _LARGEST_LOG)

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
    return _resampled(share, [responses.by_bin(column) for column in columns])


@dataclass(frozen=True)
class BandError:
    """A band at the clip value that accepts the wanted share: its LRE, and what :func:`even_bands` compares."""

    error: LengthReweightingError
    accepted_MJ: Array
    total_MJ: Array


def even_bands(responses: Responses, accept: float = ACCEPT) -> dict[str, BandError]:
    """Each of :data:`fspo.losses.BANDS`, by its shape, at the clip value at which the share ``accept`` lies inside."""
    total_MJ, bands = responses.by_bin(np.ones_like(responses.log_ratio_B)), {}
    for name, loss in _SHAPES.items():
        needed_B = needed_scale(responses.log_ratio_B, responses.length_B, ALGORITHMS[loss])
        factor = estimate(needed_B, responses.cluster_B, accept, responses.count_B)
        if factor is not None:
            accepted_MJ = responses.by_bin((needed_B <= factor.scale).astype(np.float64))
            bands[name] = BandError(length_reweighting_error(accepted_MJ, total_MJ), accepted_MJ, total_MJ)
    return bands


def _shown(value: Interval, form: str = ".2f") -> str:
    return f"{value.value:{form}} [{value.low:{form}}, {value.high:{form}}]"


def _spread_line(responses: Responses) -> str:
    exponent = exponent_of(responses)
    if not np.isfinite(exponent.value):
        return f"no exponent: S spreads in fewer than {_FEWEST_BINS} bins of length"
    named = {"more slowly than sqrt(L)": exponent.high < 0.5, "faster than sqrt(L)": exponent.low > 0.5}
    words = next((words for words, holds in named.items() if holds), "not shown to differ from sqrt(L)")
    return f"S spreads like L^{_shown(exponent)}, {words} ({exponent.n} {responses.unit} resampled)"


def _band_line(responses: Responses, accept: float) -> str | None:
    # scipy takes a second to load, and training, which imports this with the audit, has no use for it.
    from fspo.fairness.bootstrap import pooled_difference

    bands = even_bands(responses, accept)
    if len(bands) < len(_SHAPES):
        return None
    first, *others = sorted(bands, key=lambda name: bands[name].error.debiased.value)
    level = [
        name
        for name in others
        if not pooled_difference(
            [(bands[first].accepted_MJ, bands[first].total_MJ)],
            [(bands[name].accepted_MJ, bands[name].total_MJ)],
            debiased_lre,
        ).excludes_zero
    ]
    debiased = {name: bands[name].error.debiased for name in (first, *others)}
    values = ", ".join(f"{name} {lre_in_words(lre.value, lre.low, lre.high)}" for name, lre in debiased.items())
    if len(level) == len(others):
        verdict = "no band is shown to be the most even"
    elif level:
        verdict = f"{first} and {' and '.join(level)} are the most even, and not told apart"
    else:
        verdict = f"{first} is the most even"
    return f"with {accept:.0%} inside, {verdict}; LRE: {values}"


@dataclass(frozen=True)
class ClipValue:
    """A loss with the clip values at which the wanted share of recorded responses lies inside.

    Attributes:
        loss: Its key in :data:`fspo.losses.LOSSES`.
        settings: With these clip values.
        audited: The loss that was audited, by its own name; None if it has none.
        mean_length: Of the responses.
    """

    loss: str
    settings: SequenceLossSettings
    audited: str | None
    mean_length: float


Override = Callable[[ClipValue], str | None]
"""What sets a clip value in a program that trains; None if it cannot."""


def _clip_line(
    responses: Responses, name: str, audited: str | None, accept: float, override: Override | None
) -> str | None:
    """The clip values of the loss ``name``, and what sets them; or why there are none.

    None for a loss whose band is measured, and where most S are at the centre.
    """
    settings = ALGORITHMS[name]
    if settings.needs_state:
        return None
    if (reason := _diverged(responses, settings)) is not None:
        return f"no clip value for {name}: {reason}"
    needed_B = needed_scale(responses.log_ratio_B, responses.length_B, settings)
    factor = estimate(needed_B, responses.cluster_B, accept, responses.count_B)
    if factor is None:
        return None
    value, low, high = (scaled(settings, scale) for scale in (factor.scale, factor.low, factor.high))

    def side(key: str) -> str:
        return f"{getattr(value, key):.3g} [{getattr(low, key):.3g}, {getattr(high, key):.3g}]"

    both = f"{side('c_low')} below and {side('c_high')} above"
    sides = f"c = {side('c_high') if value.c_low == value.c_high else both}, in {unit_of(value.exponent)}"
    if value.exponent in (0, 1):
        sides += f" (eps {' and '.join(f'{eps:.3g}' for eps in eps_of_c(value.c_low, value.c_high))})"
    line = f"{accept:.0%} of these responses lie inside {name}'s band with {sides}"
    mean_length = float(np.average(responses.length_B, weights=responses.count_B))
    setting = None if override is None else override(ClipValue(name, value, audited, mean_length))
    return line if setting is None else f"{line}:\n  {setting}"


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
    share = rounding_share(responses)
    if not np.isfinite((share.value, share.low, share.high)).all():
        return "the mean of exp(S) says nothing: S hardly varies, or by hundreds of nats"
    verdict = _VERDICTS[movement_verdict(share)]
    return f"the mean of exp(S) is {verdict}; share of rounding {_shown(share)} (movement 0, rounding 1)"


def _diverged(responses: Responses, settings: SequenceLossSettings) -> str | None:
    """Why no clip value of this loss means anything, where S is far past what its weight is made for."""
    sequence = settings.weight == "sequence"
    limit_B = settings.s_max if sequence else np.maximum(settings.s_max, _DIVERGED_TOKEN * responses.length_B)
    share = np.average(np.abs(responses.log_ratio_B) > limit_B, weights=responses.count_B)
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
) -> list[str]:
    """What follows, a sentence each; a single one that says what is missing where the responses are too few.

    Args:
        responses: Of mini-batches before which a weight had moved.
        loss: Whose clip values are wanted; of one without a band FSPO's.
        accept: Share of the responses that is to lie inside.
        wrong: What makes these log-ratios wrong, if something does; then nothing follows.
        override: Writes clip values as settings of a program that trains; without it only their values are told.
    """
    if wrong is not None:
        return [f"no conclusion and no clip value: {wrong}"]
    if (reason := responses.too_few()) is not None:
        return [reason]
    own = named_loss(str(loss)) or "fspo"
    band, clip = _band_line(responses, accept), _clip_line(responses, own, loss, accept, override)
    # Whoever audits another band may want to change to FSPO's, whose clip value is of another size.
    other = None if clip is None or own == "fspo" else _clip_line(responses, "fspo", loss, accept, override)
    if band is None:
        band = f"no even band and no clip value: {accept:.0%} of S or more are 0, as far as their precision goes"
    lines = (_spread_line(responses), band, clip, other, _mean_line(responses))
    return [line for line in lines if line is not None]
