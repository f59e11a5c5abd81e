"""The data files of a run: which there are, and what is wrong with them.

Part of the checks before Ray starts (:mod:`recipe.runner.launch.checks`). Reads the columns of Parquet files, no rows:
``python -m fspo.data check`` does that. A JSON file is read whole, since it has no columns without its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, ListConfig

from fspo.data.check import column_problems, join_problems, read_schema, read_table
from fspo.data.offline_task import SPLITS, Split
from recipe.runner.launch.reward_function import is_own

if TYPE_CHECKING:
    import pyarrow as pa


def data_files(config: DictConfig, key: str) -> list[str]:
    """``data.train_files`` or ``data.val_files``, which may be one path or a list."""
    value = config.data[key]
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, ListConfig | list) else [str(value)]


def generated_files(config: DictConfig) -> dict[str, Split]:
    """The data files that the embedded task will write, and what each holds; explicit data files are never among them.

    A file of the task lies in ``fspo.offline_task.folder``, which is in the run folder.
    """
    task = config.fspo.get("offline_task")
    if not task:
        return {}
    wanted = [*data_files(config, "train_files"), *data_files(config, "val_files")]
    files = {str(Path(task.folder) / f"{split}.parquet"): split for split in SPLITS}
    return {path: split for path, split in files.items() if path in wanted}


def _columns_and_rows(path: Path) -> tuple[pa.Schema, int]:
    """The columns of a data file, and its number of rows. Raises ValueError, with the file's name, if it has none."""
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        schema = read_schema(path)
        return schema, pq.read_metadata(path).num_rows
    table = read_table(path)
    return table.schema, table.num_rows


def problems(config: DictConfig) -> Iterator[str]:
    """Files that are missing or cannot be read, columns that verl cannot use or join, too few rows."""
    generated = generated_files(config)
    own_class = config.data.get("custom_cls") and config.data.custom_cls.get("path")  # it reads what it likes
    for name_of_key, needed in (("train_files", config.data.train_batch_size), ("val_files", 1)):
        key = f"data.{name_of_key}"
        rows = 0
        complete = not own_class
        schemas = {}
        if not (names := data_files(config, name_of_key)) and not own_class:
            yield f"{key} names no file: make some with `python -m fspo.data prepare`, or give yours"
            continue
        for name in names:
            path = Path(name).expanduser()
            if name in generated:
                rows += config.fspo.offline_task[f"n_{generated[name]}"]
                continue
            if "://" in name:  # verl copies it
                complete = False
                continue
            if not path.is_file():
                yield f"{key}: {name} does not exist; make it with `python -m fspo.data prepare`, or correct the path"
                complete = False
                continue
            if own_class:
                continue
            try:
                schemas[name], more = _columns_and_rows(path)
            except ValueError as error:
                yield f"{key}: {error}"
                complete = False
                continue
            rows += more
            text_truth = is_own(config)
            for problem in column_problems(schemas[name], config.data.get("prompt_key", "prompt"), text_truth):
                yield f"{key}: {name} {problem}"
        yield from (f"{key}: {problem}" for problem in join_problems(schemas))
        most = config.data.get(name_of_key.replace("files", "max_samples")) or -1
        taken = most if 0 < most < rows else rows
        if complete and taken < needed:
            cut = f", of which {taken} are taken (data.train_max_samples)" if taken < rows else ""
            yield (
                f"{key}: {rows} rows{cut}, but at least {needed} are needed"
                + (" (data.train_batch_size)" if key == "data.train_files" else "")
                + "; give more data or a smaller batch"
            )
