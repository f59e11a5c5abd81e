"""Starts the real stack as a user would, and waits for what it prints.

What a run is called with and where it keeps what it writes stands here, once for all tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks import starts
from benchmarks.starts import MARK, SMALL, marked_processes, user_environment
from fspo.files import read_lines

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
MODEL = REPOSITORY / "recipe/math/data/assets/demo_model"
#: Seconds after which a wait fails. A small start takes half a minute on two quiet cores.
SOON, LATER = 120, 600
#: Exit status of a run that is worth another start.
AGAIN = 75

__all__ = ["MARK", "REPOSITORY", "SMALL", "Start", "marked_processes"]


def measured(folder: Path) -> dict[str, Any]:
    """What a run has measured of itself: ``clip_values_measured`` and ``loss_divided_by``."""
    files = (folder / "run.json", folder / "fspo.json")  # the second one under verl's own command
    return json.loads(next(file for file in files if file.is_file()).read_text())  # type: ignore[no-any-return]


def latest_step(folder: Path) -> int:
    """The step of the latest checkpoint of a run."""
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def export(folder: Path, out: Path) -> None:
    """Write the newest weights of a run in Hugging Face's format."""
    command = [sys.executable, "-m", "recipe.runner.export", str(folder), "--out", str(out)]
    subprocess.run(command, check=True, timeout=LATER, env=user_environment())


def compare(folder: Path, losses: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    """A comparison of these losses with seed 5, in a folder with the user's own files."""
    grid = ("seed=5", f"algo={','.join(losses)}", "algorithm.adv_estimator=grpo", "trainer.default_local_dir=grid")
    command = [sys.executable, "-m", "recipe.fspo.main", "-m", *grid, *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=2 * LATER, cwd=folder, env=user_environment()
    )


def stacks(output: str) -> list[str]:
    """What the FSDP workers of a run that hung wrote to their logs, whose folder the run's error names."""
    (folder,) = re.findall(r"^logs of Ray's processes: (.*)$", output, re.M)
    texts = [path.read_text(errors="replace") for path in Path(folder).glob("worker-*.err")]
    return [text for text in texts if "train_batch" in text]


#: A run with this word writes log-probabilities at each save, if its environment is :func:`probed`.
PROBE = "trainer.checkpoint_callback_class=log_prob_probe.LogProbProbe"


def probed(folder: Path) -> dict[str, str]:
    """An environment in which a start finds the modules of this folder, of which the probe writes into ``folder``.

    What was there stays in front of the installed package: in a second checkout it names the code to be tested.
    """
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "FSPO_PROBE_FILE": str(folder / "probe.jsonl")}


def read_probe(folder: Path) -> dict[int, dict[str, np.ndarray]]:
    """Log-probabilities of the probe by step; see log_prob_probe.py."""
    lines = map(json.loads, (folder / "probe.jsonl").read_text().splitlines())
    return {line.pop("step"): {name: np.array(values) for name, values in line.items()} for line in lines}


def assert_vllm_follows(log_probs: dict[str, np.ndarray]) -> None:
    """vLLM has the actor's weights of this moment, and these are no longer the weights of the start."""
    assert np.abs(log_probs["rollout"] - log_probs["actor"]).max() < 1e-4
    assert np.abs(log_probs["rollout"] - log_probs["reference"]).max() > 1e-3


def model_with_another_eos(folder: Path) -> Path:
    """The demo's model, which ends its turns with ``<eos>`` (1), in files that call ``<pad>`` (0) the eos.

    A base model is so: its chat template ends a turn with a token that neither of its files calls eos.
    """
    shutil.copytree(MODEL, folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        settings |= {"eos_token": "<pad>"} if name.startswith("tokenizer") else {"eos_token_id": 0}
        (folder / name).write_text(json.dumps(settings))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("{{ eos_token }}", "<eos>"))
    return folder


class Start(starts.Start):
    """``python -m WORDS`` in a folder, which for a run of ``recipe.fspo.main`` is the run's, too."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        number = len(list(folder.glob("stdout-*.log")))  # a log for each start in the folder
        super().__init__(folder, *words, log=f"stdout-{number}.log", **environment)

    def wait(self, timeout: float = LATER) -> int:
        """Exit status; what the start printed is in the failure if the time is over."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not finished after {timeout} s; it printed:\n{self.output()[-4000:]}")

    def ends_with(self, status: int, timeout: float = LATER) -> None:
        """Wait for the end, which has to be this one and to leave no process behind."""
        assert self.wait(timeout) == status, self.output()[-6000:]
        assert self.left_behind() == []

    def wait_for(self, text: str, timeout: float = LATER) -> None:
        """Return once the start has printed ``text``."""
        limit = time.monotonic() + timeout
        while text not in self.output():
            if self.process.poll() is not None or time.monotonic() > limit:
                pytest.fail(f"{text!r} was not printed; it printed:\n{self.output()[-4000:]}")
            time.sleep(0.2)

    def wait_for_step(self, step: int, timeout: float = LATER) -> None:
        """Return once the start has done a step of a run that would have a thousand."""
        self.wait_for(f"step {step}/1000 ", timeout)

    def processes(self) -> list[psutil.Process]:
        """Every living process of this start."""
        return marked_processes(self.mark)

    def left_behind(self) -> list[str]:
        """Names of the processes that are still there after a minute."""
        names = []
        for pid in self.left():
            with contextlib.suppress(psutil.Error):
                names.append(f"{pid} {' '.join(psutil.Process(pid).cmdline())[:80]}")
        return names

    def info(self) -> dict[str, Any]:
        """What run.json says."""
        return json.loads((self.folder / "run.json").read_text())  # type: ignore[no-any-return]

    def steps(self) -> dict[int, dict[str, float]]:
        """Metrics by step, each of which has to be there once, in their order."""
        records = read_lines(self.folder / "metrics.jsonl")
        steps = [record["step"] for record in records]
        assert steps == sorted(set(steps)), "one line a step"
        return {record["step"]: record["metrics"] for record in records}


class Starter(contextlib.ExitStack):
    """Starts; what is left of them is ended with it."""

    def __call__(self, run_dir: Path, *overrides: str, **environment: str) -> Start:
        """``python -m recipe.fspo.main`` with this run folder."""
        folder = f"trainer.default_local_dir='{run_dir}'"
        return self.module(run_dir, "recipe.fspo.main", folder, *overrides, **environment)

    def module(self, folder: Path, *words: str, **environment: str) -> Start:
        """``python -m WORDS`` in this folder."""
        one = Start(folder, *words, **environment)
        self.callback(one.stop)
        return one
