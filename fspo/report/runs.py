"""Reading run folders (docs/runs.md). Missing and broken parts are named by file and line; the rest is used."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fspo.audit.description import NOT_MOVED
from fspo.audit.reading import accept_of, counts, of_before, read_audit, settings_of
from fspo.losses import ALGORITHMS, BANDS, resolve_settings
from fspo.reading import ANYTHING, NULL, NUMBER, check_fields, is_below, mapping_of, read_yaml, wrong_fields
from fspo.records import (
    CONFIG_FILE,
    GRID_FILE,
    INFO_FILE,
    METRICS_FILE,
    STEP_FILES,
    PlannedRun,
    planned_runs,
    read_info,
    read_steps,
)
from fspo.responses import Responses
from fspo.table import FOLDER, holds_table, read_table
from fspo.types import SequenceLossSettings

Array = npt.NDArray[np.float64]

#: Columns of a run's table that a report reads.
_COLUMNS: Final = ("minibatch", "L", "inside", "kept", "truncated")
LOSS_KEY: Final = "actor_rollout_ref.actor.policy_loss"


@dataclass(slots=True, eq=False)
class Run:
    """One run folder, as far as it could be read.

    Attributes:
        path: The folder.
        info: run.json, empty if missing or broken.
        steps: Metrics by step, in order. Where a step was logged twice (after a resume), the later line counts.
        responses: Those of mini-batches before which a weight had moved.
        problems: What could not be read, each with file and line.
    """

    path: Path
    info: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    responses: Responses = field(default_factory=lambda: Responses.join([]))
    problems: list[str] = field(default_factory=list)

    @property
    def algo(self) -> str:
        """The algorithm, or the folder's name where run.json does not say."""
        return str(self.info.get("algo", self.path.name))

    @property
    def seed(self) -> int | None:
        """The seed, None where run.json does not say."""
        return self.info.get("seed")

    @property
    def clip_values(self) -> str:
        """``measured`` on the run's own responses or ``published``, which is that of a record without the key; of older
        runs also ``matched`` on a pilot run's.
        """
        return str(self.info.get("clip_values", "published"))

    @property
    def name(self) -> str:
        """Algorithm and seed, and where its clip values come from unless it has measured them."""
        origin = "" if self.clip_values == "measured" else f", {self.clip_values} clip values"
        return f"{self.algo}, seed {self.seed}{origin}"

    @property
    def status(self) -> str:
        """``finished``, ``running``, ``failed``, or ``unknown``."""
        return str(self.info.get("status", "unknown"))

    @property
    def last_step(self) -> int:
        """The last step that left a trace."""
        return max([*self.steps, int(self.responses.step_B.max(initial=0))])

    @property
    def accept(self) -> float:
        """Share of its responses for which the run has measured its clip values; the usual one if it has not."""
        return accept_of(self.info)

    @property
    def loss_settings(self) -> SequenceLossSettings | None:
        """See :func:`fspo.audit.reading.settings_of`."""
        return settings_of(self.info)

    def settings(self) -> dict[str, Any]:
        """Every setting by its key, from config.yaml; only those of the loss, from run.json, where that is missing."""
        path, loss, problem = self.path / CONFIG_FILE, self.loss_settings, ""
        config: dict[str, Any] = {}
        try:
            config = read_yaml(path) if path.exists() else {}
        except (OSError, ValueError) as error:
            problem = f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})"
        if problem and problem not in self.problems:  # read several times
            self.problems.append(problem)
        return dict(_leaves(config)) | dict(_leaves({LOSS_KEY: dataclasses.asdict(loss) if loss else {}}))

    def series(self, *names: str) -> tuple[npt.NDArray[np.int64], Array]:
        """Steps and values of the first of these metrics that was logged at all."""
        name = next((name for name in names if any(name in values for values in self.steps.values())), "")
        steps = [step for step, values in self.steps.items() if name in values]
        return np.array(steps, np.int64), np.array([self.steps[step][name] for step in steps], np.float64)

    def validation_metrics(self) -> list[str]:
        """Names of the held-out metrics: accuracies before other rewards, and of these means over samples first."""
        names = {name for values in self.steps.values() for name in values if name.startswith("val-core/")}
        return sorted(names, key=lambda name: ("/acc" not in name, "/mean@" not in name, name))

    def validation_problems(self, metric: str) -> int | None:
        """Number of held-out problems behind a metric; None if run.json has no number (in all, or by data source)."""
        count = self.info.get("validation_problems")
        if isinstance(count, dict):
            count = count.get("/".join(metric.split("/")[1:-2]))  # a source may hold slashes
        return count if isinstance(count, int) and count > 0 else None


