"""``python -m fspo.data check`` finds what would stop a run or cost rows, as verl and datasets do it."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from benchmarks.models.demo_model import shipped_model
from fspo.data.check import check, column_problems, join_problems
from fspo.data.cli import main

Row = dict[str, Any]
ROW: Row = {
    "data_source": "own/task",
    "prompt": [{"role": "user", "content": "150%44"}],
    "reward_model": {"style": "rule", "ground_truth": "18"},
    "extra_info": {"index": 0},
}


def rows(number: int) -> list[Row]:
    """Different prompts of 7 tokens of the demo's model, the generation prompt included."""
    return [{**copy.deepcopy(ROW), "prompt": [{"role": "user", "content": f"{100 + i}%44"}]} for i in range(number)]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def to_file(content: list[Row], name: str = "train.parquet") -> str:
        pq.write_table(pa.Table.from_pylist(content), tmp_path / name)
        return str(tmp_path / name)

    return to_file


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"extra_info": None}, None),
        ({"prompt": "150%44"}, 'column prompt of type string: it must be a list of messages, such as [{"role": "user"'),
        ({"prompt": ["150%44"]}, "it must be a list of messages"),
        ({"reward_model": "18"}, "column reward_model of type string: it must be a record with ground_truth"),
        ({"reward_model": {"answer": "18"}}, "it must be a record with ground_truth"),
        ({"reward_model": {"ground_truth": 18}}, "has reward_model.ground_truth of type int64, and the recipe's own"),
        ({"data_source": 3}, "column data_source of type int64: it must be text"),
        ({"extra_info": '{"index": 0}'}, "column extra_info of type string: it must be a record"),
    ],
)
def test_a_column_that_verl_cannot_use_is_named_with_its_type(changed: Row, says: str | None) -> None:
    found = list(column_problems(pa.Table.from_pylist([{**ROW, **changed}]).schema, text_truth=True))
    assert (found == []) if says is None else (len(found) == 1 and says in found[0]), found


VARIANTS: dict[str, Row] = {
    "the same": {},
    "another field": {"extra_info": {"index": 0, "level": "hard"}},
    "another order": {"prompt": [{"content": "150%44", "role": "user"}]},
    "another column": {"ability": "math"},
    "no value": {"extra_info": None},
    "a number": {"reward_model": {"style": "rule", "ground_truth": 18}},
    "a list": {"reward_model": {"style": "rule", "ground_truth": ["18"]}},
    "a text": {"extra_info": "0"},
    "a float": {"extra_info": {"index": 0.0}},
}


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(VARIANTS, 2)])
def test_files_are_refused_where_datasets_cannot_join_them(first: str, second: str) -> None:
    tables = {name: pa.Table.from_pylist([{**ROW, **VARIANTS[name]}]) for name in (first, second)}
    try:
        for order in (tables.values(), reversed(tables.values())):
            datasets.concatenate_datasets([datasets.Dataset(table) for table in order])
        joins = True
    except (ValueError, AttributeError):
        joins = False
    found = list(join_problems({name: table.schema for name, table in tables.items()}))
    assert (found == []) == joins, found
    assert all(f"in {first} and " in problem for problem in found)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"prompt": []}, "1 row(s) with an empty prompt or message: row 2 of "),
        ({"prompt": [{"role": "user", "content": ""}]}, "with an empty prompt or message"),
        ({"prompt": [None, {"role": "user", "content": "1"}]}, "with an empty prompt or message"),
        ({"reward_model": {"style": "rule", "ground_truth": " "}}, "with no reward_model.ground_truth"),
        ({"prompt": [{"role": "human", "content": "1"}]}, "with a role that is not one of system, user"),
        ({"prompt": [{"role": "assistant", "content": "1"}]}, "ends with the assistant's message"),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "with no reward_model.ground_truth"),
        ({"data_source": None}, "with no data_source"),
        ({"prompt": [{"role": "user", "content": "15x%44"}]}, "characters that the tokenizer does not know"),
        (
            {"prompt": [{"role": "user", "content": "1" * 20}]},
            "1 of 3 prompts are longer than data.max_prompt_le",
        ),
    ],
)
def test_a_row_that_verl_leaves_out_or_stops_at_is_named(write: Callable[..., str], changed: Row, says: str) -> None:
    bad = rows(3)
    bad[2] |= changed
    found = check([write(bad)], str(shipped_model()), 7)
    assert [problem for problem in found.problems if says in problem] == found.problems != []


