"""The figures of a comparison: clip rate by length, curves over steps, distribution of S / sqrt(L), noise floor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from fspo.diagnostics import dispersion
from fspo.fairness import equal_mass_starts
from fspo.matching import Sequences
from fspo.noise_floor import SAFE_MARGIN, NoiseFloor
from fspo.report.groups import LengthProfile, RunGroup, problems_interval
from fspo.report.runs import Array, Run
from fspo.report.style import (
    MUTED,
    Look,
    draw_clip_rate,
    error_bars,
    few_ticks,
    group_looks,
    length_axis,
    lre_note,
    new_figure,
    say_nothing_to_show,
    smoothed,
    whole_steps,
)
from fspo.sums import FIELDS, SequenceSums

_SIZE: Final = (6.2, 3.7)
_LINES: Final = ("-", "--", "-.", ":")
_SINGLE_STEP: Final = 6  # steps that an axis shows where there is one
_CLIPPED: Final = {
    "symmetric": "Symmetric: share outside the band",
    "active": "Active: share whose gradient is removed",
}
_ABOUT_DISTRIBUTION: Final = (
    "If the curves of short, middle and long responses coincide, a band that grows like sqrt(L) clips them alike, "
    "Gaussian or not."
)
_ABOUT_NOISE_FLOOR: Final = (
    "The floor is the root mean square of S before any weight has moved: rounding, which a band should not clip. Below "
    "the dashed line, at 5 times the floor, it does. All steps together."
)


@dataclass(frozen=True, slots=True)
class NamedFigure:
    """A figure with the name of its file, its alternative text and, where its title is not enough, a caption."""

    name: str
    alternative: str
    figure: Figure
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric drawn over steps: file name, title, metrics (the first one logged is drawn), whether it is a share."""

    name: str
    title: str
    metrics: tuple[str, ...]
    percent: bool = False
    points: bool = False


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
    groups: Sequence[RunGroup],
    profiles: Mapping[str, Mapping[str, LengthProfile | None]],
    floors: Mapping[str, NoiseFloor | str],
) -> Iterator[NamedFigure]:
    """All figures of one comparison. Call inside :func:`fspo.report.style.styled`.

    Args:
        groups: The groups of the comparison.
        profiles: Their :func:`fspo.report.groups.clip_profiles`.
        floors: Their :func:`fspo.report.groups.group_noise_floor`.
    """
    looks = group_looks([group.algo for group in groups])
    runs = [run for group in groups for run in group.runs]
    for curve in curves(runs):
        figure = new_figure(*_SIZE)
        if draw_curve(figure.subplots(), groups, curve, looks):
            yield NamedFigure(curve.name, f"{curve.title} over training steps, one line per algorithm", figure)
    figure = new_figure(2 * _SIZE[0], 1.3 * _SIZE[1])
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (view, title) in zip(panels, _CLIPPED.items(), strict=True):
        axes.set_title(title)
        draw_clip_by_length(axes, profiles[view], looks)
    yield NamedFigure("clip_by_length", f"{' and '.join(_CLIPPED.values())}, by length", figure)
    for group in groups:
        figure, axes = _panel(title := f"{group.algo}: S / sqrt(L) by length, against the Gaussian")
        _draw_distribution(axes, group, looks[group.algo])
        yield NamedFigure(f"distribution_{group.algo}", title, figure, _ABOUT_DISTRIBUTION)
    figure, axes = _panel(title := "Band's half-width over the noise floor, by length")
    if _draw_noise_floor(axes, floors, looks):
        yield NamedFigure("noise_floor", title, figure, _ABOUT_NOISE_FLOOR)


def _panel(title: str) -> tuple[Figure, Axes]:
    figure = new_figure(*_SIZE)
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes


def draw_curve(axes: Axes, groups: Sequence[RunGroup], curve: Curve, looks: dict[str, Look]) -> bool:
    """Mean over the group's runs at each step, and the range of the runs as a shade; False where none logged it."""
    axes.set_title(curve.title)
    drawn = False
    for index, (group, line) in enumerate(zip(groups, _LINES * len(groups), strict=False)):
        steps, low, mean, high = _over_runs([run.first_series(*curve.metrics) for run in group.runs], curve.points)
        if not len(steps):
            continue
        look = looks[group.algo]
        drawn = True
        if curve.points:
            known = [problems_interval(group.runs, curve.metrics[0], float(value)) for value in mean]
            ends = [found for found in known if found is not None]
            if len(ends) == len(mean):
                low, high = np.array([end[1] for end in ends]), np.array([end[2] for end in ends])
                axes.set_title(f"{curve.title}\n95% over {ends[0][0]} problems")
            spread = error_bars(mean, low, high)
            width = max(_SINGLE_STEP, steps[-1] - steps[0])
            beside = 0.02 * width * (index - (len(groups) - 1) / 2)  # bars at the same step stay legible
            axes.errorbar(
                steps + beside, mean, yerr=spread, color=look.colour, marker=look.marker, ms=5, capsize=2, ls=line,
                elinewidth=1, label=group.algo,
            )  # fmt: skip
        else:
            axes.fill_between(steps, low, high, color=look.colour, alpha=0.15, lw=0)
            axes.plot(steps, mean, color=look.colour, ls=line, label=group.algo)
    if drawn:
        whole_steps(axes)
        left, right = axes.get_xlim()
        if right - left < 1:  # a single step
            axes.set_xlim(left - _SINGLE_STEP / 2, right + _SINGLE_STEP / 2)
        if curve.percent:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        few_ticks(axes)
        axes.legend(loc="best")
    return drawn


