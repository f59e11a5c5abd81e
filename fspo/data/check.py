"""Are these files what a run needs? ``python -m fspo.data check FILE...``, and the part of it that a run asks first.

verl leaves out a prompt that is too long or that the chat template refuses, and says so in a log. It joins the files of
one key, and stops minutes later if a column has two types. Both are said here.
"""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fspo.files import local_path
from fspo.rewards.custom import ARGUMENTS, BadReward, call_problem, describe, load, result_problem

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

#: Columns of a data file in verl's schema without which training fails.
REQUIRED_COLUMNS: Final = ("data_source", "prompt", "reward_model")
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

    def fields(kind: pa.DataType) -> set[str]:
        return {each.name for each in kind} if pa.types.is_struct(kind) else set()

    def is_text(kind: pa.DataType) -> bool:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))

    required = [prompt_key if column == "prompt" else column for column in REQUIRED_COLUMNS]
    if missing := [column for column in required if column not in schema.names]:
        yield f"has no column {', '.join(missing)}; `python -m fspo.data` writes verl's schema"
    types = {column: schema.field(column).type for column in schema.names}
    prompt = types.get(prompt_key)
    is_list = prompt is not None and (pa.types.is_list(prompt) or pa.types.is_large_list(prompt))
    if prompt is not None and not (is_list and fields(prompt.value_type) >= {"role", "content"}):
        yield (
            f"has a column {prompt_key} of type {prompt}: it must be a list of messages, such as "
            '[{"role": "user", "content": TEXT}]'
        )
    if "reward_model" in types and "ground_truth" not in fields(types["reward_model"]):
        yield (
            f"has a column reward_model of type {types['reward_model']}: it must be a record with ground_truth, such "
            'as {"style": "rule", "ground_truth": TEXT}'
        )
    elif text_truth and "reward_model" in types:
        truth = types["reward_model"].field("ground_truth").type
        if not is_text(truth):
            yield (
                f"has reward_model.ground_truth of type {truth}, and the recipe's own reward reads text: write it as "
                "text, or give a reward of your own"
            )
    source = types.get("data_source")
    if source is not None and not is_text(source):
        yield f"has a column data_source of type {source}: it must be text"
    info = types.get("extra_info")
    if info is not None and not (pa.types.is_struct(info) or pa.types.is_null(info)):
        yield f'has a column extra_info of type {info}: it must be a record, such as {{"index": 0}}, or be left out'


def join_problems(schemas: Mapping[str, pa.Schema]) -> Iterator[str]:
    """Columns, or fields inside them, that have different types in files of one list: verl cannot join these."""
    import pyarrow as pa

    def leaves(name: str, kind: pa.DataType) -> Iterator[tuple[str, str]]:
        if pa.types.is_struct(kind):
            yield name, "record"
            for each in kind:
                yield from leaves(f"{name}.{each.name}", each.type)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            yield name, "large_list" if pa.types.is_large_list(kind) else "list"
            yield from leaves(f"{name}[]", kind.value_type)
        else:
            yield name, str(kind)

    types: dict[str, dict[str, str]] = defaultdict(dict)  # of a leaf: the first file with each type
    for file, schema in schemas.items():
        for column in schema:
            for leaf, kind in leaves(column.name, column.type):
                types[leaf].setdefault(kind, file)
    for leaf, found in types.items():
        # A column without any value has no type, and goes with all types but a record's.
        if len(found) > 1 and (len(found) > 2 or "null" not in found or "record" in found):
            seen = " and ".join(f"{kind} in {file}" for kind, file in found.items())
            yield f"{leaf} is {seen}: files of one list are joined, so write it with one type in all of them"


