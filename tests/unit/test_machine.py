"""Tests of recipe.runner.launch.machine: what a run shares with other users of the machine, and what is left of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from composing import composed

from recipe.runner.faults import node
from recipe.runner.faults.preemption import Preempted
from recipe.runner.launch.checks import node_problems
from recipe.runner.launch.machine import LOOPBACK_ENVIRONMENT, private_run, ray_folder
from recipe.runner.launch.problems import Refused

OWN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_ADDRESS", "TMPDIR", *LOOPBACK_ENVIRONMENT)
OWN += ("TORCHINDUCTOR_CACHE_DIR",)  # which torch sets by itself, once it has been asked


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in OWN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FSPO_RAY_TMP", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    assert not {node.PRIVATE_VARIABLE, "TMPDIR", "GLOO_SOCKET_IFNAME"} & set(os.environ) and ray_folder() is None


def test_every_ray_that_a_run_starts_has_a_token_of_its_own_and_listens_on_the_loopback(tmp_path: Path) -> None:
    tokens = set()
    for _ in range(2):
        with private_run(composed()):
            assert os.environ["RAY_AUTH_MODE"] == "token"
            tokens.add(os.environ["RAY_AUTH_TOKEN"])
            assert {name: os.environ[name] for name in LOOPBACK_ENVIRONMENT} == LOOPBACK_ENVIRONMENT
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/fspo-{os.getuid()}/inductor"
    assert len(tokens) == 2 and all(len(bytes.fromhex(token)) == 32 for token in tokens)
    # On no disk: nothing but caches is left, and Ray has written no ~/.ray.
    assert not (tmp_path / "home/.ray").exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "VLLM_HOST_IP"])
def test_what_the_user_has_set_wins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "disabled")
    with private_run(composed()):
        assert os.environ[name] == "disabled"
        assert ("RAY_AUTH_TOKEN" in os.environ) == (name in ("RAY_AUTH_TOKEN", "VLLM_HOST_IP"))


def test_a_ray_that_is_there_keeps_its_token_and_its_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with private_run(composed("ray_kwargs.ray_init.address=null")):
        assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_MODE", *LOOPBACK_ENVIRONMENT} & set(os.environ)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path)) and ray_folder() is None


def test_inductor_compiles_no_headers_into_the_temporary_folder_of_one_run() -> None:
    """Its cache outlives a run, and its precompiled headers would not: 7 s of each start on a CPU."""
    code = "import torch._inductor.config as config; print(config.cpp_cache_precompile_headers)"
    with private_run(composed()):
        printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert printed.stdout == "False\n"


def test_a_ray_that_other_machines_join_listens_for_them() -> None:
    with private_run(composed("trainer.nnodes=2")):
        assert not set(LOOPBACK_ENVIRONMENT) & set(os.environ) and "RAY_AUTH_TOKEN" in os.environ


def test_a_user_of_any_number_has_room_for_sockets_without_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks come within the private run, which has set TMPDIR; a path of a socket may have 107 bytes."""
    monkeypatch.delenv("FSPO_RAY_TMP")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    folder = Path("/tmp/fspo-1234567")
    monkeypatch.setattr(node, "private_path", lambda parent: folder)
    monkeypatch.setattr(node, "private_folder", lambda *_: folder)
    folder.mkdir()
    try:
        with private_run(composed()):
            assert list(node_problems(composed())) == []
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("end", "logs_stay"),
    [(None, False), (Preempted("saved"), False), (SystemExit(1), True), (KeyboardInterrupt(), True)],
)
def test_ray_s_files_are_private_and_go_with_a_run_that_ends_well(
    end: BaseException | None, logs_stay: bool, tmp_path: Path
) -> None:
    def run() -> Path:
        with private_run(composed()):
            folder = ray_folder()
            assert folder is not None and folder.parent.stat().st_mode & 0o777 == 0o700
            assert tempfile.gettempdir() == str(folder)
            session = folder / "session_2026-01-01_00-00-00_000000_1"
            for path in (session / "logs", session / "sockets", folder / "spilled"):
                path.mkdir(parents=True)
                (path / "file").touch()
            (folder / "session_latest").symlink_to(session)
            (folder / "ray_current_cluster").touch()
            folders.append(folder)
            if end is not None:
                raise end
        return folder

    folders: list[Path] = []
    if end is None:
        run()
    else:
        with pytest.raises(type(end)):
            run()
    (folder,) = folders
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []
    session = "session_2026-01-01_00-00-00_000000_1"
    assert left == ([session, f"{session}/logs", f"{session}/logs/file"] if logs_stay else [])


def test_a_start_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Refused), private_run(composed()):
        raise Refused("of a check")
    assert list((tmp_path / f"fspo-{os.getuid()}").iterdir()) == []


def test_the_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    private = tmp_path / f"fspo-{os.getuid()}"
    private.mkdir(mode=0o777)
    private.chmod(0o777)
    with pytest.raises(Refused, match=f"FSPO_RAY_TMP={tmp_path}: {private} "), private_run(composed()):
        pytest.fail("begun")
    own = tmp_path / "own"
    with private_run(composed(f"++ray_kwargs.ray_init._temp_dir={own}")):
        folder = ray_folder()
    assert folder is not None and folder.parent.parent == own
