"""Ray's workers of a CPU run are forked from one process that has imported everything.

A start has about eight Ray workers, and each would import torch, transformers, verl and vLLM by itself: four to twelve
CPU seconds, on few cores one after the other. Ray's documented setting ``runtime_env.py_executable`` names the program
that runs a worker; here it is :mod:`recipe.fspo.cpu.fork_client`, which hands the worker's command to this server. A
forked worker begins with the imports done, and shares their memory with the others.

Only for CPU runs on one machine: with an accelerator, or on other nodes, workers start as Ray starts them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: What takes long to import and does not import Ray: at once, while the launcher does its own imports and starts Ray.
MODULES = (
    "torch",
    "tensordict",
    "torchdata.stateful_dataloader",
    "transformers.models.qwen3.modeling_qwen3",
    "datasets",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "vllm.engine.arg_utils",
)
#: The rest of what the workers import, with the first worker's environment: Ray reads its variables when it is
#: imported, and what the raylet sets for its workers (the job, its own process) is the same for all of them.
MODULES_WITH_RAY = (
    "recipe.fspo.launch",
    "recipe.fspo.trainer",
    "recipe.fspo.worker",
    "verl.experimental.agent_loop",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "vllm.v1.worker.cpu_worker",
    "ray._private.workers.default_worker",
)
#: Variables that libraries read while they are imported: a worker with another value is not forked.
READ_AT_IMPORT = ("VERL_PLATFORM", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "VERL_USE_EXTERNAL_PLUGINS")
HEADER_BYTES = 8
_py_executable: str | None = None


def start() -> Callable[[], None]:
    """Start the server in this process's environment.

    Returns:
        What ends it. It also ends with this process, however that ends; workers that it forked go on.
    """
    global _py_executable
    folder = tempfile.mkdtemp(prefix="fspo-fork-")  # readable by this user only
    path = str(Path(folder) / "socket")
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "recipe.fspo.cpu.fork_server", path],
        stdin=subprocess.PIPE,  # closed when this process ends, however it ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def stop() -> None:
        global _py_executable
        _py_executable = None
        server.terminate()
        server.communicate()
        shutil.rmtree(folder, ignore_errors=True)

    client = str(Path(__file__).with_name("fork_client.py"))
    expected = json.dumps({name: os.environ.get(name) for name in READ_AT_IMPORT})
    _py_executable = shlex.join([sys.executable, "-I", "-S", client, path, expected])
    return stop


def py_executable() -> str | None:
    """Value for Ray's ``runtime_env.py_executable``; None if no server was started."""
    return _py_executable


@dataclass(frozen=True)
class _Request:
    """What a worker's client sent: its command, environment, working folder and standard streams."""

    argv: list[str]
    environ: dict[str, str]
    cwd: str
    streams: list[int]

    @classmethod
    def receive(cls, connection: socket.socket) -> _Request:
        header, streams, _, _ = socket.recv_fds(connection, HEADER_BYTES, 3)
        with connection.makefile("rb") as file:
            return cls(**json.loads(file.read(int.from_bytes(header, "big"))), streams=streams)

    def take_environment(self) -> None:
        os.environ.clear()
        os.environ.update(self.environ)


def _serve(path: str) -> _Request | None:
    """Fork for every request; returns it in the forked process, and None when the launcher has ended."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)  # workers that are started meanwhile wait
    from recipe.fspo.cpu.patches import report_vllm_version

    report_vllm_version()  # before vLLM decides which platform it is on
    for module in MODULES:
        importlib.import_module(module)
    if "ray" in sys.modules:
        raise RuntimeError("a module of MODULES imports ray")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    first = True
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            with contextlib.suppress(OSError):  # the launcher removes them itself, unless it was killed
                os.unlink(path)
                os.rmdir(Path(path).parent)
            return None
        connection, _ = listener.accept()
        request = _Request.receive(connection)
        if first:
            request.take_environment()
            for module in MODULES_WITH_RAY:
                importlib.import_module(module)
            gc.collect()
            gc.freeze()  # no collection writes to the pages that the forked processes share
            first = False
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)  # when a worker ends, Ray ends its process group
            listener.close()
            connection.sendall(b"1")
            connection.close()
            return request
        connection.close()
        for stream in request.streams:
            os.close(stream)


def _become(request: _Request) -> None:
    """Run the command of ``request`` as a fresh Python would."""
    import numpy as np

    for target, stream in enumerate(request.streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(request.cwd)
    request.take_environment()
    np.random.seed()  # anew, as in every process that imports it; random does so by itself
    sys.argv[:] = request.argv
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _request = _serve(sys.argv[1])
    if _request is not None:
        _become(_request)
