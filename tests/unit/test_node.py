"""Tests of recipe.runner.faults.node: what in one machine keeps a run from starting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.runner.faults import node


def test_gpus_in_exclusive_mode_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    here = (Path("/tmp/ray"), "TMPDIR=/tmp")
    assert list(node.problems(*here)) == []  # this machine's
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '0, Default\\n1, Exclusive_Process\\n2, [N/A]\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (problem,) = node.problems(*here)
    assert "GPU 1" in problem and "Exclusive_Process" in problem and "--compute-mode=DEFAULT" in problem
    assert list(node.problems(*here, has_gpus=False)) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list(node.problems(*here)) == []


def test_a_job_asks_on_the_node(tmp_path: Path) -> None:
    of_ray, of_vllm = tmp_path / ("x" * 100), tmp_path / ("y" * 100)
    of_vllm.mkdir(parents=True)
    command = [sys.executable, "-m", "recipe.runner.faults.node", str(of_ray), "7-0"]
    environment = os.environ | {"TMPDIR": str(of_vllm)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    ray, vllm = done.stderr.splitlines()
    assert done.returncode == 1 and ray.startswith("error: ")
    assert f"FSPO_RAY_TMP={of_ray}: " in ray and f"TMPDIR={of_vllm}: " in vllm


def test_a_folder_that_is_not_private_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    folder = node.private_folder(tmp_path / "new", "TMPDIR=x")
    os.umask(before)
    assert folder == tmp_path / f"new/fspo-{os.getuid()}" and folder.stat().st_mode & 0o777 == 0o700
    assert node.private_folder(tmp_path / "new", "TMPDIR=x") == folder

    def is_refused(parent: Path, why: str) -> None:
        with pytest.raises(node.NotPrivateError, match=re.escape(f"TMPDIR=x: {parent}/{why}")):
            node.private_folder(parent, "TMPDIR=x")

    folder.chmod(0o711)
    is_refused(folder.parent, f"{folder.name} (drwx--x--x, ")
    folder.chmod(0o700)
    (tmp_path / folder.name).symlink_to(folder)  # another user may have made it, to a folder of the victim's
    is_refused(tmp_path, f"{folder.name} (lrwx")
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # an owner can be changed by an administrator only
    (folder.parent / "fspo-12345").mkdir(mode=0o700)
    is_refused(folder.parent, f"fspo-12345 (drwx------, of user {os.geteuid()})")
