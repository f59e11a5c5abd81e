"""What a finished run reports at its end: held-out accuracy before and after, one figure, and where the files are."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from fspo.fairness import wilson_interval
from fspo.records import METRICS_FILE
from fspo.report.figures import curves, draw_clip_by_length, draw_curve
from fspo.report.groups import RunGroup, length_profile
from fspo.report.runs import Run, load_run
from fspo.report.style import group_looks, new_figure, save_png, say_nothing_to_show, styled


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
    with styled():
        picture = save_png(_draw(run), folder / "run.png")
    return "\n".join([*lines, f"status: {run.ending}", f"metrics: {folder / METRICS_FILE}", f"figure: {picture}"])


def _accuracy_line(label: str, step: int, share: float, problems: int | None) -> str:
    if problems is None or not 0 <= share <= 1:  # a reward that is no accuracy: verl calls a plain number acc
        return f"  {label} (step {step}): {share:.3f}"
    low, high = wilson_interval(share, problems)
    return f"  {label} (step {step}): {share:.3f}  95% interval [{low:.3f}, {high:.3f}] over {problems} problems"


def _draw(run: Run) -> Figure:
    """The curves that a report draws, and the clip rate by length, of one run."""
    group, looks = RunGroup(run.algo, run.comparison, [run]), group_looks([run.algo])
    figure = new_figure(15, 7)
    *panels, last = figure.subplots(2, 3).flat
    chosen = {curve.name: curve for curve in curves([run])}
    for axes, name in zip(panels, ("reward", "held_out_0", "response_length", "clip_rate", "lre"), strict=True):
        if name not in chosen or not draw_curve(axes, [group], chosen[name], looks):
            say_nothing_to_show(axes, f"nothing logged yet: {name.removesuffix('_0').replace('_', ' ')}")
    last.set_title("Share outside the band, by length (95%)")
    draw_clip_by_length(last, {run.algo: length_profile([run])}, looks)
    status = "" if run.status == "finished" else f" ({run.status})"
    title = f"{run.name}: {max(run.steps, default=0)} steps{status}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure
