"""Plain verl and this recipe side by side: start-up, step time and memory of the demo.

``python -m benchmarks.versus_verl`` starts both in turn, watches all their processes from outside, adds a line to
``--out`` for each finished start, and prints the table with the recipe's share of plain verl's medians. Interrupted, it
goes on; ``--runs 0`` only prints. docs/performance.md has the record.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
from omegaconf import DictConfig, OmegaConf, open_dict

from benchmarks.pages import markdown
from fspo.records import complete_lines
from recipe.runner.faults.processes import kill, processes_of
from recipe.runner.launch.compose import compose
from recipe.runner.launch.machine import platform_environment

STEPS: Final = 5
TIME_LIMIT_S: Final = 900.0
#: The demo without validation and checkpoints, which are not compared.
SHARED: Final = (
    "fspo.log=all",
    "experiment=demo",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=[file]",
)
#: Plain verl has every setting of verl, vLLM and Ray that the recipe's start has.
ALGOS: Final = {"verl": "gspo_verl", "recipe": "gspo"}
_OF_THE_RECIPE: Final = ("fspo", "evaluate", "seed")
#: Every process of a start inherits it from here.
MARK: Final = "FSPO_VERSUS_VERL"
#: PSS takes the kernel a few milliseconds per process.
_MEMORY_EVERY_S: Final = 5.0
_FIGURES: Final = {
    "first step begins, s": "first_step_begins_s",
    "first step ends, s": "first_step_ends_s",
    "step, s": "step_s",
    "peak, MiB": "peak_pss_mib",
}


class StartFailed(RuntimeError):
    """A start ended, or was ended, before its last step."""


def plain_config(run_dir: Path) -> tuple[DictConfig, dict[str, str]]:
    """Configuration and environment for ``python -m verl.trainer.main_ppo``; writes the task's data.

    The CPU platform stays, since verl has none: its engine comes by ``external_lib``, its vLLM worker as in the demo.
    """
    config = compose([*SHARED, f"algo={ALGOS['verl']}", f"fspo.run_dir={run_dir}"])
    environment = platform_environment("cpu", config.trainer.n_gpus_per_node)
    os.environ["VERL_PLATFORM"] = "cpu"  # before verl is imported by what follows
    from recipe.runner.launch.start import prepare, write_offline_task

    prepare(config)
    write_offline_task(config)
    with open_dict(config):
        config.trainer.v1.trainer_mode = "sync"
        config.actor_rollout_ref.model.external_lib = "recipe.runner.cpu.engine"
        for key in _OF_THE_RECIPE:
            config.pop(key, None)
    return config, environment


def command(variant: str, run_dir: Path) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a start that logs each step to ``run_dir/steps.jsonl``."""
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    environment["VERL_FILE_LOGGER_PATH"] = str(run_dir / "steps.jsonl")
    environment["SPT_NOENV"] = "1"  # else the processes that name themselves lose their mark
    if variant == "recipe":
        overrides = [f"fspo.run_dir={run_dir}", *SHARED, f"algo={ALGOS[variant]}"]
        return [sys.executable, "-m", "recipe.fspo.main", *overrides], environment
    config, of_platform = plain_config(run_dir)
    OmegaConf.save(config, run_dir / "plain.yaml")
    words = [sys.executable, "-m", "verl.trainer.main_ppo", f"--config-path={run_dir}", "--config-name=plain"]
    return [*words, f"hydra.run.dir={run_dir}"], environment | of_platform


def lines_written(path: Path) -> int:
    """Complete lines of a file; none if it is not there."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes().count(b"\n")
    return 0


def pss_mib(pids: Sequence[int]) -> float:
    """Resident pages of these processes, those that several share counted once in all."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(pid).memory_full_info().pss
    return total / 2**20


def step_times(entries: Sequence[Mapping[str, Any]], ended_s: Sequence[float]) -> dict[str, Any]:
    """Start-up and step times from verl's log and the moments at which its lines were seen.

    The first step begins verl's own ``timing_s/step`` before it ends. A later step lasts from one line to the next, so
    that what is outside verl's timer (metrics, loggers) is counted.
    """
    return {
        "first_step_begins_s": round(ended_s[0] - entries[0]["data"]["timing_s/step"], 2),
        "first_step_ends_s": round(ended_s[0], 2),
        "step_s": round(median(b - a for a, b in itertools.pairwise(ended_s)), 2),
    }


def measure(variant: str) -> dict[str, Any]:
    """Start a variant and watch it to its end.

    Raises:
        StartFailed: with the end of its output, if it does not reach its last step.
    """
    with tempfile.TemporaryDirectory(prefix="versus-verl-") as folder:
        run_dir, mark = Path(folder), uuid.uuid4().hex
        words, environment = command(variant, run_dir)
        ended: list[float] = []
        peak_mib, memory_at = 0.0, 0.0
        began = time.monotonic()
        with (run_dir / "stdout.log").open("wb") as out:
            process = subprocess.Popen(
                words, stdout=out, stderr=out, cwd=run_dir, env={**environment, MARK: mark}, start_new_session=True
            )
        try:
            while process.poll() is None and (now := time.monotonic() - began) < TIME_LIMIT_S and len(ended) < STEPS:
                if now >= memory_at:
                    memory_at = now + _MEMORY_EVERY_S
                    peak_mib = max(peak_mib, pss_mib(processes_of(mark, variable=MARK)))
                ended += [now] * (lines_written(run_dir / "steps.jsonl") - len(ended))
                time.sleep(0.1)
            if len(ended) < STEPS:
                tail = (run_dir / "stdout.log").read_text(errors="replace")[-3000:]
                raise StartFailed(
                    f"{variant}: {len(ended)} of {STEPS} steps in {time.monotonic() - began:.0f} s\n{tail}"
                )
            times = step_times(complete_lines(run_dir / "steps.jsonl"), ended)
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60 if len(ended) == STEPS else 1)
            kill(processes_of(mark, variable=MARK))
            process.wait()
    date = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return {"variant": variant, "date": date, "load": os.getloadavg()[0], **times, "peak_pss_mib": round(peak_mib)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Median and range of every figure, and the recipe's median as a share of plain verl's."""
    lines = []
    for title, name in _FIGURES.items():
        values = {variant: [row[name] for row in rows if row["variant"] == variant] for variant in ALGOS}
        cells = [f"{median(v):.1f} ({min(v):.1f} to {max(v):.1f})" if v else "`not run`" for v in values.values()]
        both = all(values.values())
        lines.append([title, *cells, f"{median(values['recipe']) / median(values['verl']):.2f}" if both else ""])
    return markdown(["", "plain verl", "this recipe", "recipe / verl"], lines)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="finished starts wanted of each (3)")
    parser.add_argument("--out", type=Path, default=Path("runs/versus_verl.jsonl"), help="a line for each start")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    while True:
        count = {v: sum(row["variant"] == v for row in complete_lines(arguments.out)) for v in ALGOS}
        variant = min(ALGOS, key=count.__getitem__)
        if count[variant] >= arguments.runs:
            break
        try:
            row = measure(variant)
        except StartFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
    print(table(complete_lines(arguments.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
