"""What a run shares with other users of the machine, and what is left of it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import pytest
from composing import composed

from recipe.runner.faults.preemption import ENDING
from recipe.runner.launch import machine
from recipe.runner.launch.machine import LOOPBACK_ENVIRONMENT
from recipe.runner.launch.settings import Refused

OWN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_ADDRESS", "TMPDIR", *LOOPBACK_ENVIRONMENT)
OWN += ("TORCHINDUCTOR_CACHE_DIR",)  # which torch sets by itself, once it has been asked


@pytest.fixture(autouse=True)
def parent() -> Iterator[Path]:
    """The folder of private folders: short, because of the sockets in them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, patch.dict(os.environ, {"FSPO_RAY_TMP": folder}):
        os.environ["HOME"] = f"{folder}/home"
        for name in OWN:
            os.environ.pop(name, None)
        yield Path(folder)
    tempfile.tempdir = None
    assert ENDING.folder is None


def private_run(*words: str) -> AbstractContextManager[None]:
    config = composed(*words)
    return machine.private_run(config.trainer, config.ray_kwargs.ray_init)


def test_every_ray_of_a_run_has_its_own_token_on_the_loopback(parent: Path) -> None:
    tokens = set()
    for _ in range(2):
        with private_run():
            assert os.environ["RAY_AUTH_MODE"] == "token"
            tokens.add(os.environ.pop("RAY_AUTH_TOKEN"))
            assert {name: os.environ[name] for name in LOOPBACK_ENVIRONMENT} == LOOPBACK_ENVIRONMENT
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{parent}/fspo-{os.getuid()}/inductor"
    assert len(tokens) == 2 and all(len(bytes.fromhex(token)) == 32 for token in tokens)
    # On no disk: nothing but caches is left, and Ray has written no ~/.ray.
    assert not [path for path in parent.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "VLLM_HOST_IP", "TRITON_CACHE_DIR"]
)
def test_what_the_user_has_set_wins(name: str) -> None:
    os.environ[name] = "disabled"
    with private_run():
        assert os.environ[name] == "disabled"
        assert ("RAY_AUTH_TOKEN" in os.environ) == (name not in ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"))


def test_a_ray_that_is_there_or_on_more_nodes_keeps_its_address(parent: Path) -> None:
    with private_run("trainer.nnodes=2"):  # others join it
        assert not set(LOOPBACK_ENVIRONMENT) & set(os.environ) and "RAY_AUTH_TOKEN" in os.environ
    del os.environ["RAY_AUTH_TOKEN"], os.environ["RAY_AUTH_MODE"]
    os.environ["RAY_ADDRESS"] = "10.0.0.1:6379"
    with private_run("ray_kwargs.ray_init.address=null"):
        assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_MODE", *LOOPBACK_ENVIRONMENT} & set(os.environ)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(parent)) and ENDING.folder is None


def test_a_path_of_a_socket_may_have_107_bytes(parent: Path) -> None:
    long = parent / ("x" * 60)
    os.environ["FSPO_RAY_TMP"] = str(long)
    with pytest.raises(Refused, match=f"FSPO_RAY_TMP={long}: "), private_run():
        pytest.fail("begun")
    assert list((long / f"fspo-{os.getuid()}").iterdir()) == []


def test_a_refusal_is_told_where_the_run_s_folder_is_wrong() -> None:
    with pytest.raises(Refused, match="of a check"), private_run("trainer.default_local_dir=null"):
        raise Refused("of a check")


@pytest.mark.parametrize("status", ["finished", "failed", "running"])
def test_ray_s_files_are_private_and_go_unless_the_run_failed(status: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"status": status}))
    with private_run(f"trainer.default_local_dir={tmp_path}"):
        folder = ENDING.folder
        assert folder is not None and folder.parent.stat().st_mode & 0o777 == 0o700
        assert tempfile.gettempdir() == str(folder)
        (log := folder / "session_2026-01-01_00-00-00_000000_1/logs/log").parent.mkdir(parents=True)
        log.touch()
    assert log.exists() == folder.exists() == (status != "finished")


def test_the_folder_of_somebody_else_is_refused(parent: Path) -> None:
    private = parent / f"fspo-{os.getuid()}"
    private.mkdir(mode=0o711)  # in which others may open what they know by name
    with pytest.raises(Refused, match=f"FSPO_RAY_TMP={parent}: {private} "), private_run():
        pytest.fail("begun")
    own = parent / "own"
    with private_run(f"++ray_kwargs.ray_init._temp_dir={own}"):
        assert ENDING.folder is not None and ENDING.folder.parent.parent == own
