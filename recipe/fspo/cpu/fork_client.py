"""What Ray starts in place of Python for a worker: hands its command on to the fork server.

Run by path, isolated and without site-packages (``python -I -S``), so that it is up in a few milliseconds; it must
import nothing of the package. ``fork_client.py SOCKET EXPECTED_ENVIRONMENT COMMAND...``: the server forks a process
that takes over this one's environment, working folder, standard streams and command. Where the server is gone, or the
worker was given another value of a variable that is read during the imports, Python itself runs the command.
"""

import json
import os
import socket
import sys


def main() -> None:
    path, expected, *command = sys.argv[1:]
    same = all(os.environ.get(name) == value for name, value in json.loads(expected).items())
    try:
        if not same:
            raise OSError
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            request = json.dumps({"argv": command, "environ": dict(os.environ), "cwd": os.getcwd()}).encode()
            socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2])
            connection.sendall(request)
            if not connection.recv(1):  # the server ended before it forked
                raise OSError
    except OSError:
        os.execv(sys.executable, [sys.executable, *command])


main()
