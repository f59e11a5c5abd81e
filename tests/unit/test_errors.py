"""What is said of a failed run: the process, why it died (memory), and the log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError
from waiting import wait_until

from recipe.runner.faults.errors import ExplainedError, bus_error, death, explained
from recipe.runner.faults.processes import Process, Processes


def wrapped(cause: Exception) -> RayTaskError:
    """As Ray wraps what a task raised, in a class that also derives from the cause's."""
    return RayTaskError("task", "\n".join(f"line {i}" for i in range(40)), cause).as_instanceof_cause()


def test_a_failed_run_says_why_and_keeps_the_rest_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    engine, closed = (death(Process(who, 12), None) for who in ("vLLM engine", "TransferQueue's controller"))
    nan, other = (wrapped(wrapped(error)) for error in (ExplainedError("the gradient norm is nan"), ValueError("odd")))
    assert explained(nan, log, engine, None).may_pass, "what a worker says after a death comes of the death"
    assert not explained(nan, log, closed, None).may_pass, "the trainer closes it, and may be unable to write so"
    ours = explained(nan, log, None, None).sentence
    assert ours.splitlines() == ["the gradient norm is nan", f"the whole error: {log}"]
    died = explained(other, log, engine, None).sentence
    assert died.splitlines()[0] == "the vLLM engine (process 12) died"
    said = explained(other, log, None, None).sentence
    assert "RayTaskError" in said and "line 39" in said and "line 20" not in said and "line 0" in log.read_text()
    unwritable = explained(other, tmp_path, engine, None).sentence
    assert unwritable == died.replace(str(log), str(tmp_path))


def test_a_process_without_shared_memory_is_named_so(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    code = (
        "import faulthandler, mmap, tempfile; faulthandler.enable(); file = tempfile.TemporaryFile(); "
        "file.truncate(4096); pages = mmap.mmap(file.fileno(), 4096); file.truncate(0); pages[0] = 1"
    )
    with log.open("wb") as out:  # a page that the kernel cannot give, as in a full /dev/shm
        assert subprocess.run([sys.executable, "-c", code], stderr=out).returncode == -signal.SIGBUS
    sentence = death(Process("FSDP worker", 7, str(log)), None).sentence
    for part in ("the FSDP worker (process 7) died", "--shm-size", "update_weights_bucket_megabytes"):
        assert part in sentence
    log.write_text("Segmentation fault")
    assert bus_error(str(log)) == bus_error(None) == ""


def test_a_process_killed_for_memory_is_named_so(run_id: str, begin: Callable[..., subprocess.Popen[bytes]]) -> None:
    """In a cgroup of the test's own, with a limit of 64 MiB."""
    folder, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not folder.exists():
        folder, name = Path("/sys/fs/cgroup"), "memory.max"
    folder /= f"fspo-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / name).write_text(str(2**26))
        for swap in folder.glob("memory.swap.max"):  # else what is too much would go there
            swap.write_text("0")
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    code = f"open('{folder}/cgroup.procs', 'w').write('0'); print(flush=True); input(); bytearray(2**28)"
    processes, victim = Processes(run_id), begin("VLLM::EngineCore", code)
    wait_until(lambda: processes.first_end() is None and [*processes])
    victim.communicate(b"\n", timeout=120)
    ended = processes.first_end()
    wait_until(lambda: not (folder / "cgroup.procs").read_text())  # of processes that were killed
    folder.rmdir()
    assert ended is not None
    sentence = death(ended, None).sentence
    for part in (f"vLLM engine (process {victim.pid})", "killed for memory", "max_num_seqs", "VLLM_CPU_KVCACHE_SPACE"):
        assert part in sentence
