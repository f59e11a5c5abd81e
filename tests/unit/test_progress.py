"""The lines for the person who watches, from the trainer's process to the terminal."""

from __future__ import annotations

import io
from pathlib import Path

from recipe.runner.progress import Progress, print_new


def test_only_what_is_new_is_printed_and_only_whole_lines(tmp_path: Path) -> None:
    progress, out = Progress(), io.StringIO()
    progress.say("before there is a folder")
    progress.write_to(tmp_path)
    progress.say("of an earlier start")
    log = tmp_path / "progress.log"
    begin = log.stat().st_size
    progress.say("größer\n  in two lines \udcff")
    with log.open("a") as file:
        file.write("half a li")
    begin = print_new(tmp_path, begin, out)
    assert out.getvalue().endswith("s] größer\n  in two lines \\udcff\n")
    with log.open("a") as file:
        file.write("ne\n")
    assert print_new(tmp_path, begin, out) == log.stat().st_size and out.getvalue().endswith("\nhalf a line\n")
    assert "earlier" not in out.getvalue()
    progress.write_to(tmp_path / "nowhere")
    progress.say("a disk that is full does not end the run")
