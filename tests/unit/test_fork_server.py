"""A forked worker is what Ray would have started: its command, environment, folder and streams; else Python runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from composing import composed
from omegaconf import open_dict
from waiting import wait_until

from recipe.runner.cpu import fork_server
from recipe.runner.cpu.fork_server import MODULES, write_program
from recipe.runner.launch.machine import pass_to_ray_workers

Server = tuple[subprocess.Popen[bytes], Path]
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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    path = tmp_path / "server" / "socket"
    path.parent.mkdir()
    process = subprocess.Popen([sys.executable, "-c", _SERVER, str(path)], stdin=subprocess.PIPE)
    wait_until(path.exists)
    yield process, path
    process.communicate(timeout=30)
    assert process.returncode == 0  # the end of its input ends it
    assert not path.parent.exists()  # nothing is left of a server whose launcher has gone


def run_client(path: Path, tmp_path: Path) -> dict[str, object]:
    worker, folder = tmp_path / "worker.py", tmp_path / "folder"
    worker.write_text(_WORKER, encoding="utf-8")
    folder.mkdir(exist_ok=True)
    command = [str(write_program(path)), str(worker), "a b"]
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        environment = {**os.environ, "ONLY_OF_WORKER": "yes"}
        subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=err, check=True, timeout=120)
    wait_until((tmp_path / "err").read_text)  # a forked worker goes on after its client
    answer: dict[str, object] = json.loads((tmp_path / "out").read_text())
    assert answer["argv"] == [str(worker), "a b"]
    assert answer["cwd"] == str(folder)
    assert answer["variable"] == "yes"
    assert answer["main"] == "__main__"
    assert (tmp_path / "err").read_text() == "said\n"
    return answer


def test_workers_are_forked_with_their_own_environment(server: Server, tmp_path: Path) -> None:
    first, second = (run_client(server[1], tmp_path) for _ in range(2))
    for answer in (first, second):
        assert answer["forked"]
        assert answer["leads"]  # Ray ends the process group of a worker, which must hold no other worker
    assert first["pid"] != second["pid"]


def test_without_a_server_python_runs_the_worker(tmp_path: Path) -> None:
    assert not run_client(tmp_path / "nothing", tmp_path)["forked"]


@pytest.mark.slow  # imports vLLM
def test_modules_imported_before_the_first_worker_do_not_import_ray() -> None:
    # Ray would have read its variables before they are known.
    code = f"import sys, importlib; [importlib.import_module(m) for m in {MODULES!r}]; assert 'ray' not in sys.modules"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VERL_PLATFORM": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@pytest.mark.parametrize(
    ("override", "server", "program"),
    [
        ("seed=1", "the client", "the client"),
        ("seed=1", None, None),  # that of an earlier run is forgotten
        ("ray_kwargs.ray_init.address=auto", "the client", "of an earlier run"),  # workers on other machines
    ],
)
def test_only_workers_of_this_machine_are_forked(
    override: str, server: str | None, program: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(fork_server, "_py_executable", server)
    config = composed("run.dir=RUN", override)
    with open_dict(config):
        config.ray_kwargs.ray_init.runtime_env.py_executable = "of an earlier run"
    pass_to_ray_workers(config)
    assert config.ray_kwargs.ray_init.runtime_env.py_executable == program
