"""Which clip fraction should I see? What each band clips at which length, from how far S spreads. Defined here.

Model: at length L, S is normal with standard deviation sd = sigma L**exponent and mean -sd**2 / 2. With this mean
E_old[exp S] = 1 holds, as it must where the responses were sampled from pi_old; with ``drift=none`` the mean is 0. With
``audit=FOLDER`` lengths, means and deviations are measured instead (:mod:`fspo.audit`).

``outside`` is the share of sequences with S outside the band, ``removed`` the share whose gradient the clip removes
where the sign of A does not depend on S: half of them. LRE: :func:`fspo.fairness.plain_lre` over the lengths, which are
equally frequent in the model.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from scipy.optimize import brentq  # type: ignore[import-untyped]
from scipy.stats import norm  # type: ignore[import-untyped]

from fspo.audit import LengthBins, read_audit
from fspo.fairness import Array, plain_lre
from fspo.losses import ALGORITHMS, acceptance_band
from fspo.markdown import markdown_table
from fspo.names import did_you_mean
from fspo.types import SequenceLossSettings

#: The bands by the names that a reader knows.
BANDS: Final = {"fspo": "fspo", "rloo": "seq_rloo", "gspo": "seq_gspo"}
USAGE: Final = """\
python -m fspo.expected_clip sigma=0.03 lengths=[1000,4000]   how far S spreads: nats per square root of a token
    exponent=0.5    of the length in the spread        drift=kl        mean of S -spread^2/2; none: 0
    audit=FOLDER    measured, in place of sigma, lengths, exponent, drift
    gspo=[3e-4,4e-4]  fspo=0.03  rloo=0.2              clip values, lower and upper or both alike
    accept=0.85     the clip value of each band for this share inside"""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of S at each length, [N] each; weight_N is how frequent the lengths are."""

    length_N: Array
    mean_N: Array
    std_N: Array
    weight_N: Array

    @classmethod
    def model(cls, sigma: float, lengths: Sequence[float], exponent: float = 0.5, drift: bool = True) -> Spread:
        """The model of this module."""
        length_N = np.asarray(lengths, dtype=np.float64)
        std_N = sigma * length_N**exponent
        return cls(length_N, -(std_N**2) / 2 * drift, std_N, np.ones_like(length_N))

    @classmethod
    def measured(cls, folder: Path) -> Spread:
        """From the mini-batches of an audit in which the policy had moved, in eight bins of equal mass.

        Raises:
            ValueError: if the folder has none, or is not whole.
        """
        records = read_audit(folder)
        parts = records.moved()
        if records.problems or not parts:
            raise ValueError(f"audit={folder}: {'; '.join(records.problems) or 'no mini-batch after a moved weight'}")
        bins = LengthBins.of_parts(parts)
        return cls(bins.mean("length"), bins.mean("S"), np.maximum(bins.spread(), 1e-12), bins.columns["count"])

    def outside(self, settings: SequenceLossSettings) -> tuple[Array, Array]:
        """Share of sequences below and above the band, [N] each."""
        length = torch.from_numpy(np.maximum(1, np.rint(self.length_N))).to(torch.int64)
        lower, upper = (edge.numpy() for edge in acceptance_band(length, settings, None, torch.float64))
        return norm.cdf(lower, self.mean_N, self.std_N), norm.sf(upper, self.mean_N, self.std_N)

    def accepted(self, settings: SequenceLossSettings) -> float:
        """Share inside the band over all lengths."""
        return 1 - float(np.average(sum(self.outside(settings)), weights=self.weight_N))

    def clip_for(self, settings: SequenceLossSettings, accept: float) -> float:
        """The clip value, the same on both sides, with which the band accepts this share.

        Raises:
            ValueError: if no value does.
        """
        largest = 0.999999 if settings.band in ("constant", "linear") else 1e3

        def excess(log_clip: float) -> float:
            clip = float(np.exp(log_clip))
            return self.accepted(dataclasses.replace(settings, clip_low=clip, clip_high=clip)) - accept

        low, high = np.log(1e-9), np.log(largest)
        if excess(low) > 0 or excess(high) < 0:
            raise ValueError(f"accept={accept}: band={settings.band} reaches it with no clip value; lower it")
        return float(np.exp(brentq(excess, low, high)))


