"""What a person is told when a run fails: which process failed or died, and where its log is."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from dataclasses import replace
from pathlib import Path

import ray._private.worker as ray_worker

from recipe.runner.faults import collectives, memory
from recipe.runner.faults.phase import Phase
from recipe.runner.faults.processes import FSDP_WORKER, role_by_title
from recipe.runner.faults.watchdog import Death

_LINES_OF_AN_ERROR = 12
#: How Ray describes an actor whose process has gone: its class, and further lines of which one is the process.
_ACTOR_GONE = re.compile(r"class_name: (?:\S*\.)?(?P<name>\w+)\n(?:\t\w+: .*\n)*?\tpid: (?P<pid>\d+)")
#: vLLM's server, in whose log the engine writes, when its engine has failed or died before it was ready.
_ENGINE_FAILED = re.compile(
    r"ray::vLLMHttpServer\.\w+\(\)\S* \(pid=(?P<pid>\d+).*Engine core initialization failed", re.DOTALL
)
#: Ray ends processes by itself when a machine's memory is nearly used up.
_RAY_MEMORY = re.compile(r"running low on memory\..* was (?P<used>\S+) used / (?P<limit>\S+) limit")
_RAY_ENDED = re.compile(r"Selected to kill: .*?task name=(?P<name>\w+).*? pid=(?P<pid>\d+)")


class ExplainedError(RuntimeError):
    """An error of a worker whose message says everything a person needs: printed as it is."""


class TrainingFailed(RuntimeError):
    """A process of the run failed or died; the message says which, and where its log is."""


def failure(error: BaseException, log: Path, death: Death | None, phase: Phase | None) -> TrainingFailed:
    """What a person needs of an error that came out of Ray: which process died, or the last lines of the error.

    Args:
        error: It is written to ``log`` as a whole.
        log: The launching process's log.
        death: The first death that was seen, if there was one.
        phase: What the run was doing.
    """
    with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:  # the disk may be full
        traceback.print_exception(error, file=file)
    reason = error  # Ray wraps what a task raised, once for each process on its way, in classes that derive from it
    while isinstance(inner := getattr(reason, "cause", None), BaseException):
        reason = inner
    if isinstance(reason, ExplainedError):
        return TrainingFailed(f"{reason}\nthe whole error: {log}")
    node = ray_worker._global_node  # the newest session on the machine may be another run's
    ray_logs = Path(node.get_logs_dir_path()) if node else Path("/tmp/ray/session_latest/logs").resolve()
    told = death_in(str(error), phase, ray_logs)
    if death is None or (told is not None and told.memory is not None):
        # The watchdog knows better what a process is than the name of its task.
        death = replace(death, memory=told.memory) if death and told and death.pid == told.pid else told
    if death is not None:
        ranks = collectives.told_by_dumps(log.parent) if death.role == FSDP_WORKER else None
        death = replace(death, why=memory.bus_error(death.log) or ranks or death.why)
        return TrainingFailed(f"{death.sentence()}\nthe whole error: {log}")
    last_lines = [line for line in str(error).splitlines() if line.strip()][-_LINES_OF_AN_ERROR:]
    if "FSPO_LOG_DIR" in os.environ:  # a job of slurm/, which copies the logs of all its nodes
        all_logs = f"{os.environ['FSPO_LOG_DIR']}/ray-NODE, once the job has ended"
    else:
        all_logs = str(ray_logs)
    return TrainingFailed(
        f"{type(error).__name__}: training ended early\n"
        + "\n".join(f"  {line}" for line in last_lines)
        + f"\nthe whole error: {log}\nlogs of Ray's processes: {all_logs}"
    )


def death_in(error: str, phase: Phase | None, ray_logs: Path) -> Death | None:
    """The death that an error of Ray or vLLM reports: of a process too young for the watchdog to have seen it.

    Args:
        error: Its text.
        phase: What the run was doing.
        ray_logs: Folder of the logs of Ray's workers.
    """
    gone, engine = _ACTOR_GONE.search(error), _ENGINE_FAILED.search(error)
    used, ended = _RAY_MEMORY.search(error), _RAY_ENDED.search(error)
    if used is not None and ended is not None:
        role = role_by_title(f"ray::{ended['name']}") or ended["name"]
        there = f"Ray found {used['used']} of this machine's {used['limit']} used (RAY_memory_usage_threshold)"
        log = _log(ray_logs, ended["pid"])
        return Death(role, int(ended["pid"]), log, phase, memory=f"{there}; {memory.remedy(role)}")
    if gone is not None and "killed by `ray.kill`" not in error:
        role = role_by_title(f"ray::{gone['name']}") or gone["name"]
        return Death(role, int(gone["pid"]), _log(ray_logs, gone["pid"]), phase)
    if engine is not None:
        return Death("vLLM engine", None, _log(ray_logs, engine["pid"]), phase)
    return None


def _log(ray_logs: Path, pid: str) -> str | None:
    return next((str(path) for path in ray_logs.glob(f"worker-*-{pid}.err")), None)
