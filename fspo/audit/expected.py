"""Which clip fraction should I see? The shares that each band clips, by length, before any response is sampled.

The model, defined here: at length L, S is normal with standard deviation s = sigma sqrt(L) and mean -s^2 / 2, with
which E_old[exp S] = 1 holds. ``outside`` is the share with S outside the band, and ``removed`` the share whose gradient
the clip removes: half of ``outside``, because the sign of A does not depend on S in this model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy.special import ndtr  # type: ignore[import-untyped]

from fspo.fairness.lre import Array, plain_lre
from fspo.losses import ALGORITHMS, BANDS
from fspo.markdown import markdown_table
from fspo.types import SequenceLossSettings

USAGE: Final = """\
python -m fspo.audit expected sigma=0.03 'lengths=[1000,4000]'   what each band clips; sigma: std of S / sqrt(L), nats
python -m fspo.audit expected removed=0.15 minibatches=4 'lengths=[4000]'   the sigma at which a band removes so much
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
        rows.append([name, _clip_values(ALGORITHMS[loss]), f"{_SIGMAS[(shares >= moved).argmax()]:.2g}"])
    return f"{says}\n\n{markdown_table(['band', 'c_low, c_high', 'sigma'], rows)}"


def _numbers(words: Sequence[str]) -> dict[str, list[float]]:
    numbers = {}
    for word in words:
        key, _, text = word.partition("=")
        try:
            numbers[key] = [float(number) for number in text.strip("[]").split(",")]
        except ValueError:
            numbers[key] = [math.nan]
        several = len(numbers[key]) > 1 and key != "lengths"
        if several or key not in _KNOWN or not all(0 < number < math.inf for number in numbers[key]):
            raise ValueError(f"{word}: not one of {', '.join(_KNOWN)} with a number above 0")
    return numbers


def expected(words: Sequence[str]) -> str:
    """The table that ``KEY=VALUE`` words ask for (:data:`USAGE`).

    Raises:
        ValueError: For a word that is none, or a value out of range; the message names key, value and remedy.
    """
    numbers = _numbers(words)
    if ("sigma" in numbers) == ("removed" in numbers) or "lengths" not in numbers:
        remedy = "of recorded responses: python -m fspo.audit FOLDER"
        raise ValueError(f"lengths= and one of sigma= and removed= are needed; {remedy}")
    minibatches = numbers.get("minibatches", [math.inf])[0]  # without: every one counts
    if "minibatches" in numbers and (minibatches < 2 or "removed" not in numbers):
        raise ValueError(f"minibatches={minibatches:g}: at least 2, beside removed=")
    if "sigma" in numbers:
        return _table(numbers["sigma"][0], numbers["lengths"])
    return _sigmas(numbers["removed"][0], minibatches, numbers["lengths"])