def _over_runs(
    series: Sequence[tuple[npt.NDArray[np.int64], Array]], points: bool
) -> tuple[npt.NDArray[np.int64], Array, Array, Array]:
    smooth = [(steps, values if points else smoothed(values)) for steps, values in series if len(steps)]
    steps = np.unique(np.concatenate([s for s, _ in smooth])) if smooth else np.zeros(0, dtype=np.int64)
    table = np.full((len(smooth), len(steps)), np.nan)
    for row, (s, values) in zip(table, smooth, strict=True):
        row[np.searchsorted(steps, s)] = values
    if not len(steps):
        return steps, *(np.zeros(0),) * 3
    return steps, np.nanmin(table, axis=0), np.nanmean(table, axis=0), np.nanmax(table, axis=0)


def draw_clip_by_length(axes: Axes, profiles: Mapping[str, LengthProfile | None], looks: dict[str, Look]) -> None:
    """Clip rate by length of each algorithm, with its LRE in the legend."""
    for algo, profile in profiles.items():
        if profile is not None:
            draw_clip_rate(axes, profile, looks[algo], f"{algo}: {lre_note(profile.error)}")
    if axes.has_data():
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16))
    else:
        say_nothing_to_show(axes, "no sequences after the first mini-batch of a step")


def _draw_noise_floor(axes: Axes, floors: Mapping[str, NoiseFloor | str], looks: dict[str, Look]) -> bool:
    for algo, floor in floors.items():
        if isinstance(floor, NoiseFloor):
            some = floor.rms_J > 0
            look, margin_J = looks[algo], floor.half_width_J[some] / floor.rms_J[some]
            axes.plot(floor.length_J[some], margin_J, color=look.colour, marker=look.marker, ms=5, label=algo)
    if not axes.has_data():
        return False
    axes.axhline(SAFE_MARGIN, color=MUTED, lw=1.2, ls=(0, (4, 3)), label=f"{SAFE_MARGIN:g} times the floor")
    axes.set_xscale("log")
    axes.set_yscale("log")
    length_axis(axes)
    axes.yaxis.set_major_locator(LogLocator(10, numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axes.legend(loc="best")
    return True


def _draw_distribution(axes: Axes, group: RunGroup, look: Look) -> None:
    """Density of (S / sqrt(L)) / sigma_hat of the short, middle and long third of the sequences, and the Gaussian's."""
    hist_KH = sum((run.lengths.hist_KH() for run in group.runs), np.zeros((1, 1), np.int64))
    sums_KF = sum((run.lengths.sums_MKF.sum(0) for run in group.runs), np.zeros((1, len(FIELDS))))
    if hist_KH.sum() == 0:
        say_nothing_to_show(axes, "no length statistics")
        return
    sums = SequenceSums(torch.from_numpy(sums_KF), torch.from_numpy(hist_KH))
    sigma = dispersion(sums)
    if not sigma > 0:
        say_nothing_to_show(axes, "S has no dispersion")
        return
    edges = np.linspace(-4, 4, 41)
    middle = (edges[1:] + edges[:-1]) / 2
    x = np.linspace(-4, 4, 200)
    axes.plot(x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), color=MUTED, lw=1.2, ls=(0, (4, 3)), label="Gaussian")
    starts = [*equal_mass_starts(sums_KF[:, FIELDS.index("count")], 3).tolist(), len(sums_KF)]
    for index, (first, end) in enumerate(itertools.pairwise(starts)):
        part = SequenceSums.zeros()
        part.sums_KF[first:end], part.hist_KH[first:end] = sums.sums_KF[first:end], sums.hist_KH[first:end]
        found = Sequences.from_sums(part)
        z = found.log_ratio_B / np.sqrt(found.length_B) / sigma
        density = np.histogram(z, edges, weights=found.count_B)[0] / found.count_B.sum() / np.diff(edges)
        mean_length = part.total("length") / part.total("count")
        shade = 0.45 + 0.55 * index / max(1, len(starts) - 2)
        axes.plot(
            middle, density, color=look.colour, alpha=shade, ls=_LINES[index], label=f"mean length {mean_length:.0f}"
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"S / sqrt(L), in units of its dispersion {sigma:.2g}")
    axes.set_yticks([])
    axes.legend(loc="upper right")
