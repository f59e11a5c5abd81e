"""Files are whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fspo.files import atomic_folder, atomic_path, remove_folder, write_json, write_rows


def test_atomic_path_renames_on_success_only(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file.txt"
    with atomic_path(target) as temporary:
        temporary.write_text("whole", encoding="utf-8")
        assert not target.exists()
    assert target.read_text(encoding="utf-8") == "whole"
    with pytest.raises(RuntimeError), atomic_path(target) as temporary:
        temporary.write_text("half", encoding="utf-8")
        raise RuntimeError
    assert target.read_text(encoding="utf-8") == "whole"
    with pytest.raises(ValueError):  # JSON has no such number
        write_json(target, {"x": float("nan")})
    assert [path.name for path in target.parent.iterdir()] == ["file.txt"]
    write_json(target, {"x": float("inf")}, durable=False, allow_nan=True)
    assert json.loads(target.read_text(encoding="utf-8")) == {"x": float("inf")}


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o002])
def test_the_umask_says_who_may_read(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_json(tmp_path / "a.json", {})
        with atomic_folder(tmp_path / "model") as folder:
            (folder / "deep").mkdir()
            for name in ("config.json", "deep/more.json"):
                (folder / name).touch()
            (folder / "private.safetensors").touch(0o600)  # as the real ones are
            (folder / "link").symlink_to("/etc/passwd")
    finally:
        os.umask(before)
    for path in (tmp_path / "a.json", tmp_path / "model", *(tmp_path / "model").rglob("*")):
        if not path.is_symlink():
            assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path
    assert Path("/etc/passwd").stat().st_mode & 0o777 == 0o644


def test_of_a_link_only_the_link_is_removed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/mine").touch()
    for name, target in (("link", "elsewhere"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / target)
        remove_folder(tmp_path / name)
    (tmp_path / "folder/deep").mkdir(parents=True)
    remove_folder(tmp_path / "folder")
    remove_folder(tmp_path / "folder")
    assert [path.name for path in tmp_path.rglob("*")] == ["elsewhere", "mine"]


def test_nothing_to_write_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"empty\.parquet"):
        write_rows([], tmp_path / "empty.parquet")
    assert list(tmp_path.iterdir()) == []
