"""Files are whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fspo.files import atomic_path, write_json, write_rows


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


def test_nothing_to_write_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"empty\.parquet"):
        write_rows([], tmp_path / "empty.parquet")
    assert list(tmp_path.iterdir()) == []
