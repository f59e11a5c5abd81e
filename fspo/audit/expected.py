"""Which clip fraction should I see? The shares that each band clips, by length, before any response is sampled.

The model is :meth:`fspo.responses.Responses.normal`: at length L, S is normal with standard deviation
sigma L**exponent. ``outside`` is the share with S outside the band. ``removed`` is the share whose gradient the clip
removes: half of ``outside``, because the sign of A does not depend on S in this model. Defined here.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Final

import numpy as np

from fspo.calibration import drift_per_token
from fspo.clip import needed_scale, scale_for, scaled
from fspo.fairness.lre import plain_lre
from fspo.losses import LOSSES
from fspo.markdown import markdown_table
from fspo.names import did_you_mean
from fspo.responses import Responses, normal_moments
from fspo.types import SequenceLossSettings

#: The losses of the table, by their names: those whose clip values can be measured.
LOSSES_SHOWN: Final = {loss.algo: loss.settings for loss in LOSSES.values() if loss.measurable}
USAGE: Final = """\
python -m fspo.audit expected sigma=0.03 lengths=[1000,4000]   how far S spreads: nats per token**exponent
    exponent=0.5    of the length in the spread        drift=kl        mean of S -spread^2/2; none: 0
    fspo=0.03  gspo=[3e-4,4e-4]                        clip values in nats, lower and upper or both alike
    accept=0.85     the clip values of each band for this share inside
