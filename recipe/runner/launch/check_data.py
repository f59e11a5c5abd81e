"""The data files of a run: whether verl can read them, and whether they have its columns and enough rows.

Of a Parquet file the columns are read and a few rows; a JSON file is read whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch.settings import DATA, MachineProblem, files_of

#: How files are made, and which columns they have.
_PAGE: Final = "docs/data.md"
#: Rows that are looked at; of many data sets the first are of one source.
_ROWS: Final = 1024

Rows = list[dict[str, Any]]


def splits_to_write(data: DictConfig) -> dict[str, str]:
    """The files of the recipe's own task that the run reads, and therefore writes, with the split that each holds."""
    if not (task := data.get("offline_task")):
        return {}
    files = {str(Path(task.folder).absolute() / f"{split}.parquet"): split for split in ("train", "test")}
    return {path: split for path, split in files.items() if any(path in files_of(data, name) for name in DATA)}


def read_some(file: str, rows: int = _ROWS) -> tuple[list[str], int, Rows]:
    """Columns of a file, its number of rows, and the first of them.

    Raises FileNotFoundError if it is not there; ValueError if it is no file that verl reads; the message has its name.
    """
    path = Path(file).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist ({_PAGE})")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as parquet:
                some = next((batch.to_pylist() for batch in parquet.iter_batches(batch_size=rows)), [])
                return list(parquet.schema_arrow.names), parquet.metadata.num_rows, some
        if path.suffix not in (".json", ".jsonl"):
            raise ValueError("verl reads .parquet, .json and .jsonl")
        text = path.read_text(encoding="utf-8")
        is_list = text.lstrip()[:1] == "["
        records = json.loads(text) if is_list else [json.loads(line) for line in text.splitlines() if line]
        return list(dict.fromkeys(key for record in records for key in record)), len(records), records[:rows]
    except Exception as error:  # of pyarrow, or whatever a broken file raises
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} cannot be read as rows ({said}): write it again") from error


def data_problems(data: DictConfig) -> Iterator[str]:
    """Files that are missing or cannot be read; columns and rows that verl cannot use; too few rows."""
    if OmegaConf.select(data, "custom_cls.path"):  # it reads what it likes
        return
    own, prompts = splits_to_write(data), str(data.get("prompt_key", "prompt"))
    for name, needed in zip(DATA, (data.train_batch_size, 1), strict=True):
        key, numbers, files = f"data.{name}", list[int](), files_of(data, name)
        for file in files:
            if file in own:
                numbers.append(data.offline_task[f"n_{own[file]}"])
            elif "://" not in file:  # others verl copies
                try:
                    columns, number, some = read_some(file)
                except (ValueError, OSError) as error:
                    yield (MachineProblem if isinstance(error, FileNotFoundError) else str)(f"{key}: {error}")
                    continue
                numbers.append(number)
                if problem := _row_problem(columns, some, prompts):
                    yield f"{key}: {file} {problem} ({_PAGE})"
        limit, rows = data.get(f"{name.removesuffix('_files')}_max_samples") or -1, sum(numbers)
        taken = limit if 0 < limit < rows else rows
        if len(numbers) == len(files) and taken < needed:
            yield (
                f"{key}: {taken} rows are taken of {rows} in {len(files)} file(s), and {needed} are needed "
                f"(data.train_batch_size, or 1): give more data ({_PAGE}), or a smaller batch"
            )


def _row_problem(columns: Sequence[str], rows: Rows, prompt: str) -> str | None:
    """What verl cannot use of a file, by its columns and first rows; None if nothing."""
    if absent := [column for column in (prompt, "data_source", "reward_model") if column not in columns]:
        return f"has no column {', '.join(absent)}; it has {', '.join(columns) or 'none'}"
    for number, row in enumerate(rows):
        value, truth = row.get(prompt), row.get("reward_model")
        if not (isinstance(value, list) and value and all(isinstance(one, dict) and "content" in one for one in value)):
            return f'row {number}: {prompt} must be a list of messages, such as [{{"role": "user", "content": TEXT}}]'
        if not (isinstance(truth, dict) and "ground_truth" in truth):
            return f'row {number}: reward_model must be a record such as {{"ground_truth": TEXT}}'
    return None


def rows_to_try(data: DictConfig, number: int = 2) -> list[tuple[str, dict[str, Any]]]:
    """Rows of each data source of the run's files with their places; none of a file that cannot be read."""
    chosen: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for file in dict.fromkeys(file for name in DATA for file in files_of(data, name)):
        try:
            rows = read_some(file)[2]
        except (ValueError, OSError):
            continue
        for index, row in enumerate(rows):
            of_source = chosen.setdefault(str(row.get("data_source")), [])
            if len(of_source) < number and isinstance(row.get("reward_model"), dict):
                of_source.append((f"row {index} of {file}", row))
    return [row for rows in chosen.values() for row in rows]


def training_rows(data: DictConfig) -> int | None:
    """How many rows the training files have or will have; None if one cannot be read here."""
    own = splits_to_write(data)
    try:
        return sum(
            data.offline_task[f"n_{own[file]}"] if file in own else read_some(file, 1)[1]
            for file in files_of(data, DATA[0])
        )
    except (OSError, ValueError):
        return None


def last_step(config: DictConfig, rows: int | None) -> int | None:
    """The step with which a run ends: the last one, or that of its epochs, whichever comes first; None: not known.

    Prompts that the filter of long ones takes out of so many rows are known once the tokenizer has read them.
    """
    of_epochs = None if rows is None else rows // config.data.train_batch_size * config.trainer.total_epochs
    ends = (config.trainer.total_training_steps, of_epochs)
    return min((int(step) for step in ends if step is not None), default=None)
