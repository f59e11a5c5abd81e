"""What a finished run reports at its end: held-out accuracy before and after, its LRE, and where the files are."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fspo.audit.show import NOT_MOVED, verdict
from fspo.files import METRICS_FILE
from fspo.report.build import NothingReadError, build_report
from fspo.report.compare import problems_interval
from fspo.report.runs import load_runs

#: Share of a step's responses cut at the maximum length from which it is said.
_MANY: Final = 0.1


def summarise(folder: Path) -> str:
    """Write the run's report into its folder; returns the lines that say how it went and where everything is."""
    (run,), lines = load_runs(folder), []
    for name in run.validation_metrics():
        steps, values = run.series(name)
        lines.append(f"held-out {name.removeprefix('val-core/')}")
        for place in dict.fromkeys((0, len(steps) - 1)):
            when = {0: "before", run.last_step: "after "}.get(int(steps[place]), "during")
            text = f"  {when} (step {steps[place]}): {values[place]:.3f}"
            if (over := problems_interval([run], name, values[place])) is not None:
                text += f"  95% interval [{over[1]:.3f}, {over[2]:.3f}] over {over[0]} problems"
            lines.append(text)
    steps, cut = run.series("fspo/truncated_frac")
    if len(cut) and cut[-1] >= _MANY:
        lines.append(f"note: in step {steps[-1]} {cut[-1]:.0%} of the responses were cut at data.max_response_length")
    if run.last_step > 0:
        lines.append(f"by length, all steps: {verdict(run.responses) if len(run.responses) else NOT_MOVED}")
    lines += [f"status: {run.info.get('status')}", f"metrics: {folder / METRICS_FILE}"]
    try:
        lines.append(f"report: {build_report([folder], folder).page}")
    except (NothingReadError, OSError) as error:
        lines.append(f"report: none ({error})")
    return "\n".join(lines)
