"""The first steps on one or two GPUs, in order: ``python -m benchmarks.gpu_check``.

Each step runs in a process of its own, with a log, a time and a verdict; one that fails does not stop the others. What
has passed on this machine with this torch is not repeated. The first two need torch, transformers and psutil alone.
``--device cpu`` runs the same steps in sizes that two CPU cores manage.

Results are one file, OUT/results.json. ``--write`` runs nothing: it takes this file, of whatever machine, into
``benchmarks/gpu_check/results.json``, from which the documentation's table is made; steps that such a machine ran
before, and not this time, stay there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.pages import Table, write_tables
from benchmarks.starts import Start
from fspo.files import write_json

ROOT = Path(__file__).resolve().parents[2]
#: What each step is called in the table, in the order in which they run.
STEPS = {
    "versions": "versions and driver",
    "noise": "noise floor of S",
    "smoke": "real stack, the 8B job's settings",
    "preemption": "the smoke test, warned and resumed",
    "learn": "the demo's task, learned",
}
LIMIT_S = 1800
#: What the documentation's table is made from: the results of a machine without a GPU, and of one with.
RECORD: Final = Path(__file__).with_name("results.json")
DEVICES: Final = {"cpu": "on CPUs", "cuda": "on a GPU"}


def measure(step: str, device: str, gpus: int, folder: Path) -> dict[str, Any]:
    """Run one step in this process; returns its verdict, what it has measured, and the reason if it has not passed."""
    import torch

    from benchmarks.gpu_check import steps

    try:
        if device == "cpu":
            torch.set_num_threads(1)
        elif step != "versions" and not torch.cuda.is_available():
            raise steps.Failed("torch sees no GPU (see the step `versions`)")
        if step in ("versions", "noise"):
            numbers = getattr(steps, step)(steps.SIZES[device], device)
        else:
            from benchmarks.gpu_check import stack

            numbers = getattr(stack, step)(folder, device, gpus)
        return {"verdict": "passed", "numbers": numbers}
    except Exception as error:  # whatever went wrong is this step's result, and the next one is tried
        traceback.print_exc()
        return {"verdict": "failed", "reason": str(error), "numbers": getattr(error, "numbers", {})}


def run(step: str, device: str, gpus: int, folder: Path) -> dict[str, Any]:
    """Run one step in a process of its own."""
    answer = folder / f"{step}.json"
    for old in (folder / f"{step}.log", answer):
        old.unlink(missing_ok=True)
    options = ["--device", device, "--gpus", str(gpus), "--out", str(folder), "--in-this-process", step]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # packages may lie in folders of their own
    begin = time.monotonic()
    start = Start(folder, "benchmarks.gpu_check", *options, log=f"{step}.log", PYTHONPATH=path)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            start.process.wait(LIMIT_S)
    finally:
        status = start.process.poll()
        start.stop()  # after Ctrl-C, too: nothing may be left on the GPU
    row = {
        "verdict": "failed",
        "reason": f"no result within {LIMIT_S} s (status {status})",
        "numbers": {},
    }
    if answer.is_file():
        row = json.loads(answer.read_text(encoding="utf-8"))
    return {"seconds": round(time.monotonic() - begin, 1), "log": start.log.name, **row}


def machine(device: str, gpus: int) -> str:
    """What results are of."""
    import torch

    has_gpu = device == "cuda" and torch.cuda.is_available()
    return f"{f'{gpus} x {torch.cuda.get_device_name()}' if has_gpu else device}, torch {torch.__version__}"


def shown(value: float | str) -> str:
    """A number with three digits, or more if it is large, or a text as it is."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def table(record: dict[str, Any]) -> Table:
    """Every number of every step by device; a device without a result says so, at each step's verdict."""
    results = [record[device] for device in DEVICES]
    cells = [["", "machine", *(result["machine"] for result in results)]]
    for step, title in STEPS.items():
        columns: list[dict[str, str]] = []
        for row in (result["steps"].get(step, {"verdict": "not run", "numbers": {}}) for result in results):
            told = {name: row[name] for name in ("verdict", "seconds", "commit", "reason") if name in row}
            columns.append({name: shown(value) for name, value in (told | row["numbers"]).items()})
        names = dict.fromkeys(name for column in columns for name in column)
        cells += [[title, name, *(column.get(name, "") for column in columns)] for name in names]
    return [["step", "number", *DEVICES.values()], *cells]


def write(results: Path) -> None:
    """Take the results of one machine into the record and the documentation's table."""
    result = json.loads(results.read_text(encoding="utf-8"))
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    before = record[result["device"]]
    if before["machine"] == result["machine"]:  # another hour of such a machine: what it did not run stays
        result["steps"] = before["steps"] | result["steps"]
    record[result["device"]] = result
    write_json(RECORD, record, allow_nan=True)
    write_tables({"gpu-check": table(record)})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, choices=(1, 2), help="default: those that torch sees, at most two")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="only these")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="results.json and logs")
    parser.add_argument("--commit", help="of a copy without git's folder")
    parser.add_argument("--write", action="store_true", help="OUT/results.json into the documentation; runs nothing")
    parser.add_argument("--in-this-process", choices=STEPS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    folder = chosen.out.absolute()
    if step := chosen.in_this_process:
        row = measure(step, chosen.device, chosen.gpus, folder)
        (folder / f"{step}.json").write_text(json.dumps(row), encoding="utf-8")
        return int(row["verdict"] == "failed")
    results = folder / "results.json"
    if chosen.write:
        write(results)
        return 0

    import torch

    gpus = chosen.gpus or (min(2, max(1, torch.cuda.device_count())) if chosen.device == "cuda" else 2)
    where = machine(chosen.device, gpus)
    record = {"device": chosen.device, "machine": where, "steps": {}}
    if results.exists():
        record = json.loads(results.read_text(encoding="utf-8"))
        if record["machine"] != where:
            parser.error(f"--out {folder} has results of {record['machine']}, and this is {where}: give a new folder")
    print(where, flush=True)
    commit = chosen.commit or subprocess.getoutput(f"git -C '{ROOT}' rev-parse --short=12 HEAD")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for step in chosen.steps:
        if record["steps"].get(step, {}).get("verdict") == "passed":
            print(f"{step}: passed before, not repeated", flush=True)
            continue
        try:
            row = run(step, chosen.device, gpus, folder) | {"date": time.strftime("%Y-%m-%d"), "commit": commit}
            record["steps"][step] = row
            write_json(results, record, allow_nan=True)  # before the weights go, during which the loan may end
        finally:
            for weights in folder.glob(f"{step}/global_step_*"):  # up to 28 GB at 8B's width
                shutil.rmtree(weights, ignore_errors=True)
        said = [row.get("reason"), *(f"{name}: {shown(value)}" for name, value in row["numbers"].items())]
        print(f"{step}: {row['verdict']} ({row['seconds']:.0f} s): {'; '.join(filter(None, said))}", flush=True)
    return int(any(row["verdict"] == "failed" for row in record["steps"].values()))


if __name__ == "__main__":
    sys.exit(main())
