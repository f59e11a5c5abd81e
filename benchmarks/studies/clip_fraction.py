"""What an audit of some runs says of the clip fraction of another one; docs/clip-fraction.md.

Each run of a setting is held against what :mod:`fspo.expected_clip` expects from the sums of the setting's other runs:
from their histograms, and from a normal distribution with their means and spreads by length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.pages import Table, opened
from fspo.audit import LIVE_COLUMNS, LengthBins, live_metrics
from fspo.expected_clip import BANDS, Measured, Normal, Spread, accepted, clip_for
from fspo.fairness import plain_lre
from fspo.fairness.bootstrap import mean_interval
from fspo.losses import ALGORITHMS, judged
from fspo.records import MiniBatches, read_sequences
from fspo.report.tables import show_interval
from fspo.sums import SequenceSums
from fspo.types import SequenceLossSettings

#: The archive of each setting, and the runs in it: all with FSPO's band, so that S is that of its training.
SETTINGS: Final = {
    "demo": ("records", "default/fspo"),
    "demo, 7 x learning rate": ("clipping", "comparison-4/matched_active/fspo"),
    "words": ("words", "default/fspo"),
    "SmolLM2-135M": ("pretrained", "default/fspo"),
}
ACCEPT: Final = 0.85


def _sums(run: MiniBatches, settings: SequenceLossSettings) -> SequenceSums:
    s, length, advantage = (torch.from_numpy(np.concatenate(column)) for column in (run.s, run.length, run.advantage))
    return SequenceSums.zeros().add_(judged(s, length.long(), advantage, settings))


def _expected(spread: Spread, settings: SequenceLossSettings) -> tuple[float, float]:
    share_N = 1 - sum(spread.outside(settings))
    lre = plain_lre(share_N * spread.weight_N, spread.weight_N)[0]
    return 1 - accepted(spread, settings), float(lre)


def _rows(name: str, runs: list[MiniBatches]) -> Iterator[list[str]]:
    spreads = []  # for each run, from the others
    parts = [_sums(run, ALGORITHMS["fspo"]) for run in runs]  # lengths, S and histograms are the same under any rule
    for index in range(len(runs)):
        others = parts[:index] + parts[index + 1 :]
        bins = LengthBins.of_parts(others)
        normal = Normal(bins.mean("length"), bins.mean("S"), bins.spread(), bins.columns["count"])
        spreads.append((Measured(others), normal))
    for band, loss in BANDS.items():
        columns: list[list[float]] = []
        for run, (histograms, normal) in zip(runs, spreads, strict=True):
            clip = clip_for(histograms, ALGORITHMS[loss], ACCEPT)
            settings = dataclasses.replace(ALGORITHMS[loss], clip_low=clip, clip_high=clip)
            sums = _sums(run, settings)
            measured = live_metrics({column: sums.column(column).numpy() for column in LIVE_COLUMNS})
            outside, lre = _expected(histograms, settings)
            shares = [1 - measured["accept_rate"], outside, _expected(normal, settings)[0]]
            columns.append([clip, *shares, measured["removed"], outside / 2, measured["lre"], lre])
        clip, *values = np.array(columns).T
        measured, expected, gaussian, removed, half, lre, lre_expected = values
        yield [
            *(name, band, f"{clip.mean():.3g}", f"{measured.mean():.3f}", f"{expected.mean():.3f}"),
            *(show_interval(mean_interval(list(measured - expected)), "{:+.3f}"), f"{gaussian.mean():.3f}"),
            *(f"{removed.mean():.3f}", f"{half.mean():.3f}", f"{lre.mean():.3f}", f"{lre_expected.mean():.3f}"),
        ]


def table(folder: Path) -> Table:
    """The table, from the folder of the studies' archives."""
    rows = [["setting", "band", "clip value", "outside", "expected", "difference", "normal"]]
    rows[0] += ["removed", "expected removed", "LRE", "expected LRE"]
    for name, (archive, place) in SETTINGS.items():
        with opened(folder / f"{archive}.tar.xz") as records:
            runs = [run for path in sorted((records / place).glob("seed*")) if (run := read_sequences(path))]
        rows += list(_rows(name, runs))
    return rows
