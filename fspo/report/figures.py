"""The figures of a comparison: clip rate by length, curves over steps, distribution of S / sqrt(L)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from fspo.report.groups import LengthProfile, Profiles, RunGroup, problems_interval
from fspo.report.runs import Array, Run
from fspo.report.tables import show_lre
from fspo.responses import Responses

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
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES: Final = ("-", "--", "-.", ":")
_SMOOTH_FROM: Final = 20
"""Series with at least this many points get the line of a running mean."""
_CLIPPED: Final = {
    "symmetric": ("clip_by_length", "Share outside the band, by length"),
    "active": ("removed_by_length", "Share without gradient, by length"),
}

Look = dict[str, Any]
"""Colour, marker and line of one algorithm; colour or marker alone tells algorithms apart."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric drawn over steps: file name, title, metrics (the first one logged is drawn), whether it is a share."""

    name: str
    title: str
    metrics: tuple[str, ...]
    percent: bool = False
    points: bool = False


def algo_looks(algos: Sequence[str]) -> dict[str, Look]:
    """A look for each algorithm: that of its loss; other names take those of the losses that are not among them."""
    names, colours = list(COLOURS), list(COLOURS.values())
    free = itertools.cycle([name for name in reversed(names) if name not in algos] or names)
    places = {algo: names.index(algo if algo in COLOURS else next(free)) for algo in dict.fromkeys(algos)}
    return {
        algo: {"color": colours[place], "marker": _MARKERS[place], "linestyle": _LINES[place % len(_LINES)]}
        for algo, place in places.items()
    }


def curves(runs: Sequence[Run]) -> list[Curve]:
    """The curves of a report; its runs decide which held-out metrics there are."""
    held_out = list(dict.fromkeys(name for run in runs for name in run.validation_metrics()))
    return [
        Curve("reward", "Reward in training", ("critic/rewards/mean", "critic/score/mean")),
        *(
            Curve(f"held_out_{i}", f"Held-out {name.removeprefix('val-core/')}", (name,), points=True)
            for i, name in enumerate(held_out)
        ),
        Curve("response_length", "Mean response length (tokens)", ("response_length/mean",)),
        Curve("clip_rate", "Clip rate: share outside the band", ("fspo/clip_frac",), percent=True),
        Curve("lre", "LRE over a window of steps, debiased", ("fspo/lre_debiased",)),
        Curve("grad_norm", "Gradient norm", ("actor/grad_norm",)),
    ]


def comparison_figures(
    groups: Sequence[RunGroup], profiles: Profiles, looks: Mapping[str, Look]
) -> Iterator[tuple[str, str, Figure]]:
    """All figures of one comparison with the names of their files and their titles, for :data:`STYLE`.

    ``profiles`` are the groups' :func:`fspo.report.groups.clip_profiles`, ``looks`` their :func:`algo_looks`.
    """
    for curve in curves([run for group in groups for run in group.runs]):
        figure, axes = _figure()
        if draw_curve(axes, groups, curve, looks):
            yield curve.name, curve.title, figure
    for view, (name, title) in _CLIPPED.items():
        figure, axes = _figure(4.4)
        axes.set_title(title)
        draw_clip_by_length(axes, profiles[view], looks)
        yield name, title, figure
    for group in groups:
        figure, axes = _figure()
        axes.set_title(title := f"{group.algo}: S / sqrt(L) by length")
        _draw_distribution(axes, group, looks[group.algo]["color"])
        yield f"distribution_{group.algo}", title, figure


def _figure(height: float = 3.3) -> tuple[Figure, Axes]:
    """A figure outside pyplot's global state: it can be made in any thread and need not be closed.

    At 390 pixels, a phone's width, its smallest text has 8 points.
    """
    figure = Figure(figsize=(4.6, height), layout="constrained")
    return figure, figure.subplots()


def _percent(share: float, _: object = None) -> str:
    return f"{100 * share:.3g}%"


