"""``python -m recipe.fspo.compare``: algorithms x seeds under equal conditions, one by one, and the report on them.

Each run has a folder; ``grid.json`` names them all. Runs share the data order of their seed, the initial weights, one
advantage estimator and, up to a constant factor, one gradient scale (overrides given on the command line win).
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from recipe.fspo.job import JOB, choices, compose
from recipe.runner.faults.preemption import ENDING, FAILED, PREEMPTED, STOP_VARIABLE, status_of, take_signals
from recipe.runner.launch.commands import BadInput, as_list, of_settings, refuse, split_arguments
from recipe.runner.launch.compose import Refused, key_of, parsed, quoted, text_of
from recipe.runner.launch.run_settings import has_results, run_info
from recipe.runner.launch.secrets import literal_problems
from recipe.runner.launch.values import name_problems
from recipe.runner.main import problems_of

from fspo.files import write_json
from fspo.reading import parse_object, read_text
from fspo.records import CONFIG_FILE, GRID_FILE, METRICS_FILE, PlannedRun, planned_runs

CLIP_VALUES: Final = ("measured", "published")
_GOES_ON: Final = "the same command goes on where this one stopped"
#: Keys that differ between the runs of a grid.
_OF_THE_GRID: Final = ("algo", "fspo.algo", "fspo.clip_values", "run.dir", "seed")

#: Settings of the command: default and meaning of each (docs/settings.md).
SETTINGS: Final = {
    "algos": ("[fspo,rloo,gspo]", "values of algo (ls conf/algo); the first is compared with the others"),
    "seeds": ("[1,2,3]", "seeds of data order and sampling"),
    "clip_values": ("[measured]", "each run measures its own; published: each loss's own; or both"),
    "advantage": ("shared", "one estimator for all, grpo, unless you give another; native: each algorithm's own"),
    "out": ("runs/compare/EXPERIMENT", "where the runs and the report go"),
    "run": ("null", "all; N: only run N, counted from 0, and no report (slurm/compare.sh)"),
    "dry_run": ("false", "true: only print what is there and what would be run; writes nothing"),
}
_ROWS: Final = "\n".join(f"  {f'{name}={default}':28} {meaning}" for name, (default, meaning) in SETTINGS.items())
USAGE: Final = f"""\
usage: python -m recipe.fspo.compare [KEY=VALUE ...] [any Hydra override of recipe.fspo.main ...]

Trains every algorithm with every seed and writes a report. Interrupted, the same command goes on where it stopped.

{_ROWS}

example: python -m recipe.fspo.compare experiment=demo algos=[fspo,rloo,gspo] seeds=[1,2,3]
Each run shares the rest of its configuration; by default fspo.match_scale=matched. A loss of your own is
one more value of algos; what it needs: docs/architecture.md.
"""


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


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line.

    Raises:
        BadInput: for an unknown value, naming the key and the choices.
    """
    settings, rest = split_arguments(arguments, SETTINGS)
    settings = {name: yaml.safe_load(default) for name, (default, _) in SETTINGS.items() if name != "out"} | settings
    for override in rest:
        key, text = key_of(override), text_of(override)
        if key in _OF_THE_GRID:
            raise BadInput(f"{text}: the grid sets {key}; give algos=[...], seeds=[...], clip_values=[...], out=FOLDER")
        if override.is_sweep_override():
            raise BadInput(f"{text}: all runs of a grid share its overrides; a list is {key}=[A,B]")
        if wrong := list(literal_problems(override.value(), key)):
            raise BadInput("\n".join(wrong))
    seeds = as_list(settings, "seeds")
    if not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise BadInput(f"seeds={seeds!r}: give whole numbers from 0, such as seeds=[1,2,3]")
    if (advantage := settings["advantage"]) not in ("shared", "native"):
        raise BadInput(f"advantage={advantage}: give shared or native")
    if type(settings["dry_run"]) is not bool:
        raise BadInput(f"dry_run={settings['dry_run']}: give true or false")
    shared = ["algorithm.adv_estimator=grpo"] if advantage == "shared" else []
    overrides = [*shared, *map(text_of, rest)]
    try:
        config = compose(overrides)
        problems, name = list(name_problems(config)), config.trainer.experiment_name
    except (HydraException, OmegaConfBaseException) as error:
        raise BadInput(of_settings(error, rest)) from None
    if problems:
        raise BadInput("\n".join(problems))
    if config.evaluate is True:
        raise BadInput("evaluate=true trains nothing: evaluate the runs of the grid one by one")
    request = Request(
        out=Path(str(settings.get("out") or f"runs/compare/{name}")).absolute(),
        algos=tuple(as_list(settings, "algos", choices("algo", overrides))),
        seeds=tuple(seeds),
        clip_values=tuple(as_list(settings, "clip_values", CLIP_VALUES)),
        dry_run=settings["dry_run"],
        overrides=tuple(overrides),
        only=settings["run"],
    )
    runs = len(request.runs())
    if request.only is not None and (type(request.only) is not int or not 0 <= request.only < runs):
        raise BadInput(f"run={settings['run']!r}: the grid has {runs} runs, numbered from 0 to {runs - 1}")
    return request


