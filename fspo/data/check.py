"""Are these files what a run needs? ``python -m fspo.data check FILE...``, and the part of it that a run asks first.

verl leaves out a prompt that is too long or that the chat template refuses, and says so in a log. It joins the files of
one key, and stops minutes later if a column has two types. Both are said here.
"""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fspo.files import local_path
from fspo.rewards.custom import ARGUMENTS, BadReward, call_problem, describe, load, result_problem

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

ROLES: Final = ("system", "user", "assistant", "tool")
_NAMED = 5  # rows that a sentence names
_CALLS = 3  # rows of each source with which a reward is tried


def read_schema(path: Path) -> pa.Schema:
    """The columns of a Parquet file. Raises ValueError, with the file's name, for anything else."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} is not a readable parquet file ({error}); make it again") from error


def read_table(path: Path) -> pa.Table:
    """A Parquet, JSON or JSON lines file as verl reads it. Raises ValueError, with the file's name, if it cannot be."""
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        read_schema(path)
        return pq.read_table(path)
    if path.suffix not in (".json", ".jsonl"):
        raise ValueError(f"{path}: verl reads .parquet, .json and .jsonl only")
    import datasets

    try:
        path.read_bytes().decode("utf-8")  # else only the row in question would raise
        with tempfile.TemporaryDirectory() as cache:
            return datasets.Dataset.from_json(str(path), cache_dir=cache, keep_in_memory=True).data.table
    except Exception as error:  # of pandas, pyarrow or datasets; the cause says more
        why = " ".join(str(error.__cause__ or error).split())[:300] or type(error).__name__
        raise ValueError(f"{path} is not a readable JSON file of rows in UTF-8 ({why}); make it again") from error


def column_problems(schema: pa.Schema, prompt_key: str = "prompt", text_truth: bool = False) -> Iterator[str]:
    """What of a file's columns would stop training: one that is missing, or whose type cannot be used.

    Args:
        schema: Of the file.
        prompt_key: ``data.prompt_key``.
        text_truth: Whether the reward reads a ground truth that is text, as the recipe's own does.
    """
    import pyarrow as pa

    def fields(kind: pa.DataType) -> dict[str, pa.DataType]:
        return {each.name: each.type for each in kind} if pa.types.is_struct(kind) else {}

    def is_text(kind: pa.DataType) -> bool:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))

    def is_messages(kind: pa.DataType) -> bool:
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        return is_list and fields(kind.value_type).keys() >= {"role", "content"}

    types = {column.name: column.type for column in schema}
    rules = (
        (prompt_key, is_messages, 'a list of messages, such as [{"role": "user", "content": TEXT}]'),
        ("data_source", is_text, "text"),
        ("reward_model", lambda kind: "ground_truth" in fields(kind), 'a record such as {"ground_truth": TEXT}'),
        ("extra_info", lambda kind: pa.types.is_null(kind) or pa.types.is_struct(kind), "a record, or be left out"),
    )
    if missing := [column for column, *_ in rules if column not in types and column != "extra_info"]:
        yield f"has no column {', '.join(missing)}; `python -m fspo.data prepare` writes verl's schema"
    for column, is_right, right in rules:
        if column in types and not is_right(types[column]):
            yield f"has a column {column} of type {types[column]}: it must be {right}"
    truth = fields(types["reward_model"]).get("ground_truth") if "reward_model" in types else None
    if text_truth and truth is not None and not is_text(truth):
        yield (
            f"has reward_model.ground_truth of type {truth}, and the recipe's own reward reads text: write it as "
            "text, or give a reward of your own"
        )


def join_problems(schemas: Mapping[str, pa.Schema]) -> Iterator[str]:
    """Files that verl cannot join with those before them in a list, for a type of a column or of a field in it."""
    import datasets
    import pyarrow as pa

    joined: datasets.Dataset | None = None
    types: dict[str, pa.DataType] = {}
    for file, schema in schemas.items():
        # datasets looks at the types of files with rows only.
        rows = datasets.Dataset(pa.Table.from_pylist([{}], schema=schema))
        try:
            joined = rows if joined is None else datasets.concatenate_datasets([joined, rows])
        except (ValueError, AttributeError):
            clashes = [column for column in schema if column.type != types.get(column.name, column.type)]
            differ = "; ".join(f"{column.name} is {column.type}, before {types[column.name]}" for column in clashes)
            yield f"{file} cannot be joined with the files before it: {differ}. Write one type in all of them"
            continue
        types = {column.name: column.type for column in schema} | types


