"""What is said of a failed run: the process, from what was seen or from what Ray and vLLM say, and the log."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError

from recipe.runner.faults.errors import death_in, failure
from recipe.runner.faults.nonfinite import UpdateRefused
from recipe.runner.faults.phase import Phase
from recipe.runner.faults.watchdog import Death


class Wrapped(Exception):
    """As Ray wraps what a task raised."""

    def __init__(self, cause: BaseException | None) -> None:
        super().__init__("\n".join(f"line {i}" for i in range(40)))
        self.cause = cause


class Both(Wrapped, UpdateRefused):
    """Ray's wrapper also derives from the class of what it wraps."""


def test_a_failed_run_says_what_is_needed_and_keeps_the_rest_in_its_log(tmp_path: Path) -> None:
    log, death = tmp_path / "driver.log", Death("vLLM engine", 12, None, None)
    ours = str(failure(Both(Both(UpdateRefused("the gradient norm is nan"))), log, death, None))
    assert ours.splitlines() == ["the gradient norm is nan", f"the whole error: {log}"]
    died = str(failure(Wrapped(None), log, death, None))
    assert died.splitlines()[0] == "the vLLM engine (process 12) died"
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
    death = death_in(f"RayTaskError(ActorDiedError): ray::FSPOTaskRunner.run() (pid=4322)\n{text}", None, logs)
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
    assert death is not None and death.sentence().startswith(
        "the FSDP worker (process 4520) was killed for memory: Ray found 5.57GB of this machine's 23.54GB used "
        "(RAY_memory_usage_threshold); ask for more, or lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    )
    watched = failure(RuntimeError(LOW_ON_MEMORY), tmp_path / "log", Death("agent loop", 4520, None, None), None)
    assert str(watched).startswith("the agent loop (process 4520) was killed for memory: Ray found")
    seen = Death("trainer", 1, None, None)
    assert "for memory" in str(failure(RuntimeError(LOW_ON_MEMORY), tmp_path / "log", seen, None))
    assert "for memory" not in str(failure(RuntimeError("gone"), tmp_path / "log", seen, None))


def test_what_the_watchdog_found_to_be_the_reason_is_told(tmp_path: Path) -> None:
    seen = Death("Ray node (raylet)", 11, None, None, why="the control service of Ray (process 12) is stopped")
    assert "(process 12) is stopped" in str(failure(RuntimeError("gone"), tmp_path / "log", seen, None))


def test_an_actor_that_was_ended_on_purpose_has_not_died(logs: Path) -> None:
    assert death_in(actor_died("The actor is dead because it was killed by `ray.kill`."), None, logs) is None


def test_an_engine_that_fails_to_start_is_named_with_the_log_that_tells_why(logs: Path) -> None:
    phase = Phase(0, "start-up", 0.0)
    text = (
        "ray::FSPOTaskRunner.run() (pid=1, ip=192.0.2.2)\n  some lines\nray.exceptions.RayTaskError(RuntimeError): "
        "\x1b[36mray::vLLMHttpServer.launch_server()\x1b[39m (pid=4520, ip=192.0.2.2, repr=<vLLMHttpServer object>)\n"
        "  raise RuntimeError(\nRuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {}"
    )
    death = death_in(text, phase, logs)
    assert death is not None
    assert (
        death.sentence() == f"the vLLM engine died during start-up; its log: {logs}/worker-5bc91ca5-01000000-4520.err"
    )


def test_other_errors_name_no_process(logs: Path) -> None:
    assert death_in("ValueError: data.train_batch_size=3 is not a multiple of 2", None, logs) is None
