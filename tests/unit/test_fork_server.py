"""A forked worker is what Ray would have started: its command, environment, folder and streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from recipe.runner.cpu.fork_server import write_program

#: Spawns a process in each way to end, as vLLM spawns its engine.
_SPAWNER = """
import json, multiprocessing, os, signal, sys, time

def child(connection, how):
    connection.send(["fractions" in sys.modules, os.getpid(), os.getpgrp(), multiprocessing.current_process().name])
    if how == "exit":
        sys.exit(7)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how in ("terminate", "kill"):
        time.sleep(600)

if __name__ == "__main__":
    context, ends = multiprocessing.get_context("spawn"), {}
    for how in ("return", "exit", "killed", "terminate", "kill"):
        ours, theirs = context.Pipe()
        process = context.Process(target=child, args=(theirs, how), name=how)
        process.start()
        theirs.close()
        forked, pid, group, name = ours.recv()
        if how in ("terminate", "kill"):
            getattr(process, how)()
        process.join(120)
        limit = time.monotonic() + 120
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < limit:
            time.sleep(0.05)
        ends[how] = [forked, group == os.getpgrp(), name == how, os.path.exists(f"/proc/{pid}"), process.exitcode]
    print(json.dumps(ends), flush=True)
"""
_SERVER = """
import sys
from recipe.runner.cpu import fork_server
fork_server.MODULES, fork_server.MODULES_WITH_RAY = ("decimal",), ("fractions",)
fork_server.main(sys.argv[1])
"""
_WORKER = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "variable": os.environ.get("ONLY_OF_WORKER"), "main": __name__,
    "forked": "fractions" in sys.modules, "leads": os.getpgid(0) == os.getpid(), "pid": os.getpid(),
}), flush=True)
print("said", file=sys.stderr)
"""


def listens(path: Path) -> bool:
    """The socket is there a moment before it takes connections."""
    sockets = Path("/proc/net/unix").read_text().splitlines()
    return any(line.split()[3] == "00010000" for line in sockets if line.endswith(f" {path}"))


@pytest.fixture
def program(tmp_path: Path) -> Iterator[str]:
    """What stands in for Python beside a server."""
    path = tmp_path / "server" / "socket"
    path.parent.mkdir()
    process = subprocess.Popen([sys.executable, "-c", _SERVER, str(path)], stdin=subprocess.PIPE)
    wait_until(lambda: listens(path))
    yield str(write_program(path))
    process.communicate(timeout=600)
    # The end of its input, when its launcher has gone, ends it, and nothing is left.
    assert process.returncode == 0 and not path.parent.exists()


@pytest.mark.slow  # fresh processes that import torch or verl
def test_workers_and_what_they_spawn_are_forked(program: str, tmp_path: Path) -> None:
    worker, folder, pids = tmp_path / "worker.py", tmp_path / "folder", set()
    worker.write_text(_WORKER, encoding="utf-8")
    folder.mkdir()
    command, environment = [program, str(worker), "a b"], {**os.environ, "ONLY_OF_WORKER": "yes"}
    expected = {"argv": command[1:], "cwd": str(folder), "variable": "yes", "main": "__main__", "forked": True}
    expected |= {"leads": True}  # Ray ends the process group of a worker, which must hold no other worker
    for _ in range(2):
        with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
            subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=err, check=True, timeout=600)
        wait_until((tmp_path / "err").read_text)  # a forked worker goes on after its client
        answer = json.loads((tmp_path / "out").read_text())
        pids.add(answer.pop("pid"))
        assert answer == expected and (tmp_path / "err").read_text() == "said\n"
    assert len(pids) == 2
    spawner, out = tmp_path / "spawner.py", tmp_path / "spawned"
    spawner.write_text(_SPAWNER, encoding="utf-8")
    with out.open("wb") as file:
        subprocess.run([program, str(spawner)], stdout=file, check=True, timeout=600)
    wait_until(out.read_text)  # a forked worker goes on after its client
    answer = json.loads(out.read_text())
    # The exit codes of a child; what is to be terminated is killed by what stands in for it, or that has only begun.
    ends = {"return": 0, "exit": 7} | dict.fromkeys(("killed", "terminate", "kill"), -signal.SIGKILL)
    if answer["terminate"][-1] == -signal.SIGTERM:
        ends["terminate"] = -signal.SIGTERM
    # Forked; in the worker's process group, which Ray ends; with its own name; gone.
    assert answer == {how: [True, True, True, False, code] for how, code in ends.items()}