@dataclass
class Findings:
    """What a look at the rows has found: ``lines`` to read, and ``problems`` that stop training or cost rows."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class _Row:
    """A row, by its place in words."""

    def __init__(self, file: str, number: int, values: dict[str, Any]) -> None:
        self.place = f"row {number} of {file}"
        self.file = file
        self.messages: list[dict[str, Any]] = [message or {} for message in values["prompt"] or []]
        self.source = values["data_source"]
        self.truth = (values["reward_model"] or {}).get("ground_truth")
        self.info = dict(values.get("extra_info") or {})

    def problem(self, text_truth: bool) -> str | None:
        """Why training stops at the row, or learns nothing from it."""
        if not self.messages or not all(message.get("content") for message in self.messages):
            return "an empty prompt or message"
        if not {message.get("role") for message in self.messages} <= set(ROLES):
            return f"a role that is not one of {', '.join(ROLES)}"
        if self.messages[-1]["role"] == "assistant":
            return "a prompt that ends with the assistant's message, where the response begins"
        if self.truth is None or (text_truth and not str(self.truth).strip()):
            return "no reward_model.ground_truth"
        return None if self.source else "no data_source"


def _named(rows: Sequence[_Row]) -> str:
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return ", ".join(row.place for row in rows[:_NAMED]) + more


def check(
    files: Sequence[str], model: str | None = None, max_prompt_length: int | None = None, reward: str | None = None
) -> Findings:
    """Look at every row of ``files`` as one list.

    Args:
        files: Parquet, JSON or JSON lines.
        model: Folder, hub name or ``pkg://`` path of a model, whose tokenizer and chat template are applied.
        max_prompt_length: ``data.max_prompt_length`` of the run; verl leaves out what is longer.
        reward: ``FILE:FUNCTION`` or ``pkg://MODULE:FUNCTION``; called with the ground truth as response, and with none.
            Without one, ground truths have to be what the recipe's own reward reads.

    Raises:
        ValueError, OSError: a file, model or reward that cannot be read.
    """
    found = Findings()
    schemas, rows = {}, []
    for file in dict.fromkeys(files):
        if not Path(file).is_file():
            raise FileNotFoundError(f"{file} does not exist")
        table = read_table(Path(file))
        schemas[file] = table.schema
        found.lines.append(f"{file}: {table.num_rows} rows")
        wrong = list(column_problems(table.schema, text_truth=reward is None))
        found.problems += [f"{file} {problem}" for problem in wrong]
        if not table.num_rows:
            found.problems.append(f"{file} has no rows")
        if not wrong:
            rows += [_Row(file, number, values) for number, values in enumerate(table.to_pylist())]
    found.problems += join_problems(schemas)
    if found.problems:
        return found
    bad = _by(rows, lambda row: row.problem(text_truth=reward is None))
    good = bad.pop(None, [])
    found.problems += [f"{len(which)} row(s) with {what}: {_named(which)}" for what, which in bad.items()]
    found.lines += _duplicates(good)
    sources = _by(good, lambda row: row.source)
    if model is None:
        unit = "characters"
        lengths = {row: sum(len(str(message["content"])) for message in row.messages) for row in good}
    else:
        tokenizer = _tokenizer(model)
        unit, lengths = "tokens", _token_lengths(good, tokenizer, max_prompt_length, found)
    found.lines += _table_of_sources(sources, lengths, unit)
    if model is not None:
        found.lines += _samples(sources, tokenizer, lengths)
    if reward is not None:
        _check_reward(sources, reward, found)
    return found


def _by(rows: Iterable[_Row], key: Callable[[_Row], Any]) -> dict[Any, list[_Row]]:
    """The rows by something of theirs."""
    found: dict[Any, list[_Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def _text(row: _Row) -> str:
    """The messages of a row as they are compared: contents that are not text (images) by their representation."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in row.messages)


def _duplicates(rows: Sequence[_Row]) -> Iterator[str]:
    repeated = [which for which in _by(rows, lambda row: " ".join(_text(row).split())).values() if len(which) > 1]
    across = [which for which in repeated if len({row.file for row in which}) > 1]
    conflicting = [which for which in repeated if len({str(row.truth) for row in which}) > 1]
    if repeated:
        yield f"note: {len(repeated)} prompt(s) are there more than once, such as {_named(repeated[0])}"
    if across:
        yield f"note: {len(across)} of them in several files, so a test set is not held out: {_named(across[0])}"
    if conflicting:
        yield f"note: {len(conflicting)} of them with different ground truths: {_named(conflicting[0])}"


