"""A grid of runs: what is planned, what is done, and running the rest one by one.

Each run has a folder; ``grid.json`` names them all. Runs share the data order of their seed, the initial weights, one
advantage estimator and, up to a constant factor, one gradient scale (overrides given on the command line win).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from recipe.fspo.compare.starts import Starts
from recipe.runner.launch.commands import BadInput
from recipe.runner.launch.compose import quoted
from recipe.runner.launch.run_settings import has_results, run_info

from fspo.files import write_json
from fspo.reading import parse_object, read_text
from fspo.records import CONFIG_FILE, GRID_FILE, METRICS_FILE, PlannedRun, planned_runs

CLIP_VALUES: Final = ("measured", "published")


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    out: Path
    algos: tuple[str, ...]
    seeds: tuple[int, ...]
    clip_values: tuple[str, ...]
    dry_run: bool
    overrides: tuple[str, ...]
    only: int | None = None

    def runs(self) -> list[PlannedRun]:
        """The grid: whole seeds first, so that a partial grid is paired."""
        return [
            PlannedRun(f"{clip_values}/{algo}/seed{seed}", algo, seed, clip_values)
            for clip_values in self.clip_values
            for seed in self.seeds
            for algo in self.algos
        ]


def status(folder: Path) -> str:
    """How a run stands: ``not run``, or what its run.json says (``running`` is what a killed run leaves)."""
    info = run_info(folder)
    return "not run" if info is None else str(info["status"])


def plan(request: Request) -> list[PlannedRun]:
    """The runs that are asked for and those of earlier commands; unless it is a dry run, ``grid.json`` names them all.

    Raises:
        BadInput: if the folder holds runs that were made with other overrides, and could not be compared with these, or
            if it holds something else, or cannot be written to.
    """
    path = request.out / GRID_FILE
    runs = {run.path: run for run in request.runs()}
    settings = {"overrides": list(request.overrides)}
    if path.exists():
        try:
            grid = parse_object(read_text(path))
            changed = [(key, grid[key], value) for key, value in settings.items() if grid[key] != value]
            problems: list[str] = []
            earlier = {run.path: run for run in planned_runs(request.out, problems)}
            if problems:
                raise ValueError(problems[0])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BadInput(
                f"{path} is damaged, or not of this command ({type(error).__name__}: {error}): give another out=FOLDER"
            ) from None
        folders = [info.parent for info in request.out.glob("*/*/*/run.json")]
        if changed and any(has_results(folder) or status(folder) == "running" for folder in folders):
            key, old, new = changed[0]
            raise BadInput(
                f"{path} was made with {key}={old}, not {new}: runs made under different conditions are not "
                "comparable; give another out=FOLDER, or the same overrides"
            )
        if not changed:
            runs = earlier | runs
        elif not request.dry_run:
            for folder in folders:  # a start that came to nothing; it keeps no settings
                if run_info(folder) is not None:
                    (folder / CONFIG_FILE).unlink(missing_ok=True)
    if not request.dry_run:
        try:
            request.out.mkdir(parents=True, exist_ok=True)
            write_json(path, settings | {"runs": [asdict(run) for run in runs.values()]})
        except OSError as error:
            raise BadInput(f"out={request.out}: {error}; give a folder that can be written to") from None
    return list(runs.values())


def command_of(run: PlannedRun, request: Request) -> list[str]:
    """The command line of one run."""
    overrides = [*request.overrides, f"algo={run.algo}", f"seed={run.seed}", f"fspo.clip_values={run.clip_values}"]
    return [sys.executable, "-m", "recipe.fspo.main", *overrides, f"run.dir={quoted(request.out / run.path)}"]


def _announce(run: PlannedRun, number: int, of: int, is_done: bool = False) -> None:
    done = ": finished before" if is_done else ""
    print(f"run {number} of {of}: {run.algo}, seed {run.seed}, clip_values={run.clip_values}{done}", flush=True)


def _run_all(runs: Sequence[PlannedRun], request: Request) -> int:
    """Run what is not finished; 0 if everything is, then.

    A run that fails in training does not keep the others waiting; what keeps one from its first step would keep them
    from theirs.

    Raises:
        KeyboardInterrupt: if this process is told to end; then the run in progress is, too.
    """
    failed = 0
    with Starts() as starts:
        for number, run in enumerate(runs, 1):
            folder = request.out / run.path
            is_done = status(folder) == "finished"
            _announce(run, number, len(runs), is_done)
            if is_done or (code := starts.run(command_of(run, request))) == 0:
                continue
            if code != 1 or not (folder / METRICS_FILE).is_file():
                return code
            failed = code
    return failed


def run(request: Request) -> int:
    """Run the grid, or one run of it, and report on it; returns the exit status."""
    runs = plan(request)
    if request.only is not None and not request.dry_run:
        only = request.runs()[request.only]
        if status(request.out / only.path) == "finished":
            print(f"{only.path}: finished")
            return 0
        command = command_of(only, request)
        _announce(only, request.only + 1, len(request.runs()))
        os.execv(command[0], command)  # in this process's place, so that a signal reaches it
    code = 0 if request.dry_run else _run_all(request.runs(), request)
    for planned in runs:
        print(f"{planned.path}: {status(request.out / planned.path)}")
    if not request.dry_run and any((request.out / planned.path / METRICS_FILE).is_file() for planned in runs):
        from fspo.report.build import build_report

        report = build_report([request.out], request.out / "report")
        for problem in report.problems:
            print(f"note: {problem}")
        print(f"report: {report.page}")
    if code:
        print("not finished: the same command goes on where this one stopped", file=sys.stderr)
    return code
