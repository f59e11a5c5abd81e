"""Pieces that the figures share."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from fspo.report.lengths import LengthProfile
from fspo.report.style import Look, Theme

Array = npt.NDArray[np.float64]

_SMOOTH_FROM: Final = 20
"""Series with at least so many points are drawn as a running mean over a pale line of the values themselves."""


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
    axes.plot(steps, running_mean(values, max(3, len(values) // 12)), color=colour, label=label, **line)
    return True


def running_mean(values: Array, window: int) -> Array:
    """Centred running mean; near the ends over the part of the window that exists."""
    kernel = np.ones(window)
    return np.asarray(np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same"))


def whole_steps(axes: Axes) -> None:
    """Label the x axis as training steps, in whole numbers."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def draw_length_profile(axes: Axes, profile: LengthProfile, look: Look, theme: Theme, note: str | None = None) -> None:
    """Clip rate against length with its confidence band, the overall rate, and the LRE in words."""
    error = profile.error
    seen = ~np.isnan(error.rate_K) & ~np.isnan(profile.length_K)
    x, clip = profile.length_K[seen], 1 - error.rate_K[seen]
    low, high = 1 - error.rate_high_K[seen], 1 - error.rate_low_K[seen]
    axes.axhline(1 - error.rate, color=theme.muted, lw=1, ls=(0, (4, 3)), zorder=1)
    axes.fill_between(x, low, high, color=look.colour, alpha=0.18, lw=0)
    axes.errorbar(
        x, clip, yerr=np.abs(np.stack([clip - low, high - clip])), color=look.colour, marker=look.marker, ms=5,
        elinewidth=1.1, lw=1.6,
    )  # fmt: skip
    axes.set_xscale("log")
    length_axis(axes)
    axes.set_ylim(0, max(0.05, float(np.nanmax(high)) * 1.25))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if note is None:
        note = (
            f"LRE {error.lre:.3f}, debiased {error.lre_debiased:.3f} [{error.ci_low:.3f}, {error.ci_high:.3f}]"
            if np.isfinite(error.lre)
            else "LRE undefined: nothing was accepted"
        )
    axes.text(0.02, 0.97, note, transform=axes.transAxes, va="top", fontsize=9)


def length_axis(axes: Axes) -> None:
    """Lengths on a logarithmic axis in plain numbers."""
    axes.set_xlabel("response length (tokens)")
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else ""))
