"""The processes that run math-verify: one launcher, spawned, and the workers it forks.

The launcher is a new interpreter, never a fork of the training process. It imports math-verify once, fills its caches,
and then forks a worker on each request. So replacing a stuck worker takes milliseconds instead of a second of imports,
and the workers share memory. The launcher runs no untrusted text, so it cannot get stuck itself.

Launcher protocol, over a Unix socket: the requests are `FORK` (with one file descriptor, the worker's end of a socket
pair) and `REAP pid` (kill the worker if it still runs, and collect it). The answer is one integer: the pid of the new
worker (minus errno if there is no room for one), or its wait status. A worker is only collected on REAP, so its pid is
not reused while the parent refers to it. Worker protocol, over its own socket: JSON [response, truth, normalise] in,
JSON status out.

No process outlives its parent: the launcher ends when its socket closes, a worker when the launcher ends
(PR_SET_PDEATHSIG; safe here because the launcher has a single thread) or when its own socket closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import logging
import os
import resource
import signal
import socket
import struct
import traceback
import warnings
from multiprocessing.connection import Connection

from recipe.math.answers import judge, limits

FORK, REAP = b"F", b"R"
REQUEST = struct.Struct("!ci")
REPLY = struct.Struct("!i")

_PR_SET_PDEATHSIG = 1
_ORPHAN_CHECK_S = 5.0


def main(control_fd: int, parent_pid: int, time_limit_s: float, memory_limit_mb: int) -> None:
    """Run the launcher until its parent closes the control socket."""
    logging.disable(logging.CRITICAL)  # math-verify logs every answer it cannot read
    warnings.simplefilter("ignore")
    limits.install()
    judge.warm_up()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=control_fd) as control:
        control.sendall(REPLY.pack(0))
        # The timeout matters if a process forked from the parent holds the socket open.
        control.settimeout(_ORPHAN_CHECK_S)
        while os.getppid() == parent_pid:
            try:
                data, fds, _, _ = socket.recv_fds(control, REQUEST.size, 1)
            except TimeoutError:
                continue
            if len(data) < REQUEST.size:
                return
            request, pid = REQUEST.unpack(data)
            if request == FORK:
                control.sendall(REPLY.pack(_fork_worker(control, fds[0], time_limit_s, memory_limit_mb)))
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                control.sendall(REPLY.pack(os.waitpid(pid, 0)[1]))


def _fork_worker(control: socket.socket, fd: int, time_limit_s: float, memory_limit_mb: int) -> int:
    launcher_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:  # the process table is full, perhaps for a moment
        os.close(fd)
        return -(error.errno or errno.EAGAIN)
    if pid:
        os.close(fd)
        return pid
    try:
        control.close()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == launcher_pid:
            memory = memory_limit_mb << 20
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            _serve(Connection(fd), time_limit_s)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _serve(connection: Connection, time_limit_s: float) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = json.loads(connection.recv_bytes())
            # The kernel ends this process once it has used that much processor time, even inside a C function.
            # SIGPROF keeps its default action: a worker has nothing to clean up.
            signal.setitimer(signal.ITIMER_PROF, time_limit_s)
            status = judge.judge(*task)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(json.dumps(status).encode())
