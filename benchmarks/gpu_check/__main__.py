"""The first hour on one or two GPUs, in order: ``python -m benchmarks.gpu_check``, or ``make gpu-check``.

Each step runs in a process of its own, with a log, a time and a verdict; one that fails does not stop the others. What
has passed on this machine with this torch is not repeated unless ``--again`` names it. The first four need torch,
transformers and psutil alone. ``--device cpu`` runs the same steps in sizes that two CPU cores manage.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import Table, write_tables
from benchmarks.starts import Start
from fspo.markdown import markdown_table
from fspo.records import complete_lines
from recipe.runner.faults.preemption import end_on_signals

ROOT = Path(__file__).resolve().parents[2]
#: What each step is called in the table, in the order in which they run.
STEPS = {
    "versions": "versions and driver",
    "loss": "loss: agreement, time",
    "noise": "noise floor of S",
    "update": "one FSDP2 update, FSPO and vanilla",
    "engine": "verl's engine at 8B's width, four layers",
    "vllm": "vLLM alone",
    "demo": "real stack, demo model",
    "v1": "the same with vLLM's V1 runner",
    "smoke": "real stack, `experiment=gpu_smoke`",
    "preemption": "the same, warned and resumed",
}
LIMIT_S = 1800
#: Packages may lie in folders of their own (requirements/bundle.sh slim).
PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
NOT_RUN = {"cuda": "not measured on a GPU yet", "cpu": "not run"}


def measure(step: str, device: str, gpus: int, folder: Path) -> dict[str, str]:
    """Run one step in this process; returns its verdict and what it has measured, or the reason."""
    import torch

    from benchmarks.gpu_check import engine, stack, steps

    try:
        if device == "cpu":
            torch.set_num_threads(1)
        elif step != "versions" and not torch.cuda.is_available():
            raise steps.Skipped("torch sees no GPU (see the step `versions`)")
        size = steps.SIZES[device]
        if step in ("demo", "v1"):
            text = getattr(stack, step)(folder, device)
        elif step in ("engine", "vllm"):
            text = getattr(engine, step)(folder, size, device)
        elif step in ("smoke", "preemption"):
            text = getattr(stack, step)(folder, size, device, gpus)
        else:
            text = getattr(steps, step)(size, device)
        return {"verdict": "passed", "found": text}
    except steps.Skipped as reason:
        return {"verdict": "skipped", "found": str(reason)}
    except steps.Failed as reason:
        return {"verdict": "failed", "found": str(reason)}
    except Exception as error:  # whatever went wrong is this step's result, and the next one is tried
        traceback.print_exc()
        return {"verdict": "failed", "found": f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"}


def run(step: str, device: str, gpus: int, folder: Path) -> dict[str, Any]:
    """Run one step in processes of its own: one per GPU for the update, otherwise one."""
    for old in (folder / f"{step}.log", *folder.glob(f"{step}-*.json")):
        old.unlink(missing_ok=True)
    ranks = gpus if step == "update" else 1
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if step == "update" else []
    options = ["--device", device, "--gpus", str(gpus), "--out", str(folder), "--in-this-process", step]
    begin = time.monotonic()
    start = Start(folder, *torchrun, "benchmarks.gpu_check", *options, log=f"{step}.log", PYTHONPATH=PATH)
    status = f"killed after {LIMIT_S} s"
    try:
        status = f"status {start.process.wait(LIMIT_S)}"
    except subprocess.TimeoutExpired:
        pass
    finally:
        start.stop()  # after Ctrl-C, too: nothing may be left on the GPU
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{step}-*.json"))]
    row = next((row for row in rows if row["verdict"] == "failed"), rows[0] if len(rows) == ranks else None)
    row = row or {"verdict": "failed", "found": f"{len(rows)} of {ranks} process(es) gave a result ({status})"}
    return {"step": step, "seconds": round(time.monotonic() - begin, 1), **row}


def machine(device: str, gpus: int) -> str:
    import torch

    versions = f"torch {torch.__version__}"
    if device == "cpu" or not torch.cuda.is_available():
        return f"{device}, {versions}"
    return f"{gpus} x {torch.cuda.get_device_name()}, {versions}"


def table(rows: Sequence[dict[str, Any]], device: str) -> Table:
    """The latest result of each step; what has none says so."""
    latest = {row["step"]: row for row in rows}
    cells = []
    for step, title in STEPS.items():
        row = latest.get(step)
        result = [row["verdict"], f"{row['seconds']:.0f}", row["found"]] if row else [NOT_RUN[device], "", ""]
        cells.append([title, *result])
    return [["step", "verdict", "s", "found"], *cells]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, choices=(1, 2), help="default: those that torch sees, at most two")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="only these")
    parser.add_argument("--again", nargs="*", choices=STEPS, default=[], help="repeat these although they have passed")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="results.jsonl and logs")
    parser.add_argument("--write", action="store_true", help="write docs/tables/gpu-check*.csv")
    parser.add_argument("--in-this-process", choices=STEPS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    folder = chosen.out.absolute()
    if chosen.in_this_process:
        row = measure(chosen.in_this_process, chosen.device, chosen.gpus, folder)
        result = folder / f"{chosen.in_this_process}-{os.environ.get('RANK', '0')}.json"
        result.write_text(json.dumps(row), encoding="utf-8")
        return int(row["verdict"] == "failed")  # torchrun then ends the other ranks, which may wait for this one

    import torch

    gpus = chosen.gpus or (min(2, max(1, torch.cuda.device_count())) if chosen.device == "cuda" else 2)
    where = machine(chosen.device, gpus)
    results = folder / "results.jsonl"
    if folder.exists() and not results.exists() and any(folder.iterdir()):
        parser.error(f"--out {folder} holds other files: give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    results.touch()
    print(where, flush=True)
    end_on_signals()
    for step in chosen.steps:
        rows = [row for row in complete_lines(results) if row["machine"] == where]
        before = {row["step"]: row for row in rows}.get(step, {"verdict": "not run"})
        if before["verdict"] == "passed" and step not in chosen.again:
            print(f"{step}: passed before, not repeated (--again {step})", flush=True)
            continue
        row = {**run(step, chosen.device, gpus, folder), "machine": where, "date": time.strftime("%Y-%m-%d")}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        log = f"; log: {folder / step}.log" if row["verdict"] == "failed" else ""
        print(f"{step}: {row['verdict']} ({row['seconds']:.0f} s): {row['found']}{log}", flush=True)
    rows = [row for row in complete_lines(results) if row["machine"] == where]
    heads, *cells = table(rows, chosen.device)
    print(f"\n{where}.\n\n{markdown_table(heads, cells)}")
    if chosen.write:
        name = {"cuda": "gpu-check", "cpu": "gpu-check-cpu"}[chosen.device]
        write_tables({name: [[*heads, "machine"], *([*row, where] for row in cells)]})
    return int(any(row["verdict"] == "failed" for row in {row["step"]: row for row in rows}.values()))


if __name__ == "__main__":
    sys.exit(main())
