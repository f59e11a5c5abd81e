"""What ``python -m recipe.fspo.main`` refuses and takes: the tables of refusals.py, in dry runs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import answered_here
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import refusals
from checking import check_all
from data_rows import ROW
from refusals import NOT_SERVED, Row

from recipe.fspo.main import main
from recipe.runner.launch import reward_trial
from recipe.runner.launch.own_process import asked

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Said:
    """The sentences of a dry run, by what they begin with."""

    problems: list[str]
    notes: list[str]
    unsettled: list[str]


def key_of(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


@dataclass
class Command:
    """Rows that are run together: they choose the same groups, and give other keys."""

    rows: list[Row] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        return [word for row in self.rows for word in shlex.split(row[0])]

    @property
    def groups(self) -> list[str]:
        return sorted(word for word in self.words if "." not in word)

    @property
    def keys(self) -> set[str]:
        return {key_of(word) for word in self.words}

    def sentences_of(self, row: Row, sentences: list[str]) -> list[str]:
        """Those that begin with a key of the row: what another row is told does not answer this one."""
        if len(self.rows) == 1:
            return sentences
        keys = Command([row]).keys
        beginnings = (re.split(": | must ", one)[0].split(", ") for one in sentences)
        return [one for one, words in zip(sentences, beginnings, strict=True) if keys & {*map(key_of, words)}]

    def __str__(self) -> str:
        return " ".join(self.words)


def alone(rows: Sequence[Row]) -> list[Command]:
    """A command for each row, in an order in which each choice of groups is composed once."""
    return sorted((Command([row]) for row in rows), key=lambda command: command.groups)


def together(rows: Sequence[Row]) -> list[Command]:
    """Few commands with all rows: a start names all that is wrong, and costs half a second."""
    commands: list[Command] = []
    for command in alone(rows):
        others = (other for other in commands if other.groups == command.groups and not other.keys & command.keys)
        if (other := next(others, None)) is not None:
            other.rows += command.rows
        else:
            commands.append(command)
    return commands


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, text in refusals.FILES.items():
        (folder / name).write_text(text)
    for name, rows in (("text", [ROW] * 32), ("number", [ROW | {"reward_model": {"ground_truth": 18}}] * 32)):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    pq.write_table(pa.Table.from_pylist([ROW])[:0], folder / "zero.parquet")
    return folder


Say = Callable[[Command], Said]


@pytest.fixture(scope="module")
def answers() -> dict[str, Said]:
    """By command: several tests ask about the same ones, and each answer costs a third of a second."""
    return {}


def answered(module: str, *arguments: str, given: bytes) -> tuple[Any, str | None]:
    """A function of the user's may end its process."""
    return (asked if given else answered_here.of_rewards)(module, *arguments, given=given)


@pytest.fixture
def say(
    files: Path, answers: dict[str, Said], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Say:
    """Gives a command to the program, which refuses it with status 2, or finishes, and writes nothing."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.chdir(files)
    monkeypatch.setattr(reward_trial, "asked", answered)

    def said(command: Command) -> Said:
        text = shlex.join(command.words)
        if text not in answers:
            answers[text] = ask(command)
        return answers[text]

    def ask(command: Command) -> Said:
        before, status = sorted(files.iterdir()), 0
        monkeypatch.setattr(sys, "argv", ["main", "dry_run=true", *command.words])
        try:
            main()
        except SystemExit as ended:
            status = int(str(ended.code))
        out, err = capsys.readouterr()
        problems, notes = (re.findall(rf"^(?:python -m \S+: )?{kind}: (.*)", err, re.M) for kind in ("error", "note"))
        assert (status, sorted(files.iterdir())) == (2 if problems else 0, before), err
        return Said(problems, notes, re.findall("^not checked on this machine: (.*)", out, re.M))

    return said


def assert_one_holds(sentences: list[str], parts: Sequence[str]) -> None:
    assert any(all(part in sentence for part in parts) for sentence in sentences), sentences


@pytest.mark.parametrize(
    "command", [*alone(refusals.ALONE), *(c for t in refusals.TOGETHER for c in together(t))], ids=str
)
def test_what_cannot_work_is_refused_with_key_value_and_remedy(say: Say, command: Command) -> None:
    problems = say(command).problems
    check_all((row[0], partial(assert_one_holds, command.sentences_of(row, problems), row[1:])) for row in command.rows)


@pytest.mark.parametrize("words", NOT_SERVED)
def test_what_is_not_served_is_refused(say: Say, words: str) -> None:
    assert_one_holds(say(Command([(words,)])).problems, [NOT_SERVED[words]])


@pytest.mark.parametrize("command", alone(refusals.UNSETTLED), ids=str)
def test_what_only_the_machine_can_settle_is_listed(say: Say, command: Command) -> None:
    said = say(command)
    assert said.problems == []
    assert_one_holds(said.unsettled, command.rows[0][1:])


@pytest.mark.parametrize("command", alone([(command,) for command in refusals.TAKEN]), ids=str)
def test_what_works_gets_no_word(say: Say, command: Command) -> None:
    said = say(command)
    assert (said.problems, said.notes) == ([], [])
