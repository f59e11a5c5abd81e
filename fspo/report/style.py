"""The look of all figures, colour-blind safe, on light and dark backgrounds; and the pieces that they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from fspo.fairness import LengthReweightingError
from fspo.files import atomic_path
from fspo.report.groups import LengthProfile
from fspo.report.runs import Array


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours for one background; ``groups`` has the palette of Okabe and Ito, lighter on the dark one."""

    name: str
    page: str
    text: str
    muted: str
    grid: str
    groups: dict[str, str]
    others: tuple[str, ...]


LIGHT: Final = Theme(
    "light",
    "#ffffff",
    "#1c2230",
    "#5b6475",
    "#e3e6ec",
    {
        "fspo": "#0072b2",
        "rloo": "#d55e00",
        "gspo": "#009e73",
        "fspo_v1": "#56b4e9",
        "fspo_quantile": "#b0508f",
        "fspo_active": "#5c8a00",
    },
    ("#8a6d3b", "#6b5bd2", "#7a7f87", "#a33c3c"),
)
DARK: Final = Theme(
    "dark",
    "#14171d",
    "#e8eaf0",
    "#a2a9b8",
    "#2c323d",
    {
        "fspo": "#4fb0ee",
        "rloo": "#ff8a3d",
        "gspo": "#2fd1a0",
        "fspo_v1": "#9fd8ff",
        "fspo_quantile": "#e58cc4",
        "fspo_active": "#b5d94c",
    },
    ("#d0b27c", "#a79bff", "#b9bec8", "#ef7f7f"),
)
THEMES: Final = (LIGHT, DARK)

_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")

_SMOOTH_FROM: Final = 20
"""Series with at least this many points are drawn as a running mean, over a pale line of the values themselves."""


@dataclass(frozen=True, slots=True)
class Look:
    """Colour and marker of one group; either one is enough to tell the groups apart."""

    colour: str
    marker: str


def group_looks(algos: Sequence[str], theme: Theme) -> dict[str, Look]:
    """A look for each algorithm: its own colour where it has one, otherwise the next free one."""
    looks: dict[str, Look] = {}
    spare = 0
    for algo in algos:
        if algo in looks:
            continue
        # A seq_ prefix names the loss behind the algorithm's config key.
        colour = theme.groups.get(algo.removeprefix("seq_"))
        if colour is None:
            colour = theme.others[spare % len(theme.others)]
            spare += 1
        looks[algo] = Look(colour, _MARKERS[len(looks) % len(_MARKERS)])
    return looks


@contextmanager
def themed(theme: Theme) -> Iterator[None]:
    """Matplotlib settings of a theme for figures made inside the block."""
    settings: Any = {
        "figure.facecolor": theme.page,
        "axes.facecolor": theme.page,
        "savefig.facecolor": theme.page,
        "text.color": theme.text,
        "axes.labelcolor": theme.muted,
        "axes.titlecolor": theme.text,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "axes.edgecolor": theme.grid,
        "grid.color": theme.grid,
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
        "axes.labelsize": 9.5,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "ytick.major.size": 0,
        "xtick.major.size": 3,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.9,
        "lines.solid_capstyle": "round",
        "font.size": 10,
        "axes.xmargin": 0.03,
    }
    with matplotlib.rc_context(settings):
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


def say_nothing_to_show(axes: Axes, theme: Theme, reason: str) -> None:
    """Write into an empty panel why it is empty."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, reason, ha="center", va="center", color=theme.muted, transform=axes.transAxes, wrap=True)


def draw_smoothed(
    axes: Axes, steps: npt.NDArray[np.int64], values: Array, colour: str, label: str | None = None, **line: Any
) -> bool:
    """Draw a series over steps; returns False, and draws nothing, if it is empty."""
    if len(steps) == 0:
        return False
    if len(steps) < _SMOOTH_FROM:
        axes.plot(steps, values, color=colour, label=label, marker="o" if len(steps) == 1 else None, **line)
        return True
    axes.plot(steps, values, color=colour, alpha=0.25, lw=1)
    axes.plot(steps, smoothed(values), color=colour, label=label, **line)
    return True


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


def draw_length_profile(axes: Axes, profile: LengthProfile, look: Look, theme: Theme) -> None:
    """Draw the clip rate against length with its confidence band, the overall rate and the LRE."""
    x, low, high = draw_clip_rate(axes, profile, look)
    axes.fill_between(x, low, high, color=look.colour, alpha=0.18, lw=0)
    axes.axhline(1 - profile.error.rate, color=theme.muted, lw=1, ls=(0, (4, 3)), zorder=1)
    axes.set_ylim(0, max(0.05, float(np.nanmax(high)) * 1.25))
    axes.text(0.02, 0.97, lre_note(profile.error), transform=axes.transAxes, va="top", fontsize=9)


def error_bars(values: Array, low: Array, high: Array) -> Array:
    """Lengths of error bars, down and up. An end that should be the value itself may miss it by rounding."""
    return np.abs(np.stack([values - low, high - values]))


def draw_clip_rate(
    axes: Axes, profile: LengthProfile, look: Look, label: str | None = None
) -> tuple[Array, Array, Array]:
    """Draw the clip rate against length with its 95% intervals; returns the lengths and the intervals' ends."""
    error = profile.error
    seen = ~np.isnan(error.rate_K) & ~np.isnan(profile.length_K)
    x, clip = profile.length_K[seen], 1 - error.rate_K[seen]
    low, high = 1 - error.rate_high_K[seen], 1 - error.rate_low_K[seen]
    axes.errorbar(
        x, clip, yerr=error_bars(clip, low, high), color=look.colour, marker=look.marker, ms=5,
        elinewidth=1.1, lw=1.6, label=label,
    )  # fmt: skip
    axes.set_xscale("log")
    length_axis(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    return x, low, high


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