def say_nothing_to_show(axes: Axes, reason: str) -> None:
    """Write into an empty panel why it is empty."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, reason, ha="center", va="center", transform=axes.transAxes, wrap=True)


def draw_curve(axes: Axes, groups: Sequence[RunGroup], curve: Curve, looks: Mapping[str, Look]) -> bool:
    """Mean over the group's runs at each step, and the range of the runs as a shade; False where none logged it.

    Of long series every logged value is a pale point, and line and shade are of running means, as the title says. With
    ``points``, error bars show 95% intervals over problems if their number is known, else the range over runs.
    """
    axes.set_title(curve.title)
    longest = max((len(run.series(*curve.metrics)[0]) for group in groups for run in group.runs), default=0)
    half = max(1, longest // 24) if longest >= _SMOOTH_FROM and not curve.points else 0
    if half:
        axes.set_title(f"{curve.title}\npoints: steps; line: mean of {2 * half + 1} steps")
    for index, group in enumerate(groups):
        values: dict[int, list[float]] = {}  # by step, of the runs that logged it
        for run in group.runs:
            steps, logged = run.series(*curve.metrics)
            if half:
                axes.plot(steps, logged, ".", color=looks[group.algo]["color"], alpha=0.35, markersize=4)
            for step, value in zip(steps.tolist(), _running_mean(logged, half), strict=True):
                values.setdefault(step, []).append(value)
        if not values:
            continue
        steps = np.array(sorted(values))
        mean, low, high = (np.array([of(values[step]) for step in steps]) for of in (np.mean, np.min, np.max))
        look = looks[group.algo]
        if curve.points:
            known = [problems_interval(group.runs, curve.metrics[0], float(value)) for value in mean]
            if all(known):
                problems, low, high = np.array(known).T
                axes.set_title(f"{curve.title}\n95% over {problems[0]:.0f} problems")
            beside = 0.03 * max(4, steps[-1] - steps[0]) * (index - (len(groups) - 1) / 2)  # bars stay legible
            axes.errorbar(steps + beside, mean, _bars(mean, low, high), capsize=2, label=group.algo, **look)
        else:
            axes.fill_between(steps, low, high, color=look["color"], alpha=0.15, lw=0)
            marker = look["marker"] if len(steps) == 1 else ""  # a line of one point is invisible
            axes.plot(steps, mean, label=group.algo, color=look["color"], linestyle=look["linestyle"], marker=marker)
    if not axes.has_data():
        return False
    axes.set_xlabel("step")
    left, right = axes.get_xlim()
    axes.set_xlim(np.floor(left), np.ceil(right))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    if curve.percent:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(_percent)
    axes.legend()
    return True


def _running_mean(values: Array, half: int) -> list[float]:
    """Mean of each value with ``half`` on either side; near the ends over the part that exists."""
    return [float(values[max(0, i - half) : i + half + 1].mean()) for i in range(len(values))]


def _bars(values: Array, low: Array, high: Array) -> Array:
    """Lengths of error bars, down and up. An end that should be the value itself may miss it by rounding."""
    return np.abs(np.stack([values - low, high - values]))


def draw_clip_by_length(axes: Axes, profiles: Mapping[str, LengthProfile | None], looks: Mapping[str, Look]) -> None:
    """Clip rate by length of each algorithm with 95% intervals side by side, and its LRE in the legend."""
    for index, (algo, profile) in enumerate(profiles.items()):
        if profile is not None:
            error = profile.error
            clip_K, low_K, high_K = 1 - error.rate_K, 1 - error.rate_high_K, 1 - error.rate_low_K
            bars = _bars(clip_K, low_K, high_K)
            beside_K = profile.length_K * 1.05 ** (index - (len(profiles) - 1) / 2)
            axes.errorbar(beside_K, clip_K, bars, label=f"{algo}: LRE {show_lre(error)}", **looks[algo])
    if not axes.has_data():
        say_nothing_to_show(axes, "no sequences after the first mini-batch of a step")
        return
    axes.set_xlabel("response length (tokens)")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_percent)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16))


def _draw_distribution(axes: Axes, group: RunGroup, colour: str) -> None:
    """Density of (S / sqrt(L)) / sigma_hat of the short, middle and long third of the sequences, and the Gaussian's."""
    responses = Responses.join([run.responses for run in group.runs])
    sigma = responses.sigma()
    if not sigma > 0:
        say_nothing_to_show(axes, "no sequences, or S has no dispersion")
        return
    x, edges = np.linspace(-4, 4, 200), np.linspace(-4, 4, 41)
    axes.plot(x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), color="grey", linestyle="--", label="Gaussian")
    third_B = np.searchsorted(responses.starts(3), responses.fine_B, side="right") - 1
    for index in range(int(third_B.max()) + 1):
        drawn_B = third_B == index
        density = np.histogram(responses.z_B[drawn_B] / sigma, edges)[0] / drawn_B.sum() / np.diff(edges)
        shade = 0.45 + 0.55 * index / max(1, int(third_B.max()))
        axes.plot(
            (edges[1:] + edges[:-1]) / 2,
            density,
            color=colour,
            alpha=shade,
            linestyle=_LINES[index],
            label=f"mean length {responses.length_B[drawn_B].mean():.0f}",
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"S / sqrt(L), in units of its dispersion {sigma:.2g}")
    axes.set_yticks([])
    axes.legend()
