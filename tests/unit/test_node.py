"""Tests of recipe.runner.faults.node: what in one machine keeps a run from starting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from composing import composed

from recipe.runner.faults import node
from recipe.runner.launch import checks


@pytest.mark.parametrize(
    ("socket", "room"),
    # Ray itself: bytes of session_2026-11-25_15-31-45_123456_1234567/sockets/plasma_store and of vLLM's uuid4.
    [(node.RAY, 107 - 1 - 42 - 1 - 20), (node.VLLM, 107 - 1 - 36)],
)
def test_a_folder_too_long_for_sockets_is_named(socket: str, room: int) -> None:
    folder = Path("/" + "t" * (room - 1))
    assert list(node.socket_problems(folder, socket, "TMPDIR=x")) == []
    (problem,) = node.socket_problems(folder.with_name("é" * (room // 2 + 1)), socket, "TMPDIR=x")
    assert problem.startswith("TMPDIR=x: ") and "107" in problem and "shorter" in problem


def test_a_folder_without_execution_is_named_with_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local, real = tmp_path / "local", os.statvfs
    local.mkdir()

    def statvfs(path: Path) -> SimpleNamespace:  # only an administrator can mount one
        return SimpleNamespace(f_flag=real(path).f_flag | os.ST_NOEXEC * (path == local))

    monkeypatch.setattr(os, "statvfs", statvfs)
    (problem,) = node.kernel_problems((tmp_path, "TMPDIR"), (local / "not" / "there", "FSPO_RAY_TMP"))
    assert problem.startswith("set FSPO_RAY_TMP to ") and f"{local} is mounted noexec" in problem


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
    ray = tmp_path / ("x" * 100) / "fspo-7-0"
    command = [sys.executable, "-m", "recipe.runner.faults.node", str(ray), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    assert f"FSPO_RAY_TMP={ray.parent}: " in done.stderr and done.stderr.count("\n") == 1
    command[-2] = "/tmp/fspo-7-0"
    assert subprocess.run(command, timeout=60).returncode == 0


def test_a_run_with_a_ray_of_its_own_asks_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/" + "x" * 100)
    (problem,) = checks.node_problems(composed())
    assert problem.startswith("TMPDIR=/xxx")
    (problem,) = checks.node_problems(composed(f"++ray_kwargs.ray_init._temp_dir=/{'y' * 100}"))
    assert problem.startswith("ray_kwargs.ray_init._temp_dir=/yyy")
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    assert list(checks.node_problems(composed())) == []
    monkeypatch.delenv("RAY_TMPDIR")
    assert list(checks.node_problems(composed("++ray_kwargs.ray_init.address=auto"))) == []
