"""Plain verl and this recipe side by side: start-up, step time and memory of the demo.

``python -m benchmarks.versus_verl`` starts both in turn, watches all their processes from outside, and prints the table
with the recipe's share of plain verl's medians. docs/clusters.md has the record.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
from omegaconf import OmegaConf, open_dict

from benchmarks.starts import Start
from fspo.files import read_lines
from fspo.markdown import markdown_table
from recipe.fspo.main import composed, write_task
from recipe.runner.launch.machine import platform_environment

STEPS: Final = 5
TIME_LIMIT_S: Final = 900.0
#: The demo without validation and checkpoints, which are not compared.
SHARED: Final = (
    "experiment=demo",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=[file]",
)
#: Plain verl has every setting of verl, vLLM and Ray that the recipe's start has.
ALGOS: Final = {"verl": "gspo_verl", "recipe": "gspo"}
#: verl's file logger writes where this variable says.
STEPS_VARIABLE: Final = "VERL_FILE_LOGGER_PATH"
STEPS_FILE: Final = "steps.jsonl"
_OF_THE_RECIPE: Final = ("fspo", "run", "dry_run", "evaluate", "seed")
#: PSS takes the kernel a few milliseconds per process.
_MEMORY_EVERY_S: Final = 5.0
_FIGURES: Final = {
    "first step begins, s": "first_step_begins_s",
    "first step ends, s": "first_step_ends_s",
    "step, s": "step_s",
    "peak, MiB": "peak_pss_mib",
}


def plain_verl(run_dir: Path, *overrides: str) -> tuple[list[str], dict[str, str]]:
    """Words after ``python -m``, and environment, of verl's own trainer with everything else that a run has.

    Writes the task's data and the configuration. The CPU platform stays, since verl has none: its engine comes by
    ``external_lib``, its vLLM worker as in the demo.
    """
    config = composed([*overrides, f"trainer.default_local_dir={run_dir}"])
    environment = platform_environment("cpu", config.trainer.n_gpus_per_node)
    os.environ["VERL_PLATFORM"] = "cpu"  # before verl is imported by what follows
    from verl.workers.config import PolicyLossConfig

    from recipe.runner.launch.machine import on_this_machine

    on_this_machine(config)
    OmegaConf.resolve(config)
    write_task(config.data)
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    with open_dict(config):
        config.trainer.v1.trainer_mode = "sync"
        config.actor_rollout_ref.model.external_lib = "recipe.runner.cpu.engine"
        for key in _OF_THE_RECIPE:
            config.pop(key, None)
        for key in set(policy_loss) - {field.name for field in dataclasses.fields(PolicyLossConfig)}:
            policy_loss.pop(key)
        policy_loss._target_ = "verl.workers.config.PolicyLossConfig"
    OmegaConf.save(config, run_dir / "plain.yaml")
    words = ["verl.trainer.main_ppo", f"--config-path={run_dir}", "--config-name=plain", f"hydra.run.dir={run_dir}"]
    # Without SPT_NOENV the processes that name themselves lose the mark of their start.
    return words, environment | {"SPT_NOENV": "1", STEPS_VARIABLE: str(run_dir / STEPS_FILE)}


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
    """Start a variant and watch it to its end; leaves with the end of its output if it does not reach its last step."""
    with tempfile.TemporaryDirectory(prefix="versus-verl-") as folder:
        run_dir = Path(folder)
        shared = (*SHARED, f"algo={ALGOS[variant]}")
        words = ["recipe.fspo.main", f"trainer.default_local_dir={run_dir}", *shared]
        environment = {STEPS_VARIABLE: str(run_dir / STEPS_FILE)}
        if variant == "verl":
            words, environment = plain_verl(run_dir, *shared)
        ended: list[float] = []
        peak_mib, memory_at = 0.0, 0.0
        began, start = time.monotonic(), Start(run_dir, *words, **environment)
        try:
            while (now := time.monotonic() - began) < TIME_LIMIT_S and len(ended) < STEPS:
                ended += [now] * (len(read_lines(run_dir / STEPS_FILE)) - len(ended))
                if start.process.poll() is not None:
                    break
                if now >= memory_at:
                    memory_at = now + _MEMORY_EVERY_S
                    peak_mib = max(peak_mib, pss_mib(start.pids()))
                time.sleep(0.1)
            if len(ended) < STEPS:
                sys.exit(f"error: {variant}: {len(ended)} of {STEPS} steps in {now:.0f} s\n{start.output()[-3000:]}")
            times = step_times(read_lines(run_dir / STEPS_FILE), ended)
            with contextlib.suppress(subprocess.TimeoutExpired):
                start.process.wait(60)
        finally:
            start.stop()
    return {"variant": variant, **times, "peak_pss_mib": round(peak_mib)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Median and range of every figure, and the recipe's median as a share of plain verl's."""
    lines = []
    for title, name in _FIGURES.items():
        verl, recipe = ([row[name] for row in rows if row["variant"] == variant] for variant in ALGOS)
        cells = [f"{median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in (verl, recipe)]
        lines.append([title, *cells, f"{median(recipe) / median(verl):.2f}"])
    return markdown_table(["", "plain verl", "this recipe", "recipe / verl"], lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="starts of each (3)")
    rows = []
    for variant in [*ALGOS] * parser.parse_args().runs:
        rows.append(measure(variant))
        print(rows[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