def load_runs(path: Path) -> list[Run]:
    """Read a run folder, an audit's folder, or a parquet file of responses; what could not be read is in ``problems``.

    A file's responses are judged by each of the bands with a published clip value.
    """
    if path.suffix != ".parquet" and path.is_dir() and not holds_table(path):
        return [load_run(path)]
    records = read_audit(path)
    problems = [*records.problems, *(f"{path}: {note}" for note in records.notes())]
    moved = records.responses.moved()
    if path.suffix == ".parquet":
        # No folder: a file holds nothing else of a run.
        runs = []
        for name, loss in BANDS.items() if len(moved) else ():
            settings = {"loss_mode": loss} | dataclasses.asdict(ALGORITHMS[loss])
            judged = moved.judged_by(ALGORITHMS[loss])
            runs.append(Run(path.with_suffix(""), {"algo": name, "loss": settings}, responses=judged))
        return runs or [Run(path, problems=problems)]
    if len(records.responses) and not len(moved):
        problems.append(f"{path}: {NOT_MOVED}")
    if len(moved) and not moved.rule_known:
        problems.append(f"{path}: of the loss {records.loss} no rule is known: python -m fspo.audit shows S by L")
        moved = Responses.join([])
    return [Run(path, {"algo": records.loss or path.name}, responses=moved, problems=problems)]


def load_run(path: Path) -> Run:
    """Read one run folder: what could be read, with ``problems`` naming the rest."""
    run = Run(path)
    files = [path / name for name in (INFO_FILE, CONFIG_FILE, *STEP_FILES, FOLDER)]
    if foreign := [file for file in files if not is_below(file, path)]:
        # In a folder of somebody else's: the page would show files of the reader's own.
        run.problems += [
            f"{file}: a link that leads out of the run's folder; nothing of it is read" for file in foreign
        ]
        return run
    run.info = read_info(path, run.problems)
    for number, step, metrics in read_steps(path / METRICS_FILE, run.problems, _metrics):
        wrong = wrong_fields(metrics, dict.fromkeys(metrics, NUMBER | NULL))
        run.problems += [f"{path / METRICS_FILE}:{number}: {name} {sentence}" for name, sentence in wrong.items()]
        # Validation and training of one step may come on two lines; null means undefined.
        values = {name: value for name, value in metrics.items() if value is not None and name not in wrong}
        run.steps[step] = run.steps.get(step, {}) | values
    run.steps = dict(sorted(run.steps.items()))
    try:
        resolve_settings(run.info.get("loss", {}))
    except (TypeError, ValueError) as error:
        run.problems.append(f"{path / INFO_FILE}: loss: {error}")
    if (old := of_before(path)) is not None:
        run.problems.append(old)
    if os.path.lexists(path / FOLDER):
        table = read_table(path / FOLDER, columns=_COLUMNS)
        run.problems += table.problems
        run.responses = Responses.of_rows(table.columns, counts(table.meta, False)).moved()
    return run


def _metrics(line: dict[str, Any]) -> dict[str, Any]:
    return dict(check_fields(line, {"metrics": mapping_of(ANYTHING)}, needed=("metrics",))["metrics"])


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _leaves(below, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def expand_paths(paths: list[Path]) -> tuple[list[Path], dict[Path, PlannedRun], list[str]]:
    """Folders of runs to read, the runs of planned grids by the folder where each is expected, and problems.

    A folder with grid.json is replaced by the runs that are planned there; any other path is taken as a run.
    """
    folders: list[Path] = []
    planned: dict[Path, PlannedRun] = {}
    problems: list[str] = []
    for path in paths:
        if not (path / GRID_FILE).is_file():
            folders.append(path)
            continue
        runs = {path / run.path: run for run in planned_runs(path, problems)}
        if outside := [folder for folder in runs if not is_below(folder, path)]:
            problems.append(
                f"{path / GRID_FILE}: {', '.join(map(str, outside))}: not below the grid's folder, and not read"
            )
            runs = {folder: run for folder, run in runs.items() if folder not in outside}
        planned |= runs
        folders += [folder for folder in runs if folder.is_dir()]
    return list(dict.fromkeys(folders)), planned, problems
