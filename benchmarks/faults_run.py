"""One row of the fault matrix: start the real stack, kill one process at one moment, note everything that follows."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from fspo.files import complete_lines
from recipe.fspo.faults.phase import Phase, read_phase
from recipe.fspo.faults.processes import ROLES, kill, processes_of, role_of

#: Every process of one start inherits it from here, whatever the run itself marks.
MARK: Final = "FSPO_FAULTS"
#: Small, but everything real: 8 prompts x 8 responses of at most 64 tokens, two updates a step, a validation after each
#: step and a save after each second one.
SETTINGS: Final = (
    "experiment=demo",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "data.max_response_length=64",
    "fspo.offline_task.n_train=64",
    "fspo.offline_task.n_test=8",
    "trainer.val_before_train=false",
    "trainer.test_freq=1",
    "trainer.save_freq=2",
    "trainer.total_epochs=1000",
    "trainer.total_training_steps=1000",
)
SAVE_FREQ: Final = 2
#: What is killed, and the role (:data:`recipe.fspo.faults.processes.ROLES`) that finds it.
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
#: Phases in which something is killed, in the order of a step.
MOMENTS: Final = ("start-up", "generation", "update", "weight sync", "save", "validation")
START_LIMIT_S: Final = 420.0
END_LIMIT_S: Final = 120.0
LEFT_AFTER_S: Final = 20.0
#: A process that dies is at least so old: the watch must have seen it to know it.
YOUNGEST_S: Final = 1.0
#: During start-up a process is killed as soon as it is so old, but these only once others are that depend on them.
_EXISTS_FIRST: Final = {
    "launching process": "vLLM engine",
    "Ray node (raylet)": "FSDP worker",
    "control service of Ray (gcs_server)": "FSDP worker",
}
#: A judge killed is replaced; the run is asked to do this many steps more, and is then ended by the harness.
SURVIVED_STEPS: Final = 2


class NotReached(RuntimeError):
    """The run did not come to the moment; nothing was killed, so there is no row."""


@dataclass
class Run:
    """A start of the stack in the run folder that all rows share."""

    folder: Path
    overrides: tuple[str, ...]

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.mark, self.began = uuid.uuid4().hex, time.time()
        self.log = self.folder / f"start-{time.strftime('%H%M%S')}.log"
        command = [sys.executable, "-m", "recipe.fspo.main", *SETTINGS, f"fspo.run_dir={self.folder}", *self.overrides]
        environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**environment, MARK: self.mark},
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def phase(self) -> Phase | None:
        return read_phase(self.folder)

    def pids(self) -> list[int]:
        """Living processes of this start."""
        return processes_of(self.mark, variable=MARK)

    def find(self, role: str) -> int | None:
        """A process by role; the launching one and the judges have no title of their own."""
        if role == "launching process":
            return self.process.pid
        for pid in self.pids():
            if role == "judge":
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    if "fspo.rewards.worker" in " ".join(process.cmdline()) and not process.children():
                        return pid
            elif role_of(pid) == role:
                return pid
        return None

    def left(self) -> list[int]:
        """What is still there LEFT_AFTER_S seconds from now."""
        limit = time.monotonic() + LEFT_AFTER_S
        while (left := self.pids()) and time.monotonic() < limit:
            time.sleep(0.1)
        return left

    def stop(self) -> None:
        """Kill what is left, by process id."""
        kill(self.pids())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


def tracked_step(folder: Path) -> int:
    """The step that a resume begins from; 0 without a checkpoint."""
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.is_file() else 0


def checkpoint_norm(folder: Path, step: int) -> float | None:
    """Euclidean norm of a checkpoint's weights, as the run notes it of those that it begins with."""
    path = folder / "checkpoints" / f"global_step_{step}" / "actor" / "model_world_size_1_rank_0.pt"
    if not path.is_file():
        return None
    total, seen = 0.0, set()
    for tensor in torch.load(path, weights_only=False).values():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.data_ptr() not in seen:  # tied weights stand in it under two names
            total += float(local.to(torch.float64).square().sum())
        seen.add(local.data_ptr())
    return total**0.5


def _steps(folder: Path, skip: int = 0) -> list[dict[str, Any]]:
    return complete_lines(folder / "metrics.jsonl")[skip:]


def aim(run: Run, role: str, moment: str, step: int) -> int:
    """Wait until the run is at the moment of the step, and return the process to be killed."""
    limit, victim, looked, found = time.monotonic() + START_LIMIT_S, None, 0.0, 0.0
    while run.process.poll() is None and time.monotonic() < limit:
        phase = run.phase()
        if victim is None and time.monotonic() - looked > (0.02 if moment == "start-up" else 1.0):
            looked = time.monotonic()
            waits_for = _EXISTS_FIRST.get(role) if moment == "start-up" else None
            if waits_for is None or run.find(waits_for) is not None:
                victim, found = run.find(role), time.monotonic()
        here = phase is not None and phase.since > run.began and phase.phase == moment
        if (
            here
            and victim is not None
            and time.monotonic() - found > YOUNGEST_S
            and (moment == "start-up" or phase.step >= step)
        ):
            return victim
        time.sleep(0.002)
    raise NotReached(f"{moment} of step {step} was not reached:\n{run.output()[-3000:]}")


