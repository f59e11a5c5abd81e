"""Run a program that a model has written, within limits, and compare what it prints: a reward for code.

This is no security boundary. The program runs as the same user, sees the file system and the network, and may signal
that user's other processes. The limits keep an honest mistake from stopping a training run: an endless loop, memory or
output without end, processes left behind. Programs that may attack need a container or a virtual machine of their own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from dataclasses import dataclass
from pathlib import Path

from fspo.rewards.pool import WALL_FACTOR
from fspo.rewards.verdict import Status, Verdict

_RUNNER = Path(__file__).with_name("program_runner.py")
_OUTPUT_BYTES = 1 << 20
_GRACE_S = 30.0  # for the runner to start on a busy machine, and to end what the program left
_FENCE = re.compile(r"(?P<before>[^`]*)(?P<ticks>`{3,})[ \t]*(?P<info>[^`]*)")
_PYTHON = re.compile(r"\{?\.?(?:python3?|py)(?![\w-])", re.IGNORECASE)
#: A reward worker of verl calls its function from up to 32 threads at once, and there may be eight such workers.
_running = threading.BoundedSemaphore(min(8, max(2, len(os.sched_getaffinity(0)) // 2)))


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended, and what it printed.

    Attributes:
        status: ``CORRECT`` if it ended with exit status 0, ``WRONG`` with another one (an exception), ``TIMEOUT``,
            ``REFUSED`` beyond the limit of memory or output, ``CRASHED`` by another signal.
        stdout, stderr: At most 1 MiB each.
    """

    status: Status
    stdout: str
    stderr: str


def run_program(
    program: str, stdin: str = "", *, time_limit_s: float = 1.0, memory_limit_mb: int = 512
) -> ProgramResult:
    """Run Python source with nothing but the standard library, in an empty folder that is removed afterwards.

    It can be called from any number of threads; half as many programs run at once as there are processors, at most 8.

    Args:
        program: The source.
        stdin: What the program reads.
        time_limit_s: Processor time in seconds; ten times that in wall-clock time is the last resort.
        memory_limit_mb: Address space in MiB.

    Raises:
        ValueError: a limit that is not positive, or too little memory for Python itself.
    """
    if not 0 < time_limit_s < 3600:
        raise ValueError(f"time_limit_s={time_limit_s}: give a number of seconds between 0 and 3600")
    if memory_limit_mb < 64:
        raise ValueError(f"memory_limit_mb={memory_limit_mb}: Python needs at least 64")
    limits = {
        "time_s": time_limit_s,
        "wall_s": time_limit_s * WALL_FACTOR,
        "memory_bytes": memory_limit_mb << 20,
        "output_bytes": _OUTPUT_BYTES,
    }
    # The folder of the program is writable by it; what it reads and prints lies outside, in files without a name.
    with (
        _running,
        tempfile.TemporaryDirectory(prefix="fspo-program-") as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        source = Path(folder) / "program.py"
        source.write_text(program, encoding="utf-8", errors="surrogatepass")
        given.write(stdin.encode("utf-8", errors="surrogatepass"))
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_RUNNER), str(source), json.dumps(limits)],
            stdin=given,
            stdout=out,
            stderr=err,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8"},  # no keys of the training run
            start_new_session=True,
        )
        try:
            code = process.wait(limits["wall_s"] + _GRACE_S)
        except subprocess.TimeoutExpired:
            code = 128 + signal.SIGPROF
        finally:
            process.kill()
            process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(_OUTPUT_BYTES + 1))
    stdout, stderr = (text.decode("utf-8", errors="replace") for text in texts)
    return ProgramResult(_status(code, texts, stderr), stdout, stderr)


def _status(code: int, texts: list[bytes], stderr: str) -> Status:
    if code in (128 + signal.SIGPROF, 128 + signal.SIGXCPU, 128 + signal.SIGKILL):
        return Status.TIMEOUT
    if any(len(text) >= _OUTPUT_BYTES for text in texts) or stderr.rstrip().endswith("MemoryError"):
        return Status.REFUSED
    if code > 128:
        return Status.CRASHED
    return Status.CORRECT if code == 0 else Status.WRONG


def score_program(
    response: str, ground_truth: str, *, time_limit_s: float = 1.0, memory_limit_mb: int = 512
) -> Verdict:
    """Verdict on the last code block of a response: ``CORRECT`` if every case prints what it should.

    Args:
        response: Text with a fenced block, ````` ```python `````; the last one counts, or the last one without a
            language if there is none in Python.
        ground_truth: JSON text, ``{"inputs": [...], "outputs": [...]}``: what the program reads, and what it is to
            print; white space at the ends of lines and of the output does not count.
        time_limit_s, memory_limit_mb: Of each case; see :func:`run_program`.

    Returns:
        Besides ``CORRECT``: ``NO_ANSWER`` without a block; ``BAD_TRUTH`` if the ground truth is not as above; what
        :func:`run_program` says of the first case that fails, and ``WRONG`` if it only prints something else.
    """
    try:
        truth = json.loads(ground_truth)
        cases = list(zip(truth["inputs"], truth["outputs"], strict=True))
    except (ValueError, TypeError, KeyError):
        cases = []
    if not cases or not all(isinstance(text, str) for case in cases for text in case):
        return Verdict.of(Status.BAD_TRUTH)
    program = _program(response)
    if program is None:
        return Verdict.of(Status.NO_ANSWER)
    for given, expected in cases:
        result = run_program(program, given, time_limit_s=time_limit_s, memory_limit_mb=memory_limit_mb)
        if result.status is not Status.CORRECT:
            return Verdict.of(result.status)
        if _lines(result.stdout) != _lines(expected):
            return Verdict.of(Status.WRONG)
    return Verdict.of(Status.CORRECT)


def _program(response: str) -> str | None:
    """The last closed block in Python, else the last without a language; its common indentation is taken away.

    Models write text before an opening fence and behind a closing one (``</answer>``), and end a block behind its code.
    """
    found: dict[str, str] = {}
    ticks, info, lines = "", "", list[str]()
    for line in map(str.rstrip, response.split("\n")):
        fence = _FENCE.fullmatch(line)
        if not ticks:
            if fence:
                ticks, info, lines = fence["ticks"], fence["info"], []
        elif fence and len(fence["ticks"]) >= len(ticks) and not (fence["before"].strip() and fence["info"]):
            if not fence["before"].strip() and _PYTHON.match(fence["info"]):  # the block before was never closed
                ticks, info, lines = fence["ticks"], fence["info"], []
                continue
            text = "\n".join([*lines, fence["before"]])
            found["python" if _PYTHON.match(info) else info] = textwrap.dedent(text)
            ticks = ""
        else:
            lines.append(line)
    return found.get("python", found.get(""))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
