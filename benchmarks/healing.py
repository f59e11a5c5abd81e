"""``python -m benchmarks.healing FOLDER``: faults at random in a long run with ``fspo.restarts``; docs/reliability.md.

Kills (SIGKILL) or hangs (SIGSTOP) of a process drawn at random, on average every ten minutes; or none, to compare what
was learned. Interrupted, the same command goes on with the run, and draws other faults. Rows:
benchmarks/faults/healing.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.faults import PAGE
from benchmarks.pages import markdown, write_lines, write_section
from fspo.files import complete_lines
from recipe.fspo.faults.processes import processes_of, role_of

ROWS: Final = PAGE.parents[1] / "benchmarks" / "faults" / "healing.jsonl"
#: Steps over which rewards are averaged for the table, and after which it is validated.
BLOCK: Final = 20
SETTINGS: Final = (
    "experiment=demo",
    "fspo.restarts=100",
    "trainer.total_epochs=1000",
    "trainer.total_training_steps=100000",
    "trainer.save_freq=1",
    f"trainer.test_freq={BLOCK}",
    "trainer.max_actor_ckpt_to_keep=2",
)
HELD_OUT: Final = "val-core/fspo/remainder/acc/mean@1"
#: Seconds between faults: their mean, and how far from it, as a share.
EVERY_S: Final = 600.0
JITTER: Final = 0.5
SIGNALS: Final = {"kills": signal.SIGKILL, "hangs": signal.SIGSTOP, "none": None}
LAUNCHER: Final = "launching process"
#: Every process of the run inherits it from here.
MARK: Final = "FSPO_HEALING"


def family_of(parent: int) -> dict[str, list[int]]:
    """Processes of the run by role; the launching one is the parent's child."""
    children = psutil.Process(parent).children()
    found = {LAUNCHER: [child.pid for child in children if "recipe.fspo.main" in child.cmdline()]}
    for pid in processes_of(str(os.getpid()), variable=MARK):
        if (role := role_of(pid)) is not None:
            found.setdefault(role, []).append(pid)
    return {role: pids for role, pids in found.items() if pids}


def strike(parent: int, how: int, draw: random.Random) -> str | None:
    """Kill or stop one process; its role, or None if there is none at the moment."""
    found = family_of(parent)
    if how == signal.SIGSTOP:
        found.pop(LAUNCHER, None)  # nobody watches it, and a stopped Ray node is found by Ray
    if not found:
        return None
    role = draw.choice(sorted(found))
    os.kill(draw.choice(found[role]), how)
    return role


def go_on(folder: Path, minutes: float, faults: str, seed: int) -> list[str]:
    """Run for some minutes; returns what was struck, in order."""
    starts = len(json.loads((folder / "run.json").read_text())["starts"]) if (folder / "run.json").exists() else 0
    draw, struck = random.Random(f"{seed} {starts}"), []
    command = [sys.executable, "-m", "recipe.fspo.main", *SETTINGS, f"fspo.run_dir={folder}", f"seed={seed}"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "healing.log").open("ab") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, MARK: str(os.getpid())})
    end, next_s = time.monotonic() + 60 * minutes, time.monotonic() + EVERY_S * draw.uniform(1 - JITTER, 1 + JITTER)
    how = SIGNALS[faults]
    while run.poll() is None and time.monotonic() < end:
        if how is not None and time.monotonic() > next_s and (role := strike(run.pid, how, draw)):
            next_s = time.monotonic() + EVERY_S * draw.uniform(1 - JITTER, 1 + JITTER)
            struck.append(role)
            print(f"{time.strftime('%H:%M:%S')} {role}", flush=True)
        time.sleep(1)
    if run.poll() is None:
        run.terminate()  # a shell that runs this in the background lets its children ignore SIGINT
    if (code := run.wait(180)) not in (0, 143):
        print(f"the run ended with status {code}; see {folder / 'healing.log'}", file=sys.stderr)
    return struck


def summary(folder: Path, faults: str, struck: list[str], minutes: float, seed: int) -> dict[str, Any]:
    """What became of the run, all its starts together."""
    info, lines = json.loads((folder / "run.json").read_text()), complete_lines(folder / "metrics.jsonl")
    steps = [line["step"] for line in lines if line["step"] > 0]
    rewards: dict[int, list[float]] = {}
    for line in lines:
        if "critic/score/mean" in line["metrics"]:
            rewards.setdefault(-(-line["step"] // BLOCK) * BLOCK, []).append(line["metrics"]["critic/score/mean"])
    return {
        "faults": faults,
        "seed": seed,
        "minutes": round(minutes, 1),
        "struck": struck,
        "restarts": sum("reason" in start for start in info["starts"]),
        "steps": max(steps),
        "logged_twice": len(steps) - len(set(steps)),
        "not_logged": max(steps) - len(set(steps)),
        "ettr": round(info["effective_time_ratio"], 4),
        "rewards": {str(end): round(sum(of) / len(of), 4) for end, of in rewards.items()},
        "held_out": {str(line["step"]): line["metrics"][HELD_OUT] for line in lines if HELD_OUT in line["metrics"]},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The table of the page."""
    header = ("faults", "seed", "minutes", "struck", "restarts", "steps", "logged twice", "not logged", "ETTR")
    lines = []
    for row in rows:
        roles = ", ".join(f"{row['struck'].count(role)} {role}" for role in sorted(set(row["struck"])))
        numbers = [row[name] for name in ("restarts", "steps", "logged_twice", "not_logged")]
        first = [row["faults"], str(row["seed"]), f"{row['minutes']:.0f}", roles]
        lines.append([*first, *map(str, numbers), f"{row['ettr']:.1%}" if row["struck"] else ""])
    return f"{markdown(header, lines)}\n\n{learned(rows)}" if lines else "Not run yet."


def learned(rows: list[dict[str, Any]]) -> str:
    """A second table: mean reward of 20 steps, and held-out accuracy after them, of every run that got so far."""
    ends = [BLOCK * 2**i for i in range(6) if any(str(BLOCK * 2**i) in row["held_out"] for row in rows)]
    lines = [
        [
            row["faults"],
            str(row["seed"]),
            what,
            *(f"{row[name][str(end)]:.3f}" if str(end) in row[name] else "" for end in ends),
        ]
        for what, name in (("reward", "rewards"), ("held-out accuracy", "held_out"))
        for row in rows
    ]
    return markdown(("faults", "seed", "mean of the steps up to", *map(str, ends)), lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="run folder")
    parser.add_argument("--minutes", type=float, default=95.0)
    parser.add_argument("--faults", choices=SIGNALS, default="kills")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    folder, which = given.folder.absolute(), (given.faults, given.seed)
    same = [row for row in complete_lines(ROWS) if (row["faults"], row["seed"]) == which]
    before = same[0] if same and (folder / "run.json").exists() else None
    struck = go_on(folder, given.minutes, given.faults, given.seed)
    minutes = given.minutes + (before["minutes"] if before else 0.0)
    row = summary(folder, given.faults, [*(before["struck"] if before else []), *struck], minutes, given.seed)
    # Read again: other runs may have ended in the meantime.
    rows = [each for each in complete_lines(ROWS) if (each["faults"], each["seed"]) != which] + [row]
    write_lines(ROWS, rows)
    write_section(PAGE, "healing", table(rows))
    print(row)


if __name__ == "__main__":
    main()
