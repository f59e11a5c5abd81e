"""``python -m recipe.fspo.compare``: algorithms x seeds under one set of conditions, and the report on them.

Each cell of the grid is a run folder; ``grid.json`` names them all. The same command continues where it was
interrupted. Runs share the data order of their seed, the initial weights, one advantage estimator and, up to a constant
factor, one gradient scale (``advantage=shared grad_scale=matched``; overrides given on the command line win).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from hydra.errors import HydraException

from fspo.data.io import atomic_path, write_json
from recipe.fspo.calibrate import CALIBRATION_FILE, calibrate
from recipe.fspo.compose import CONF_DIR, compose
from recipe.fspo.exits import BAD_INPUT, INTERRUPTED
from recipe.fspo.preemption import PREEMPTED

GRID_FILE: Final = "grid.json"
OVERRIDES_FILE: Final = "overrides.yaml"
COMPARISONS: Final = ("default", "matched")
#: "A fair comparison": what every run of a grid shares unless the command line says otherwise.
FAIR: Final = ("advantage=shared", "grad_scale=matched", "fspo.record_sequences=true")

USAGE: Final = """\
usage: python -m recipe.fspo.compare [KEY=VALUE ...] [any Hydra override of recipe.fspo.main ...]

Trains every algorithm with every seed and writes a report. Interrupted, the same command goes on where it stopped.

  algos=[fspo,rloo,gspo]    values of algo, the first is compared with the others (ls conf/algo)
  seeds=[1,2,3]             seeds of data order and sampling
  comparisons=[default]     default: published clip values; matched: clip values at which all algorithms clip the same
                            share of the same sequences; or both
  target_clip_rate=0.15     that share
  out=FOLDER                where the runs and the report go (runs/compare/EXPERIMENT)
  starts=auto               shared: one start of Ray, FSDP and vLLM trains cell after cell; separate: a start each,
                            which resumes from checkpoints; auto: shared on CPUs
  dry_run=false             true: only say what is there and what would be run

