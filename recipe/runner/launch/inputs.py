"""The data of a run: where the files are, and what is wrong with them.

Part of the checks before Ray starts (:mod:`recipe.runner.launch.checks`). Of Parquet files the columns are read and no
rows. A JSON file has no columns without its rows, and is read whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch.data_files import (
    MEDIA,
    NO_ROWS,
    PAGE,
    column_problems,
    columns_and_rows,
    data_files,
    generated_files,
    join_problems,
    truth_problem,
)
from recipe.runner.launch.job import Job
from recipe.runner.launch.model_files import media_problem, model_problems
from recipe.runner.launch.rewards import reads_text
from recipe.runner.launch.values import MachineProblem, PreflightError


def data_problems(config: DictConfig) -> Iterator[str]:
    """Files that are missing or cannot be read; columns that verl or the recipe's reward cannot use; too few rows."""
    if OmegaConf.select(config, "data.custom_cls.path"):  # it reads what it likes
        return
    generated, prompts = generated_files(config.data), config.data.get("prompt_key", "prompt")
    media = [config.data.get(key) or name for key, name in MEDIA.items()]
    of_text = reads_text(config.reward)
    for name, needed in (("train_files", config.data.train_batch_size), ("val_files", 1)):
        key, rows, schemas = f"data.{name}", 0, {}
        files = data_files(config.data, name)
        for file in files:
            if file in generated:
                rows += config.data.offline_task[f"n_{generated[file]}"]
            elif "://" not in file:  # else verl copies it
                path = Path(file).expanduser()
                try:
                    schema, more = columns_and_rows(path)
                    problems = list(column_problems(schema, prompts))
                    if of_text and not problems and (problem := truth_problem(path)):
                        problems.append(f"{problem}, which {of_text} reads")
                    if problem := media_problem(path, config.actor_rollout_ref.model.path, media):
                        problems.append(f"{problem} (actor_rollout_ref.model.path)")
                except (ValueError, FileNotFoundError) as error:
                    kind = MachineProblem if isinstance(error, FileNotFoundError) else str
                    yield kind(f"{key}: {error}")
                    continue
                problems += [] if more else [NO_ROWS]
                for problem in problems:
                    yield f"{key}: {file} {problem}"
                if more:
                    schemas[file] = schema
                    rows += more
        for problem in join_problems(schemas):
            yield f"{key}: {problem}"
        of_samples = f"data.{name.replace('files', 'max_samples')}"
        limit = OmegaConf.select(config, of_samples) or -1
        taken = limit if 0 < limit < rows else rows
        if taken < needed and all(file in generated or file in schemas for file in files):
            yield (
                f"{key}: {rows} rows in {len(files)} file(s), of which {taken} are taken ({of_samples}={limit}), and "
                f"{needed} are needed (data.train_batch_size, or 1): give more data ({PAGE}), "
                "or a smaller batch"
            )


#: What a run reads that may lie on its machine only.
MODEL_AND_DATA: Final = (lambda config: model_problems(config.actor_rollout_ref.model), data_problems)


def steps_of_epochs(config: DictConfig) -> int | None:
    """Steps in ``trainer.total_epochs`` of the training files, at most; None where their length is not known here.

    Prompts that the filter of long ones takes out are not known before the tokenizer has read them.
    """
    if OmegaConf.select(config, "data.custom_cls.path"):
        return None
    rows, generated = 0, generated_files(config.data)
    for file in data_files(config.data, "train_files"):
        try:
            split = generated.get(file)
            rows += config.data.offline_task[f"n_{split}"] if split else columns_and_rows(Path(file).expanduser())[1]
        except (OSError, ValueError):
            return None
    limit = config.data.get("train_max_samples") or -1
    rows = limit if 0 < limit < rows else rows
    return int(rows // config.data.train_batch_size * config.trainer.total_epochs)


def last_step(config: DictConfig) -> int | None:
    """The step with which a run ends: the last one, or that of its epochs, whichever comes first; None: not known."""
    ends = (config.trainer.total_training_steps, steps_of_epochs(config))
    return min((step for step in ends if step is not None), default=None)


def write_offline_task(job: Job, data: DictConfig) -> None:
    """Let the job write those of its files that ``data.train_files`` and ``data.val_files`` name, if any.

    Raises:
        PreflightError: if a file of another origin is in the way.
    """
    if splits := generated_files(data):
        assert job.write_data is not None  # what has none is refused before
        try:
            job.write_data(**data.offline_task, splits=tuple(splits.values()))
        except FileExistsError as error:
            raise PreflightError(f"data.offline_task: {error}") from error
