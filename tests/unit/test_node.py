"""What in one machine keeps a run from starting. That a job asks on its nodes: test_job_scripts.py."""

from __future__ import annotations

import os
import re
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


def test_a_folder_that_is_not_private_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    folder = node.private_folder(tmp_path / "new", "TMPDIR=x")
    os.umask(before)
    assert folder == tmp_path / f"new/fspo-{os.getuid()}" and folder.stat().st_mode & 0o777 == 0o700
    assert node.private_folder(tmp_path / "new", "TMPDIR=x") == folder

    def is_refused(parent: Path, why: str) -> None:
        with pytest.raises(node.NotPrivateError, match=re.escape(f"TMPDIR=x: {parent}/{why}")):
            node.private_folder(parent, "TMPDIR=x")

    (tmp_path / folder.name).symlink_to(folder)  # another user may have made it, to a folder of the victim's
    is_refused(tmp_path, f"{folder.name} (lrwx")
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # an owner can be changed by an administrator only
    (folder.parent / "fspo-12345").mkdir(mode=0o700)
    is_refused(folder.parent, f"fspo-12345 (drwx------, of user {os.geteuid()})")
