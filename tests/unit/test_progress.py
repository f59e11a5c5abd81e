"""The lines for the person who watches, from the trainer's process to the terminal."""

from __future__ import annotations

import io
import threading
from pathlib import Path

from waiting import wait_until

from recipe.runner.launch import train
from recipe.runner.progress import Progress, length, print_new


def progress_in(folder: Path) -> Progress:
    progress = Progress()
    progress.write_to(folder)
    return progress


def test_only_what_is_new_is_printed_and_only_whole_lines(tmp_path: Path) -> None:
    assert length(tmp_path) == 0
    progress_in(tmp_path).say("of an earlier start")
    begin, out = length(tmp_path), io.StringIO()
    assert print_new(tmp_path, begin, out) == begin and out.getvalue() == ""
    progress_in(tmp_path).say("größer\n  in two lines \udcff")
    with (tmp_path / "progress.log").open("a") as file:
        file.write("half a li")
    begin = print_new(tmp_path, begin, out)
    assert out.getvalue().endswith("s] größer\n  in two lines \\udcff\n")
    with (tmp_path / "progress.log").open("a") as file:
        file.write("ne\n")
    assert print_new(tmp_path, begin, out) == length(tmp_path) and out.getvalue().endswith("\nhalf a line\n")
    assert "earlier" not in out.getvalue()


def test_the_launching_process_prints_to_the_last_line(tmp_path: Path) -> None:
    over, out, progress = threading.Event(), io.StringIO(), progress_in(tmp_path)
    thread = threading.Thread(target=train._follow, args=(tmp_path, 0, over, out))
    thread.start()
    progress.say("first")
    wait_until(lambda: "first" in out.getvalue())
    progress.say("last")
    over.set()
    thread.join(10)
    assert "last" in out.getvalue()
    # A full disk, or no folder, does not end the run.
    progress_in(tmp_path / "nowhere").say("a line")
    Progress().say("a line")
    assert print_new(tmp_path / "nowhere", 0, io.StringIO()) == 0