example: python -m recipe.fspo.compare experiment=demo algos=[fspo,rloo,gspo] seeds=[1,2,3]
Each run shares the rest of its configuration; by default advantage=shared grad_scale=matched.
"""


class BadInput(ValueError):
    """The command line asks for something that cannot be run; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Cell:
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
    starts: str
    dry_run: bool
    overrides: tuple[str, ...]

    def cells(self) -> list[Cell]:
        """The grid: default clips before matched ones, and whole seeds first, so that a partial grid is paired."""
        return [
            Cell(f"{comparison}/{algo}/seed{seed}", algo, seed, comparison)
            for comparison in COMPARISONS
            if comparison in self.comparisons
            for seed in self.seeds
            for algo in self.algos
        ]

    def pilot(self) -> Cell:
        """The run whose sequences fix the matched clip values: the first algorithm's, with default clips."""
        return Cell(f"default/{self.algos[0]}/seed{self.seeds[0]}", self.algos[0], self.seeds[0], "default")


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line.

    Raises:
        BadInput: for an unknown value, naming the key and the choices.
    """
    own: dict[str, Any] = {
        "algos": ["fspo", "rloo", "gspo"],
        "seeds": [1, 2, 3],
        "comparisons": ["default"],
        "target_clip_rate": 0.15,
        "out": None,
        "starts": "auto",
        "dry_run": False,
    }
    overrides = list(FAIR)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise BadInput(f"{argument!r} is not KEY=VALUE; see --help")
        if key in ("algo", "seed", "fspo.run_dir", "fspo.then"):
            raise BadInput(f"{argument}: the grid sets {key}; give algos=[...], seeds=[...] and out=FOLDER instead")
        if key not in own:
            overrides.append(argument)
            continue
        own[key] = yaml.safe_load(value)
        if isinstance(own[key], str) and key in ("algos", "seeds", "comparisons"):
            own[key] = [own[key]]
        if key == "seeds" and isinstance(own[key], int):
            own[key] = [own[key]]
    _check(own)
    try:
        config = compose(overrides)
    except HydraException as error:
        raise BadInput(str(error)) from None
    starts = own["starts"]
    if starts == "auto":
        starts = "shared" if config.trainer.device == "cpu" else "separate"
    return Request(
        out=Path(own["out"] or f"runs/compare/{config.trainer.experiment_name}").absolute(),
        algos=tuple(own["algos"]),
        seeds=tuple(own["seeds"]),
        comparisons=tuple(own["comparisons"]),
        target_clip_rate=float(own["target_clip_rate"]),
        starts=starts,
        dry_run=bool(own["dry_run"]),
        overrides=tuple(overrides),
    )


def _check(own: dict[str, Any]) -> None:
    known = sorted(path.stem for path in (CONF_DIR / "algo").glob("*.yaml"))
    for key, allowed in (("algos", known), ("comparisons", COMPARISONS)):
        values = own[key]
        if not isinstance(values, list) or not values:
            raise BadInput(f"{key}={values!r}: give a list such as {key}=[{','.join(allowed[:2])}]")
        for value in values:
            if value not in allowed:
                raise BadInput(f"{key}: {value!r} is not known; choose from {', '.join(allowed)}")
    seeds = own["seeds"]
    if not isinstance(seeds, list) or not seeds or not all(isinstance(seed, int) and seed >= 0 for seed in seeds):
        raise BadInput(f"seeds={seeds!r}: give whole numbers from 0, such as seeds=[1,2,3]")
    for key in ("algos", "seeds", "comparisons"):
        if len(set(own[key])) < len(own[key]):
            raise BadInput(f"{key}={own[key]!r} names a value twice")
    rate = own["target_clip_rate"]
    if not isinstance(rate, int | float) or not 0 < rate < 1:
        raise BadInput(f"target_clip_rate={rate!r} must lie strictly between 0 and 1, such as 0.15")
    if own["starts"] not in ("auto", "shared", "separate"):
        raise BadInput(f"starts={own['starts']!r} must be auto, shared or separate")
    if not isinstance(own["dry_run"], bool):
        raise BadInput(f"dry_run={own['dry_run']!r} must be true or false")


def status(folder: Path) -> str:
    """How a cell stands: ``not run``, or what its run.json says (``running`` is what a killed run leaves)."""
    try:
        return str(json.loads((folder / "run.json").read_text(encoding="utf-8"))["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return "not run"


def plan(request: Request) -> list[Cell]:
    """Write (or extend) ``grid.json`` and return its cells.

    Raises:
        BadInput: if the folder holds a grid made with other overrides: its runs could not be compared with these.
    """
    path = request.out / GRID_FILE
    cells = {cell.path: cell for cell in request.cells()}
    settings = {"overrides": list(request.overrides), "target_clip_rate": request.target_clip_rate}
    if path.is_file():
        grid = json.loads(path.read_text(encoding="utf-8"))
        for key, value in settings.items():
            if grid.get(key) != value:
                raise BadInput(
                    f"{path} was made with {key}={grid.get(key)}, not {value}: runs made under different conditions "
                    "are not comparable; give another out=FOLDER, or the same overrides"
                )
        cells = {cell["path"]: Cell(**cell) for cell in grid["runs"]} | cells
    request.out.mkdir(parents=True, exist_ok=True)
    write_json(path, settings | {"runs": [asdict(cell) for cell in cells.values()]})
    return list(cells.values())


def _overrides_of(cell: Cell, request: Request) -> list[str]:
    overrides = [*request.overrides, f"algo={cell.algo}", f"seed={cell.seed}", f"fspo.comparison={cell.comparison}"]
    if cell.comparison == "matched":
        calibration = json.loads((request.out / CALIBRATION_FILE).read_text(encoding="utf-8"))
        overrides += calibration["algos"][cell.algo]["overrides"]
    return [*overrides, f"fspo.run_dir={request.out / cell.path}"]


def _start(cells: Sequence[Cell], request: Request) -> int:
    """Run the cells in one start of the stack; returns the exit status."""
    files = []
    for cell in cells:
        folder = request.out / cell.path
        if not any(folder.glob("checkpoints/global_step_*")):
            shutil.rmtree(folder, ignore_errors=True)  # an interrupted run without a checkpoint begins anew
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(folder / OVERRIDES_FILE) as temporary:
            temporary.write_text(yaml.safe_dump(_overrides_of(cell, request)), encoding="utf-8")
        files.append(folder / OVERRIDES_FILE)
    then = f"fspo.then=[{','.join(str(path) for path in files[1:])}]"
    command = [sys.executable, "-m", "recipe.fspo.main", *yaml.safe_load(files[0].read_text(encoding="utf-8")), then]
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt):
                process.wait(timeout=60)  # it has had the same signal and ends by itself
            raise


def _batches(cells: Sequence[Cell], request: Request) -> Iterator[list[Cell]]:
    """Cells to run, start by start, as long as each start finishes something."""
    while pending := [cell for cell in cells if status(request.out / cell.path) != "finished"]:
        yield pending if request.starts == "shared" else pending[:1]
        if all(status(request.out / cell.path) != "finished" for cell in pending):
            return


def run_cells(cells: Sequence[Cell], request: Request) -> int:
    """Run what is not finished; 0 if everything is afterwards, otherwise the last exit status."""
    code = 0
    for batch in _batches(cells, request):
        code = _start(batch, request)
        if code < 0 or code in (BAD_INPUT, PREEMPTED, INTERRUPTED):  # not to be tried again
            return code
    unfinished = [cell for cell in cells if status(request.out / cell.path) != "finished"]
    return (code or 1) if unfinished else 0


def run(request: Request) -> int:
    """Run the grid and report on it; returns the exit status."""
    cells = plan(request)
    code = 0
    if not request.dry_run:
        code = run_cells([cell for cell in cells if cell.comparison == "default"], request)
        matched = [cell for cell in cells if cell.comparison == "matched"]
        if matched and code == 0:
            code = run_cells([request.pilot()], request)
            if code == 0:
                algos = dict.fromkeys(cell.algo for cell in matched)
                calibrate(request.out, request.pilot().path, list(algos), request.overrides, request.target_clip_rate)
                code = run_cells(matched, request)
    for cell in cells:
        print(f"{cell.path}: {status(request.out / cell.path)}")
    if any((request.out / cell.path / "metrics.jsonl").is_file() for cell in cells):
        from fspo.report.build import build_report

        report = build_report([request.out], request.out / "report")
        for problem in report.problems:
            print(f"note: {problem}")
        print(f"report: {report.page}")
    if code:
        print("not finished: the same command goes on where this one stopped", file=sys.stderr)
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
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on where this one stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