python -m fspo.audit expected removed=0.15 minibatches=4 lengths=[4000]   the sigma at which a band removes so much
    removed: share of the gradients, as pg_clipfrac has it; minibatches: of a rollout batch, the first of which
    removes nothing where pi_old is recomputed; leave it out where every mini-batch counts (pi_old is the engine's)
python -m fspo.audit expected sigma=0.03 lengths=[1000,4000] tis=2   the weight that a cap of 2 leaves, by length"""
#: Of the sigmas tried.
_NARROWEST, _WIDEST = 1e-7, 10.0


def shares_outside(responses: Responses, settings: SequenceLossSettings) -> np.ndarray:
    """Share of the responses of each length, in their order, whose S is outside the band."""
    kl = drift_per_token(float(responses.s_B.sum()), float(responses.length_B.sum()))
    outside_B = needed_scale(responses.s_B, responses.length_B, settings, kl) > 1
    lengths, group_B = np.unique(responses.length_B, return_inverse=True)
    return np.bincount(group_B, outside_B, len(lengths)) / np.bincount(group_B, minlength=len(lengths))


def table(responses: Responses, bands: Mapping[str, SequenceLossSettings], accept: float | None = None) -> str:
    """One row for each band: clip values, share outside and removed by length, LRE."""
    lengths = np.unique(responses.length_B)
    heads = ["band", "c_low, c_high", *(f"outside, removed at L = {length:.0f}" for length in lengths), "LRE"]
    heads += [] if accept is None else [f"c_low, c_high for {accept:.0%} inside"]
    kl = drift_per_token(float(responses.s_B.sum()), float(responses.length_B.sum()))
    rows = []
    for name, settings in bands.items():
        outside = shares_outside(responses, settings)
        lre = float(plain_lre(1 - outside, np.ones_like(outside))[0])
        row = [name, f"{settings.c_low:.3g}, {settings.c_high:.3g}", *(f"{x:.1%}, {x / 2:.1%}" for x in outside)]
        row.append(f"{lre:.3f}" if len(lengths) > 1 else "-")
        if accept is not None:
            value = scaled(settings, scale_for(needed_scale(responses.s_B, responses.length_B, settings, kl), accept))
            row.append(f"{value.c_low:.3g}, {value.c_high:.3g}")
        rows.append(row)
    return markdown_table(heads, rows)


def truncated_weight(mean: float, spread: float, cap: float) -> tuple[float, float]:
    """E[min(exp S, C)] and the share with exp S above C, for a normal S.

    With mean m, standard deviation s and the normal distribution Phi, the first is
    exp(m + s^2 / 2) Phi((log C - m) / s - s) + C Phi((m - log C) / s), and the second Phi((m - log C) / s).

    Args:
        mean: m, nats.
        spread: s > 0, nats.
        cap: C > 0.
    """
    above = NormalDist().cdf((mean - math.log(cap)) / spread)
    below = NormalDist().cdf((math.log(cap) - mean) / spread - spread)
    # In logarithms: where exp overflows, nothing is below the cap.
    rest = math.exp(mean + spread**2 / 2 + math.log(below)) if below > 0 else 0.0
    return rest + cap * above, above


def weights(sigma: float, lengths: Sequence[float], exponent: float, drift: bool, cap: float) -> str:
    """One row for each length: the weight of a response under a cap on exp(S), truncated importance sampling."""
    heads = ["L", "mean of S", f"mean of min(exp S, {cap:g})", f"share above {cap:g}"]
    rows = []
    means, spreads = normal_moments(sigma, np.asarray(lengths, dtype=np.float64), exponent, drift)
    for length, mean, spread in zip(lengths, means.tolist(), spreads.tolist(), strict=True):
        weight, above = truncated_weight(mean, spread, cap)
        rows.append([f"{length:.0f}", f"{mean:.3g}", f"{weight:.3g}", f"{above:.1%}"])
    return markdown_table(heads, rows)


def sigma_for(
    removed: float, lengths: Sequence[float], settings: SequenceLossSettings, exponent: float, drift: bool
) -> tuple[float, float]:
    """The smallest sigma at which a band removes this share of the responses, nats per token**exponent, and the share.

    If no sigma from 1e-7 to 10 removes so much, the one that removes the most. A clip that acts on one side removes
    at most a quarter; where the mean of S falls with sigma, a wide spread may remove less than a narrow one.
    """

    def of(sigma: float) -> float:
        return float(shares_outside(Responses.normal(sigma, lengths, exponent, drift), settings).mean()) / 2

    tried = np.geomspace(_NARROWEST, _WIDEST, 81).tolist()
    shares = [of(sigma) for sigma in tried]
    first = next((i for i, share in enumerate(shares) if share >= removed), None)
    if first is None:
        most = int(np.argmax(shares))
        return tried[most], shares[most]
    low, high = tried[max(first - 1, 0)], tried[first]
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if of(middle) < removed else (low, middle)
    return high, of(high)


def sigmas(
    removed: float,
    minibatches: float,
    lengths: Sequence[float],
    bands: Mapping[str, SequenceLossSettings],
    exponent: float,
    drift: bool,
) -> str:
    """One row for each band: the sigma behind a share of removed gradients over all mini-batches of a rollout batch.

    ValueError if no sigma of any band explains it.
    """
    moved = removed / (1 - 1 / minibatches)
    if moved >= 0.5:
        limit = f"a clip removes at most {0.5 * (1 - 1 / minibatches):.1%} where the sign of A does not follow S"
        cause = "the first mini-batch is not on policy, or S follows A"
        raise ValueError(f"removed={removed:g}: {limit}, so {cause}; audit the run (python -m fspo.audit FOLDER)")
    says = f"{removed:.1%} removed"
    if moved > removed:
        says += f" over all mini-batches, {moved:.1%} of those after the first"
    rows = []
    for name, settings in bands.items():
        sigma, share = sigma_for(moved, lengths, settings, exponent, drift)
        value = f"{sigma:.2g}"
        if share < moved:
            value = f"none up to {_WIDEST:g}: at most {share:.1%}, at {sigma:.2g}"
        elif sigma <= _NARROWEST:
            value = f"under {_NARROWEST:g}"
        rows.append([name, f"{settings.c_low:.3g}, {settings.c_high:.3g}", value])
    return f"{says}\n\n{markdown_table(['band', 'c_low, c_high', 'sigma'], rows)}"


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
        raise ValueError(f"{name}={value}: must be a number between {low:g} and {high:g}")
    return float(value)


def _listed(value: object, times: int) -> list[object]:
    return value if isinstance(value, list) else [value] * times


def expected(words: Sequence[str]) -> str:
    """The table that ``KEY=VALUE`` words ask for (:data:`USAGE`).

    Raises:
        ValueError: For a word that is none, or a value out of range; the message names key, value and remedy.
    """
    known = ("sigma", "removed", "minibatches", "lengths", "exponent", "drift", "accept", "tis", *LOSSES_SHOWN)
    values: dict[str, object] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in known:
            raise ValueError(f"{word}: not one of {', '.join(known)} with a value{did_you_mean(key, known)}")
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            value = text
        values[key] = list(value) if isinstance(value, tuple) else value  # lengths=250,1000
    if ("sigma" in values) == ("removed" in values) or "lengths" not in values:
        remedy = "of recorded responses: python -m fspo.audit FOLDER"
        raise ValueError(f"lengths= and one of sigma= and removed= are needed; {remedy}")
    for key, needed in (("minibatches", "removed"), ("accept", "sigma"), ("tis", "sigma")):
        if key in values and needed not in values:
            raise ValueError(f"{key}={values[key]}: stands beside {needed}= only; leave it out")
    bands = dict(LOSSES_SHOWN)
    for name in values.keys() & LOSSES_SHOWN.keys():
        pair = _listed(values[name], 2)
        if len(pair) != 2:
            raise ValueError(f"{name}={pair}: give one clip value, or a lower and an upper one")
        low, high = (_number(name, value, 0, 1e3) for value in pair)
        bands[name] = dataclasses.replace(bands[name], c_low=low, c_high=high)
    accept = _number("accept", values["accept"], 0, 1) if "accept" in values else None
    if (drift := values.get("drift", "kl")) not in ("kl", "none"):
        raise ValueError(f"drift={drift}: must be kl (the mean of S is -spread^2/2) or none (0)")
    lengths = _listed(values["lengths"], 1)
    if not lengths:
        raise ValueError("lengths=[]: give at least one length in tokens")
    known_lengths = [_number("lengths", length, 1 - 1e-9, 2**31) for length in lengths]
    exponent = _number("exponent", values.get("exponent", 0.5), -1e-9, 2)
    if "removed" in values:
        minibatches = math.inf  # every one counts
        if "minibatches" in values:
            minibatches = _number("minibatches", values["minibatches"], 0, 1e6)
            if minibatches < 2 or minibatches % 1:
                remedy = "the first removes nothing where pi_old is recomputed; leave it out where each counts"
                raise ValueError(f"minibatches={values['minibatches']}: must be an integer of at least 2; {remedy}")
        removed = _number("removed", values["removed"], 0, 1)
        return sigmas(removed, minibatches, known_lengths, bands, exponent, drift == "kl")
    sigma = _number("sigma", values["sigma"], 0, 10)
    shown = table(Responses.normal(sigma, known_lengths, exponent, drift=drift == "kl"), bands, accept)
    if "tis" in values:
        cap = _number("tis", values["tis"], 0, 1e6)
        shown += "\n\n" + weights(sigma, known_lengths, exponent, drift == "kl", cap)
    return shown
