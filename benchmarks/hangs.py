"""``python -m benchmarks.hangs``: stops or occupies processes of a run; the table of hangs in docs/reliability.md.

As :mod:`benchmarks.faults`: one run folder for all rows, those that are done are in benchmarks/faults/hangs.jsonl, and
the same command goes on with the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.faults import PAGE, failures_of_resume, with_resume
from benchmarks.faults_run import (
    PROCESSES,
    SAVE_FREQ,
    NotReached,
    Run,
    aim,
    left_by_others,
    resume_of,
    see_resume,
    sentence,
    tracked_step,
)
from benchmarks.pages import markdown, write_lines, write_section
from fspo.files import complete_lines
from recipe.fspo.faults.hang import HANG_FILE

ROWS: Final = PAGE.parents[1] / "benchmarks" / "faults" / "hangs.jsonl"
#: With the demo's ``fspo.hang_after_s=90``.
NAMED_LIMIT_S: Final = 120.0
END_LIMIT_S: Final = 200.0
#: Process, what is done to it, and when. ``stopped``: SIGSTOP; the others are done by faults_reward.py.
CELLS: Final = (
    ("FSDP worker", "stopped", "update"),
    ("reward worker", "sleeps", "generation"),
    ("vLLM engine", "stopped", "generation"),
    ("reward worker", "loops", "generation"),
    ("trainer", "stopped", "update"),
    ("vLLM engine", "stopped", "weight sync"),
    ("FSDP worker", "stopped", "save"),
    ("vLLM engine", "stopped", "start-up"),
    ("node", "stopped", "update"),
    ("reward worker", "stopped", "validation"),
    ("vLLM server", "stopped", "generation"),
    ("FSDP worker", "stopped", "start-up"),
    ("trainer", "stopped", "generation"),
    ("reward worker", "loops", "validation"),
    ("agent loop", "stopped", "generation"),
    ("load balancer of the vLLM servers", "stopped", "generation"),
    ("TransferQueue's controller", "stopped", "generation"),
    ("TransferQueue's storage", "stopped", "update"),
    ("GCS", "stopped", "update"),
)
#: What the message says of the process.
_SAYS: Final = {"stopped": "is stopped", "sleeps": "is in hang", "loops": "is busy in hang"}
#: Processes that have no Python.
_NO_PYTHON: Final = (PROCESSES["node"], PROCESSES["GCS"])
_HEADER: Final = ("process", "what", "moment", "named after", "end after", "exit code", "left", "resume", "verdict")


def without_stack(text: str) -> int:
    """How many processes of a hang.txt have no stack, though they have Python."""
    processes = re.split(r"^the ", text, flags=re.MULTILINE)[1:]
    return sum("\n  no stack" in each and not each.startswith(_NO_PYTHON) for each in processes)


def _role(process: str) -> str:
    return PROCESSES.get(process, process)


def verdict(row: dict[str, Any]) -> str:
    """What a row fails of the requirements; empty if nothing."""
    found = []
    if row["named_s"] is None or row["named_s"] > NAMED_LIMIT_S + row.get("went_on_s", 0.0):
        found.append("named too late")
    if row["end_s"] is None or row["end_s"] > END_LIMIT_S + row.get("went_on_s", 0.0):
        found.append("ended too late")
    if row["exit_code"] != 1:
        found.append("exit code")
    if row["left"]:
        found.append("processes left")
    if f"the {_role(row['process'])} (process" not in row["message"] or _SAYS[row["how"]] not in row["message"]:
        found.append("message")
    if row.get("without_stack"):  # not counted in the first rows
        found.append("a process without a stack")
    return ", ".join([*found, *failures_of_resume(row)])


def _reward(folder: Path) -> tuple[str, ...]:
    """Overrides of every start, as a resumed run keeps its reward; nothing hangs until FSPO_FAULTS_HANG is written."""
    trigger = folder / "hang"
    trigger.unlink(missing_ok=True)
    os.environ["FSPO_FAULTS_HANG"] = str(trigger)
    path = Path(__file__).with_name("faults_reward.py")
    return f"reward.custom_reward_function.path={path}", "reward.custom_reward_function.name=hang_or_score"


def run_row(folder: Path, process: str, how: str, moment: str) -> tuple[dict[str, Any], str | None]:
    """One row, and how the start resumed (the result of the rows before it).

    Raises:
        NotReached: if the run ended, or took too long, before the moment.
    """
    left = left_by_others(folder)
    (folder / HANG_FILE).unlink(missing_ok=True)
    run = Run(folder, _reward(folder))
    try:
        victim = aim(run, _role(process), moment, left[0] + SAVE_FREQ)
        if how == "stopped":
            os.kill(victim, signal.SIGSTOP)
        else:
            Path(os.environ["FSPO_FAULTS_HANG"]).write_text(how, encoding="utf-8")
        began, struck, at, named = time.monotonic(), time.time(), run.phase(), None
        now, went_on_s = at, 0.0
        assert at is not None
        while run.process.poll() is None and time.monotonic() < began + went_on_s + 1.5 * END_LIMIT_S:
            now = run.phase() or now
            if now.step > at.step + 1:  # training goes on without this process
                went_on_s = round(now.since - struck, 1)
            if named is None and "warning: no progress" in run.output():
                named = round(time.monotonic() - began, 1)
            time.sleep(0.2)
        row: dict[str, Any] = {"process": process, "how": how, "moment": moment, "step": at.step, "named_s": named}
        row |= {"went_on_s": went_on_s} if went_on_s else {}
        ended = time.monotonic()
        pids, code = run.left(), run.process.poll()
        row |= {"end_s": None if code is None else round(ended - began, 1), "exit_code": code, "left": len(pids)}
        row |= {"message": sentence(run.output()), "steps_lost": max(0, now.step - tracked_step(folder))}
        if (stacks := folder / HANG_FILE).exists():
            row["without_stack"] = without_stack(stacks.read_text(encoding="utf-8"))
        if named is None and _SAYS[how] in row["message"]:
            row["named_s"] = row["end_s"]  # Ray has given the process up before the limit
        return row, resume_of(run, *left)
    finally:
        run.stop()


def table(rows: list[dict[str, Any]]) -> str:
    """The table of the page."""
    done, lines = {(row["process"], row["how"], row["moment"]): row for row in rows}, []
    for cell in CELLS:
        if (row := done.get(cell)) is None:
            lines.append([*cell, "not run", *[""] * 5])
            continue
        seconds = ["never" if row[name] is None else f"{row[name]:.0f} s" for name in ("named_s", "end_s")]
        if went_on_s := row.get("went_on_s"):
            seconds[1] += f", of which {went_on_s:.0f} s trained"
        failed = f"**{verdict(row)}**" if verdict(row) else "as required"
        lines.append([*cell, *seconds, str(row["exit_code"]), str(row["left"]), row.get("resume") or "not run", failed])
    return markdown(_HEADER, lines)


def run(folder: Path, minutes: float) -> None:
    """Run rows until all are done or the time is over; one start more shows how what the last has left is resumed."""
    limit, ran = time.monotonic() + 60 * minutes, False
    for cell in CELLS:
        rows = complete_lines(ROWS)
        if time.monotonic() > limit or any(cell == (row["process"], row["how"], row["moment"]) for row in rows):
            continue
        print(f"{time.strftime('%H:%M:%S')} {' '.join(cell)}", flush=True)
        try:
            row, resumed = run_row(folder, *cell)
        except NotReached as error:
            print(error, file=sys.stderr)
            continue
        ran = True
        print(f"  {json.dumps(row)}\n  before: {resumed}; {verdict(row) or 'as required'}", flush=True)
        write_lines(ROWS, [*with_resume(rows, resumed), row])
    if ran:  # otherwise the folder may hold another run than that of the rows
        resumed = see_resume(folder, _reward(folder))
        write_lines(ROWS, with_resume(complete_lines(ROWS), resumed))
        print(f"  before: {resumed}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fspo-hangs", help="run folder")
    parser.add_argument("--minutes", type=float, default=90.0, help="start no row after this time")
    parser.add_argument("--table", action="store_true", help="only write the table from the rows that there are")
    arguments = parser.parse_args()
    if not arguments.table:
        run(arguments.folder, arguments.minutes)
    write_section(PAGE, "hangs", table(complete_lines(ROWS)))


if __name__ == "__main__":
    main()
