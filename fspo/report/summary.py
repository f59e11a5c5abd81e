"""What a finished run reports at its end: held-out accuracy before and after, one figure, and where the files are."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from matplotlib import style
from matplotlib.figure import Figure

from fspo.files import atomic_path
from fspo.records import METRICS_FILE
from fspo.report.figures import STYLE, algo_looks, curves, draw_clip_by_length, draw_curve, say_nothing_to_show
from fspo.report.groups import LengthProfile, RunGroup, length_profile, problems_interval
from fspo.report.runs import Run, load_run
from fspo.report.tables import NOTHING, show_lre

#: Share of a step's responses cut at the maximum length from which it is said.
_MANY: Final = 0.1


def summarise(folder: Path) -> str:
    """Draw the run's figure, ``run.png``; returns the lines that say how it went and where everything is.

    Missing data leaves a panel that says so; the rest is drawn.
    """
    run, picture, lines = load_run(folder), folder / "run.png", []
    for name in run.validation_metrics():
        steps, values = run.series(name)
        lines.append(f"held-out {name.removeprefix('val-core/')}")
        for place in dict.fromkeys((0, len(steps) - 1)):
            text = f"  {_when(steps[place], run)} (step {steps[place]}): {values[place]:.3f}"
            if (over := problems_interval([run], name, values[place])) is not None:
                text += f"  95% interval [{over[1]:.3f}, {over[2]:.3f}] over {over[0]} problems"
            lines.append(text)
        if steps[-1] < run.last_step:
            every = run.settings().get("trainer.test_freq")
            lines.append(f"  of the run's last step, {run.last_step}, there is none (trainer.test_freq={every})")
    steps, cut = run.series("fspo/truncated_frac")
    if len(cut) and cut[-1] >= _MANY:
        lines.append(f"note: in step {steps[-1]} {cut[-1]:.0%} of the responses were cut at data.max_response_length")
    profile = length_profile([run])
    if max(run.steps, default=0) > 0:
        lines.append(f"LRE, symmetric, of all steps: {_lre(run, profile)}")
    with style.context(STYLE), atomic_path(picture) as temporary:
        draw_run(run, profile).savefig(temporary, format="png")
    return "\n".join([*lines, f"status: {run.status}", f"metrics: {folder / METRICS_FILE}", f"figure: {picture}"])


def _when(step: int, run: Run) -> str:
    """Where in the training a validation was: it also validates where it is resumed."""
    return "before" if step == 0 else "after " if step == run.last_step else "during"


def _lre(run: Run, profile: LengthProfile | None) -> str:
    """The run's LRE, or why there is none."""
    if profile is None and len(run.responses):
        return f"{NOTHING} (what the loss accepts is not known)"
    if profile is None:
        return f"{NOTHING} (no mini-batch came after an update, so nothing could be clipped)"
    shown, why = show_lre(profile.error), "95%; 0: all lengths are accepted equally often"
    if shown == NOTHING:
        could = run.responses.could_clip()
        why = "nothing was clipped" if could else "nothing could be clipped: every S is 0, or every advantage"
    return f"{shown} ({why})"


def draw_run(run: Run, profile: LengthProfile | None) -> Figure:
    """The curves that a report draws, and the clip rate by length, of one run, in the style that is in force."""
    group, looks = RunGroup(run.algo, run.clip_values, [run]), algo_looks([run.algo])
    figure = Figure(figsize=(15, 7), layout="constrained")
    *panels, last = figure.subplots(2, 3).flat
    chosen = {curve.name: curve for curve in curves([run])}
    for axes, name in zip(panels, ("reward", "held_out_0", "response_length", "clip_rate", "lre"), strict=True):
        if name not in chosen or not draw_curve(axes, [group], chosen[name], looks):
            say_nothing_to_show(axes, f"nothing logged yet: {name.removesuffix('_0').replace('_', ' ')}")
    last.set_title("Share outside the band, by length (95%)")
    draw_clip_by_length(last, {run.algo: profile}, looks)
    status = "" if run.status == "finished" else f" ({run.status})"
    title = f"{run.name}: {max(run.steps, default=0)} steps{status}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure
