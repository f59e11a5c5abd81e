"""A process that ends for want of memory: noticed as such, with how much there was and what to lower."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from recipe.runner.faults import memory
from recipe.runner.faults.errors import failure
from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.faults.watchdog import Death, Watchdog

MIB = 2**20


def test_the_smallest_limit_counts(tmp_path: Path) -> None:
    for path, limit in {".": "max", "job": str(512 * MIB), "job/step": "max"}.items():
        (tmp_path / path).mkdir(exist_ok=True)
        (tmp_path / path / "memory.max").write_text(limit + "\n")
    assert memory.limit_of("0::/job/step\n", tmp_path) == 512 * MIB
    assert memory.limit_of("0::/\n", tmp_path) is None
    assert memory.limit_of("0::/of/another/namespace\n", tmp_path) is None
    assert memory.limit_of("", tmp_path) is None
    first = "12:memory:/job/step\n3:cpu:/\n0::/\n"
    for path, limit in {"memory": 2**63 - 4096, "memory/job": 900 * MIB, "memory/job/step": 800 * MIB}.items():
        (tmp_path / path).mkdir(exist_ok=True)
        (tmp_path / path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    assert memory.limit_of(first, tmp_path) == 800 * MIB
    assert memory.limit_of("12:memory:/\n", tmp_path) is None, "version 1 has a number for no limit"


def test_what_to_lower_is_said() -> None:
    assert memory.explanation("reward worker", "").endswith("ask for more, or lower reward.num_workers")
    total = psutil.virtual_memory().total / 2**30
    assert memory.explanation("trainer", "").startswith(f"this machine has {total:.1f} GiB; ")
    sentence = Death("trainer", 7, None, None, memory="this machine has 1.0 GiB").sentence()
    assert sentence == "the trainer (process 7) was killed for memory: this machine has 1.0 GiB"


def test_a_process_without_shared_memory_is_named_so(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    code = (
        "import faulthandler, mmap, tempfile; faulthandler.enable(); file = tempfile.TemporaryFile(); "
        "file.truncate(4096); pages = mmap.mmap(file.fileno(), 4096); file.truncate(0); pages[0] = 1"
    )
    with log.open("wb") as out:  # a page that the kernel cannot give, as in a full /dev/shm
        assert subprocess.run([sys.executable, "-c", code], stderr=out).returncode == -signal.SIGBUS
    why = memory.bus_error(str(log), shared=tmp_path)
    assert why is not None and f"({tmp_path} has " in why and "update_weights_bucket_megabytes" in why
    said = str(failure(RuntimeError("x"), tmp_path / "driver.log", Death("FSDP worker", 7, str(log), None), None))
    assert said.startswith("the FSDP worker (process 7) died: there was no shared memory left (/dev/shm has ")
    log.write_text("Segmentation fault")
    assert memory.bus_error(str(log)) is None
    assert memory.bus_error(None) is None


def test_a_process_killed_for_memory_is_named_so(run_id: str, memory_limit: Callable[[int], Path]) -> None:
    small_memory = memory_limit(64 * MIB)
    code = f"open('{small_memory}/cgroup.procs', 'w').write('0'); print('in', flush=True); input(); bytearray(2**28)"
    deaths: list[Death] = []
    watch = Watchdog(run_id, lambda: None, deaths.append, lambda: None, lambda: None)
    with subprocess.Popen(
        ["VLLM::EngineCore", "-c", code], executable=sys.executable, env={**os.environ, RUN_ID_VARIABLE: run_id},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as victim:  # fmt: skip
        assert victim.stdout is not None and victim.stdout.readline() == "in\n"
        watch.start()
        limit = time.monotonic() + 10
        while not watch._known:
            assert time.monotonic() < limit
            time.sleep(0.02)
        victim.communicate("\n", timeout=20)
    while not deaths:
        assert time.monotonic() < limit + 20
        time.sleep(0.02)
    watch.stop()
    assert deaths[0].sentence() == (
        f"the vLLM engine (process {victim.pid}) was killed for memory: its job or container may use 0.1 GiB; ask for "
        "more, or lower actor_rollout_ref.rollout.max_num_seqs (on CPUs also the environment variable "
        "VLLM_CPU_KVCACHE_SPACE)"
    )
