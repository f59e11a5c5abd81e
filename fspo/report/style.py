"""One look for all figures: colour-blind safe, on light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fspo.files import atomic_path


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a background; ``groups`` are those of Okabe and Ito, lightened on dark."""

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
        "fspo_adaptive": "#b8860b",
        "fspo_quantile": "#b0508f",
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
        "fspo_adaptive": "#f0b93a",
        "fspo_quantile": "#e58cc4",
    },
    ("#d0b27c", "#a79bff", "#b9bec8", "#ef7f7f"),
)
THEMES: Final = (LIGHT, DARK)

_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True, slots=True)
class Look:
    """Colour and marker of one group: each tells groups apart on its own."""

    colour: str
    marker: str


def group_looks(algos: Sequence[str], theme: Theme) -> dict[str, Look]:
    """A look for each algorithm: its own where it has one, the next free colour otherwise."""
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
    """A figure outside pyplot's global state (usable from any thread, nothing to close)."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Figure, path: Path, dpi: int = 130) -> Path:
    """Write a PNG, complete or not at all."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=dpi)
    return path


def say_nothing_to_show(axes: Axes, theme: Theme, reason: str) -> None:
    """Say in an empty panel why it is empty."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, reason, ha="center", va="center", color=theme.muted, transform=axes.transAxes, wrap=True)
