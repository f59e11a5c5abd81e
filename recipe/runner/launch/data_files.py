"""The data files of a run as verl reads them: columns and rows, and what would stop training at them.

verl joins the files of one key, and stops minutes later if a column has two types.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omegaconf import DictConfig, ListConfig

from fspo.row_files import no_rows_in

if TYPE_CHECKING:
    import pyarrow as pa

#: How files are made, and which columns they have.
PAGE: Final = "docs/data.md"
NO_ROWS: Final = "has no rows, and verl cannot read such a file: leave it out, or make it again"
#: verl's columns of what only a model with a processor takes, by the keys of `data` that rename them.
MEDIA: Final = {"image_key": "images", "video_key": "videos", "audio_key": "audios"}
#: Under which names other data sets have what verl's columns hold.


def data_files(data: DictConfig, key: str) -> list[str]:
    """``data.train_files`` or ``data.val_files``, which may be one path or a list."""
    value = data[key]
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, ListConfig | list) else [str(value)]


def generated_files(data: DictConfig) -> dict[str, str]:
    """The data files that the job will write, and the split that each holds; explicit data files are never among them.

    A file of its own lies in ``data.offline_task.folder``, which is in the run folder.
    """
    task = data.get("offline_task")
    if not task:
        return {}
    wanted = [*data_files(data, "train_files"), *data_files(data, "val_files")]
    files = {str(Path(task.folder) / f"{split}.parquet"): split for split in ("train", "test")}
    return {path: split for path, split in files.items() if path in wanted}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises ValueError or FileNotFoundError, with the file's name, for a file that verl does not read."""
    if what := no_rows_in(path):
        raise (ValueError if path.exists() else FileNotFoundError)(f"{path} {what} ({PAGE})")
    try:
        with _quiet_datasets():
            yield
    except Exception as error:  # of pandas, pyarrow or datasets; the cause says more
        why = " ".join(str(error.__cause__ or error).split())[:300] or type(error).__name__
        way = "copy it again, or write it again"
        if path.suffix != ".parquet":
            way = "write it in UTF-8, as one JSON list of records or a record a line"
        raise ValueError(f"{path} cannot be read as rows ({why}): {way}") from error


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Without the progress bars and messages of `datasets`, which name no file."""
    import datasets

    level, bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


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


def media_columns(path: Path, columns: Collection[str] = tuple(MEDIA.values())) -> list[str]:
    """Those of the columns that a file has and that are not empty in every row. Errors as :func:`read_table`."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    def holds(values: pa.Array) -> bool:
        is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
        return bool(pc.max(pc.list_value_length(values)).as_py() if is_list else values.null_count < len(values))

    schema, _ = columns_and_rows(path)
    present = [column for column in columns if column in schema.names]
    if not present:
        return []
    if path.suffix == ".parquet":
        with _readable(path), pq.ParquetFile(path) as file:  # images may be large: up to the first one
            batches = file.iter_batches(batch_size=64, columns=present)
            return next((some for batch in batches if (some := [c for c in present if holds(batch[c])])), [])
    table = read_table(path, present)
    return [column for column in present if any(row[column] for row in rows_of(table.select([column])))]


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
        truth = record_of(record["reward_model"]).get("ground_truth")
        if not isinstance(truth, str):
            named = f"reward_model.ground_truth={truth!r} ({type(truth).__name__})"
            return f"row {row}: {named}: write every ground truth as text"
    return None


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """The rows as verl's data set gives them, with JSON columns (of mixed types) decoded.

    In JSON lines a record may differ from row to row in its keys or in the types of their values.
    """
    kinds = {column.name: column.type for column in table.schema}
    return [{name: _decoded(value, kinds[name]) for name, value in row.items()} for row in table.to_pylist()]


def record_of(value: Any) -> dict[str, Any]:
    """A value as a record; an empty one if it is none."""
    return dict(value) if isinstance(value, dict) else {}


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


def column_problems(schema: pa.Schema, prompt_key: str = "prompt") -> Iterator[str]:
    """What of a file's columns would stop training: one that is missing, or whose type cannot be used.

    Args:
        schema: Of the file.
        prompt_key: ``data.prompt_key``.
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
        return _is_json(kind) or "ground_truth" in fields(kind)

    def is_record(kind: pa.DataType) -> bool:
        return bool(pa.types.is_null(kind) or pa.types.is_struct(kind) or _is_json(kind))

    types = {"extra_info": pa.null()} | {column.name: column.type for column in schema}
    absent = [column for column in (prompt_key, "data_source", "reward_model") if column not in types]
    if absent:
        have = ", ".join(schema.names) or "none"
        yield f"has no column {', '.join(absent)}; it has {have} ({PAGE})"
    for column, is_right, right in (
        (prompt_key, is_messages, 'a list of messages, such as [{"role": "user", "content": TEXT}]'),
        ("data_source", _is_text, "text"),
        ("reward_model", has_truth, 'a record such as {"ground_truth": TEXT}; a reward of yours may read other types'),
        ("extra_info", is_record, "a record, or be left out"),
    ):
        if column not in absent and not is_right(types[column]):
            yield f"has a column {column} of type {types[column]}: it must be {right} ({PAGE})"


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
