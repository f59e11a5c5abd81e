"""The parent's side of the worker processes: it starts them, sends them answers and replaces those that die."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from recipe.math.answers.verdict import Status
from recipe.math.answers.worker import FORK, REAP, REPLY, REQUEST

START_LIMIT_S = 120.0
WALL_FACTOR = 10.0
"""A worker is killed after this many time limits of wall-clock time, even if it has used little processor time."""

ANSWERS_PER_WORKER = 5_000
"""A worker is replaced after this many answers: ANTLR's caches only grow."""

_PAUSE_S = 0.1


class WorkerStartError(RuntimeError):
    """The launcher process did not come up."""


class _Launcher:
    """Handle of the launcher process (see `worker`)."""

    def __init__(self, time_limit_s: float, memory_limit_mb: int) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        arguments = (theirs.fileno(), os.getpid(), time_limit_s, memory_limit_mb)
        command = f"from recipe.math.answers.worker import main; main{arguments}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", command],  # -P: no module from the current folder
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        theirs.close()
        self._socket = ours
        self._lock = threading.Lock()
        ours.settimeout(START_LIMIT_S)
        try:
            self._reply()
        except OSError as error:
            self.close()
            raise WorkerStartError(
                f"the math-verify launcher did not start within {START_LIMIT_S:.0f} s: see its message above; "
                f"`{sys.executable} -c 'import math_verify'` must work"
            ) from error

    def fork(self) -> tuple[int, Connection]:
        ours, theirs = socket.socketpair()
        with ours, theirs, self._lock:
            socket.send_fds(self._socket, [REQUEST.pack(FORK, 0)], [theirs.fileno()])
            pid = self._reply()
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
            return pid, Connection(ours.detach())

    def reap(self, pid: int) -> int:
        with self._lock:
            self._socket.sendall(REQUEST.pack(REAP, pid))
            return self._reply()

    def _reply(self) -> int:
        data = self._socket.recv(REPLY.size, socket.MSG_WAITALL)
        if len(data) < REPLY.size:
            raise ConnectionError("the launcher process ended")
        (value,) = REPLY.unpack(data)
        return int(value)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Worker:
    def __init__(self, launcher: _Launcher) -> None:
        self.launcher = launcher
        self.pid, self.connection = launcher.fork()
        self.answered = 0


class WorkerPool:
    """Up to `n_workers` processes, started on first use. Safe to use from any number of threads.

    A worker judges one answer at a time. The time limit is the processor time of that answer: time in a queue and other
    load on the machine do not count. WALL_FACTOR limits the wall-clock time too.
    """

    def __init__(self, n_workers: int, time_limit_s: float, memory_limit_mb: int) -> None:
        self.n_workers = n_workers
        self.time_limit_s = time_limit_s
        self.memory_limit_mb = memory_limit_mb
        self._reset()
        this = weakref.ref(self)

        def forget_parent() -> None:  # whose workers are not the child's
            if (pool := this()) is not None:
                pool._reset()

        os.register_at_fork(after_in_child=forget_parent)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._launcher: _Launcher | None = None
        # Callers wait in the order in which they came, and each thread has its own worker.
        self._threads = ThreadPoolExecutor(self.n_workers, thread_name_prefix="math-verify")
        self._own = threading.local()

    def run(self, response: str, truth: str, normalise: bool) -> Status:
        """`judge.judge` in one worker (and its replacement); waits until one is free.

        Raises:
            WorkerStartError: no worker can be started at all, a fault of the installation.
        """
        return self._threads.submit(self._judged, json.dumps([response, truth, normalise]).encode()).result()

    def _judged(self, task: bytes) -> Status:
        status = Status.CRASHED
        # One retry after a crash: the kernel may have killed the worker, or its launcher, for another reason.
        for _ in range(2):
            worker = getattr(self._own, "worker", None) or self._start()
            self._own.worker = None  # until it has answered
            if worker is None:
                return Status.REFUSED
            try:
                worker.connection.send_bytes(task)
                status = self._receive(worker)
            except (EOFError, OSError) as error:
                status = self._bury(worker, isinstance(error, TimeoutError))
                if status is Status.TIMEOUT:
                    return status
                continue
            if worker.answered < ANSWERS_PER_WORKER:
                self._own.worker = worker
            else:
                self._collect(worker)
            return status
        return status

    def _receive(self, worker: _Worker) -> Status:
        if not worker.connection.poll(self.time_limit_s * WALL_FACTOR):
            raise TimeoutError
        status = Status(json.loads(worker.connection.recv_bytes()))
        worker.answered += 1
        return status

    def _start(self) -> _Worker | None:
        """A new worker; None if the machine has had no room for a process for as long as an answer may take."""
        end = time.monotonic() + self.time_limit_s * WALL_FACTOR
        while True:
            try:
                with self._lock:
                    if self._launcher is None or self._launcher.ended():
                        self._launcher = _Launcher(self.time_limit_s, self.memory_limit_mb)
                        weakref.finalize(self, self._launcher.close)
                    launcher = self._launcher
                return _Worker(launcher)
            except (ConnectionError, TimeoutError):
                launcher.close()  # it was about to end, or its reply is still to come
            except OSError as error:
                # The process table or the memory is full, or another thread has closed this launcher.
                if error.errno not in (errno.EAGAIN, errno.ENOMEM, errno.EBADF):
                    raise WorkerStartError(f"no process for math-verify can be started: {error}") from error
            if time.monotonic() > end:
                return None
            time.sleep(_PAUSE_S)

    def _bury(self, worker: _Worker, stuck: bool) -> Status:
        """Collect a dead or stuck worker and say what ended it."""
        wait_status = self._collect(worker)
        over_time = wait_status is not None and os.WTERMSIG(wait_status) == signal.SIGPROF
        return Status.TIMEOUT if stuck or over_time else Status.CRASHED

    def _collect(self, worker: _Worker) -> int | None:
        """End and collect a worker; its wait status, or None if its launcher is gone (and the worker with it)."""
        worker.connection.close()
        try:
            return worker.launcher.reap(worker.pid)
        except OSError:
            worker.launcher.close()
            return None

    def close(self) -> None:
        """End all processes. The pool starts new ones if it is used again."""
        if self._launcher is not None:
            self._launcher.close()
