"""What cannot be read of a run folder is named, and the rest is used: in an audit and in a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from composing import composed
from omegaconf import OmegaConf
from test_report import write_run

from fspo.audit.__main__ import main as audit
from fspo.reading import parse_json, printable, read_yaml
from fspo.records import numbered_lines
from fspo.report.__main__ import main as report
from fspo.table import FOLDER

Spoil = Callable[[Path], object]


def table_of(run: Path) -> Path:
    return min((run / FOLDER).iterdir())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


#: What is wrong, whether an audit meets it, and the file that is named.
DAMAGE: dict[str, tuple[Spoil, bool, str]] = {
    "a table cut short": (lambda run: cut(table_of(run)), True, "responses-"),
    "a table of something else": (lambda run: table_of(run).write_bytes(b"no table" * 20), True, "responses-"),
    "run.json cut short": (lambda run: cut(run / "run.json"), True, "run.json"),
    "run.json of another kind": (lambda run: (run / "run.json").write_text("[1]"), True, "run.json"),
    "no run.json": (lambda run: (run / "run.json").unlink(), False, "run.json"),
    "metrics cut short": (lambda run: cut(run / "metrics.jsonl"), False, "metrics.jsonl"),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), False, "metrics.jsonl"),
    "config.yaml of another kind": (lambda run: (run / "config.yaml").write_text("a: [b"), False, "config.yaml"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_run_is_named_and_the_rest_is_reported(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, met_by_audit, named = DAMAGE[how]
    for seed in (1, 2):
        write_run(tmp_path / f"run{seed}", "fspo", seed)
    spoil(tmp_path / "run1")
    status = audit([str(tmp_path / "run1")])
    said = capsys.readouterr()
    assert (status != 0 and named in said.err) or not met_by_audit
    assert report([str(tmp_path / "run1"), str(tmp_path / "run2"), "--out", str(tmp_path / "report")]) in (0, None)
    page = (tmp_path / "report/report.html").read_text(encoding="utf-8")
    assert named in page + capsys.readouterr().err and "fspo (n = " in page


def test_yaml_is_understood_as_omegaconf_does(tmp_path: Path) -> None:
    path, resolved = tmp_path / "config.yaml", composed("algo=gspo")
    path.write_text(OmegaConf.to_yaml(resolved))
    assert read_yaml(path) == OmegaConf.to_container(OmegaConf.load(path))


def test_a_file_that_is_wrong_throughout_is_not_read_to_its_end(tmp_path: Path) -> None:
    path, problems = tmp_path / "metrics.jsonl", list[str]()
    path.write_text("x\n" * 5000 + '{"step": 1}\n')
    assert not list(numbered_lines(path, problems))
    assert 1000 <= len(problems) <= 1001 and "line 1000" in problems[-1]


def test_texts_hold_nothing_that_cannot_be_written_or_that_a_terminal_obeys() -> None:
    assert parse_json('"\\ud83d\\ude00 \\ud800"') == "\U0001f600 ?"
    assert printable("a\x1b[2J\u202eb\tc") == "a\\x1b[2J\\u202eb\tc"
