"""Tests of recipe.runner.faults.node: what in one machine keeps a run from starting."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from recipe.runner.faults import node


def test_gpus_in_exclusive_mode_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list(node.gpu_problems()) == []  # this machine's
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '0, Default\\n1, Exclusive_Process\\n2, [N/A]\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (problem,) = node.gpu_problems()
    assert "GPU 1" in problem and "Exclusive_Process" in problem and "--compute-mode=DEFAULT" in problem
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list(node.gpu_problems()) == []


def test_a_job_asks_on_the_node(tmp_path: Path) -> None:
    parent = tmp_path / ("x" * 100)
    command = [sys.executable, "-m", "recipe.runner.faults.node", str(parent), "7-0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    assert f"FSPO_RAY_TMP={parent}: " in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / ("y" * 100)).mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / ("y" * 100))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    of_ray, of_vllm = done.stderr.splitlines()
    assert f"FSPO_RAY_TMP={parent}: " in of_ray and f"TMPDIR={environment['TMPDIR']}: " in of_vllm
    with tempfile.TemporaryDirectory() as short:  # pytest's own may be too long for a socket of Ray's
        command[-2] = short
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, f"{short}/fspo-{os.getuid()}/7-0\n"), done.stderr


def test_a_folder_that_is_not_private_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    folder = node.private_folder(tmp_path / "new", "TMPDIR=x")
    os.umask(before)
    assert folder == tmp_path / f"new/fspo-{os.getuid()}" and folder.stat().st_mode & 0o777 == 0o700
    assert node.private_folder(tmp_path / "new", "TMPDIR=x") == folder

    def refused(parent: Path) -> str:
        with pytest.raises(node.NotPrivateError) as error:
            node.private_folder(parent, "TMPDIR=x")
        assert str(error.value).startswith("TMPDIR=x: ")
        return str(error.value)

    for mode in (0o770, 0o707, 0o711):
        folder.chmod(mode)
        assert f"{folder} is open to others (mode {mode:o})" in refused(folder.parent)
    folder.chmod(0o700)
    (tmp_path / folder.name).symlink_to(folder)  # another user may have made it, to a folder of the victim's
    assert "link" in refused(tmp_path)
    with monkeypatch.context() as patch:  # an owner can be changed by an administrator only
        patch.setattr(os, "getuid", lambda: 12345)
        (folder.parent / "fspo-12345").mkdir(mode=0o700)
        assert f"belongs to the user {os.geteuid()}" in refused(folder.parent)
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused(tmp_path / "file")


@pytest.mark.slow  # fresh processes that import torch or verl
def test_inductor_takes_no_kernels_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default is a folder of a known name in the temporary one, whoever made it."""
    program = "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"
    private = node.private_folder(tmp_path, "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it by itself, once it has been asked
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for variables, folder in ((node.cache_environment(private), private), ({}, tmp_path)):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment | variables, capture_output=True, text=True, timeout=100
        )
        assert Path(done.stdout.strip()).parent == folder, done.stderr


def test_kernels_are_private_unless_the_user_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    kernels = node.cache_environment(Path("/p"))
    assert kernels["TRITON_CACHE_DIR"] == "/mine" and kernels["VLLM_CACHE_ROOT"] == "/p/vllm"
