"""Reading run folders (docs/run-folder.md). Missing and broken parts are named by file and line; the rest is used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import yaml  # type: ignore[import-untyped]

from fspo.funnel import FunnelSteps
from fspo.losses import resolve_settings
from fspo.records import (
    CONFIG_FILE,
    FUNNEL_FILE,
    GRID_FILE,
    INFO_FILE,
    LENGTH_STATS_FILE,
    METRICS_FILE,
    PlannedRun,
    from_record,
    numbered_steps,
    read_object,
)
from fspo.sums import FIELDS, FINE_LENGTH_EDGES, Z_EDGES, SequenceSums
from fspo.types import SequenceLossSettings

Array = npt.NDArray[np.float64]

LOSS_KEY: Final = "actor_rollout_ref.actor.policy_loss"


@dataclass(slots=True)
class LengthStats:
    """Sums by fine length bin of every mini-batch but the first of each step.

    Attributes:
        step_M: Step of each mini-batch.
        sums_MKF: Sums, columns as in :data:`fspo.sums.FIELDS`.
        cells_M: For each mini-batch the filled cells of its histogram of z = S / sqrt(L), int64 [n, 3]: fine length
            bin, cell of :data:`fspo.sums.Z_EDGES`, sequences.
        unmoved: The mini-batches left out, together: there S is rounding (:mod:`fspo.noise_floor`).
    """

    step_M: npt.NDArray[np.int64]
    sums_MKF: Array
    cells_M: list[npt.NDArray[np.int64]]
    unmoved: SequenceSums = field(default_factory=SequenceSums.zeros)

    def hist_KH(self) -> npt.NDArray[np.int64]:
        """The histogram over all mini-batches, by fine length bin."""
        hist = np.zeros((len(FINE_LENGTH_EDGES) - 1, len(Z_EDGES) - 1), np.int64)
        for cells in self.cells_M:
            np.add.at(hist, (cells[:, 0], cells[:, 1]), cells[:, 2])
        return hist


@dataclass(slots=True)
class Run:
    """One run folder, as far as it could be read.

    Attributes:
        path: The folder.
        info: run.json, empty if missing or broken.
        steps: Metrics by step, in order. Where a step was logged twice (after a resume), the later line counts.
        lengths: Length statistics.
        funnel: Where responses ended, one entry per step; none for a run from before there was a funnel.
        problems: What could not be read, each with file and line.
    """

    path: Path
    info: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    lengths: LengthStats = field(default_factory=lambda: _empty_lengths())
    funnel: FunnelSteps = field(default_factory=lambda: FunnelSteps.of([]))
    problems: list[str] = field(default_factory=list)

    @property
    def algo(self) -> str:
        """The algorithm, or the folder's name where run.json does not say."""
        return str(self.info.get("algo", self.path.name))

    @property
    def seed(self) -> int | None:
        """The seed, None where run.json does not say."""
        seed = self.info.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def comparison(self) -> str:
        """``default`` or ``matched``: where the clip values come from."""
        return str(self.info.get("comparison", "default"))

    @property
    def name(self) -> str:
        """Algorithm and seed, and the comparison unless it is the default one."""
        return f"{self.algo}, seed {self.seed}" + ("" if self.comparison == "default" else f", {self.comparison}")

    @property
    def status(self) -> str:
        """``finished``, ``running``, ``failed``, or ``unknown``."""
        return str(self.info.get("status", "unknown"))

    @property
    def last_step(self) -> int:
        """The last step that left a trace."""
        return max([*self.steps, *self.lengths.step_M.tolist()], default=0)

    @property
    def ending(self) -> str:
        """The status, with the restarts after failures and what they cost (effective training time ratio)."""
        restarts = sum("reason" in start for start in self.info.get("starts", ()))
        if not restarts or not (ratio := self.info.get("effective_time_ratio")):
            return self.status
        return f"{self.status}, after {restarts} restart(s); {ratio:.0%} of the time in steps that count"

    @property
    def loss_settings(self) -> SequenceLossSettings | None:
        """The loss as run.json records it; None if it is not one of this package's, or not recorded.

        So is the loss of a run of an earlier version whose band was widened by staleness, or had a dual clip.
        """
        loss = self.info.get("loss")
        if not isinstance(loss, dict) or loss.get("staleness", "none") != "none" or loss.get("dual_clip") is not None:
            return None
        try:
            return resolve_settings(loss)
        except (TypeError, ValueError):
            return None

    def settings(self) -> dict[str, Any]:
        """Every setting by its key, from config.yaml; only those of the loss, from run.json, where that is missing."""
        try:
            config = yaml.load(
                (self.path / CONFIG_FILE).read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            )
        except (OSError, ValueError, yaml.YAMLError):
            config = {}
        loss = self.loss_settings
        return dict(_leaves(config)) | dict(_leaves({LOSS_KEY: dataclasses.asdict(loss) if loss else {}}))

    def series(self, name: str) -> tuple[npt.NDArray[np.int64], Array]:
        """Steps at which a metric was logged, and its values."""
        found = [(step, values[name]) for step, values in self.steps.items() if name in values]
        return np.array([s for s, _ in found], dtype=np.int64), np.array([v for _, v in found], dtype=np.float64)

    def first_series(self, *names: str) -> tuple[npt.NDArray[np.int64], Array]:
        """The first of several metrics that was logged at all."""
        for name in names:
            steps, values = self.series(name)
            if len(steps):
                return steps, values
        return np.zeros(0, dtype=np.int64), np.zeros(0)

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


