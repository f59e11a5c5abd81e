"""The look of all figures, colour-blind safe; and the pieces that they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from fspo.fairness import LengthReweightingError
from fspo.files import atomic_path
from fspo.report.groups import LengthProfile
from fspo.report.runs import Array

MUTED: Final = "#5b6475"
_TEXT: Final = "#1c2230"
_GRID: Final = "#e3e6ec"
#: The palette of Okabe and Ito; any other algorithm gets the next of the rest.
_COLOURS: Final = {
    "fspo": "#0072b2",
    "rloo": "#d55e00",
    "gspo": "#009e73",
    "fspo_v1": "#56b4e9",
    "fspo_quantile": "#b0508f",
    "fspo_active": "#5c8a00",
}
_OTHERS: Final = ("#8a6d3b", "#6b5bd2", "#7a7f87", "#a33c3c", "#b8860b")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
_SETTINGS: Final[Any] = {
    "text.color": _TEXT,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": _TEXT,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.edgecolor": _GRID,
    "grid.color": _GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.9,
    "font.size": 10,
    "axes.xmargin": 0.03,
}
_SMOOTH_FROM: Final = 20
"""Series with at least this many points are drawn as a running mean."""


@dataclass(frozen=True, slots=True)
class Look:
    """Colour and marker of one group; either one is enough to tell the groups apart."""

    colour: str
    marker: str


def group_looks(algos: Sequence[str]) -> dict[str, Look]:
    """A look for each algorithm: its own colour where it has one, otherwise the next free one."""
    looks: dict[str, Look] = {}
    spare = 0
    for algo in dict.fromkeys(algos):
        # A seq_ prefix names the loss behind the algorithm's config key.
        colour = _COLOURS.get(algo.removeprefix("seq_"))
        if colour is None:
            colour, spare = _OTHERS[spare % len(_OTHERS)], spare + 1
        looks[algo] = Look(colour, _MARKERS[len(looks) % len(_MARKERS)])
    return looks


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib's settings for figures made inside the block."""
    with matplotlib.rc_context(_SETTINGS):
        yield


def new_figure(width: float, height: float) -> Figure:
    """A figure outside pyplot's global state: it can be made in any thread and need not be closed."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Figure, path: Path, dpi: int = 130) -> Path:
    """Write a PNG, complete or not at all."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=dpi)
    return path


def say_nothing_to_show(axes: Axes, reason: str) -> None:
    """Write into an empty panel why it is empty."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, reason, ha="center", va="center", color=MUTED, transform=axes.transAxes, wrap=True)


def smoothed(values: Array) -> Array:
    """A short series as it is; of a long one a centred running mean, near the ends over the part that exists."""
    if len(values) < _SMOOTH_FROM:
        return values
    kernel = np.ones(max(3, len(values) // 12))
    return np.asarray(np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same"))


def whole_steps(axes: Axes) -> None:
    """Label the x axis as training steps, in whole numbers."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def few_ticks(axes: Axes) -> None:
    """At most five values on the y axis, round ones."""
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))


def error_bars(values: Array, low: Array, high: Array) -> Array:
    """Lengths of error bars, down and up. An end that should be the value itself may miss it by rounding."""
    return np.abs(np.stack([values - low, high - values]))


def draw_clip_rate(axes: Axes, profile: LengthProfile, look: Look, label: str) -> None:
    """Draw the clip rate against length with its 95% intervals."""
    error = profile.error
    seen = ~np.isnan(error.rate_K) & ~np.isnan(profile.length_K)
    clip, low, high = (1 - rate_K[seen] for rate_K in (error.rate_K, error.rate_high_K, error.rate_low_K))
    axes.errorbar(
        profile.length_K[seen], clip, yerr=error_bars(clip, low, high), color=look.colour, marker=look.marker, ms=5,
        elinewidth=1.1, lw=1.6, label=label,
    )  # fmt: skip
    axes.set_xscale("log")
    length_axis(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    few_ticks(axes)


def lre_note(error: LengthReweightingError) -> str:
    """The debiased LRE with its interval."""
    if not np.isfinite(error.lre):
        return "LRE undefined, nothing accepted"
    return f"LRE {error.debiased.value:.3f} [{error.debiased.low:.3f}, {error.debiased.high:.3f}]"


def length_axis(axes: Axes) -> None:
    """Label a logarithmic axis of lengths with plain numbers."""
    axes.set_xlabel("response length (tokens)")
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else ""))
