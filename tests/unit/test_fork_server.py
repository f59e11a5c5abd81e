"""A forked worker is what Ray would have started: its command, environment, folder and streams; else Python runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import open_dict

from recipe.fspo.compose import compose
from recipe.fspo.cpu import fork_server
from recipe.fspo.cpu.fork_server import MODULES
from recipe.fspo.environment import pass_to_ray_workers

CLIENT = str(Path(fork_server.__file__).with_name("fork_client.py"))
_SERVER = """
import sys
from recipe.fspo.cpu import fork_server
fork_server.MODULES, fork_server.MODULES_WITH_RAY = ("decimal",), ("fractions",)
request = fork_server._serve(sys.argv[1])
if request is not None:
    fork_server._become(request)
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
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    path = tmp_path / "socket"
    process = subprocess.Popen([sys.executable, "-c", _SERVER, str(path)], stdin=subprocess.PIPE)
    limit = time.monotonic() + 30
    while not path.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    yield process, path
    process.communicate(timeout=30)
    assert process.returncode == 0  # the end of its input ends it


def run_client(path: Path, tmp_path: Path, expected: dict[str, str | None]) -> dict[str, object]:
    worker, folder = tmp_path / "worker.py", tmp_path / "folder"
    worker.write_text(_WORKER, encoding="utf-8")
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-I", "-S", CLIENT, str(path), json.dumps(expected), str(worker), "a b"]
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        environment = {**os.environ, "ONLY_OF_WORKER": "yes"}
        subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=err, check=True, timeout=60)
    limit = time.monotonic() + 30
    while not (tmp_path / "err").read_text() and time.monotonic() < limit:
        time.sleep(0.05)  # a forked worker goes on after its client
    found: dict[str, object] = json.loads((tmp_path / "out").read_text())
    assert found["argv"] == [str(worker), "a b"]
    assert found["cwd"] == str(folder)
    assert found["variable"] == "yes"
    assert found["main"] == "__main__"
    assert (tmp_path / "err").read_text() == "said\n"
    return found


def test_workers_are_forked_with_their_own_environment(
    server: tuple[subprocess.Popen[bytes], Path], tmp_path: Path
) -> None:
    first, second = (run_client(server[1], tmp_path, {"HOME": os.environ.get("HOME")}) for _ in range(2))
    for found in (first, second):
        assert found["forked"]
        assert found["leads"]  # Ray ends the process group of a worker, which must hold no other worker
    assert first["pid"] != second["pid"]


def test_a_worker_whose_libraries_would_read_another_value_is_not_forked(
    server: tuple[subprocess.Popen[bytes], Path], tmp_path: Path
) -> None:
    assert not run_client(server[1], tmp_path, {"HOME": "elsewhere"})["forked"]


def test_without_a_server_python_runs_the_worker(tmp_path: Path) -> None:
    assert not run_client(tmp_path / "nothing", tmp_path, {})["forked"]


@pytest.mark.slow  # imports vLLM
def test_modules_imported_before_the_first_worker_do_not_import_ray() -> None:
    # Ray would have read its variables before they are known.
    code = f"import sys, importlib; [importlib.import_module(m) for m in {MODULES!r}]; assert 'ray' not in sys.modules"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VERL_PLATFORM": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@pytest.mark.parametrize(
    ("override", "forks"),
    [
        ("seed=1", True),
        ("fspo.fork_workers=false", False),
        ("ray_kwargs.ray_init.address=auto", False),  # workers on other machines
    ],
)
def test_only_workers_of_this_machine_are_forked(override: str, forks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(fork_server, "_py_executable", "the client")
    config = compose(["fspo.run_dir=RUN", override])
    pass_to_ray_workers(config)
    assert (config.ray_kwargs.ray_init.runtime_env.py_executable == "the client") is forks


def test_the_server_of_an_earlier_run_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    config = compose(["fspo.run_dir=RUN"])
    with open_dict(config):
        config.ray_kwargs.ray_init.runtime_env.py_executable = "a client of a server that is gone"
    pass_to_ray_workers(config)
    assert config.ray_kwargs.ray_init.runtime_env.py_executable is None
