"""What a finished run says at its end: held-out accuracy before and after with intervals, and where its files are."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig

from fspo.fairness import wilson_interval
from fspo.report.run_figure import plot_run
from fspo.report.runs import load_run

FIGURE_FILE = "run.png"


def _accuracy_line(label: str, step: int, share: float, problems: int | None) -> str:
    if problems is None:
        return f"  {label} (step {step}): {share:.3f}"
    low, high = wilson_interval(share, problems)
    return f"  {label} (step {step}): {share:.3f}  95% interval [{low:.3f}, {high:.3f}] over {problems} problems"


def print_summary(config: DictConfig) -> None:
    """Draw the run's figure and print where everything is."""
    folder = Path(config.fspo.run_dir)
    run = load_run(folder)
    for name in run.validation_metrics():
        steps, values = run.series(name)
        if len(steps):
            print(f"held-out {name.removeprefix('val-core/')}")
            problems = run.validation_problems(name)
            print(_accuracy_line("before", int(steps[0]), float(values[0]), problems))
            print(_accuracy_line("after ", int(steps[-1]), float(values[-1]), problems))
    figure = plot_run(folder, folder / FIGURE_FILE)
    info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    print(f"status: {info['status']}\nmetrics: {folder / 'metrics.jsonl'}\nfigure: {figure}", flush=True)
