"""A process that judges answers for `scorer`: lines of JSON in, [answer, truth], and a status for each out.

An empty line says that it has begun. The kernel ends it with SIGALRM when an answer has used its time, even inside a
C function. No text of an answer is run. It ends with its input, and at most ORPHAN_CHECK_S after its parent where
another process holds that open.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import sys
import warnings
from typing import Final

from recipe.math.answers import judge

ORPHAN_CHECK_S: Final = 5.0
#: It ends after so many answers, since the caches of math-verify's parser only grow.
MAX_ANSWERS: Final = 5_000


def main(parent_pid: int, time_limit_s: float, memory_limit_mb: int) -> None:
    """Judge until the input ends or the parent is gone."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody listens any more
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    logging.disable(logging.CRITICAL)  # math-verify logs every answer that it cannot read
    judge.judge(r"\sqrt{12}", "2x + 1 = 0")  # the parser's tables are made
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_mb << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(flush=True)
    for _ in range(MAX_ANSWERS):
        while not select.select([sys.stdin], [], [], ORPHAN_CHECK_S)[0]:
            if not os.path.exists(f"/proc/{parent_pid}"):
                return
        if not (line := sys.stdin.readline()):
            return
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)
        try:
            status = judge.judge(*json.loads(line))
        except MemoryError:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(status, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
