"""What Ray, or multiprocessing in a worker, starts in place of Python: hands the command on to the fork server.

``fork_client.py SOCKET COMMAND...``, isolated (``python -I -S``), is up in a few milliseconds; it must import nothing
of the package. The server forks a process that takes over this one's environment, working folder and command, as the
kernel knows them, and its open files, which are sent.
"""

import os
import signal
import socket
import sys


def main() -> None:
    path, *command = sys.argv[1:]
    spawned = "--multiprocessing-fork" in command
    if command[0].startswith("-") and not spawned:  # multiprocessing's resource tracker
        os.execv(sys.executable, [sys.executable, *command])
    files = [fd for fd in range(256) if os.path.exists(f"/proc/self/fd/{fd}")] if spawned else [0, 1, 2]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [bytes(files)], files)
        pid = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
        if spawned:
            _stand_in(connection, pid)


def _stand_in(connection: socket.socket, pid: int) -> None:
    """Be the forked process, which ends when this one does: pass SIGTERM on, end when and as it ends."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    with connection.makefile("rb") as file:
        status = file.read()  # until the process has ended
    if not status:  # a signal ended it
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(status[0])


main()
