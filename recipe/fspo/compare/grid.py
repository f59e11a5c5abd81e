"""A grid of runs: what is planned, what is done, and running the rest one by one.

Each run has a folder; ``grid.json`` names them all. Runs share the data order of their seed, the initial weights, one
advantage estimator and, up to a constant factor, one gradient scale (overrides given on the command line win).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fspo.files import write_json
from recipe.fspo.compare.matched_clips import CALIBRATION_FILES, calibrate
from recipe.fspo.launch.commands import BadInput
from recipe.fspo.launch.run_settings import run_info

GRID_FILE: Final = "grid.json"
COMPARISONS: Final = ("default", *CALIBRATION_FILES)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of the grid."""

    path: str
    algo: str
    seed: int
    comparison: str


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    out: Path
    algos: tuple[str, ...]
    seeds: tuple[int, ...]
    comparisons: tuple[str, ...]
    target_clip_rate: float
    dry_run: bool
    overrides: tuple[str, ...]
    only: int | None = None

    def runs(self) -> list[PlannedRun]:
        """The grid: default clips before matched ones, and whole seeds first, so that a partial grid is paired."""
        return [
            PlannedRun(f"{comparison}/{algo}/seed{seed}", algo, seed, comparison)
            for comparison in COMPARISONS
            if comparison in self.comparisons
            for seed in self.seeds
            for algo in self.algos
        ]

    def pilot(self) -> PlannedRun:
        """The run whose sequences fix the matched clip values: the first algorithm's, with default clips."""
        return PlannedRun(f"default/{self.algos[0]}/seed{self.seeds[0]}", self.algos[0], self.seeds[0], "default")


def status(folder: Path) -> str:
    """How a run stands: ``not run``, or what its run.json says (``running`` is what a killed run leaves)."""
    info = run_info(folder)
    return "not run" if info is None else str(info["status"])


def plan(request: Request) -> list[PlannedRun]:
    """Write (or extend) ``grid.json`` and return its runs.

    Raises:
        BadInput: if the folder holds a grid made with other overrides: its runs could not be compared with these.
    """
    path = request.out / GRID_FILE
    runs = {run.path: run for run in request.runs()}
    settings = {"overrides": list(request.overrides), "target_clip_rate": request.target_clip_rate}
    if path.is_file():
        grid = json.loads(path.read_text(encoding="utf-8"))
        for key, value in settings.items():
            if grid.get(key) != value:
                raise BadInput(
                    f"{path} was made with {key}={grid.get(key)}, not {value}: runs made under different conditions "
                    "are not comparable; give another out=FOLDER, or the same overrides"
                )
        runs = {run["path"]: PlannedRun(**run) for run in grid["runs"]} | runs
    request.out.mkdir(parents=True, exist_ok=True)
    write_json(path, settings | {"runs": [asdict(run) for run in runs.values()]})
    return list(runs.values())


def command_of(run: PlannedRun, request: Request) -> list[str]:
    """The command line of one run."""
    overrides = [*request.overrides, f"algo={run.algo}", f"seed={run.seed}", f"fspo.comparison={run.comparison}"]
    if run.comparison in CALIBRATION_FILES:
        calibration = json.loads((request.out / CALIBRATION_FILES[run.comparison]).read_text(encoding="utf-8"))
        overrides += calibration["algos"][run.algo]["overrides"]
    return [sys.executable, "-m", "recipe.fspo.main", *overrides, f"fspo.run_dir={request.out / run.path}"]


def _start(run: PlannedRun, request: Request) -> int:
    """Start one run; returns its exit status."""
    with subprocess.Popen(command_of(run, request)) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            try:
                process.wait(timeout=30)  # a terminal's Ctrl-C was for it, too
            except (KeyboardInterrupt, subprocess.TimeoutExpired):
                process.send_signal(signal.SIGINT)
                process.wait(timeout=60)
            raise


def _run_all(runs: Sequence[PlannedRun], request: Request) -> int:
    """Run what is not finished; 0 if everything is, then. One that fails in training does not keep the others waiting;
    what keeps a run from its first step would keep them from theirs."""
    failed = 0
    for run in runs:
        folder = request.out / run.path
        if status(folder) != "finished" and (code := _start(run, request)) != 0:
            if code != 1 or not (folder / "metrics.jsonl").is_file():
                return code
            failed = code
    return failed


def _run_grid(runs: Sequence[PlannedRun], request: Request) -> int:
    code = _run_all([run for run in runs if run.comparison == "default"], request)
    for comparison in CALIBRATION_FILES:
        matched = [run for run in runs if run.comparison == comparison]
        if code == 0 and matched:
            code = _run_all([request.pilot()], request)
        if code == 0 and matched:
            algos = list(dict.fromkeys(run.algo for run in matched))
            pilot, rate = request.pilot().path, request.target_clip_rate
            calibrate(request.out, pilot, algos, request.overrides, rate, comparison)
            code = _run_all(matched, request)
    return code


def run(request: Request) -> int:
    """Run the grid, or one run of it, and report on it; returns the exit status."""
    runs = plan(request)
    if request.only is not None:
        only = request.runs()[request.only]
        if status(request.out / only.path) == "finished":
            print(f"{only.path}: finished")
            return 0
        command = command_of(only, request)
        os.execv(command[0], command)  # in this process's place, so that a warning's signal reaches it
    code = 0 if request.dry_run else _run_grid(runs, request)
    for each in runs:
        print(f"{each.path}: {status(request.out / each.path)}")
    if any((request.out / each.path / "metrics.jsonl").is_file() for each in runs):
        from fspo.report.build import build_report

        report = build_report([request.out], request.out / "report")
        for problem in report.problems:
            print(f"note: {problem}")
        print(f"report: {report.page}")
    if code:
        print("not finished: the same command goes on where this one stopped", file=sys.stderr)
    return code
