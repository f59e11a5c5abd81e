"""What Ray, or multiprocessing in a worker, starts in place of Python: hands the command on to the fork server.

Run by path, isolated and without site-packages (``python -I -S``), so that it is up in a few milliseconds; it must
import nothing of the package. ``fork_client.py SOCKET EXPECTED_ENVIRONMENT COMMAND...``: the server forks a process
that takes over this one's environment, working folder, open files and command. Where the server is gone or cannot, or
the process was given another value of a variable that is read during the imports, Python itself runs the command.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    path, expected, *command = sys.argv[1:]
    same = all(os.environ.get(name) == value for name, value in json.loads(expected).items())
    spawned = "--multiprocessing-fork" in command
    if same and (spawned or not command[0].startswith("-")):  # else it is multiprocessing's resource tracker
        files = sorted(fd for fd in range(256) if _is_open(fd)) if spawned else [0, 1, 2]
        with socket.socket(socket.AF_UNIX) as connection:
            pid = _hand_on(connection, path, command, files, spawned)
            if pid and spawned:
                _stand_in(connection, pid)
            if pid:
                return
    os.execv(sys.executable, [sys.executable, *command])


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _hand_on(connection: socket.socket, path: str, command: list[str], files: list[int], spawned: bool) -> int:
    """The forked process; 0 if the server is gone or ended before it forked."""
    request = {"argv": command, "environ": dict(os.environ), "cwd": os.getcwd(), "files": files}
    request["group"] = os.getpgrp() if spawned else 0
    text = json.dumps(request).encode()
    try:
        connection.connect(path)
        socket.send_fds(connection, [len(text).to_bytes(8, "big")], files)
        connection.sendall(text)
        return int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
    except OSError:
        return 0


def _stand_in(connection: socket.socket, pid: int) -> None:
    """Be the forked process for the one that started this: pass signals on, end when and as it ends.

    It ends when this process does, whatever kills this.
    """

    passed_on = [signal.SIGKILL]

    def forward(number: int, frame: object) -> None:
        passed_on.append(signal.Signals(number))
        try:  # noqa: SIM105 (contextlib would take longer to import than all the rest)
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    status = b""
    try:
        while received := connection.recv(1):
            status = received
    except OSError:
        pass
    if not status:  # a signal ended it
        if len(passed_on) > 1:
            signal.signal(passed_on[-1], signal.SIG_DFL)
        os.kill(os.getpid(), passed_on[-1])
    os._exit(status[0])


main()
