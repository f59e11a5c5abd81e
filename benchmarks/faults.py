"""``python -m benchmarks.faults``: kills, stops or occupies processes of a run; docs/tables/faults-*.csv.

``kills`` and ``hangs`` have a row for each process, what is done to it, and moment. All rows of one kind use one run
folder, so that each start also is the resume of the rows before it. Rows that are done are kept in
benchmarks/faults/KIND.jsonl, and the same command goes on with the others. ``--table`` runs nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from benchmarks.pages import Table, write_lines, write_tables
from benchmarks.starts import SMALL, Start
from fspo.records import complete_lines
from recipe.runner.checkpoints.integrity import step_folder, tracked_step
from recipe.runner.faults.hang import HANG_FILE
from recipe.runner.faults.phase import read_phase
from recipe.runner.faults.processes import role_of

ROOT: Final = Path(__file__).resolve().parents[1]
ROWS: Final = {kind: ROOT / "benchmarks" / "faults" / f"{kind}.jsonl" for kind in ("kills", "hangs")}
REWARD: Final = Path(__file__).with_name("faults_reward.py")
#: A validation after each step and a save after each second one.
SETTINGS: Final = (*SMALL, "trainer.test_freq=1", "trainer.save_freq=2", "trainer.total_training_steps=1000")
SAVE_FREQ: Final = 2
#: What the page calls a process, and its role in :data:`recipe.runner.faults.processes.ROLES`; others have their role.
PROCESSES: Final = {
    "driver": "launching process",
    "trainer": "trainer",
    "FSDP worker": "FSDP worker",
    "vLLM server": "vLLM server",
    "vLLM engine": "vLLM engine",
    "reward worker": "reward worker",
    "judge": "judge",
    "node": "Ray node (raylet)",
    "GCS": "control service of Ray (gcs_server)",
}
#: Phases in which something is done, in the order of a step.
MOMENTS: Final = ("start-up", "generation", "update", "weight sync", "save", "validation")
#: Roles killed at every moment; of the others, which end in the same way, some moments.
_SOME: Final = {"vLLM server": ("generation", "weight sync"), "judge": ("generation",), "GCS": ("update", "save")}
KILLS: Final = tuple((p, "killed", m) for p in PROCESSES for m in MOMENTS if m in _SOME.get(p, MOMENTS))
#: ``stopped``: SIGSTOP; the others are done by faults_reward.py.
HANGS: Final = (
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
CELLS: Final = {"kills": KILLS, "hangs": HANGS}
#: What the message says of a process that hangs.
_SAYS: Final = {"stopped": "is stopped", "sleeps": " in hang", "loops": " in hang"}
#: Processes that have no Python.
_NO_PYTHON: Final = (PROCESSES["node"], PROCESSES["GCS"])
#: Seconds within which a run has to end after a kill; name what hangs, and end after that (``run.hang_after_s=90``).
KILL_LIMIT_S, NAMED_LIMIT_S, HANG_LIMIT_S = 60.0, 120.0, 200.0
START_LIMIT_S, END_LIMIT_S = 420.0, 300.0
#: A process that is struck is at least so old: the watch must have seen it to know it.
YOUNGEST_S: Final = 1.0
#: During start-up a process is struck as soon as it is so old, but these only once others are that depend on them.
_EXISTS_FIRST: Final = {PROCESSES["driver"]: "vLLM engine", **dict.fromkeys(_NO_PYTHON, "FSDP worker")}

Row = dict[str, Any]
Cell = tuple[str, str, str]


class NotReached(RuntimeError):
    """The run did not come to the moment; nothing was struck, so there is no row."""


# ---------------------------------------------------------------- one start


class Run(Start):
    """A start of the stack in the run folder that all rows share."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.began = time.time()
        command = ("recipe.fspo.main", f"run.dir={folder}", *overrides)
        super().__init__(folder, *command, log=f"start-{time.strftime('%H%M%S')}.log")

    def find(self, role: str) -> int | None:
        """A process by role; the launching one and the judges have no title of their own."""
        if role == PROCESSES["driver"]:
            return self.process.pid
        for pid in self.pids():
            if role == "judge":
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    if "recipe.math.answers.worker" in " ".join(process.cmdline()) and not process.children():
                        return pid
            elif role_of(pid) == role:
                return pid
        return None

    def aim(self, role: str, moment: str, step: int) -> int:
        """Wait until the run is at the moment of the step, and return the process to be struck.

        Raises:
            NotReached: if the run ends, or takes too long, before the moment.
        """
        starting = moment == "start-up"
        limit, victim, looked, seen_at = time.monotonic() + START_LIMIT_S, None, 0.0, 0.0
        while self.process.poll() is None and time.monotonic() < limit:
            phase = read_phase(self.folder)
            if victim is None and time.monotonic() - looked > (0.02 if starting else 1.0):
                looked = time.monotonic()
                waits_for = _EXISTS_FIRST.get(role) if starting else None
                if waits_for is None or self.find(waits_for) is not None:
                    victim, seen_at = self.find(role), time.monotonic()
            here = phase is not None and phase.since > self.began and phase.phase == moment
            old_enough = victim is not None and time.monotonic() - seen_at > YOUNGEST_S
            if here and old_enough and (starting or phase.step >= step):
                return victim
            time.sleep(0.002)
        raise NotReached(f"{moment} of step {step} was not reached:\n{self.output()[-3000:]}")


