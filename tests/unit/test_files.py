"""Files are whole or not there. How the lines of a run are read: tests/promises/test_rows.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fspo.files import atomic_path, read_steps, write_json


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


@pytest.mark.parametrize("line", ["3", '{"step": null, "metrics": {}}', '{"step": 2}'])
def test_a_line_that_is_no_step_s_is_named_and_costs_no_other(line: str, tmp_path: Path) -> None:
    path, problems = tmp_path / "metrics.jsonl", list[str]()
    path.write_text(f'{{"step": 1, "metrics": {{}}}}\n{line}\n{{"step": 2, "metrics": {{}}}}\n')
    assert [record["step"] for record in read_steps(path, problems)] == [1, 2]
    (said,) = problems
    assert said.startswith(f"{path}: ") and said.endswith("line 2")
