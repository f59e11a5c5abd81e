"""Which clip fraction should I see? The shares that each band clips, by length, before any response is sampled.

The model, defined here: at length L, S is normal with standard deviation s = sigma sqrt(L) and mean -s^2 / 2, with
which E_old[exp S] = 1 holds. ``outside`` is the share with S outside the band, and ``removed`` the share whose gradient
the clip removes: half of ``outside``, because the sign of A does not depend on S in this model.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from scipy.special import ndtr  # type: ignore[import-untyped]

from fspo.fairness.lre import Array, plain_lre
from fspo.losses import ALGORITHMS, BANDS
from fspo.markdown import markdown_table
from fspo.types import SequenceLossSettings

USAGE: Final = """\
python -m fspo.audit expected sigma=0.03 lengths=[1000,4000]   what each band clips; sigma: std of S / sqrt(L), nats
python -m fspo.audit expected removed=0.15 minibatches=4 lengths=[4000]   the sigma at which a band removes so much
    removed: share of the gradients, as pg_clipfrac has it; minibatches: of a rollout batch, the first of which
    removes nothing where pi_old is recomputed; leave it out where every mini-batch counts (pi_old is the engine's)"""
_KNOWN: Final = ("sigma", "removed", "minibatches", "lengths")
#: The sigmas tried: two digits are given.
_SIGMAS: Final = np.geomspace(1e-7, 10, 2000)


def shares_outside(sigma: float, lengths: Sequence[float], settings: SequenceLossSettings) -> Array:
    """Share of the responses of each length whose S is outside the band.

    With mean m, deviation s and the normal distribution Phi it is Phi((lower - m) / s) + Phi((m - upper) / s).

    Args:
        sigma: nats per square root of a token.
        lengths: L of each group, tokens.
        settings: Of the loss; its drift, if any, is taken as measured.
    """
    length_N = np.asarray(lengths, dtype=np.float64)
    spread_N, half_N = sigma * np.sqrt(length_N), length_N**settings.exponent
    mean_N = -(spread_N**2) / 2
    centre_N = mean_N if settings.drift == "kl" else 0.0
    below_N = ndtr((centre_N - settings.c_low * half_N - mean_N) / spread_N)
    return np.asarray(below_N + ndtr((mean_N - centre_N - settings.c_high * half_N) / spread_N))


def _clip_values(settings: SequenceLossSettings) -> str:
    return f"{settings.c_low:.3g}, {settings.c_high:.3g}"


def _table(sigma: float, lengths: Sequence[float]) -> str:
    """One row for each named band: clip values, share outside and removed by length, LRE."""
    heads = ["band", "c_low, c_high", *(f"outside, removed at L = {length:.0f}" for length in lengths), "LRE"]
    rows = []
    for name, loss in BANDS.items():
        outside_N = shares_outside(sigma, lengths, ALGORITHMS[loss])
        lre = f"{plain_lre(1 - outside_N, np.ones_like(outside_N)):.3f}" if len(lengths) > 1 else "-"
        shares = [f"{share:.1%}, {share / 2:.1%}" for share in outside_N.tolist()]
        rows.append([name, _clip_values(ALGORITHMS[loss]), *shares, lre])
    return markdown_table(heads, rows)


def _sigmas(removed: float, minibatches: float, lengths: Sequence[float]) -> str:
    """One row for each named band: the sigma behind a share of removed gradients over all mini-batches of a batch."""
    moved = removed / (1 - 1 / minibatches)
    if moved >= 0.5:
        limit = f"a clip removes at most {0.5 * (1 - 1 / minibatches):.1%} where the sign of A does not follow S"
        cause = "the first mini-batch is not on policy, or S follows A"
        raise ValueError(f"removed={removed:g}: {limit}, so {cause}; audit the run (python -m fspo.audit FOLDER)")
    says = f"{removed:.1%} removed"
    if moved > removed:
        says += f" over all mini-batches, {moved:.1%} of those after the first"
    rows = []
    for name, loss in BANDS.items():
        shares = np.array([shares_outside(sigma, lengths, ALGORITHMS[loss]).mean() / 2 for sigma in _SIGMAS])
        first = int((shares >= moved).argmax()) if (shares >= moved).any() else int(shares.argmax())
        value = f"{_SIGMAS[first]:.2g}"
        if shares[first] < moved:
            value = f"none up to {_SIGMAS[-1]:g}: at most {shares[first]:.1%}, at {value}"
        rows.append([name, _clip_values(ALGORITHMS[loss]), value])
    return f"{says}\n\n{markdown_table(['band', 'c_low, c_high', 'sigma'], rows)}"


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
        raise ValueError(f"{name}={value}: must be a number between {low:g} and {high:g}")
    return float(value)


def expected(words: Sequence[str]) -> str:
    """The table that ``KEY=VALUE`` words ask for (:data:`USAGE`).

    Raises:
        ValueError: For a word that is none, or a value out of range; the message names key, value and remedy.
    """
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in _KNOWN:
            raise ValueError(f"{word}: not one of {', '.join(_KNOWN)} with a value")
        try:
            values[key] = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            values[key] = text
    if ("sigma" in values) == ("removed" in values) or values.get("lengths", ()) == ():
        remedy = "of recorded responses: python -m fspo.audit FOLDER"
        raise ValueError(f"lengths= and one of sigma= and removed= are needed; {remedy}")
    listed = values["lengths"] if isinstance(values["lengths"], list | tuple) else [values["lengths"]]
    lengths = [_number("lengths", length, 1 - 1e-9, 2**31) for length in listed]
    if not lengths:
        raise ValueError("lengths=[]: give at least one length in tokens")
    minibatches = values.get("minibatches", math.inf)  # without: every one counts
    if "minibatches" in values and (_number("minibatches", minibatches, 1, 1e6) % 1 or "removed" not in values):
        raise ValueError(f"minibatches={minibatches}: an integer of at least 2, beside removed=")
    if "sigma" in values:
        return _table(_number("sigma", values["sigma"], 0, 10), lengths)
    return _sigmas(_number("removed", values["removed"], 0, 1), minibatches, lengths)