# ---------------------------------------------------------------- how a start takes up what the last one left


def checkpoint_norm(folder: Path, step: int) -> float | None:
    """Euclidean norm of a checkpoint's weights, as the run notes it of those that it begins with."""
    path = step_folder(folder / "checkpoints", step) / "actor" / "model_world_size_1_rank_0.pt"
    if not path.is_file():
        return None
    total, seen = 0.0, set()
    for tensor in torch.load(path, weights_only=False).values():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.data_ptr() not in seen:  # tied weights stand in it under two names
            total += float(local.to(torch.float64).square().sum())
        seen.add(local.data_ptr())
    return total**0.5


def left_by_others(folder: Path) -> tuple[int, float | None, int]:
    """What :func:`resume_of` compares a start with: step and norm of the checkpoint before it, and logged steps."""
    before = tracked_step(folder / "checkpoints") or 0
    return before, checkpoint_norm(folder, before), len(complete_lines(folder / "metrics.jsonl"))


def resume_of(run: Run, resumed_from: int, norm: float | None, logged_before: int) -> str | None:
    """How this start took up what the starts before it had left; None if it has not come that far."""
    steps = complete_lines(run.folder / "metrics.jsonl")[logged_before:]
    if not steps:
        return None
    first = steps[0]
    if first["step"] != resumed_from + 1:
        return f"WRONG: step {first['step']} after a save of step {resumed_from}"
    if resumed_from and f"global_step_{resumed_from}" not in run.output():
        return f"WRONG: did not say that it resumed from step {resumed_from}"
    begun_with = math.hypot(*json.loads((run.folder / "run.json").read_text())["weights_at_start"])  # a norm per rank
    if norm is not None and not math.isclose(begun_with, norm, rel_tol=1e-9):
        return f"WRONG: weights of norm {begun_with}, saved were {norm}"
    gradient = first["metrics"]["actor/grad_norm"]  # exactly 0 where all groups have equal rewards
    if gradient is None or not math.isfinite(gradient):
        return "WRONG: the first gradient is not finite"
    return f"step {resumed_from + 1}" if resumed_from else "from the beginning"


def with_resume(rows: list[Row], resumed: str | None) -> list[Row]:
    """How a start resumed is the result of all rows since the last one that did."""
    return rows if resumed is None else [row | {"resume": row.get("resume") or resumed} for row in rows]


# ---------------------------------------------------------------- one row


def _overrides(folder: Path, kind: str) -> tuple[str, ...]:
    """Of a start; a resumed run keeps its reward, so nothing hangs until the file FSPO_FAULTS_HANG is written."""
    reward = f"reward.custom_reward_function.path={REWARD}"
    if kind == "hangs":
        (folder / "hang").unlink(missing_ok=True)
        os.environ["FSPO_FAULTS_HANG"] = str(folder / "hang")
        return (*SETTINGS, reward, "reward.custom_reward_function.name=hang_or_score")
    return (*SETTINGS, reward)


