"""Files are whole or not there. How the lines of a run are read: tests/promises/test_rows.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fspo.files import atomic_path, write_json


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file.txt"
    with atomic_path(target) as temporary:
        temporary.write_text("whole", encoding="utf-8")
        assert not target.exists()
    with pytest.raises(RuntimeError), atomic_path(target) as temporary:
        temporary.write_text("half", encoding="utf-8")
        raise RuntimeError
    with pytest.raises(ValueError):  # JSON has no such number
        write_json(target, {"x": float("nan")})
    assert target.read_text(encoding="utf-8") == "whole"
    assert [path.name for path in target.parent.iterdir()] == ["file.txt"]
    write_json(target, {"x": float("inf")}, durable=False, allow_nan=True)
    assert json.loads(target.read_text(encoding="utf-8")) == {"x": float("inf")}