def test_lengths_are_those_by_which_verl_leaves_prompts_out(write: Callable[..., str]) -> None:
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    mixed = rows(6)
    for row, text in zip(mixed, ["1", "11", "1%1", "111%1", "111%11", "111111%1"], strict=True):
        row["prompt"][0]["content"] = text
    file = write(mixed)
    settings = {"max_prompt_length": 6, "filter_overlong_prompts_workers": None, "cache_dir": str(Path(file).parent)}
    kept = RLHFDataset(file, AutoTokenizer.from_pretrained(shipped_model()), OmegaConf.create(settings))
    (problem,) = check([file], str(shipped_model()), 6).problems
    assert problem.startswith(f"{6 - len(kept)} of 6 prompts are longer")


def test_duplicates_are_told_within_and_across_files(write: Callable[..., str]) -> None:
    train, test = rows(4), rows(2)
    train[3] = {**train[0], "reward_model": {"style": "rule", "ground_truth": "19"}}
    found = check([write(train), write(test, "test.parquet")])
    assert found.problems == []
    notes = [line for line in found.lines if line.startswith("note: ")]
    said = [
        "2 prompt(s) are there more than once",
        "2 prompt(s) are there in several",
        "1 prompt(s) are there with diff",
    ]
    assert [note for note, words in zip(notes, said, strict=True) if words not in note] == []


def test_the_command_shows_sources_lengths_a_sample_and_scores(
    write: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = rows(3)
    content[2]["data_source"] = "own/other"
    file, reward = write(content), tmp_path / "reward.py"
    reward.write_text(
        "async def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': solution_str == ground_truth}\n"
    )
    model = "pkg://fspo.data/assets/demo_model"
    command = ["check", file, "--model", model, "--max-prompt-length", "7", "--reward", f"{reward}:score"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^own/task +2  7, 7, 7, 7, 7$", printed, re.M)
    assert "  | 102%44=\n  ground truth: '18'" in printed
    assert f"row 2 of {file}, own/other: 1    0" in printed and "note: " not in printed
    reward.write_text("def score(data_source, **_):\n    return data_source == 'own/other'\n")
    assert main(command) == 0
    assert "note: own/task, own/other: the ground truth scores no more than no response" in capsys.readouterr().out
    command[-1] = str(reward)
    assert main(command) == 1
    assert "it has no function 'compute_score'" in capsys.readouterr().err
    reward.write_text("def compute_score(solution_str, **_):\n    return 1 / len(solution_str)\n")
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "(own/task), response '': it raised ZeroDivisionError: division by zero\n" in said
    assert f'File "{reward}", line 2, in compute_score' in said


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise SystemExit(0)", "it raised SystemExit: 0"),
        ("return {'score': 1.0, 'acc': 5.0}", "it returned acc=5.0, which must lie between 0 and 1"),
        (
            "return {'score': 1.0, 'a' if solution_str else 'b': 1}",
            "the keys b, score, and before a, score",
        ),
        ("return {'score': 1.0} if solution_str else 1.0", "it returned the keys none, and before score"),
    ],
)
def test_what_a_reward_must_not_do(write: Callable[..., str], tmp_path: Path, body: str, says: str) -> None:
    (tmp_path / "reward.py").write_text(f"def compute_score(solution_str, **_):\n    {body}\n")
    (problem,) = check([write(rows(2))], reward=str(tmp_path / "reward.py")).problems
    assert says in problem


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a readable JSON file"),
        (json.dumps(ROW).encode()[:-9], "is not a readable JSON file"),
        (json.dumps({**ROW, "data_source": "\ud800"}).encode(), "is not a readable JSON file"),
        (json.dumps({**ROW, "data_source": "é"}, ensure_ascii=False).encode("latin-1"), "can't decode byte 0xe9"),
    ],
)
def test_a_json_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, says: str
) -> None:
    (tmp_path / "train.jsonl").write_bytes(content)
    assert main(["check", str(tmp_path / "train.jsonl")]) == 2
    said = capsys.readouterr().err
    assert f"error: {tmp_path / 'train.jsonl'} is not a readable JSON file" in said and says in said


def test_json_lines_and_files_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows(3)))
    assert check([str(file)]).problems == []
    (tmp_path / "train.csv").write_text("a,b\n")
    (tmp_path / "broken.parquet").write_text("PAR1")
    for name, says in (
        ("no.parquet", "does not exist"),
        ("train.csv", "verl reads .parquet, .json and .jsonl only"),
        ("broken.parquet", "is not a readable parquet file"),
    ):
        assert main(["check", str(tmp_path / name)]) == 2
        assert says in capsys.readouterr().err
    assert main(["check", str(file), "--max-prompt-length", "9"]) == 2
    assert "give --model" in capsys.readouterr().err