def table(spread: Spread, settings: dict[str, SequenceLossSettings], accept: float | None = None) -> str:
    """One row for each band: clip values, share outside and removed by length, LRE."""
    heads = ["band", "clip values", *(f"outside, removed at L = {length:.0f}" for length in spread.length_N), "LRE"]
    heads += [] if accept is None else [f"clip value for {accept:.0%} inside"]
    rows = []
    for name, loss in settings.items():
        below, above = spread.outside(loss)
        cells = [f"{share:.1%}, {share / 2:.1%}" for share in below + above]
        lre = float(plain_lre((1 - below - above) * spread.weight_N, spread.weight_N)[0])
        row = [name, f"{loss.clip_low:g}, {loss.clip_high:g}", *cells, f"{lre:.3f}"]
        rows.append(row if accept is None else [*row, f"{spread.clip_for(loss, accept):.3g}"])
    return markdown_table(heads, rows)


def _number(name: str, low: float, high: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
            raise ValueError(f"{name}={value}: must be a number between {low:g} and {high:g}")
        return float(value)

    return read


def _drift(value: object) -> bool:
    if value not in ("kl", "none"):
        raise ValueError(f"drift={value}: must be kl (the mean of S is -spread^2/2) or none (0)")
    return value == "kl"


def _parse(words: Sequence[str]) -> tuple[Spread, dict[str, SequenceLossSettings], float | None]:
    known = ("sigma", "lengths", "exponent", "drift", "audit", "accept", *BANDS)
    values: dict[str, object] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in known:
            raise ValueError(f"{word}: not one of {', '.join(known)} with a value{did_you_mean(key, known)}")
        try:
            values[key] = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            values[key] = text
    settings = {}
    for name, loss in BANDS.items():
        pair = values.get(name, [ALGORITHMS[loss].clip_low, ALGORITHMS[loss].clip_high])
        pair = pair if isinstance(pair, list) else [pair, pair]
        if len(pair) != 2:
            raise ValueError(f"{name}={pair}: give one clip value, or a lower and an upper one")
        low, high = pair
        read = _number(name, 0, 1e3)
        settings[name] = dataclasses.replace(ALGORITHMS[loss], clip_low=read(low), clip_high=read(high))
    accept = _number("accept", 0, 1)(values["accept"]) if "accept" in values else None
    if "audit" in values:
        if idle := [key for key in ("sigma", "lengths", "exponent", "drift") if key in values]:
            raise ValueError(f"{idle[0]}={values[idle[0]]} has no effect beside audit=; leave one of them out")
        return Spread.measured(Path(str(values["audit"]))), settings, accept
    if "sigma" not in values or "lengths" not in values:
        raise ValueError("sigma= and lengths= are needed, or audit=FOLDER")
    lengths = values["lengths"] if isinstance(values["lengths"], list) else [values["lengths"]]
    if not lengths:
        raise ValueError("lengths=[]: give at least one length in tokens")
    spread = Spread.model(
        _number("sigma", 0, 10)(values["sigma"]),
        [_number("lengths", 0, 2**31)(length) for length in lengths],
        _number("exponent", 0, 2)(values.get("exponent", 0.5)),
        drift=_drift(values.get("drift", "kl")),
    )
    return spread, settings, accept


def main(words: Sequence[str]) -> int:
    """``python -m fspo.expected_clip``; status 2 for a wrong call."""
    try:
        print(table(*_parse(words)))
    except ValueError as error:
        print(f"error: {error}\n{USAGE}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