@dataclass
class Findings:
    """What a look at the rows has found: ``lines`` to read, and ``problems`` that stop training or cost rows."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class _Row:
    file: str
    number: int
    values: dict[str, Any]

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [message or {} for message in self.values.get("prompt") or []]

    @property
    def source(self) -> str:
        return str(self.values.get("data_source"))

    @property
    def truth(self) -> Any:
        return (self.values.get("reward_model") or {}).get("ground_truth")

    @property
    def text(self) -> str:
        """The messages as they are compared: contents that are not text (images) by their representation."""
        return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in self.messages)

    def __str__(self) -> str:
        return f"row {self.number} of {self.file}"


def _rows(file: str) -> tuple[pa.Schema, list[_Row]]:
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    table = read_table(path)
    return table.schema, [_Row(file, number, values) for number, values in enumerate(table.to_pylist())]


def _named(rows: Sequence[object]) -> str:
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return ", ".join(map(str, rows[:_NAMED])) + more


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
        schemas[file], of_file = _rows(file)
        found.lines.append(f"{file}: {len(of_file)} rows")
        wrong = column_problems(schemas[file], text_truth=reward is None)
        found.problems += [f"{file} {problem}" for problem in wrong]
        if not of_file:
            found.problems.append(f"{file} has no rows")
        rows += of_file
    found.problems += join_problems(schemas)
    if found.problems or not rows:
        return found
    good = _check_rows(rows, found, text_truth=reward is None)
    _check_duplicates(good, found)
    tokenizer = None if model is None else _tokenizer(model)
    lengths = _check_lengths(good, tokenizer, max_prompt_length, found)
    _describe_sources(good, lengths, "characters" if tokenizer is None else "tokens", found)
    if tokenizer is not None:
        _show_samples(good, tokenizer, found)
    if reward is not None:
        _check_reward(good, reward, found)
    return found


def _check_rows(rows: Sequence[_Row], found: Findings, text_truth: bool) -> list[_Row]:
    bad: dict[str, list[_Row]] = defaultdict(list)
    good = []
    for row in rows:
        contents = [message.get("content") for message in row.messages]
        roles = [message.get("role") for message in row.messages]
        if not row.messages or any(not content for content in contents):
            bad["an empty prompt or message"].append(row)
        elif not set(roles) <= set(ROLES):
            bad[f"a role that is not one of {', '.join(ROLES)}"].append(row)
        elif roles[-1] == "assistant":
            bad["a prompt that ends with the assistant's message, where the response begins"].append(row)
        elif row.truth is None or (text_truth and not str(row.truth).strip()):
            bad["no reward_model.ground_truth"].append(row)
        elif not row.values.get("data_source"):
            bad["no data_source"].append(row)
        else:
            good.append(row)
    found.problems += [f"{len(which)} row(s) with {what}: {_named(which)}" for what, which in bad.items()]
    return good


def _check_duplicates(rows: Sequence[_Row], found: Findings) -> None:
    by_text: dict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        by_text[" ".join(row.text.split())].append(row)
    repeated = [which for which in by_text.values() if len(which) > 1]
    across = [which for which in repeated if len({row.file for row in which}) > 1]
    conflicting = [which for which in repeated if len({str(row.truth) for row in which}) > 1]
    for what, groups in (
        ("more than once", repeated),
        ("in several files (a test set is then no longer held out)", across),
        ("with different ground truths", conflicting),
    ):
        if groups:
            found.lines.append(f"note: {len(groups)} prompt(s) are there {what}, such as {_named(groups[0])}")


def _tokenizer(model: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(local_path(model))
    if not tokenizer.chat_template:
        raise ValueError(f"--model {model}: its tokenizer has no chat template, and prompts are lists of messages")
    return tokenizer


def _prompt(row: _Row, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.apply_chat_template(row.messages, add_generation_prompt=True, tokenize=False))


def _check_lengths(
    rows: Sequence[_Row], tokenizer: PreTrainedTokenizerBase | None, most: int | None, found: Findings
) -> list[int | None]:
    """The length of every prompt: in tokens, None where the template fails; without a tokenizer in characters."""
    if tokenizer is None:
        return [sum(len(str(message["content"])) for message in row.messages) for row in rows]
    lengths: list[int | None] = []
    too_long, unknown, refused = [], [], defaultdict(list)
    for row in rows:
        try:
            ids = tokenizer(_prompt(row, tokenizer), add_special_tokens=False)["input_ids"]
        except Exception as error:  # a template may raise anything; verl leaves such a row out
            refused[f"{type(error).__name__}: {error}"].append(row)
            lengths.append(None)
            continue
        lengths.append(len(ids))
        if most is not None and len(ids) > most:
            too_long.append(row)
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            unknown.append(row)
    for why, which in refused.items():
        found.problems.append(f"{len(which)} row(s) that the chat template refuses ({why}): {_named(which)}")
    if too_long:
        found.problems.append(
            f"{len(too_long)} of {len(rows)} prompts are longer than data.max_prompt_length={most} tokens, and verl "
            f"leaves them out: {_named(too_long)}"
        )
    if unknown:
        found.problems.append(
            f"{len(unknown)} prompt(s) have characters that the tokenizer does not know (they become "
            f"{tokenizer.unk_token}): {_named(unknown)}"
        )
    return lengths


def _describe_sources(rows: Sequence[_Row], lengths: Sequence[int | None], unit: str, found: Findings) -> None:
    import numpy as np

    counts = Counter(row.source for row in rows)
    width = max([len("data_source"), *map(len, counts)])
    found.lines += ["", f"{'data_source':{width}}  {'rows':>7}  prompt {unit}: min, median, 90%, 99%, max"]
    for source, count in counts.most_common():
        known = [n for row, n in zip(rows, lengths, strict=True) if row.source == source and n is not None]
        quantiles = np.quantile(known, (0, 0.5, 0.9, 0.99, 1), method="higher").tolist() if known else []
        found.lines.append(f"{source:{width}}  {count:>7}  {', '.join(map(str, quantiles))}")


def _first_of_each_source(rows: Sequence[_Row], number: int) -> Iterator[_Row]:
    seen: Counter[str] = Counter()
    for row in rows:
        seen[row.source] += 1
        if seen[row.source] <= number:
            yield row


def _show_samples(rows: Sequence[_Row], tokenizer: PreTrainedTokenizerBase, found: Findings) -> None:
    for row in _first_of_each_source(rows, 1):
        try:
            text = _prompt(row, tokenizer)
        except Exception:  # it is among the problems
            continue
        found.lines += ["", f"{row}, {row.source}, as the model sees it:"]
        found.lines += [f"  | {line}" for line in text.split("\n")]
        found.lines.append(f"  ground truth: {row.truth!r}")


def _check_reward(rows: Sequence[_Row], reward: str, found: Findings) -> None:
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
    found.lines += ["", f"reward {path}:{name}    response = ground truth    no response"]
    earned: dict[str, bool] = {}
    keys: set[str] | None = None
    for row in _first_of_each_source(rows, _CALLS):
        scores = []
        for response in (str(row.truth), ""):
            try:
                result = _call(function, row, response)
                problem = result_problem(result)
            except (Exception, SystemExit) as error:
                problem = f"it raised {describe(error)}"
            else:
                has = set(map(str, result)) if isinstance(result, Mapping) else set()
                keys = has if keys is None else keys
                if problem is None and has != keys:
                    problem = (
                        f"it returned the keys {', '.join(sorted(has)) or 'none'}, and before "
                        f"{', '.join(sorted(keys)) or 'none'}: return the same keys for every row"
                    )
                elif problem is None and "acc" in has and not 0 <= result["acc"] <= 1:
                    problem = f"it returned acc={result['acc']!r}, which must lie between 0 and 1"
            if problem is not None:
                found.problems.append(f"--reward {reward}, {row} ({row.source}), response {response!r}: {problem}")
                return
            scores.append(float(result["score"] if isinstance(result, Mapping) else result))
        found.lines.append(f"  {row}, {row.source}: {scores[0]:g}    {scores[1]:g}")
        earned[row.source] = earned.get(row.source, False) or scores[0] > scores[1]
    if sources := [source for source, better in earned.items() if not better]:
        found.lines.append(
            f"note: {', '.join(sources)}: the ground truth scores no more than no response. That is right if it is no "
            "answer, such as the cases of a program; try the function with an answer of your own then"
        )


def _call(function: Callable[..., Any], row: _Row, response: str) -> Any:
    info = dict(row.values.get("extra_info") or {})
    result = function(**dict(zip(ARGUMENTS, (row.source, response, row.truth, info), strict=True)))
    return asyncio.run(result) if inspect.iscoroutinefunction(function) else result
