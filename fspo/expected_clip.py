"""Which clip fraction should I see? What each band clips at which length, from how far S spreads. Defined here.

Model: at length L, S is normal with standard deviation sd = sigma L**exponent and mean -sd**2 / 2. With this mean
E_old[exp S] = 1 holds, as it must where the responses were sampled from pi_old; with ``drift=none`` the mean is 0. With
``audit=FOLDER`` the distribution of S by length is measured instead (:mod:`fspo.audit`), tails included.

``outside`` is the share of sequences with S outside the band, ``removed`` the share whose gradient the clip removes
where the sign of A does not depend on S: half of them. LRE: :func:`fspo.fairness.lre.plain_lre` over the lengths,
which are equally frequent in the model.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from scipy.optimize import brentq  # type: ignore[import-untyped]
from scipy.stats import norm  # type: ignore[import-untyped]

from fspo.audit import LengthBins, read_audit
from fspo.calibration import drift_per_token
from fspo.diagnostics import band_edges
from fspo.fairness.lre import Array, merge_bins, plain_lre
from fspo.files import piped
from fspo.losses import ALGORITHMS, BANDS, LOSSES
from fspo.markdown import markdown_table
from fspo.names import did_you_mean
from fspo.sums import Z_EDGES, SequenceSums
from fspo.types import BandState, SequenceLossSettings

#: The losses of the table: all whose clip value can be measured, of those that share a band the first.
_ROWS: Final = {
    loss.algo: name for name, loss in LOSSES.items() if name in BANDS.values() or loss.settings.drift == "kl"
}
USAGE: Final = """\
python -m fspo.expected_clip sigma=0.03 lengths=[1000,4000]   how far S spreads: nats per square root of a token
    exponent=0.5    of the length in the spread        drift=kl        mean of S -spread^2/2; none: 0
    audit=FOLDER    measured, in place of sigma, lengths, exponent, drift
    gspo=[3e-4,4e-4]  fspo=0.03  fspo_v1=0.03  rloo=0.2   clip values in nats per token**exponent, lower and upper or
                    both alike (rloo and gspo: -log(1 - eps), log(1 + eps))
    accept=0.85     the clip value of each band for this share inside"""


@dataclasses.dataclass(frozen=True)
class Normal:
    """The model of this module: mean and deviation of S at each of N lengths; weight_N is how frequent they are."""

    length_N: Array
    mean_N: Array
    std_N: Array
    weight_N: Array

    @classmethod
    def of(cls, sigma: float, lengths: Sequence[float], exponent: float = 0.5, drift: bool = True) -> Normal:
        """The lengths are equally frequent."""
        length_N = np.asarray(lengths, dtype=np.float64)
        std_N = sigma * length_N**exponent
        return cls(length_N, -(std_N**2) / 2 * drift, std_N, np.ones_like(length_N))

    def outside(self, settings: SequenceLossSettings) -> tuple[Array, Array]:
        """Share of sequences below and above the band, [N] each; one about the drift has it as measured over all."""
        drift = max(0.0, -float(np.average(self.mean_N, weights=self.weight_N)))
        kl = drift / float(np.average(self.length_N, weights=self.weight_N))
        lower, upper = band_edges(self.length_N, settings, BandState(drift_per_token=kl))
        return norm.cdf(lower, self.mean_N, self.std_N), norm.sf(upper, self.mean_N, self.std_N)


class Measured:
    """The histograms of S / sqrt(L) of recorded sums, in eight length bins of equal mass; linear within a cell."""

    def __init__(self, parts: Sequence[SequenceSums]) -> None:
        whole = sum(parts, SequenceSums.zeros())
        self._bins = LengthBins.of(whole)
        self.length_N, self.weight_N = self._bins.mean("length"), self._bins.columns["count"]
        self._length_K = (whole.column("length") / whole.column("count").clamp(min=1)).numpy()
        self._kl = drift_per_token(whole.total("S"), whole.total("length"))
        self._below_KH = whole.hist_KH.numpy().cumsum(axis=1)  # sequences up to the upper edge of each cell

    @classmethod
    def audit(cls, folder: Path) -> Measured:
        """From the mini-batches of an audit in which the policy had moved.

        Raises:
            ValueError: if the folder has none, or is not whole.
        """
        records = read_audit(folder)
        parts = records.moved()
        if not sum(part.total("count") for part in parts):
            records.problems.append("no response in a mini-batch after a moved weight")
        if records.problems:
            raise ValueError(f"audit={folder}: {'; '.join(records.problems)}")
        for note in records.notes():
            print(f"note: audit={folder}: {note}", file=sys.stderr)
        return cls(parts)

    def outside(self, settings: SequenceLossSettings) -> tuple[Array, Array]:
        """Share of sequences below and above the band, [N] each; one about the drift has it as measured over all."""
        state = BandState(drift_per_token=self._kl)
        z_edges, root_K = Z_EDGES[1:-1].numpy(), np.sqrt(np.maximum(self._length_K, 1))
        lower_K, upper_K = (
            np.array([np.interp(z, z_edges, row[:-1]) for z, row in zip(edge_K / root_K, self._below_KH, strict=True)])
            for edge_K in band_edges(self._length_K, settings, state)
        )
        below_N, above_N = (
            merge_bins(count_K, self._bins.starts) / self.weight_N
            for count_K in (lower_K, self._below_KH[:, -1] - upper_K)
        )
        return below_N, above_N


Spread = Normal | Measured


def accepted(spread: Spread, settings: SequenceLossSettings) -> float:
    """Share inside the band over all lengths."""
    return 1 - float(np.average(sum(spread.outside(settings)), weights=spread.weight_N))


def clip_for(spread: Spread, settings: SequenceLossSettings, accept: float) -> float | None:
    """The clip value, the same on both sides, with which the band accepts this share; None if no value does."""

    def excess(log_clip: float) -> float:
        clip = float(np.exp(log_clip))
        return accepted(spread, dataclasses.replace(settings, c_low=clip, c_high=clip)) - accept

    low, high = np.log(1e-9), np.log(1e3)
    if excess(low) > 0 or excess(high) < 0:
        return None
    return float(np.exp(brentq(excess, low, high)))


def table(spread: Spread, settings: dict[str, SequenceLossSettings], accept: float | None = None) -> str:
    """One row for each band: clip values, share outside and removed by length, LRE."""
    heads = [
        "band",
        "clip values, nats",
        *(f"outside, removed at L = {length:.0f}" for length in spread.length_N),
        "LRE",
    ]
    heads += [] if accept is None else [f"clip value for {accept:.0%} inside"]
    rows = []
    for name, loss in settings.items():
        below, above = spread.outside(loss)
        cells = [f"{share:.1%}, {share / 2:.1%}" for share in below + above]
        lre = float(plain_lre((1 - below - above) * spread.weight_N, spread.weight_N)[0])
        row = [
            name,
            f"{loss.c_low:g}, {loss.c_high:g}",
            *cells,
            f"{lre:.3f}" if len(spread.length_N) > 1 else "-",
        ]
        if accept is not None:
            clip = clip_for(spread, loss, accept)
            row.append("none" if clip is None else f"{clip:.3g}")
        rows.append(row)
    return markdown_table(heads, rows)


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
        raise ValueError(f"{name}={value}: must be a number between {low:g} and {high:g}")
    return float(value)


def _parse(words: Sequence[str]) -> tuple[Spread, dict[str, SequenceLossSettings], float | None]:
    known = ("sigma", "lengths", "exponent", "drift", "audit", "accept", *_ROWS)
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
    settings = {}
    for name, loss in _ROWS.items():
        pair = values.get(name, [ALGORITHMS[loss].c_low, ALGORITHMS[loss].c_high])
        pair = pair if isinstance(pair, list) else [pair, pair]
        if len(pair) != 2:
            raise ValueError(f"{name}={pair}: give one clip value, or a lower and an upper one")
        low, high = (_number(name, value, 0, 1e3) for value in pair)
        settings[name] = dataclasses.replace(ALGORITHMS[loss], c_low=low, c_high=high)
    accept = _number("accept", values["accept"], 0, 1) if "accept" in values else None
    if "audit" in values:
        if idle := [key for key in ("sigma", "lengths", "exponent", "drift") if key in values]:
            raise ValueError(f"{idle[0]}={values[idle[0]]} has no effect beside audit=; leave one of them out")
        return Measured.audit(Path(str(values["audit"]))), settings, accept
    if "sigma" not in values or "lengths" not in values:
        raise ValueError("sigma= and lengths= are needed, or audit=FOLDER")
    if (drift := values.get("drift", "kl")) not in ("kl", "none"):
        raise ValueError(f"drift={drift}: must be kl (the mean of S is -spread^2/2) or none (0)")
    lengths = values["lengths"] if isinstance(values["lengths"], list) else [values["lengths"]]
    if not lengths:
        raise ValueError("lengths=[]: give at least one length in tokens")
    spread = Normal.of(
        _number("sigma", values["sigma"], 0, 10),
        [_number("lengths", length, 1 - 1e-9, 2**31) for length in lengths],
        _number("exponent", values.get("exponent", 0.5), 0, 2),
        drift=drift == "kl",
    )
    return spread, settings, accept


def main(words: Sequence[str]) -> int:
    """``python -m fspo.expected_clip``; status 2 for a wrong call."""
    if words in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    try:
        print(table(*_parse(words)))
    except ValueError as error:
        print(f"error: {error}\n{USAGE}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(piped(lambda: main(sys.argv[1:])))
