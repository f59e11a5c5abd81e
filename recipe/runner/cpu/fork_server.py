"""The processes of a CPU run are forked from one process that has imported everything.

Each of a start's eight Ray workers, and vLLM's engine, would import torch, transformers, verl and vLLM by itself: four
to fifteen CPU seconds. Ray's setting ``runtime_env.py_executable`` names the program that runs a worker, and
``multiprocessing.set_executable`` in a worker the one that runs what it spawns; here it is
:mod:`recipe.runner.cpu.fork_client`, which hands the command to this server. Only for CPU runs on one machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import multiprocessing
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
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

#: What does not import Ray: at once, while the launcher does its own imports and starts Ray.
MODULES = (
    *("torch", "tensordict", "torchdata.stateful_dataloader", "transformers.models.qwen3.modeling_qwen3", "datasets"),
    *("torch.distributed.fsdp", "torch.utils.tensorboard", "vllm.engine.arg_utils"),
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.v1.worker.gpu_model_runner",  # the CPU's is made of it
)
#: The rest of what the workers import, with the first worker's environment, which Ray reads when it is imported: what
#: the raylet sets for its workers is the same for all of them.
MODULES_WITH_RAY = (
    "verl.trainer.main_ppo",
    "verl.experimental.agent_loop",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "vllm.v1.worker.cpu_worker",
    "ray._private.workers.default_worker",  # upstream: ray._private.workers.default_worker:parser
)
#: How many open files a process may pass on.
MAX_FILES = 64
#: Value for Ray's ``runtime_env.py_executable``; None if no server was started.
py_executable: str | None = None


@contextlib.contextmanager
def running(modules: Sequence[str]) -> Iterator[None]:
    """Within it there is a server, which imports ``modules``, too. It also ends with this process."""
    global py_executable
    folder = Path(tempfile.mkdtemp(prefix="fork-server-"))  # readable by this user only
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "recipe.runner.cpu.fork_server", str(folder / "socket"), *modules],
        stdin=subprocess.PIPE,  # closed when this process ends, however it ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    py_executable = str(write_program(folder / "socket"))
    try:
        yield
    finally:
        py_executable = None
        server.kill()  # SIGTERM may be blocked
        server.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def write_program(path: Path) -> Path:
    """Write what stands in for Python where the server's socket is ``path``."""
    client = Path(__file__).with_name("fork_client.py")
    command = shlex.join([sys.executable, "-I", "-S", str(client), str(path)])
    program = path.with_name("python")
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    program.chmod(0o700)
    return program


class _Client:
    """What was started in place of Python, and is taken over."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        pid = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED)  # the first of its three numbers
        process = psutil.Process(pid)
        self.environment, self.folder, self.group = process.environ(), process.cwd(), os.getpgid(pid)
        command = process.cmdline()
        self.argv = command[command.index(connection.getsockname()) + 1 :]
        #: By multiprocessing, not by Ray.
        self.is_spawned = "--multiprocessing-fork" in self.argv

    def take_environment(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)

    def take_files(self) -> None:
        """Give its files the numbers that they have there, and the connection another where that is one of them."""
        wanted, files, _, _ = socket.recv_fds(self.connection, MAX_FILES, MAX_FILES)
        above, old = max(wanted) + 1, [self.connection.detach(), *files]
        connection, *files = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in old)
        for fd in old:
            os.close(fd)
        self.connection = socket.socket(fileno=connection)
        for fd, number in zip(files, wanted, strict=True):
            os.dup2(fd, number)
            os.close(fd)


def _serve(path: Path, modules: Sequence[str]) -> _Client | None:
    """Fork for every client; returns it in the forked process, and None when the launcher has ended."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)  # workers that are started meanwhile wait
    from recipe.runner.cpu.patches import make_agent_loops_without_hydra, report_vllm_version

    report_vllm_version()  # before vLLM decides which platform it is on
    for module in MODULES:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    first = True
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            shutil.rmtree(path.parent, ignore_errors=True)  # the launcher does so itself, unless it was killed
            return None
        connection, _ = listener.accept()
        if first:
            _Client(connection).take_environment()
            for module in (*modules, *MODULES_WITH_RAY):
                importlib.import_module(module)
            make_agent_loops_without_hydra()
            gc.collect()
            gc.freeze()  # no collection writes to the pages that the forked processes share
            first = False
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _Client(connection)  # where that cannot be done, the client gets no answer
        connection.close()


def _become(client: _Client, program: Path) -> None:
    """Run the client's command as a fresh Python would; ``program`` runs what it spawns."""
    import numpy as np

    # When a worker ends, Ray ends its process group: a worker leads its own, and what it spawns is in it.
    os.setpgid(0, client.group if client.is_spawned else 0)
    client.take_files()
    os.chdir(client.folder)
    client.take_environment()
    client.connection.sendall(os.getpid().to_bytes(8, "big"))
    np.random.seed()  # anew, as in every process that imports it; random does so by itself
    if client.is_spawned:
        _become_spawned(client)
        return
    client.connection.close()
    multiprocessing.set_executable(str(program))
    sys.argv[:] = client.argv
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _become_spawned(client: _Client) -> None:
    """Run multiprocessing's command: ``[options] -c CODE --multiprocessing-fork``."""

    def end_with_client() -> None:
        with contextlib.suppress(OSError):
            client.connection.recv(1)  # nothing is ever sent: it returns when the client has been killed
        os.kill(os.getpid(), signal.SIGKILL)

    from recipe.runner.cpu.patches import write_titles_as_ray_does

    write_titles_as_ray_does()
    threading.Thread(target=end_with_client, daemon=True, name="ends with its client").start()
    position, status = client.argv.index("-c"), 1
    sys.argv[:] = client.argv[position::2]
    try:
        exec(client.argv[position + 1], {"__name__": "__main__"})
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    finally:
        client.connection.sendall(bytes([status % 256]))  # what the client ends with, once this process has ended


def main(path: str, *modules: str) -> None:
    """The server, and every process that is forked from it."""
    if (client := _serve(Path(path), modules)) is not None:
        _become(client, Path(path).with_name("python"))


if __name__ == "__main__":
    main(*sys.argv[1:])