def without_stack(text: str) -> int:
    """How many processes of a hang.txt have no stack, though they have Python."""
    processes = re.split(r"^the ", text, flags=re.MULTILINE)[1:]
    return sum("\n  no stack" in text and not text.startswith(_NO_PYTHON) for text in processes)


def run_row(folder: Path, kind: str, cell: Cell) -> tuple[Row, str | None]:
    """One row, and how the start resumed (the result of the rows before it)."""
    process, how, moment = cell
    left = left_by_others(folder)
    (folder / HANG_FILE).unlink(missing_ok=True)
    run = Run(folder, *_overrides(folder, kind))
    try:
        # One whole step first, that is not saved: its loss is the price of the fault.
        victim = run.aim(PROCESSES.get(process, process), moment, left[0] + SAVE_FREQ)
        if how in ("sleeps", "loops"):
            Path(os.environ["FSPO_FAULTS_HANG"]).write_text(how, encoding="utf-8")
        else:
            os.kill(victim, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        began, struck, at, named_s, went_on_s = time.monotonic(), time.time(), read_phase(folder), None, 0.0
        assert at is not None
        now = at
        survives = process == "judge"  # the pool starts another; the run goes on
        while run.process.poll() is None and time.monotonic() < began + went_on_s + END_LIMIT_S:
            now = read_phase(folder) or now
            if how != "killed" and now.step > at.step + 1:  # training goes on without this process
                went_on_s = round(now.since - struck, 1)
            if named_s is None and "warning: no progress" in run.output():
                named_s = round(time.monotonic() - began, 1)
            if survives and now.step >= at.step + 3:
                break
            time.sleep(0.1)
        ended, code = time.monotonic(), run.process.poll()
        row: Row = {"process": process, "moment": moment, "hit": at.phase == moment, "step": at.step}
        if survives and code is None and now.step >= at.step + 3:
            return row | {"end_s": None, "exit_code": None, "left": 0, "steps_lost": 0} | {
                "message": "the run goes on"
            }, resume_of(run, *left)
        pids, errors = run.left(), (line for line in run.output().splitlines() if line.startswith("error: "))
        message = next(errors, "").removeprefix("error: ")  # why the run ended
        log = re.search(r"its log: (\S+)", message)
        row |= {
            "end_s": None if code is None else round(ended - began, 1),
            "exit_code": 128 - code if code is not None and code < 0 else code,
            "left": len(pids),
            "message": message,
            "log_exists": bool(log and Path(log[1]).is_file()),
            "steps_lost": max(0, now.step - (tracked_step(folder / "checkpoints") or 0)),
        }
        if how != "killed":
            # Ray may have given the process up before the limit; the message says it then.
            row |= {"how": how, "named_s": row["end_s"] if named_s is None and _SAYS[how] in message else named_s}
            row |= {"went_on_s": went_on_s} if went_on_s else {}
            if (stacks := folder / HANG_FILE).exists():
                row["without_stack"] = without_stack(stacks.read_text(encoding="utf-8"))
        return row, resume_of(run, *left)
    finally:
        run.stop()


def see_resume(folder: Path, kind: str) -> str | None:
    """How a start takes up what the last row has left; it is ended after its first step."""
    left = left_by_others(folder)
    run, limit = Run(folder, *_overrides(folder, kind)), time.monotonic() + START_LIMIT_S
    try:
        while run.process.poll() is None and time.monotonic() < limit:
            if (resumed := resume_of(run, *left)) is not None:
                return resumed
            time.sleep(0.2)
        return None
    finally:
        run.stop()


def cell_of(row: Row) -> Cell:
    """Process, what was done to it, and when."""
    return row["process"], row.get("how", "killed"), row["moment"]


def run_rows(kind: str, folder: Path, only: Sequence[str]) -> None:
    """Run rows until all are done; one start more shows how what the last left is resumed."""
    path, ran = ROWS[kind], False
    done = set(map(cell_of, complete_lines(path)))
    asked = [cell for cell in CELLS[kind] if (":".join(cell) in only if only else cell not in done)]
    for cell in asked:
        print(f"{time.strftime('%H:%M:%S')} {' '.join(cell)}", flush=True)
        try:
            row, resumed = run_row(folder, kind, cell)
        except NotReached as error:
            print(error, file=sys.stderr)
            continue
        ran = True
        kept = with_resume([old for old in complete_lines(path) if cell_of(old) != cell], resumed)
        write_lines(path, [*kept, row] if row["hit"] else kept)  # else it was in another phase by then
        print(f"  {json.dumps(row)}\n  before: {resumed}; {verdict(row) or 'as required'}", flush=True)
    if ran:  # otherwise the folder may hold another run than that of the rows
        write_lines(path, with_resume(complete_lines(path), see_resume(folder, kind)))


# ---------------------------------------------------------------- verdicts and tables


def verdict(row: Row) -> str:
    """What a row fails of the requirements; empty if nothing."""
    process, how, _ = cell_of(row)
    if process == "judge":
        return "" if row["message"] == "the run goes on" else "did not survive"
    end_s = math.inf if row["end_s"] is None else row["end_s"]
    if how == "killed":
        failed = {
            "too late": end_s > KILL_LIMIT_S,
            "exit code": not row["exit_code"],
            "message": not row["message"] or not row.get("log_exists"),
        }
    else:
        later = row.get("went_on_s", 0.0)
        named = f"the {PROCESSES.get(process, process)} (process" in row["message"] and _SAYS[how] in row["message"]
        failed = {
            "named too late": row["named_s"] is None or row["named_s"] > NAMED_LIMIT_S + later,
            "ended too late": end_s > HANG_LIMIT_S + later,
            "exit code": row["exit_code"] != 1,
            "message": not named,
            "a process without a stack": bool(row.get("without_stack")),  # not counted in the first rows
        }
    failed |= {
        "processes left": bool(row["left"]),
        "lost more than since the last save": row["steps_lost"] > SAVE_FREQ,
        "resume": "WRONG" in (row.get("resume") or ""),
    }
    return ", ".join(requirement for requirement, fails in failed.items() if fails)


HEADS: Final = {
    "kills": ["killed", "moment", "end after", "exit code", "left", "steps lost", "resume", "message names", "verdict"],
    "hangs": ["process", "what", "moment", "named after", "end after", "exit code", "left", "resume", "verdict"],
}


def _of_kill(row: Row) -> list[str]:
    if row["process"] == "judge" and not verdict(row):
        return ["goes on", "", "0", "0", "", "nothing: the pool starts another"]
    end = "does not end" if row["end_s"] is None else f"{row['end_s']:.1f} s"
    named = row["message"].split(" (process")[0].removeprefix("the ") or "nothing"
    counts = [str(row[name]) for name in ("exit_code", "left", "steps_lost")]
    return [end, *counts, row.get("resume") or "not run", named]


def _of_hang(row: Row) -> list[str]:
    seconds = ["never" if row[name] is None else f"{row[name]:.0f} s" for name in ("named_s", "end_s")]
    if went_on_s := row.get("went_on_s"):
        seconds[1] += f", of which {went_on_s:.0f} s trained"
    return [*seconds, str(row["exit_code"]), str(row["left"]), row.get("resume") or "not run"]


def table(kind: str, rows: Sequence[Row]) -> Table:
    """A line for each cell, in the order in which they are run."""
    done, lines = {cell_of(row): row for row in rows}, []
    for cell in CELLS[kind]:
        line = [cell[0], cell[2], "not run"] if kind == "kills" else [*cell, "not run"]
        if (row := done.get(cell)) is not None:
            line[-1:] = [*(_of_kill if kind == "kills" else _of_hang)(row), verdict(row) or "as required"]
        lines.append(line + [""] * (len(HEADS[kind]) - len(line)))
    return [HEADS[kind], *lines]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=ROWS)
    parser.add_argument("--only", nargs="*", default=[], metavar="PROCESS:WHAT:MOMENT", help="these rows, again")
    parser.add_argument("--table", action="store_true", help="only write the table from the rows that there are")
    asked = parser.parse_args()
    if not asked.table:
        folder = Path(tempfile.gettempdir()) / f"fspo-{asked.kind}"
        run_rows(asked.kind, folder, asked.only)
    write_tables({f"faults-{asked.kind}": table(asked.kind, complete_lines(ROWS[asked.kind]))})


if __name__ == "__main__":
    main()