def sentence(output: str) -> str:
    """The line that says why the run ended."""
    lines = [line.removeprefix("error: ") for line in output.splitlines() if line.startswith("error: ")]
    return lines[0] if lines else ""


def resume_of(run: Run, resumed_from: int, norm: float | None, logged_before: int) -> str | None:
    """How this start took up what the starts before it had left; None if it has not come that far."""
    steps = _steps(run.folder, logged_before)
    if not steps:
        return None
    first = steps[0]
    if first["step"] != resumed_from + 1:
        return f"WRONG: step {first['step']} after a save of step {resumed_from}"
    if resumed_from and f"global_step_{resumed_from}" not in run.output():
        return f"WRONG: did not say that it resumed from step {resumed_from}"
    shards = json.loads((run.folder / "run.json").read_text())["weights_at_start"]  # one norm for each rank
    begun_with = math.hypot(*shards)
    if norm is not None and not math.isclose(begun_with, norm, rel_tol=1e-9):
        return f"WRONG: weights of norm {begun_with}, saved were {norm}"
    gradient = first["metrics"]["actor/grad_norm"]  # exactly 0 where all groups have equal rewards
    if gradient is None or not math.isfinite(gradient):
        return "WRONG: the first gradient is not finite"
    return f"step {resumed_from + 1}" if resumed_from else "from the beginning"


def left_by_others(folder: Path) -> tuple[int, float | None, int]:
    """What :func:`resume_of` compares a start with: step and norm of the checkpoint before it, and logged steps."""
    before = tracked_step(folder)
    return before, checkpoint_norm(folder, before), len(_steps(folder))


def see_resume(folder: Path, overrides: tuple[str, ...] = ()) -> str | None:
    """How a start takes up what the last row has left; it is ended after its first step."""
    left = left_by_others(folder)
    run, limit = Run(folder, overrides), time.monotonic() + START_LIMIT_S
    try:
        while run.process.poll() is None and time.monotonic() < limit:
            if (resumed := resume_of(run, *left)) is not None:
                return resumed
            time.sleep(0.2)
        return None
    finally:
        run.stop()


def run_row(folder: Path, process: str, moment: str) -> tuple[dict[str, Any], str | None]:
    """One row, and how the start resumed (the result of the rows before it).

    Raises:
        NotReached: if the run ended, or took too long, before the moment.
    """
    left = left_by_others(folder)
    reward = Path(__file__).with_name("faults_reward.py")
    run = Run(folder, (f"reward.custom_reward_function.path={reward}",) if process == "judge" else ())
    try:
        # One whole step first, that is not saved: its loss is the price of the fault.
        victim = aim(run, PROCESSES[process], moment, left[0] + SAVE_FREQ)
        os.kill(victim, signal.SIGKILL)
        killed, at = time.monotonic(), run.phase()
        assert at is not None
        row: dict[str, Any] = {"process": process, "moment": moment, "hit": at.phase == moment, "step": at.step}
        row |= _survive(run, at.step) if process == "judge" else _end(run, killed)
        row["steps_lost"] = max(0, at.step - tracked_step(folder)) if row["exit_code"] is not None else 0
        return row, resume_of(run, *left)
    finally:
        run.stop()


def _end(run: Run, killed: float) -> dict[str, Any]:
    try:
        code: int | None = run.process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"end_s": None, "gone_s": None, "exit_code": None, "left": len(run.pids()), "message": "did not end"}
    ended = time.monotonic()
    left = run.left()
    row = {"end_s": round(ended - killed, 1), "gone_s": round(time.monotonic() - killed, 1), "left": len(left)}
    names = [" ".join(psutil.Process(pid).cmdline())[:60] for pid in left if psutil.pid_exists(pid)]
    message = sentence(run.output())
    log = re.search(r"its log: (\S+)", message)
    return row | {
        "exit_code": 128 - code if code is not None and code < 0 else code,
        "left_names": names,
        "message": message,
        "log_exists": bool(log and Path(log[1]).is_file()),
    }


def _survive(run: Run, step: int) -> dict[str, Any]:
    """What a fault that is meant to be survived comes to."""
    limit = time.monotonic() + END_LIMIT_S
    while run.process.poll() is None and time.monotonic() < limit:
        logged = _steps(run.folder)
        if logged and logged[-1]["step"] >= step + SURVIVED_STEPS:
            return {"end_s": None, "gone_s": None, "exit_code": None, "left": 0, "message": "the run goes on"}
        time.sleep(0.2)
    return _end(run, time.monotonic())


assert set(PROCESSES.values()) - {"launching process", "judge"} <= set(ROLES.values())
