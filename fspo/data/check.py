"""Are these files what a run needs? ``python -m fspo.data check FILE...``, and the part of it that a run asks first.

verl leaves out a prompt that is too long or that the chat template refuses, and says so in a log. It joins the files of
one key, and stops minutes later if a column has two types. Both are said here.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fspo.files import local_path
from fspo.names import did_you_mean
from fspo.rewards.custom import BadReward, call, call_problem, describe, load, reads_text, result_problem

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

ROLES: Final = ("system", "user", "assistant", "tool")
NO_ROWS: Final = "has no rows, and verl cannot read such a file: leave it out, or make it again"
#: Under which names other data sets have what verl's columns hold.
_ALIASES: Final = {
    "prompt": ("question", "problem", "messages", "conversations", "instruction", "input", "query"),
    "data_source": ("source", "dataset", "data_set", "task"),
    "reward_model": ("answer", "solution", "ground_truth", "label", "target", "final_answer"),
}
_NAMED = 5  # rows that a sentence names
_CALLS = 3  # rows of each source with which a reward is tried


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises ValueError or FileNotFoundError, with the file's name, for a file that verl does not read."""
    if path.suffix not in (".parquet", ".json", ".jsonl"):
        raise ValueError(f"{path}: verl reads .parquet, .json and .jsonl only")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; make it with `python -m fspo.data prepare`, or correct the path"
        )
    try:
        yield
    except Exception as error:  # of pandas, pyarrow or datasets; the cause says more
        why = " ".join(str(error.__cause__ or error).split())[:300] or type(error).__name__
        raise ValueError(f"{path} cannot be read as rows ({why}); make it again, JSON in UTF-8") from error


def columns_and_rows(path: Path) -> tuple[pa.Schema, int]:
    """The columns of a file and its number of rows; of a Parquet file no row is read. Errors as :func:`read_table`."""
    import pyarrow.parquet as pq

    if path.suffix != ".parquet":
        table = read_table(path)
        return table.schema, table.num_rows
    with _readable(path):
        return pq.read_schema(path), pq.read_metadata(path).num_rows


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """A Parquet, JSON or JSON lines file as verl reads it, or some columns of it.

    Raises ValueError or FileNotFoundError, with the file's name, if it cannot be.
    """
    import datasets
    import pyarrow.parquet as pq

    with _readable(path):
        if path.suffix == ".parquet":
            return pq.read_table(path, columns=columns)
        path.read_bytes().decode("utf-8")  # else only the row in question would raise
        with tempfile.TemporaryDirectory() as cache:
            table = datasets.Dataset.from_json(str(path), cache_dir=cache, keep_in_memory=True).data.table
            return table if columns is None else table.select(columns)


def truth_problem(path: Path) -> str | None:
    """The first ground truth of a file that is not text; None if all are. The file has verl's columns."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = read_table(path, ["reward_model"])
    kind = table.schema.field("reward_model").type
    is_text = pa.types.is_struct(kind) and _is_text(kind.field("ground_truth").type)
    if is_text and not pc.struct_field(table["reward_model"], "ground_truth").null_count:  # whatever their number
        return None
    for row, record in enumerate(rows_of(table)):
        truth = _record(record["reward_model"]).get("ground_truth")
        if not isinstance(truth, str):
            named = f"reward_model.ground_truth={truth!r} ({type(truth).__name__})"
            return f"row {row}: {named}: write every ground truth as text"
    return None


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table as verl's data set gives them: what `datasets` keeps as JSON, for it has several types, read.

    In JSON lines a record may differ from row to row in its keys or in the types of their values.
    """
    kinds = {column.name: column.type for column in table.schema}
    return [{name: _decoded(value, kinds[name]) for name, value in row.items()} for row in table.to_pylist()]


def _decoded(value: Any, kind: pa.DataType) -> Any:
    import pyarrow as pa

    if _is_json(kind):
        return json.loads(value) if isinstance(value, str | bytes) else value
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {field.name: _decoded(value[field.name], field.type) for field in kind}
    if isinstance(value, list) and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return [_decoded(item, kind.value_type) for item in value]
    return value


