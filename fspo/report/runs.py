"""The runs of a report: read from folders of runs, audits and parquet files, and grouped by algorithm.

What is missing or cannot be read is named; the rest is used.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml  # type: ignore[import-untyped]

from fspo.audit.read import AuditRecords, read_audit
from fspo.audit.show import NOT_MOVED
from fspo.conclusion import in_view
from fspo.fairness.lre import Array, LengthReweightingError
from fspo.files import CONFIG_FILE, INFO_FILE, METRICS_FILE, read_object, read_steps
from fspo.losses import ALGORITHMS, BANDS, LOSSES
from fspo.responses import Responses
from fspo.table import FOLDER

#: What differs between any two runs, and says nothing of their results.
_OF_THE_RUN: Final = re.compile(r"seed|ray_kwargs|experiment_name|project_name|resume|(^|[._])dir$")


@dataclass(slots=True, eq=False)
class Run:
    """One run, as far as it could be read.

    Attributes:
        path: Its folder, or file.
        info: run.json, empty if missing or broken.
        steps: Metrics by step, in order.
        records: Its responses, and what an audit says of them.
        responses: Those of mini-batches before which a weight had moved.
        settings: Every setting by its key, of config.yaml.
        problems: What could not be read, each with file and line.
    """

    path: Path
    info: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    records: AuditRecords = field(default_factory=AuditRecords)
    responses: Responses = field(default_factory=lambda: Responses.of_rows({}))
    settings: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def algo(self) -> str:
        """The algorithm, else the loss, or the folder's name where nothing says."""
        return str(self.info.get("algo") or self.records.loss or self.path.name)

    @property
    def seed(self) -> int | None:
        """The seed, None where run.json does not say."""
        seed = self.info.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def last_step(self) -> int:
        """The last step that left a trace."""
        return max([*self.steps, int(self.responses.step_B.max(initial=0))])

    def series(self, *names: str) -> tuple[np.ndarray, Array]:
        """Steps and values of the first of these metrics that the run has logged."""
        name = next((name for name in names if any(name in values for values in self.steps.values())), "")
        steps = [step for step, values in self.steps.items() if name in values]
        return np.array(steps, np.int64), np.array([self.steps[step][name] for step in steps], np.float64)

    def validation_metrics(self) -> list[str]:
        """Names of the held-out metrics: accuracies before other rewards, and of these means over samples first."""
        names = {name for values in self.steps.values() for name in values if name.startswith("val-core/")}
        return sorted(names, key=lambda name: ("/acc" not in name, "/mean@" not in name, name))

    def validation_problems(self, metric: str) -> int | None:
        """Number of held-out problems behind a metric, those of its data source; None if run.json does not say."""
        source = "/".join(metric.split("/")[1:-2])  # which may hold slashes
        counts = self.info.get("validation_problems")
        count = counts.get(source) if isinstance(counts, dict) else None
        return count if isinstance(count, int) else None


@dataclass(slots=True, eq=False)
class Group:
    """The runs of one algorithm, by seed."""

    name: str
    runs: list[Run] = field(default_factory=list)
    responses: Responses = field(init=False)
    _errors: dict[str, LengthReweightingError | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runs.sort(key=lambda run: (run.seed is None, run.seed or 0, str(run.path)))
        self.responses = Responses.join([run.responses for run in self.runs])

    def error(self, view: str) -> LengthReweightingError | None:
        """The LRE of all its runs together; None where it is not known what the loss accepts."""
        if view not in self._errors:
            counted = in_view(self.responses, view)
            self._errors[view] = counted.error(view) if counted.rule_known else None
        return self._errors[view]


def load_runs(path: Path, every_mini_batch: bool = False) -> list[Run]:
    """Read a run's folder, a folder with runs below it, an audit's, or a parquet file, which each named band judges."""
    if any((path / name).is_file() for name in (INFO_FILE, METRICS_FILE)):
        return [_load_run(path)]
    records = read_audit(path, every_mini_batch=every_mini_batch)
    folders = {file.parent for name in (INFO_FILE, METRICS_FILE) for file in path.rglob(name)}
    if folders and not len(records.responses):
        # What lies in a run's folder is no run of its own.
        return [_load_run(folder) for folder in sorted(folders) if folders.isdisjoint(folder.parents)]
    run = Run(path, records=records)
    _take_responses(run)
    if path.suffix != ".parquet" or not len(run.responses):
        return [run]
    judged = {name: run.responses.judged_by(ALGORITHMS[loss]) for name, loss in BANDS.items()}
    return [dataclasses.replace(run, info={"algo": name}, responses=of) for name, of in judged.items()]


def _load_run(path: Path) -> Run:
    run = Run(path)
    run.info = {"algo": path.name, **read_object(path / INFO_FILE, run.problems)}
    for line in read_steps(path / METRICS_FILE, run.problems):
        # Validation and training of one step may come on two lines; null means undefined.
        values = {name: float(value) for name, value in line["metrics"].items() if isinstance(value, int | float)}
        known = {name: value for name, value in values.items() if math.isfinite(value)}
        run.steps[line["step"]] = run.steps.get(line["step"], {}) | known
    try:
        if (path / CONFIG_FILE).is_file():
            run.settings = dict(_leaves(yaml.safe_load((path / CONFIG_FILE).read_text(encoding="utf-8"))))
    except (OSError, ValueError, yaml.YAMLError) as error:
        run.problems.append(f"{path / CONFIG_FILE}: cannot be read ({' '.join(str(error).split())[:200]})")
    if (path / FOLDER).exists():
        run.records = read_audit(path)
        _take_responses(run)
    return run


def _take_responses(run: Run) -> None:
    """The responses of the records that count, with what a reader has to know of them."""
    run.responses = run.records.responses.moved()
    notes = run.records.notes() + [NOT_MOVED] * (len(run.records.responses) > len(run.responses) == 0)
    run.problems += [*run.records.problems, *(f"{run.path}: {note}" for note in notes)]


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _leaves(below, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def group_runs(runs: Sequence[Run], problems: list[str]) -> list[Group]:
    """By algorithm (and where clip values come from, if an algorithm has both): ours in their order, then the rest.

    Of two runs of one group with one seed the one given last counts, and the other is named.
    """
    origin = {run.path: str(run.info.get("clip_values", "published")) for run in runs}
    named: dict[str, dict[object, Run]] = {}
    for run in runs:
        both = len({origin[one.path] for one in runs if one.algo == run.algo}) > 1
        group = named.setdefault(f"{run.algo}, {origin[run.path]}" if both else run.algo, {})
        key = run.path if run.seed is None else run.seed
        if key in group:
            problems.append(f"{group[key].path}: left out: {run.path} is a run of {run.algo} with the same seed")
        group[key] = run
    rank = {loss.algo: place for place, loss in enumerate(LOSSES.values())}
    groups = [Group(name, list(of.values())) for name, of in named.items()]
    return sorted(groups, key=lambda group: (rank.get(group.runs[0].algo, len(rank)), group.name))


def differing_settings(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, each with its values in each group."""
    differing = {}
    for key in dict.fromkeys(key for group in groups for run in group.runs for key in run.settings):
        values = [dict.fromkeys(str(run.settings.get(key, "not set")) for run in group.runs) for group in groups]
        if len({value for of_group in values for value in of_group}) > 1 and not _OF_THE_RUN.search(key):
            differing[key] = [" or ".join(of_group) for of_group in values]
    return differing
