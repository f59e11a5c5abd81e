"""A process that judges answers: a keeper that has imported math-verify, and the child it has forked, which judges.

So an answer that hangs costs a fork, not an import. The parent writes lines of JSON, [answer, truth], one at a time,
and reads a status for each. The kernel ends a child whose answer has used its time, even inside a C function; the
keeper then says so. No text of an answer is run. A child ends when its input or its keeper does; should another process
hold the input open, at most ORPHAN_CHECK_S after the parent has died.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import select
import signal
import sys
import warnings
from typing import Final

from recipe.math.answers import judge
from recipe.math.answers.verdict import Status

ORPHAN_CHECK_S: Final = 5.0
#: A child is forked anew after so many answers, since ANTLR's caches only grow, and after one that took its memory.
ANSWERS_PER_CHILD: Final = 5_000
_FINISHED, _RENEWED = 0, 3
_PR_SET_PDEATHSIG: Final = 1


def main(parent_pid: int, time_limit_s: float, memory_limit_mb: int) -> None:
    """Keep one child, until the input ends, the parent dies or the child crashes."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody listens any more
    judge.warm_up()
    gc.collect()
    gc.freeze()
    end = _RENEWED
    while end in (_RENEWED, -signal.SIGALRM):
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
            resource.setrlimit(resource.RLIMIT_AS, (memory_limit_mb << 20,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os._exit(_serve(parent_pid, time_limit_s))
        end = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if end == -signal.SIGALRM:  # it has answered nothing, as its timer runs only before
            print(Status.TIMEOUT, flush=True)


def _serve(parent_pid: int, time_limit_s: float) -> int:
    for _ in range(ANSWERS_PER_CHILD):
        while not select.select([sys.stdin], [], [], ORPHAN_CHECK_S)[0]:
            if not os.path.exists(f"/proc/{parent_pid}"):
                return _FINISHED
        if not (line := sys.stdin.readline()):
            return _FINISHED
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)
        try:
            status = judge.judge(*json.loads(line))
        except MemoryError:
            status = Status.CRASHED
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(status, flush=True)
        if status is Status.CRASHED:
            break
    return _RENEWED


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