def _is_json(kind: pa.DataType) -> bool:
    """Whether `datasets` keeps a column as JSON, because its values have several types; the rows tell more."""
    return str(getattr(kind, "extension_name", "")) == "arrow.json"


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def column_problems(schema: pa.Schema, prompt_key: str = "prompt", text_truth: bool = False) -> Iterator[str]:
    """What of a file's columns would stop training: one that is missing, or whose type cannot be used.

    Args:
        schema: Of the file.
        prompt_key: ``data.prompt_key``.
        text_truth: Whether the reward reads a ground truth that is text, as the recipe's own does.
    """
    import pyarrow as pa

    def fields(kind: pa.DataType) -> dict[str, pa.DataType]:
        return {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}

    def is_messages(kind: pa.DataType) -> bool:
        if _is_json(kind) or not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            return _is_json(kind)
        have = fields(kind.value_type)
        texts = all(name in have and (_is_text(have[name]) or _is_json(have[name])) for name in ("role", "content"))
        return texts or _is_json(kind.value_type)

    def has_truth(kind: pa.DataType) -> bool:
        truth = fields(kind).get("ground_truth")
        return _is_json(kind) or (truth is not None and (_is_text(truth) or not text_truth))

    def is_record(kind: pa.DataType) -> bool:
        return bool(pa.types.is_null(kind) or pa.types.is_struct(kind) or _is_json(kind))

    types = {"extra_info": pa.null()} | {column.name: column.type for column in schema}
    for column, is_right, right in (
        (prompt_key, is_messages, 'a list of messages, such as [{"role": "user", "content": TEXT}]'),
        ("data_source", _is_text, "text"),
        ("reward_model", has_truth, 'a record such as {"ground_truth": TEXT}; a reward of yours may read other types'),
        ("extra_info", is_record, "a record, or be left out"),
    ):
        if column not in types:
            likely = [name for name in _ALIASES.get(column, ()) if name in schema.names]
            hint = f": it is probably {likely[0]}" if likely else did_you_mean(column, schema.names)
            have = ", ".join(schema.names) or "none"
            yield f"has no column {column}{hint}; it has {have}. `python -m fspo.data prepare` writes verl's schema"
        elif not is_right(types[column]):
            yield f"has a column {column} of type {types[column]}: it must be {right}"


def join_problems(schemas: Mapping[str, pa.Schema]) -> Iterator[str]:
    """A file that verl cannot join with those before it in a list, for a type of a column or of a field in it."""
    import datasets
    import pyarrow as pa

    types: dict[str, pa.DataType] = {}
    rows: list[datasets.Dataset] = []
    for file, schema in schemas.items():
        empty = [pa.nulls(1, column.type) for column in schema]  # it looks at files with rows only
        try:
            rows.append(datasets.Dataset(pa.Table.from_arrays(empty, schema=schema)))
        except Exception as error:  # the features that another release of datasets has written into the file
            why = " ".join(str(error).split())[:200]
            yield f"{file} cannot be read by datasets {datasets.__version__}, the installed one ({why}): write it again"
            return
        try:
            datasets.concatenate_datasets(rows)
        except (ValueError, AttributeError):
            clashes = [column for column in schema if column.type != types.get(column.name, column.type)]
            differ = "; ".join(f"{column.name} is {column.type}, before {types[column.name]}" for column in clashes)
            yield f"{file} cannot be joined with the files before it: {differ}. Write one type in all of them"
            return
        types |= {column.name: column.type for column in schema}


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
        prompt = values["prompt"] if isinstance(values["prompt"], list) else []
        self.messages: list[dict[str, Any]] = [message if isinstance(message, dict) else {} for message in prompt]
        self.source = values["data_source"]
        self.truth = _record(values["reward_model"]).get("ground_truth")
        self.info = _record(values.get("extra_info"))

    def problem(self) -> str | None:
        """Why training stops at the row, or learns nothing from it."""
        contents = [message.get("content") for message in self.messages]
        if any(content and not isinstance(content, str) for content in contents):
            return "a message whose content is not text: write it as text"
        if not contents or not all(content and content.strip() for content in contents):
            return "an empty prompt or message"
        roles = [message.get("role") for message in self.messages]
        if not set(roles) <= set(ROLES) or roles[-1] == "assistant":
            return f"a role that is not one of {', '.join(ROLES)}, or a last message of the assistant's"
        has_truth = str(self.truth).strip().lower() not in ("", "none", "nan", "null")  # 0 is one
        return None if str(self.source or "").strip() and has_truth else "no data_source or reward_model.ground_truth"

    def text(self) -> str:
        """The messages as they are compared: contents that are not text (images) by their representation."""
        return " ".join(f"{message['role']}: {message['content']}" for message in self.messages)