def _tokenizer(model: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(local_path(model))
    if not tokenizer.chat_template:
        raise ValueError(f"--model {model}: its tokenizer has no chat template, and prompts are lists of messages")
    return tokenizer


def _prompt(row: _Row, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.apply_chat_template(row.messages, add_generation_prompt=True, tokenize=False))


def _token_lengths(
    rows: Sequence[_Row], tokenizer: PreTrainedTokenizerBase, most: int | None, found: Findings
) -> dict[_Row, int]:
    """The length of every prompt in tokens, of those that the chat template takes."""
    lengths: dict[_Row, int] = {}
    problems: dict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        try:
            ids = tokenizer(_prompt(row, tokenizer), add_special_tokens=False)["input_ids"]
        except Exception as error:  # a template may raise anything; verl leaves such a row out
            problems[f"that the chat template refuses ({type(error).__name__}: {error})"].append(row)
            continue
        lengths[row] = len(ids)
        if most is not None and len(ids) > most:
            problems[f"longer than data.max_prompt_length={most} tokens, and verl leaves them out"].append(row)
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            problems["with characters that the tokenizer does not know"].append(row)
    found.problems += [
        f"{len(which)} of {len(rows)} prompts {what}: {_named(which)}" for what, which in problems.items()
    ]
    return lengths


def _table_of_sources(sources: Mapping[str, list[_Row]], lengths: Mapping[_Row, int], unit: str) -> Iterator[str]:
    import numpy as np

    width = max(map(len, ["data_source", *sources]))
    yield f"\n{'data_source':{width}}  {'rows':>7}  prompt {unit}: min, median, 90%, 99%, max"
    for source, rows in sources.items():
        known = [lengths[row] for row in rows if row in lengths]
        quantiles = np.quantile(known, (0, 0.5, 0.9, 0.99, 1), method="higher").tolist() if known else []
        yield f"{source:{width}}  {len(rows):>7}  {', '.join(map(str, quantiles))}"


def _samples(
    sources: Mapping[str, list[_Row]], tokenizer: PreTrainedTokenizerBase, lengths: Mapping[_Row, int]
) -> Iterator[str]:
    for source, (row, *_) in sources.items():
        if row in lengths:
            text = _prompt(row, tokenizer).replace("\n", "\n  | ")
            yield f"\n{row.place}, {source}, as the model sees it:\n  | {text}\n  ground truth: {row.truth!r}"


def _check_reward(sources: Mapping[str, list[_Row]], reward: str, found: Findings) -> None:
    path, colon, name = reward.rpartition(":")
    if not colon or name.startswith("//"):  # pkg://module
        path, name = reward, "compute_score"
    try:
        function = load(path, name)
        problem = call_problem(function)
    except BadReward as error:
        problem = str(error)
    if problem is not None:
        found.problems.append(f"--reward {reward}: {problem}")
        return
    found.lines.append(f"\nreward {path}:{name}    response = ground truth    no response")
    keys: set[str] = set()
    for row in [row for rows in sources.values() for row in rows[:_CALLS]]:
        scores = []
        for response in (str(row.truth), ""):
            result, problem = _call(function, row, response)
            here = set(map(str, result)) if isinstance(result, Mapping) else {"score"}
            if problem is None and here != (keys := keys or here):
                problem = f"it returned the keys {sorted(here)}, and before {sorted(keys)}: return the same every time"
            if problem is not None:
                place = f"{row.place} ({row.source}), response {response!r}"
                found.problems.append(f"--reward {reward}, {place}: {problem}")
                return
            scores.append(float(result["score"] if isinstance(result, Mapping) else result))
        found.lines.append(f"  {row.place}, {row.source}: {scores[0]:g}    {scores[1]:g}")


def _call(function: Callable[..., Any], row: _Row, response: str) -> tuple[Any, str | None]:
    """What a reward returns, and what is wrong with it."""
    try:
        result = function(**dict(zip(ARGUMENTS, (row.source, response, row.truth, dict(row.info)), strict=True)))
        result = asyncio.run(result) if inspect.iscoroutinefunction(function) else result
        problem = result_problem(result)
    except (Exception, SystemExit) as error:
        return None, f"it raised {describe(error)}"
    if problem is None and isinstance(result, Mapping) and not 0 <= result.get("acc", 0) <= 1:
        problem = f"it returned acc={result['acc']!r}, which must lie between 0 and 1"
    return result, problem
