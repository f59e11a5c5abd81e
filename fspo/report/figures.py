"""The figures of a report: what clips do by length, and curves over steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter

from fspo.conclusion import in_view
from fspo.fairness.lre import Array, LengthReweightingError
from fspo.report.compare import REWARDS
from fspo.report.runs import Group

#: For :func:`matplotlib.style.context`, around everything that draws.
STYLE: Final[Any] = [
    "seaborn-v0_8-whitegrid",
    {
        **{f"axes.spines.{side}": False for side in ("left", "right", "top")},
        **{"axes.grid.axis": "y", "axes.titlelocation": "left", "axes.titlesize": 11, "axes.titleweight": "bold"},
        **{f"figure.constrained_layout.{side}_pad": 0.08 for side in "hw"},
        **{"grid.color": "0.9", "legend.fontsize": 9.5, "savefig.dpi": 160},
        "text.parse_math": False,  # names come from the records
    },
]
#: The colour of a loss in every figure: the palette of Okabe and Ito, and some that go with it.
COLOURS: Final = {
    "fspo": "#0072b2",
    "rloo": "#d55e00",
    "gspo": "#009e73",
    "fspo_v1": "#56b4e9",
    "luspo": "#5c8a00",
    "grpo": "#8a6d3b",
    "unclipped": "#6b5bd2",
}
#: Series with at least this many points get the line of a running mean.
_SMOOTH_FROM: Final = 20

Look = dict[str, Any]
"""Colour, marker and line of one algorithm; colour or marker alone tells algorithms apart."""
Profile = tuple[Array, LengthReweightingError]
"""Mean length of each bin, and rates, LRE and intervals."""


def algo_looks(algos: Sequence[str]) -> dict[str, Look]:
    """A look for each algorithm: that of its loss; other names take those of the losses that are not among them."""
    places = {algo: place for place, algo in enumerate(COLOURS)}
    free = itertools.cycle([place for algo, place in places.items() if algo not in algos] or places.values())
    looks = {}
    for algo in algos:
        place = places[algo] if algo in places else next(free)
        line = ("-", "--", "-.", ":")[place % 4]
        looks[algo] = {"color": [*COLOURS.values()][place], "marker": "os^DvPX"[place], "linestyle": line}
    return looks


def figures(groups: Sequence[Group]) -> Iterator[tuple[str, Figure]]:
    """All figures of a report with their names, for :data:`STYLE`."""
    looks = algo_looks([group.name for group in groups])
    for view, title in {"outside": "outside the band", "removed": "without gradient"}.items():
        profiles = {}
        for group in groups:
            if (error := group.error(view)) is not None:
                counted = in_view(group.responses, view)
                profiles[group.name] = (counted.means(counted.length_B)[0], error)
        if profiles:
            figure, axes = _figure(4.4)
            axes.set_title(f"Share {title}, by length")
            draw_clip_by_length(axes, profiles, looks)
            yield view, figure
    held_out = dict.fromkeys(name for group in groups for run in group.runs for name in run.validation_metrics())
    for title, *names in (
        ("Reward in training", *REWARDS),
        *((f"Held-out {name.removeprefix('val-core/')}", name) for name in held_out),
        ("Mean response length (tokens)", "response_length/mean"),
        ("Share outside the band", "fspo/clip_frac"),
        ("LRE over a window of steps", "fspo/lre_debiased"),
    ):
        figure, axes = _figure(3.3)
        if draw_curve(axes, groups, title, names, looks):
            yield title, figure


def _figure(height: float) -> tuple[Figure, Axes]:
    """A figure outside pyplot's global state. At 390 pixels, a phone's width, its smallest text has 8 points."""
    figure = Figure(figsize=(4.6, height), layout="constrained")
    return figure, figure.subplots()


def draw_curve(
    axes: Axes, groups: Sequence[Group], title: str, names: Sequence[str], looks: Mapping[str, Look]
) -> bool:
    """Mean over the group's runs at each step, and the range of the runs as a shade; False where none logged it.

    Of long series every logged value is a pale point, and line and shade are of running means, as the title says.
    """
    longest = max((len(run.series(*names)[0]) for group in groups for run in group.runs), default=0)
    half = max(1, longest // 24) if longest >= _SMOOTH_FROM else 0
    axes.set_title(f"{title}\npoints: steps; line: mean of {2 * half + 1} steps" if half else title)
    for group in groups:
        look, by_step = looks[group.name], dict[int, list[float]]()  # of the runs that logged it
        for run in group.runs:
            steps, logged = run.series(*names)
            if half:
                axes.plot(steps, logged, ".", color=look["color"], alpha=0.35, markersize=4)
            for i, step in enumerate(steps.tolist()):
                by_step.setdefault(step, []).append(float(logged[max(0, i - half) : i + half + 1].mean()))
        if by_step:
            steps = np.array(sorted(by_step))
            mean, low, high = (np.array([of(by_step[step]) for step in steps]) for of in (np.mean, np.min, np.max))
            axes.fill_between(steps, low, high, color=look["color"], alpha=0.15, lw=0)
            axes.plot(steps, mean, label=group.name, **look | ({} if len(steps) < _SMOOTH_FROM else {"marker": ""}))
    if not axes.has_data():
        return False
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.legend()
    return True


def draw_clip_by_length(axes: Axes, profiles: Mapping[str, Profile], looks: Mapping[str, Look]) -> None:
    """Share that a clip refuses by length, of each algorithm, with 95% intervals, and its LRE in the legend."""
    for index, (algo, (length_K, error)) in enumerate(profiles.items()):
        # An end that should be the value itself may miss it by rounding.
        bars_2K = np.abs([error.rate_high_K - error.rate_K, error.rate_K - error.rate_low_K])
        beside_K = length_K * 1.05 ** (index - (len(profiles) - 1) / 2)
        axes.errorbar(beside_K, 1 - error.rate_K, bars_2K, label=f"{algo}: LRE {error.words}", **looks[algo])
    axes.set_xlabel("response length (tokens)")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16))