def load_run(path: Path) -> Run:
    """Read one run folder.

    Args:
        path: The folder; its files may be missing, cut short or broken.

    Returns:
        What could be read, with ``problems`` naming the rest.
    """
    run = Run(path)
    if not path.is_dir():
        run.problems.append(f"{path}: not a folder; give the folder that holds {METRICS_FILE}")
        return run
    run.info = read_object(path / INFO_FILE, run.problems)
    starts, ratio = run.info.get("starts", []), run.info.get("effective_time_ratio")
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        run.problems.append(f"{path / INFO_FILE}: 'starts' must be a list of objects, left out")
        del run.info["starts"]
    if ratio is not None and _finite(ratio) is None:
        run.problems.append(f"{path / INFO_FILE}: 'effective_time_ratio' must be a number, left out")
        del run.info["effective_time_ratio"]
    for number, line in numbered_steps(path / METRICS_FILE, run.problems):
        step, metrics = line["step"], line.get("metrics")
        if not isinstance(metrics, dict):
            run.problems.append(f"{path / METRICS_FILE}:{number}: needs an object 'metrics'")
            continue
        values = {name: value for name, each in metrics.items() if (value := _finite(each)) is not None}
        bad = sorted(name for name in metrics.keys() - values.keys() if metrics[name] is not None)
        if bad:
            run.problems.append(f"{path / METRICS_FILE}:{number}: not a finite number, left out: {', '.join(bad[:4])}")
        # Validation and training of one step may come on two lines.
        run.steps[step] = run.steps.get(step, {}) | values
    run.steps = dict(sorted(run.steps.items()))
    if not run.steps:
        run.problems.append(f"{path / METRICS_FILE}: no step logged")
    run.lengths = _read_lengths(path / LENGTH_STATS_FILE, run.problems)
    if (path / FUNNEL_FILE).exists():
        run.funnel = _read_funnel(path / FUNNEL_FILE, run.problems)
    return run


def _finite(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:  # an integer beyond all floats
        return None


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
        grid = path / GRID_FILE
        if not grid.is_file():
            folders.append(path)
            continue
        runs = read_object(grid, problems).get("runs")
        if not isinstance(runs, list):
            problems.append(f"{grid}: needs a list 'runs'")
            continue
        for index, run in enumerate(runs):
            try:
                plan = PlannedRun(
                    run["path"], str(run["algo"]), int(run["seed"]), str(run.get("comparison", "default"))
                )
                folder = path / plan.path
            except (KeyError, TypeError, ValueError) as error:
                problems.append(f"{grid}: run {index}: needs 'path', 'algo' and 'seed' ({error!r})")
                continue
            planned[folder] = plan
            if folder.is_dir():
                folders.append(folder)
    return list(dict.fromkeys(folders)), planned, problems


def _read_lengths(path: Path, problems: list[str]) -> LengthStats:
    parts: dict[tuple[int, int], tuple[Array, npt.NDArray[np.int64]]] = {}
    unmoved: dict[int, SequenceSums] = {}
    last = (0, 0)
    for number, line in numbered_steps(path, problems):
        step, minibatch = line["step"], line.get("minibatch")
        if not isinstance(minibatch, int):
            problems.append(f"{path}:{number}: needs an integer 'minibatch'")
            continue
        try:
            sums = from_record(line)
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
            continue
        again, last = (step, minibatch) < last, (step, minibatch)
        if minibatch == 0:
            unmoved[step] = sums if again else unmoved.get(step, SequenceSums.zeros()) + sums
            continue
        parts[step, minibatch] = sums.sums_KF.numpy(), sums.cells().numpy()
    found = _empty_lengths()
    found.unmoved = sum(unmoved.values(), SequenceSums.zeros())
    if parts:
        order = sorted(parts)
        found.step_M = np.array([step for step, _ in order])
        found.sums_MKF, found.cells_M = np.stack([parts[k][0] for k in order]), [parts[k][1] for k in order]
    return found


def _read_funnel(path: Path, problems: list[str]) -> FunnelSteps:
    """Of a step that was done twice, the later record."""
    records: dict[int, dict[str, Any]] = {}
    for number, line in numbered_steps(path, problems):
        try:
            FunnelSteps.of([line])
            records[line["step"]] = line
        except (KeyError, TypeError, ValueError, IndexError) as error:
            problems.append(f"{path}:{number}: not a record of the length funnel ({error!r})")
    return FunnelSteps.of(list(records.values()))


def _empty_lengths() -> LengthStats:
    return LengthStats(np.zeros(0, np.int64), np.zeros((0, len(FINE_LENGTH_EDGES) - 1, len(FIELDS))), [])