def problems(request: Request) -> Iterator[str]:
    """What would end a run of the grid before its first step, maybe hours after the others have begun.

    A run of each algorithm is looked at, and none that has begun. Imports verl and the user's modules.
    """
    algos_of: dict[str, list[str]] = {}
    before, shown = dict(os.environ), io.StringIO()
    for run in {(run.algo, run.clip_values): run for run in reversed(request.runs())}.values():
        if run_info(request.out / run.path) is None:
            with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):  # the run itself says it
                wrong = _problems_of(overrides_of(run, request), is_own=run.algo not in choices("algo"))
            for problem in wrong:
                algos_of.setdefault(problem, []).append(run.algo)
    os.environ.clear()  # the runs set the platform anew
    os.environ |= before
    for problem, algos in algos_of.items():
        named = [algo for algo in request.algos if algo in algos]
        yield problem if len(named) == len(request.algos) else f"algo={', '.join(named)}: {problem}"


def _problems_of(words: Sequence[str], is_own: bool) -> list[str]:
    """What a dry run of these overrides names, and what keeps a loss that is not shipped from being compared."""
    wrong, overrides = list[str](), parsed(words)
    config: DictConfig | None
    try:
        config = compose(words)
    except Refused as error:
        wrong, config = list(error.problems), error.config
    wrong += problems_of(config, JOB, overrides)
    return wrong


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


def overrides_of(run: PlannedRun, request: Request) -> list[str]:
    """The overrides of one run."""
    of_run = [f"algo={run.algo}", f"seed={run.seed}", f"fspo.clip_values={run.clip_values}"]
    return [*request.overrides, *of_run, f"run.dir={quoted(request.out / run.path)}"]


def command_of(run: PlannedRun, request: Request) -> list[str]:
    """The command line of one run."""
    return [sys.executable, "-m", "recipe.fspo.main", *overrides_of(run, request)]


class Starts:
    """Starts commands one after another, and passes on the signals that come, after which none starts."""

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def take(self, signum: signal.Signals) -> None:
        """Pass a signal on to the current command; without one, this process ends at once."""
        with self._lock:
            if self._process is None:
                ENDING.how_far = lambda: f"while no run was going on; {_GOES_ON}"
                ENDING.take(signum)
            self.signals.append(signum)
            self._process.send_signal(signum)

    def is_stopped(self) -> bool:
        """Whether no other command is to start: a signal came, or the job's file that asks for the end is there."""
        return bool(self.signals) or os.path.isfile(os.environ.get(STOP_VARIABLE, ""))

    def run(self, command: Sequence[str]) -> int:
        """Run one command to its end; its exit status, -N if signal N ended it."""
        with self._lock:  # a signal that comes now waits for the process
            # In a group of its own: a terminal's Ctrl-C reaches it once, from here.
            self._process = subprocess.Popen(command, process_group=0)
        code = self._process.wait()
        self._process = None
        return code


#: Of this process.
STARTS: Final = Starts()


def _announce(run: PlannedRun, number: int, of: int, is_done: bool = False) -> None:
    done = ": finished before" if is_done else ""
    print(f"run {number} of {of}: {run.algo}, seed {run.seed}, clip_values={run.clip_values}{done}", flush=True)


def _run_all(runs: Sequence[PlannedRun], request: Request) -> int:
    """Run what is not finished, one after another, and return the exit status.

    A run that fails does not keep the others waiting. 75 (130 after Ctrl-C): the same command goes on, because this one
    was told to end, or a run ended that another start may finish.
    """
    codes = set[int]()
    for number, run in enumerate(runs, 1):
        is_done = status(request.out / run.path) == "finished"
        if not is_done and STARTS.is_stopped():
            codes.add(PREEMPTED)
            break
        _announce(run, number, len(runs), is_done)
        if not is_done:
            codes.add(STARTS.run(command_of(run, request)))
    if codes <= {0}:
        return 0
    if STARTS.signals:
        return status_of(STARTS.signals)
    return PREEMPTED if PREEMPTED in codes else FAILED


def run(request: Request) -> int:
    """Run the grid, or one run of it, and report on it; returns the exit status.

    Raises:
        BadInput: if a run of the grid could not start, or its folder is in the way.
    """
    if (request.only is None or request.dry_run) and (wrong := list(problems(request))):
        raise BadInput("\n".join(wrong))
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
        print(f"not finished: {_GOES_ON}", file=sys.stderr)
    return code


def main() -> None:
    """Command line."""
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE, end="")
        return
    try:
        code = run(parse(arguments))
    except BadInput as error:
        refuse(error)
    sys.exit(code)


if __name__ == "__main__":
    take_signals(STARTS.take)
    main()
