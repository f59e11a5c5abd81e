"""The columns of data files as verl and datasets use them."""

from __future__ import annotations

import contextlib

import datasets
import pyarrow as pa
import pytest
from data_rows import ROW, Row

from recipe.runner.launch.data_files import column_problems, join_problems


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"extra_info": None}, None),
        ({"prompt": "150%44"}, "prompt of type string"),
        ({"reward_model": "18"}, "reward_model of type string"),
        ({"reward_model": {"ground_truth": 18}}, None),  # a reward of one's own may read numbers
        ({"data_source": 3}, "data_source of type int64"),
        ({"extra_info": '{"index": 0}'}, "extra_info of type string"),
    ],
)
def test_a_column_that_verl_cannot_use_is_named_with_its_type(changed: Row, says: str | None) -> None:
    problems = list(column_problems(pa.Table.from_pylist([{**ROW, **changed}]).schema))
    assert (problems == []) if says is None else (len(problems) == 1 and says in problems[0]), problems


@pytest.mark.parametrize(
    ("changed", "column"),
    [
        ({}, None),
        ({"extra_info": {"index": 0, "level": "hard"}}, None),
        ({"prompt": [{"content": "150%44", "role": "user"}]}, None),
        ({"ability": "math"}, None),
        ({"reward_model": {"style": "rule", "ground_truth": ["18"]}}, "reward_model"),
        ({"extra_info": "0"}, "extra_info"),
    ],
)
def test_files_that_datasets_cannot_join_are_named_with_the_column(changed: Row, column: str | None) -> None:
    schemas = {name: pa.Table.from_pylist([row]).schema for name, row in (("a", ROW), ("b", ROW | changed))}
    problems = list(join_problems(schemas))
    assert len(problems) == (column is not None)
    assert all(problem.startswith("b ") and str(column) in problem for problem in problems)
    with pytest.raises((ValueError, AttributeError)) if problems else contextlib.nullcontext():
        datasets.concatenate_datasets([datasets.Dataset(pa.Table.from_pylist([row])) for row in (ROW, ROW | changed)])


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (
            {"question": "prompt", "answer": "reward_model"},
            ("no column prompt, reward_model",),
        ),
        ({"prompt": "data_source", "solution": "data_source"}, ("type string", "no column reward_model")),
    ],
)
def test_a_missing_column_is_named_with_those_there_are(columns: dict[str, str], says: tuple[str, ...]) -> None:
    row = {name: ROW[column] for name, column in columns.items()} | {"data_source": "own"}
    problems = "\n".join(column_problems(pa.Table.from_pylist([row]).schema))
    assert all(part in problems for part in (*says, *row)), problems
