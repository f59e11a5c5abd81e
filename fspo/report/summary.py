"""What a finished run says at its end: held-out accuracy before and after with intervals, and where its files are."""

from __future__ import annotations

import json
from pathlib import Path

from fspo.fairness import wilson_interval
from fspo.report.run_figure import plot_run
from fspo.report.runs import INFO_FILE, METRICS_FILE, load_run


def _accuracy_line(label: str, step: int, share: float, problems: int | None) -> str:
    if problems is None:
        return f"  {label} (step {step}): {share:.3f}"
    low, high = wilson_interval(share, problems)
    return f"  {label} (step {step}): {share:.3f}  95% interval [{low:.3f}, {high:.3f}] over {problems} problems"


def summarise(folder: Path) -> str:
    """Draw the run's figure, ``run.png``; returns the lines that say how it went and where everything is."""
    run, lines = load_run(folder), []
    for name in run.validation_metrics():
        steps, values = run.series(name)
        if len(steps):
            problems = run.validation_problems(name)
            lines.append(f"held-out {name.removeprefix('val-core/')}")
            lines.append(_accuracy_line("before", int(steps[0]), float(values[0]), problems))
            lines.append(_accuracy_line("after ", int(steps[-1]), float(values[-1]), problems))
    figure = plot_run(folder, folder / "run.png")
    status = json.loads((folder / INFO_FILE).read_text(encoding="utf-8"))["status"]
    return "\n".join([*lines, f"status: {status}", f"metrics: {folder / METRICS_FILE}", f"figure: {figure}"])
