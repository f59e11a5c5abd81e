"""What a trainer writes beside verl's checkpoints, where no run folder is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fspo.records import append_records
from recipe.fspo.reporter import NOTES_FILE, Reporter


def test_a_line_that_a_kill_has_cut_gets_its_end(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"step": 1}\n{"st')
    append_records(tmp_path / "x.jsonl", [{"step": 2}])
    assert (tmp_path / "x.jsonl").read_text() == '{"step": 1}\n{"st\n{"step":2}\n'


def test_lines_and_notes_go_beside_the_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder is not there before verl's first save; notes are of this start, the last of a name."""
    reporter = Reporter(OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path / "new/checkpoints")}}))
    reporter.append("funnel.jsonl", [{"step": 1}])
    reporter.append("funnel.jsonl", [{"step": 2}, {"step": 3}])
    reporter.note(a=1, b=float("inf"))
    reporter.note(a=2)
    reporter.say("a sentence")
    lines = (tmp_path / "new/checkpoints/funnel.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert json.loads((tmp_path / "new/checkpoints" / NOTES_FILE).read_text()) == {"a": 2, "b": float("inf")}
    assert capsys.readouterr().out == "a sentence\n"
