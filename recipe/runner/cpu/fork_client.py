"""What Ray, or multiprocessing in a worker, starts in place of Python: hands the command on to the fork server.

``fork_client.py SOCKET COMMAND...``, isolated (``python -I -S``), is up in a few milliseconds; it must import nothing
of the package. The server forks a process that takes over this one's environment, working folder and command, as the
kernel knows them, and its open files, which are sent. Where the server is gone, Python itself runs the command.
"""

import os
import signal
import socket
import sys


def main() -> None:
    path, *command = sys.argv[1:]
    spawned = "--multiprocessing-fork" in command
    if spawned or not command[0].startswith("-"):  # else it is multiprocessing's resource tracker
        files = [fd for fd in range(256) if os.path.exists(f"/proc/self/fd/{fd}")] if spawned else [0, 1, 2]
        with socket.socket(socket.AF_UNIX) as connection:
            pid = _hand_on(connection, path, files)
            if pid and spawned:
                _stand_in(connection, pid)
            if pid:
                return
    os.execv(sys.executable, [sys.executable, *command])


def _hand_on(connection: socket.socket, path: str, files: list[int]) -> int:
    """The forked process; 0 if the server is gone or ended before it forked."""
    try:
        connection.connect(path)
        socket.send_fds(connection, [bytes(files)], files)
        return int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
    except OSError:
        return 0


def _stand_in(connection: socket.socket, pid: int) -> None:
    """Be the forked process, which ends when this one does: pass SIGTERM on, end when and as it ends."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    try:
        with connection.makefile("rb") as file:
            status = file.read()  # until the process has ended
    except OSError:
        status = b""
    if not status:  # a signal ended it
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(status[0])


main()
