"""Code of the user's, imported in a process of its own: both ends of the question what is wrong with it.

A module of this package that is started so calls :func:`answer`, and the launching process calls :func:`asked`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

#: Some modules load a model while they are imported.
_LOAD_LIMIT_S: Final = 300
#: For what the user's module has registered to run at the end, such as the end of its processes.
_END_LIMIT_S: Final = 5.0


def asked(module: str, *arguments: str, given: bytes = b"") -> tuple[Any, str | None]:
    """What a module of this package answers about code of the user's, which it imports in a process of its own.

    ``given``, its input, may hold secrets, and all users of the machine can read a command line.

    Returns:
        The answer; and why the process ended before it could answer, or None.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        ended = subprocess.run(command, input=given, capture_output=True, timeout=_LOAD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, f"it was not imported within {_LOAD_LIMIT_S} s; every worker would have to wait as long"
    try:
        return json.loads(ended.stdout), None
    except ValueError:  # it ended before it could answer
        errors = ended.stderr.decode(errors="replace").strip()[-2000:]
        return None, f"the process that imported it ended with status {ended.returncode}: {errors}"


def answer(make: Callable[[], Any]) -> None:
    """Write what ``make`` returns to standard output, as JSON, and see that this process ends.

    What the user's code or its child processes write to file descriptor 1 meanwhile goes to standard error: it must
    not be taken for the answer.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        output.write(json.dumps(make()))
    end_in_time(0)


def end_in_time(status: int) -> None:
    """Let this process end with ``status`` within a few seconds, whatever still runs in it.

    A call that hangs in a thread of an executor would keep it: Python waits for such threads before it ends.
    """

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    last = threading.Timer(_END_LIMIT_S, end)
    last.daemon = True
    last.start()
