"""Unit tests run in one process, in which verl is imported once: on the CPU platform."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ["VERL_PLATFORM"] = "cpu"
# Ray's functions would start a Ray, or join another one's: here they are errors.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What is of the whole process is for the next test as it was: no order of the files means anything.

    A loss adds itself to verl's registry, and a command that runs in this process leaves Hydra begun.
    """
    if "verl" in sys.modules:
        import verl.trainer.ppo.core_algos  # noqa: F401
    losses = getattr(sys.modules.get("verl.trainer.ppo.core_algos"), "POLICY_LOSS_REGISTRY", {})
    registered = dict(losses)
    yield
    losses.clear()
    losses.update(registered)
    if hydra := sys.modules.get("hydra.core.global_hydra"):
        hydra.GlobalHydra.instance().clear()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """What a rank's process has made before it loads anything."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def run_id() -> Iterator[str]:
    """Of a run of the test's own; whatever is marked with it is killed at the end."""
    from recipe.runner.faults.processes import kill, processes_of

    run_id = uuid.uuid4().hex
    yield run_id
    kill(processes_of(run_id))


@pytest.fixture
def begin(run_id: str, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a process of the run with a title like one of Ray's or vLLM's, which runs a Python program.

    Returns when the program has printed a line. Its errors go to ``log.err`` in the test's folder, and it has an input.
    """
    from recipe.runner.faults.processes import RUN_ID_VARIABLE

    def begin(title: str, code: str = "import time; print(flush=True); time.sleep(600)") -> subprocess.Popen[bytes]:
        program = tmp_path / f"{title.rpartition(':')[2]}.py"
        program.write_text(code, encoding="utf-8")
        with (tmp_path / "log.err").open("wb") as log:
            process = subprocess.Popen(
                [title, str(program)],
                executable=sys.executable,
                # With such a title for its own name, Python does not find the environment's packages by itself.
                env={**os.environ, RUN_ID_VARIABLE: run_id, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        stack.enter_context(process)  # which closes its pipes, of which a child of its may hold the other end
        stack.callback(process.kill)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    with contextlib.ExitStack() as stack:
        yield begin
