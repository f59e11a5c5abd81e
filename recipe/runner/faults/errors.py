"""What a person reads when a run fails: which process failed or died, when, why if known, and where its log is."""

from __future__ import annotations

import contextlib
import os
import traceback
from dataclasses import dataclass
from pathlib import Path

import ray._private.worker as ray_worker

from recipe.runner.faults.phase import Phase, during
from recipe.runner.faults.processes import CLOSED_BY_TRAINER, Process

_LINES_OF_AN_ERROR = 12
#: The setting to lower when this process runs out of host memory.
_LOWER = {
    "FSDP worker": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu (or ppo_micro_batch_size_per_gpu)",
    "vLLM engine": "actor_rollout_ref.rollout.max_num_seqs (on CPUs also the variable VLLM_CPU_KVCACHE_SPACE)",
    "reward worker": "reward.num_workers",
}


class ExplainedError(RuntimeError):
    """An error of a worker whose message says all that a person needs: printed as it is."""


@dataclass(frozen=True)
class Failure:
    """Why a run ends before its time: a sentence, and the process that has died, if one has."""

    sentence: str
    process: Process | None = None
    may_pass: bool = True  #: Whether a process has died or hung, and might not do so again.


def death(process: Process, phase: Phase | None, memory: str = "") -> Failure:
    """The failure of a run whose process has ended; ``memory``: why it was killed for memory, if not by the kernel."""
    how, why = "died", bus_error(process.log)
    if process.for_memory or memory:
        lower = _LOWER.get(process.role, "data.train_batch_size")
        how, why = "was killed for memory", f": {memory}ask for more, or lower {lower}"
    log = f"; its log: {process.log}{f' on {process.node}' if process.node else ''}" if process.log else ""
    return Failure(f"{process} {how}{during(phase)}{why}{log}", process)


def explained(error: BaseException, log: Path, failure: Failure | None, phase: Phase | None) -> Failure:
    """What a person needs of an error that came out of Ray: the first failure seen, or its last lines.

    The whole error is written to ``log``, that of the launching process.
    """
    with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:  # the disk may be full
        traceback.print_exception(error, file=file)
    reason = error  # Ray wraps what a task raised, once for each process on its way, in classes that derive from it
    while isinstance(inner := getattr(reason, "cause", None), BaseException):
        reason = inner
    died, whole = failure and failure.process, f"\nthe whole error: {log}"
    # What a worker says after a death comes of the death. But a trainer that ends closes some by itself, and on a full
    # disk it cannot write that it does.
    if isinstance(reason, ExplainedError) and (died is None or died.role in CLOSED_BY_TRAINER):
        return Failure(f"{reason}{whole}", may_pass=False)
    if died is not None:
        if "running low on memory" in str(error):  # Ray's own monitor
            full = "its machine's memory is nearly used up (RAY_memory_usage_threshold); "
            failure = death(died, phase, full)
        return Failure(f"{failure.sentence}{whole}")
    # upstream: ray._private.worker:_global_node
    # upstream: ray._private.node:Node.get_logs_dir_path
    node = ray_worker._global_node  # the newest session on the machine may be another run's
    ray_logs = node.get_logs_dir_path() if node else "/tmp/ray/session_latest/logs"
    if of_job := os.environ.get("FSPO_LOG_DIR"):  # a job of slurm/ copies the logs of all its nodes
        ray_logs = f"{of_job}/ray-NODE, once the job has ended"
    whole += f"\nlogs of Ray's processes: {ray_logs}"
    if failure is not None:  # a hang: the stacks stand in all logs
        return Failure(f"{failure.sentence}{whole}")
    last_lines = [f"\n  {line}" for line in str(error).splitlines() if line.strip()][-_LINES_OF_AN_ERROR:]
    return Failure(f"{type(error).__name__}: training ended early{''.join(last_lines)}{whole}", may_pass=False)


def bus_error(log: str | None) -> str:
    """What to say of a process whose log ends in SIGBUS, the kernel's answer to a full ``/dev/shm``; else nothing."""
    end = b""
    with contextlib.suppress(OSError):
        end = Path(log or "").read_bytes()[-(2**16) :]
    if b"SIGBUS received" not in end and b"Fatal Python error: Bus error" not in end:
        return ""
    return (
        ": there was no shared memory left: give /dev/shm more (containers: --shm-size), or lower "
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    )
