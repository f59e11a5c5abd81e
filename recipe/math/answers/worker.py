"""A process that judges answers: a keeper that has imported math-verify, and the child it has forked, which judges.

So an answer that hangs costs a fork, not an import. Lines of JSON come in, [answer, truth], and a status goes out for
each; an empty line says that the keeper has begun. The kernel ends a child whose answer has used its time, even inside
a C function, and the keeper says so. No text of an answer is run. The kernel ends each process with its parent.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys
import warnings
from typing import Final

from recipe.math.answers import judge
from recipe.math.answers.verdict import Status

MEMORY_LIMIT: Final = 1 << 30  # address space of a child, in bytes
#: A child is forked anew after so many answers, since the caches of math-verify's parser only grow.
ANSWERS_PER_CHILD: Final = 5_000
_PR_SET_PDEATHSIG, _FINISHED, _RENEWED = 1, 0, 3


def main(time_limit_s: float) -> None:
    """Keep one child, until the input ends or the child crashes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # math-verify logs every answer that it cannot read
    judge.judge(r"\sqrt{12}", "2x + 1 = 0")  # the parser's tables are made
    print(flush=True)
    end = _RENEWED
    while end in (_RENEWED, -signal.SIGALRM):
        pid = os.fork()
        if pid == 0:
            os._exit(_serve(time_limit_s))
        end = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if end == -signal.SIGALRM:  # it has answered nothing, as its timer runs only before
            print(Status.TIMEOUT, flush=True)


def _serve(time_limit_s: float) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    for count, line in enumerate(sys.stdin, start=1):
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)
        status = judge.judge(*json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(status, flush=True)
        if status is Status.CRASHED or count == ANSWERS_PER_CHILD:
            return _RENEWED
    return _FINISHED


if __name__ == "__main__":
    main(float(sys.argv[1]))