def _record(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _named(rows: Sequence[_Row]) -> str:
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return ", ".join(row.place for row in rows[:_NAMED]) + more


def _by(rows: Iterable[_Row], key: Callable[[_Row], Any]) -> dict[Any, list[_Row]]:
    """The rows by something of theirs."""
    groups: dict[Any, list[_Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


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
    findings = Findings()
    schemas, rows = {}, []
    for file in dict.fromkeys(files):
        table = read_table(Path(file))
        schemas[file] = table.schema
        findings.lines.append(f"{file}: {table.num_rows} rows")
        wrong = list(column_problems(table.schema, text_truth=reward is None))
        wrong += [] if table.num_rows else [NO_ROWS]
        findings.problems += [f"{file} {problem}" for problem in wrong]
        if not wrong:
            rows += [_Row(file, number, values) for number, values in enumerate(rows_of(table))]
    findings.problems += join_problems(schemas)
    if findings.problems:
        return findings
    bad = _by(rows, _Row.problem)
    good = bad.pop(None, [])
    findings.problems += [f"{len(which)} row(s) with {what}: {_named(which)}" for what, which in bad.items()]
    findings.lines += _duplicates(good)
    sources = _by(good, lambda row: row.source)
    prompts = {} if model is None else _prompts(good, model, findings)
    if long := [row for row, (_, length) in prompts.items() if max_prompt_length and length > max_prompt_length]:
        longer = f"longer than data.max_prompt_length={max_prompt_length} tokens, and verl leaves them out"
        findings.problems.append(f"{len(long)} of {len(good)} prompts {longer}: {_named(long)}")
    findings.lines += _sources(sources, prompts)
    if reward is not None:
        _check_reward(sources, reward, findings)
    return findings


def _duplicates(rows: Sequence[_Row]) -> Iterator[str]:
    repeated = [which for which in _by(rows, lambda row: " ".join(row.text().split())).values() if len(which) > 1]
    across = [which for which in repeated if len({row.file for row in which}) > 1]
    conflicting = [which for which in repeated if len({str(row.truth) for row in which}) > 1]
    for which, what in (
        (repeated, "are there more than once"),
        (across, "are in several files, so a test set is not held out"),
        (conflicting, "have different ground truths"),
    ):
        if which:
            yield f"note: {len(which)} prompt(s) {what}, such as {_named(which[0])}"


def _prompts(rows: Sequence[_Row], model: str, findings: Findings) -> dict[_Row, tuple[str, int]]:
    """Each prompt as the model sees it, and its length in tokens, of those that the chat template takes."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(local_path(model))
    if not tokenizer.chat_template:
        raise ValueError(f"--model {model}: its tokenizer has no chat template, and prompts are lists of messages")
    prompts = {}
    refused: dict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        try:
            text = str(tokenizer.apply_chat_template(row.messages, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # a template may raise anything; verl leaves such a row out
            refused[f"{type(error).__name__}: {error}"].append(row)
        else:
            prompts[row] = (text, len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    findings.problems += [
        f"{len(which)} of {len(rows)} prompts that the chat template refuses ({why}): {_named(which)}"
        for why, which in refused.items()
    ]
    return prompts


def _sources(sources: Mapping[str, list[_Row]], prompts: Mapping[_Row, tuple[str, int]]) -> Iterator[str]:
    import numpy as np

    width = max(map(len, ["data_source", *sources]))
    yield f"\n{'data_source':{width}}  {'rows':>7}" + "  prompt tokens: min, median, 90%, 99%, max" * bool(prompts)
    for source, rows in sources.items():
        lengths = [prompts[row][1] for row in rows if row in prompts]
        quantiles = np.quantile(lengths, (0, 0.5, 0.9, 0.99, 1), method="higher").tolist() if lengths else []
        yield f"{source:{width}}  {len(rows):>7}  {', '.join(map(str, quantiles))}".rstrip()
    for source, (row, *_) in sources.items():
        if row in prompts:
            text = prompts[row][0].replace("\n", "\n  | ")
            yield f"\n{row.place}, {source}, as the model sees it:\n  | {text}\n  ground truth: {row.truth!r}"


def _check_reward(sources: Mapping[str, list[_Row]], reward: str, findings: Findings) -> None:
    path, colon, name = reward.rpartition(":")
    if not colon or name.startswith("//"):  # pkg://module
        path, name = reward, "compute_score"
    place = f"--reward {reward}"
    try:
        function = load(path, name)
        if problem := call_problem(function):
            raise BadReward(problem)
        findings.lines.append(f"\nreward {path}:{name}    response = ground truth    no response")
        boxed = reads_text(path)
        gained: dict[str, bool] = defaultdict(bool)
        keys: set[str] = set()
        kinds: dict[str, str] = {}
        for row in [row for rows in sources.values() for row in rows[:_CALLS]]:
            scores = []
            # The recipe's reward reads LaTeX in a box.
            tries = [str(row.truth), *([f"\\boxed{{{row.truth}}}"] if boxed else [])]
            for response in (*tries, ""):
                place = f"--reward {reward}, {row.place} ({row.source}), response {response!r}"
                result = _result(function, row, response, kinds)
                here = set(map(str, result))
                if here != (keys := keys or here):
                    raise BadReward(f"it returned the keys {sorted(here)}, and before {sorted(keys)}: return the same")
                scores.append(float(result["score"]))
            best, nothing = max(scores[:-1]), scores[-1]
            # Equal texts are equal even if neither can be read, so another answer has to be refused for what it is.
            is_read = not boxed or _result(function, row, "\\boxed{0}", kinds).get("status") != "bad_truth"
            gained[row.source] = gained[row.source] or (best > nothing and is_read)
            findings.lines.append(f"  {row.place}, {row.source}: {best:g}    {nothing:g}")
        for source in [source for source, gain in gained.items() if boxed and not gain]:
            rows = sources[source][:_CALLS]
            findings.problems.append(
                f"{place.partition(',')[0]}: no ground truth of data_source={source} can be read and scores more than "
                f"an empty response, such as {rows[0].truth!r} ({_named(rows)}): write the answer alone, as text"
            )
    except BadReward as error:
        findings.problems.append(f"{place}: {error}")


def _result(function: Callable[..., Any], row: _Row, response: str, kinds: dict[str, str]) -> Mapping[str, Any]:
    """What a reward returns, as a record. Raises BadReward if it cannot be used."""
    result = call(function, row.source, response, row.truth, dict(row.info))
    try:
        problem = result_problem(result, kinds)
    except Exception as error:
        raise BadReward(f"it returned {type(result).__name__}, and reading that raised {describe(error)}") from error
    if problem is None and isinstance(result, Mapping) and not 0 <= result.get("acc", 0) <= 1:
        problem = f"it returned acc={result['acc']!r}, which must lie between 0 and 1"
    if problem is not None:
        raise BadReward(problem)
    return result if isinstance(result, Mapping) else {"score": result}
