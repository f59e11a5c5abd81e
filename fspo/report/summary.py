"""What a finished run reports at its end: held-out accuracy before and after, one figure, and where the files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fspo.fairness import wilson_interval
from fspo.records import METRICS_FILE
from fspo.report.groups import length_profile
from fspo.report.runs import Run, load_run
from fspo.report.style import (
    LIGHT,
    Look,
    Theme,
    draw_length_profile,
    draw_smoothed,
    error_bars,
    group_looks,
    new_figure,
    save_png,
    say_nothing_to_show,
    themed,
    whole_steps,
)


def summarise(folder: Path) -> str:
    """Draw the run's figure, ``run.png``; returns the lines that say how it went and where everything is.

    Missing data leaves a panel that says so; the rest is drawn.
    """
    run, lines = load_run(folder), []
    for name in run.validation_metrics():
        steps, values = run.series(name)
        if len(steps):
            problems = run.validation_problems(name)
            lines.append(f"held-out {name.removeprefix('val-core/')}")
            lines.append(_accuracy_line("before", int(steps[0]), float(values[0]), problems))
            lines.append(_accuracy_line("after ", int(steps[-1]), float(values[-1]), problems))
    with themed(LIGHT):
        figure = new_figure(10.5, 6.8)
        axes = figure.subplots(2, 2)
        look = group_looks([run.algo], LIGHT)[run.algo]
        _draw_outcome(axes[0, 0], run, look, LIGHT)
        _draw_response_length(axes[0, 1], run, look, LIGHT)
        _draw_clip_rate(axes[1, 0], run, look, LIGHT)
        _draw_clip_by_length(axes[1, 1], run, look, LIGHT)
        seed = "" if run.seed is None else f", seed {run.seed}"
        last = max(run.steps, default=0)
        status = "" if run.status == "finished" else f" ({run.status})"
        figure.suptitle(f"{run.algo}{seed}: {last} steps{status}", x=0.01, ha="left", fontsize=13, fontweight="bold")
        picture = save_png(figure, folder / "run.png")
    return "\n".join([*lines, f"status: {run.ending}", f"metrics: {folder / METRICS_FILE}", f"figure: {picture}"])


def _accuracy_line(label: str, step: int, share: float, problems: int | None) -> str:
    if problems is None or not 0 <= share <= 1:  # a reward that is no accuracy: verl calls a plain number acc
        return f"  {label} (step {step}): {share:.3f}"
    low, high = wilson_interval(share, problems)
    return f"  {label} (step {step}): {share:.3f}  95% interval [{low:.3f}, {high:.3f}] over {problems} problems"


def _draw_outcome(axes: Axes, run: Run, look: Look, theme: Theme) -> None:
    axes.set_title("Reward in training, held-out accuracy")
    drawn = draw_smoothed(axes, *run.first_series("critic/rewards/mean", "critic/score/mean"), look.colour, "reward")
    names = run.validation_metrics()
    if names:
        steps, values = run.series(names[0])
        n = run.validation_problems(names[0])
        label = "held-out accuracy" if "/acc" in names[0] else "held-out reward"
        style: dict[str, Any] = {"color": theme.text, "marker": "o", "ms": 6, "lw": 1.2, "zorder": 4, "label": label}
        if n is not None and bool(((values >= 0) & (values <= 1)).all()):
            low, high = wilson_interval(values, n)
            spread = error_bars(values, low, high)
            axes.errorbar(steps, values, yerr=spread, capsize=3, elinewidth=1.2, **style)
            axes.set_title(f"Reward in training, held-out accuracy (n = {n}, 95%)")
        else:
            axes.plot(steps, values, **style)
        if len(steps) > 1:
            text = f"{label}: {values[0]:.3f} before, {values[-1]:.3f} after"
            axes.text(0.02, 0.97, text, transform=axes.transAxes, va="top", fontsize=9.5, fontweight="bold")
            low_y, high_y = axes.get_ylim()
            axes.set_ylim(low_y, high_y + 0.12 * (high_y - low_y))
        drawn = True
    if drawn:
        whole_steps(axes)
        axes.legend(loc="best")
    else:
        say_nothing_to_show(axes, theme, "no reward logged yet")


def _draw_response_length(axes: Axes, run: Run, look: Look, theme: Theme) -> None:
    axes.set_title("Mean response length (tokens)")
    if draw_smoothed(axes, *run.series("response_length/mean"), look.colour):
        whole_steps(axes)
    else:
        say_nothing_to_show(axes, theme, "no response length logged yet")


def _draw_clip_rate(axes: Axes, run: Run, look: Look, theme: Theme) -> None:
    axes.set_title("Clipped sequences by step")
    outside = draw_smoothed(axes, *run.series("fspo/clip_frac"), look.colour, "outside the band")
    active = draw_smoothed(axes, *run.series("fspo/clip_active_frac"), theme.muted, "gradient removed", linestyle="--")
    if outside or active:
        whole_steps(axes)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.legend(loc="best")
    else:
        say_nothing_to_show(axes, theme, "no clip rate logged yet\n(it needs two mini-batches a step)")


def _draw_clip_by_length(axes: Axes, run: Run, look: Look, theme: Theme) -> None:
    axes.set_title("Outside the band, by response length (95%)")
    profile = length_profile([run])
    if profile is None:
        say_nothing_to_show(axes, theme, "no length statistics yet")
        return
    draw_length_profile(axes, profile, look, theme)
