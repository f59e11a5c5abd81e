"""What is said of a failed run: the process, why it died (memory), and the log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError

from recipe.runner.faults.errors import Death, bus_error, death_in, failure, killed_for_memory, memory_limit
from recipe.runner.faults.nonfinite import UpdateRefused
from recipe.runner.faults.phase import Phase
from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.faults.watchdog import Watchdog

MIB = 2**20


class Wrapped(Exception):
    """As Ray wraps what a task raised."""

    def __init__(self, cause: BaseException | None) -> None:
        super().__init__("\n".join(f"line {i}" for i in range(40)))
        self.cause = cause


class Both(Wrapped, UpdateRefused):
    """Ray's wrapper also derives from the class of what it wraps."""


def test_a_failed_run_says_what_is_needed_and_keeps_the_rest_in_its_log(tmp_path: Path) -> None:
    log, death = tmp_path / "driver.log", Death("vLLM engine", 12, None, None, why="GCS is stopped")
    ours = str(failure(Both(Both(UpdateRefused("the gradient norm is nan"))), log, death, None))
    assert ours.splitlines() == ["the gradient norm is nan", f"the whole error: {log}"]
    died = str(failure(Wrapped(None), log, death, None))
    assert died.splitlines()[0] == "the vLLM engine (process 12) died: GCS is stopped"
    other = str(failure(Wrapped(None), log, None, None))
    assert other.startswith("Wrapped: training ended early") and "line 39" in other and "line 20" not in other
    assert log.read_text().count("line 0\n") == 3
    assert str(failure(Wrapped(None), tmp_path, death, None)) == died.replace(
        str(log), str(tmp_path)
    )  # cannot be written


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for pid in (4520, 45200):
        (tmp_path / f"worker-5bc91ca5-01000000-{pid}.err").touch()
    return tmp_path


def actor_died(why: str, name: str = "create_colocated_worker_cls.<locals>.WorkerDict") -> str:
    """What Ray says of an actor whose process has gone."""
    context = ActorDiedErrorContext(
        actor_id=b"0" * 16,
        class_name=name,
        pid=4520,
        name="QoRrQWWorkerDict_0:0",
        ray_namespace="one",
        node_ip_address="192.0.2.2",
        error_message=why,
    )
    return str(ActorDiedError(context))


def test_a_worker_that_died_before_it_was_watched_is_named_by_what_ray_says(logs: Path) -> None:
    text = actor_died("The actor is dead because its worker process has died.")
    death = death_in(f"RayTaskError(ActorDiedError): ray::TaskRunner.run() (pid=4322)\n{text}", None, logs)
    assert death == Death("FSDP worker", 4520, str(logs / "worker-5bc91ca5-01000000-4520.err"), None)
    loop = death_in(actor_died("The actor is dead.", "AgentLoopWorkerTQ"), None, logs)
    assert loop is not None and loop.role == "agent loop"


#: Of an error of Ray 2.56, shortened.
LOW_ON_MEMORY = (
    "OutOfMemoryError: 1 worker(s) were killed due to the node running low on memory. Memory on the node "
    "(IP: 192.0.2.2, ID: 4a3d) was 5.57GB used / 23.54GB limit (0.236623)\nOOM kill reason: Memory usage exceeded\n"
    "Selected to kill: (Actor(7486f57e): job ID=01000000, lease ID=00000000, task name=WorkerDict.__init__, required "
    "resources="
    "{CPU: 1}, pid=4520, actual memory used=0.03GB, worker ID=ba43)\n"
)


def test_a_worker_that_ray_ended_for_memory_is_named_so(logs: Path, tmp_path: Path) -> None:
    death = death_in(LOW_ON_MEMORY, None, logs)
    assert death is not None
    for part in ("FSDP worker (process 4520)", "5.57GB", "23.54GB", "RAY_memory_usage_threshold", "ppo_max_token_len"):
        assert part in death.sentence()
    watched = failure(RuntimeError(LOW_ON_MEMORY), tmp_path / "log", Death("agent loop", 4520, None, None), None)
    assert str(watched).startswith("the agent loop (process 4520) was killed for memory: Ray found")
    seen = Death("trainer", 1, None, None)
    assert "for memory" in str(failure(RuntimeError(LOW_ON_MEMORY), tmp_path / "log", seen, None))
    assert "for memory" not in str(failure(RuntimeError("gone"), tmp_path / "log", seen, None))


@pytest.mark.parametrize(
    "error",
    [actor_died("it was killed by `ray.kill`."), "ValueError: data.train_batch_size=3 is not a multiple of 2"],
    ids=["on purpose", "no process"],
)
def test_other_errors_name_no_process(logs: Path, error: str) -> None:
    assert death_in(error, None, logs) is None


def test_an_engine_that_fails_to_start_is_named_with_the_log_that_tells_why(logs: Path) -> None:
    phase = Phase(0, "start-up", 0.0)
    text = (
        "ray::TaskRunner.run() (pid=1, ip=192.0.2.2)\n  some lines\nray.exceptions.RayTaskError(RuntimeError): "
        "\x1b[36mray::vLLMHttpServer.launch_server()\x1b[39m (pid=4520, ip=192.0.2.2, repr=<vLLMHttpServer object>)\n"
        "  raise RuntimeError(\nRuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {}"
    )
    death = death_in(text, phase, logs)
    assert death is not None
    assert (
        death.sentence() == f"the vLLM engine died during start-up; its log: {logs}/worker-5bc91ca5-01000000-4520.err"
    )


# ---------------------------------------------------------------- memory


def test_the_smallest_limit_counts(tmp_path: Path) -> None:
    for path, limit in {".": "max", "job": str(512 * MIB), "job/step": "max"}.items():
        (tmp_path / path).mkdir(exist_ok=True)
        (tmp_path / path / "memory.max").write_text(limit + "\n")
    assert memory_limit("0::/job/step\n", tmp_path) == 512 * MIB
    total = psutil.virtual_memory().total
    for no_limit in ("0::/\n", "0::/of/another/namespace\n", ""):
        assert memory_limit(no_limit, tmp_path) == total
    first = "12:memory:/job/step\n3:cpu:/\n0::/\n"
    for path, limit in {"memory": 2**63 - 4096, "memory/job": 900 * MIB, "memory/job/step": 800 * MIB}.items():
        (tmp_path / path).mkdir(exist_ok=True)
        (tmp_path / path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    assert memory_limit(first, tmp_path) == 800 * MIB
    assert memory_limit("12:memory:/\n", tmp_path) == total, "version 1 has a number for no limit"


def test_what_to_lower_is_said() -> None:
    assert killed_for_memory("reward worker", "").endswith("ask for more, or lower reward.num_workers")
    total = psutil.virtual_memory().total / 2**30
    assert killed_for_memory("trainer", "").startswith(f"this machine has {total:.1f} GiB; ")
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
    why = bus_error(str(log), shared=tmp_path)
    assert why is not None and f"({tmp_path} has " in why and "update_weights_bucket_megabytes" in why
    said = str(failure(RuntimeError("x"), tmp_path / "driver.log", Death("FSDP worker", 7, str(log), None), None))
    assert said.startswith("the FSDP worker (process 7) died: there was no shared memory left (/dev/shm has ")
    log.write_text("Segmentation fault")
    assert bus_error(str(log)) is None
    assert bus_error(None) is None


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
    for part in (f"vLLM engine (process {victim.pid})", "0.1 GiB", "max_num_seqs", "VLLM_CPU_KVCACHE_SPACE"):
        assert part in deaths[0].sentence()
