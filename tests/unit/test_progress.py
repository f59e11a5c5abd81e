"""The lines for the person who watches, from the trainer's process to the terminal."""

from __future__ import annotations

import io
from pathlib import Path

from recipe.runner.progress import Progress, print_new


def progress_in(folder: Path) -> Progress:
    progress = Progress()
    progress.write_to(folder)
    return progress


def test_only_what_is_new_is_printed_and_only_whole_lines(tmp_path: Path) -> None:
    progress_in(tmp_path).say("of an earlier start")
    log, out = tmp_path / "progress.log", io.StringIO()
    begin = log.stat().st_size
    assert print_new(tmp_path, begin, out) == begin and out.getvalue() == ""
    progress_in(tmp_path).say("größer\n  in two lines \udcff")
    with log.open("a") as file:
        file.write("half a li")
    begin = print_new(tmp_path, begin, out)
    assert out.getvalue().endswith("s] größer\n  in two lines \\udcff\n")
    with log.open("a") as file:
        file.write("ne\n")
    assert print_new(tmp_path, begin, out) == log.stat().st_size and out.getvalue().endswith("\nhalf a line\n")
    assert "earlier" not in out.getvalue()
    # A full disk, or no folder, does not end the run.
    progress_in(tmp_path / "nowhere").say("a line")
    Progress().say("a line")
    assert print_new(tmp_path / "nowhere", 0, io.StringIO()) == 0
