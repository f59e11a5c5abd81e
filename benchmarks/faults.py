"""``python -m benchmarks.faults``: kills each process of a run at each moment; the table of docs/reliability.md.

All rows use one run folder, so that each start also is the resume of the rows before it. Rows that are done are kept
in benchmarks/faults/rows.jsonl, and the same command goes on with the others; ``--minutes`` stops it in time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.faults_run import MOMENTS, PROCESSES, SAVE_FREQ, NotReached, run_row, see_resume
from benchmarks.pages import write_lines, write_section
from fspo.files import complete_lines

ROOT: Final = Path(__file__).resolve().parents[1]
ROWS: Final = ROOT / "benchmarks" / "faults" / "rows.jsonl"
PAGE: Final = ROOT / "docs" / "reliability.md"
#: Requirements that a row is held to.
LIMIT_S: Final = 60.0
#: First each process where it is needed most, for a matrix that is cut short; then the rest.
_FIRST: Final = (
    ("FSDP worker", "update"),
    ("vLLM engine", "generation"),
    ("reward worker", "generation"),
    ("trainer", "save"),
    ("driver", "weight sync"),
    ("node", "update"),
    ("FSDP worker", "start-up"),
    ("vLLM engine", "start-up"),
    ("driver", "start-up"),
    ("FSDP worker", "save"),
    ("vLLM engine", "weight sync"),
    ("reward worker", "validation"),
    ("GCS", "update"),
    ("vLLM server", "generation"),
    ("judge", "generation"),
    ("node", "start-up"),
    ("trainer", "start-up"),
    ("reward worker", "start-up"),
)
_ORDER: Final = ("save", "generation", "start-up", "weight sync", "update", "validation")
#: Roles with a row for every moment; of the others, which end in the same way, some moments.
_SOME: Final = {
    "vLLM server": ("generation", "weight sync"),
    "judge": ("generation",),
    "GCS": ("update", "save"),
}

Row = dict[str, Any]


def cells() -> list[tuple[str, str]]:
    """Process and moment of every row, in the order in which they are run."""
    every = [(process, moment) for moment in _ORDER for process in PROCESSES if moment in _SOME.get(process, MOMENTS)]
    return list(dict.fromkeys([*_FIRST, *every]))


def verdict(row: Row) -> str:
    """What a row fails of the requirements; empty if nothing."""
    if row["process"] == "judge":
        return "" if row["message"] == "the run goes on" else "did not survive"
    found = []
    if row["end_s"] is None or row["end_s"] > LIMIT_S:
        found.append("too late")
    if not row["exit_code"]:
        found.append("exit code")
    if row["left"]:
        found.append("processes left")
    if not row["message"] or not row.get("log_exists"):
        found.append("message")
    return ", ".join([*found, *failures_of_resume(row)])


def failures_of_resume(row: Row) -> list[str]:
    """What a row fails of the requirements on what was lost, and on how the next start took it up."""
    found = []
    if row["steps_lost"] > SAVE_FREQ:
        found.append("lost more than since the last save")
    if "WRONG" in (row.get("resume") or ""):
        found.append("resume")
    return found


def table(rows: list[Row]) -> str:
    """The table of the page, in the order of :data:`PROCESSES` and a step's moments."""
    done = {(row["process"], row["moment"]): row for row in rows}
    lines = [
        "| killed | moment | end after | exit code | left | steps lost | resume | message names |",
        "|---|---|---|---|---|---|---|---|",
    ]
    every = set(cells())
    for process in PROCESSES:
        for moment in MOMENTS:
            if (process, moment) not in every:
                continue
            row = done.get((process, moment))
            if row is None:
                lines.append(f"| {process} | {moment} | not run | | | | | |")
                continue
            if process == "judge" and not verdict(row):
                lines.append(f"| {process} | {moment} | goes on | | 0 | 0 | | nothing: the pool starts another |")
                continue
            end = "does not end" if row["end_s"] is None else f"{row['end_s']:.1f} s"
            named = row["message"].split(" (process")[0].removeprefix("the ") or "nothing"
            failed = f" **{verdict(row)}**" if verdict(row) else ""
            lines.append(
                f"| {process} | {moment} | {end} | {row['exit_code']} | {row['left']} | {row['steps_lost']} | "
                f"{row.get('resume') or 'not run'} | {named}{failed} |"
            )
    shown = [done[cell] for cell in every if cell in done]
    met = sum(not verdict(row) for row in shown)
    ends = [row["end_s"] for row in shown if row["end_s"] is not None]
    lines += ["", f"{met} of the {len(shown)} rows that were run, of {len(every)}, meet every requirement."]
    if ends:
        lines[-1] += f" The slowest end took {max(ends):.1f} s."
    return "\n".join(lines)


def _next_cell() -> tuple[str, str] | None:
    done = {(row["process"], row["moment"]) for row in complete_lines(ROWS)}
    return next((cell for cell in cells() if cell not in done), None)


def run(folder: Path, minutes: float, only: list[str]) -> None:
    """Run rows until all are done or the time is over."""
    limit, failed = time.monotonic() + 60 * minutes, 0
    asked = [tuple(name.split(":", 1)) for name in only]
    while time.monotonic() < limit:
        cell = asked.pop(0) if asked else None if only else _next_cell()
        if cell is None:
            break
        print(f"{time.strftime('%H:%M:%S')} {cell[0]} during {cell[1]}", flush=True)
        try:
            row, resumed = run_row(folder, *cell)
        except NotReached as error:
            print(error, file=sys.stderr)
            failed += 1
            if failed > 1:
                sys.exit(1)
            continue
        if not row["hit"]:
            print(f"  missed: it was in another phase by then ({row}); again", flush=True)
        rows = [old for old in complete_lines(ROWS) if (old["process"], old["moment"]) != cell]
        rows = with_resume(rows, resumed)
        write_lines(ROWS, [*rows, row] if row["hit"] else rows)
        write_section(PAGE, "table", table(complete_lines(ROWS)))
        print(
            f"  {json.dumps(row)}\n  resume of the rows before: {resumed}; {verdict(row) or 'as required'}", flush=True
        )

    if not all(row.get("resume") for row in complete_lines(ROWS)):
        resumed = see_resume(folder)
        write_lines(ROWS, with_resume(complete_lines(ROWS), resumed))
        print(f"  resume of the rows before: {resumed}", flush=True)


def with_resume(rows: list[Row], resumed: str | None) -> list[Row]:
    """How a start resumed is the result of all rows since the last one that did."""
    return rows if resumed is None else [row | {"resume": row.get("resume") or resumed} for row in rows]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fspo-faults", help="run folder")
    parser.add_argument("--minutes", type=float, default=120.0, help="start no row after this time")
    parser.add_argument("--only", nargs="*", default=[], metavar="PROCESS:MOMENT", help="these rows, again")
    parser.add_argument("--table", action="store_true", help="only write the table from the rows that there are")
    arguments = parser.parse_args()
    if not arguments.table:
        run(arguments.folder, arguments.minutes, arguments.only)
    write_section(PAGE, "table", table(complete_lines(ROWS)))


if __name__ == "__main__":
    main()
