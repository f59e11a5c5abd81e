"""The inputs of a run (model, data and reward function): where they are, and what is wrong with them.

Part of the checks before Ray starts (:mod:`recipe.runner.launch.checks`). Of Parquet files the columns are read and no
rows: ``python -m recipe.runner.check_data`` does that. A JSON file has no columns without its rows, and is read whole.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from fspo.names import did_you_mean
from recipe.runner.launch.compose import leaves
from recipe.runner.launch.data_files import (
    MEDIA,
    NO_ROWS,
    PAGE,
    column_problems,
    columns_and_rows,
    join_problems,
    media_columns,
    truth_problem,
)
from recipe.runner.launch.job import Job
from recipe.runner.launch.own_process import asked
from recipe.runner.launch.reward_function import NOTE, BadReward, class_problem, problem_of, truth_reader
from recipe.runner.launch.reward_trial import Outcome, TrialRow, first_rows, rows_of_file
from recipe.runner.launch.values import MachineProblem, PreflightError

#: A folder with one of these has a tokenizer.
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
#: A file smaller than this in place of weights is the pointer that git-lfs leaves.
POINTER_BYTES: Final = 1024
_CONFIG: Final = "config.json"
_MODEL: Final = "actor_rollout_ref.model"
_REWARD: Final = "reward.custom_reward_function"
#: What verl calls without a reward function of the user's.
_VERLS: Final = ("pkg://verl.utils.reward_score", "default_compute_score")
#: verl's reward groups of before 0.7, whose values are null unless a command has one.
_LEGACY: Final = ("custom_reward_function", "reward_model", "sandbox_fusion")
_MANAGER: Final = "reward.reward_manager"
#: Managers of verl's releases that call the reward as the recipe's does, and know nothing that it does not.
_LIKE_OURS: Final = ("naive", "dapo", "batch", "prime")
#: Rewards that start with this belong to a recipe; to import one starts nothing.
_RECIPES: Final = "pkg://recipe."
_FILE: Final = "file://"


def absolute_path(path: str) -> str:
    """A path that means the same to a worker of Ray, which has another working folder; ``pkg://`` as it is."""
    path = path.removeprefix(_FILE)
    return path if "://" in path else str(Path(path).expanduser().absolute())


# ---------------------------------------------------------------- the model


def looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or Path(model).exists()


def model_folder(model: str) -> Path | None:
    """The folder of a model on this machine, the local hub cache included; None if it is not there."""
    folder = Path(model).expanduser()
    if folder.is_dir() or looks_like_a_path(model):
        return folder if folder.is_dir() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def read_model_config(config: DictConfig) -> dict[str, Any]:
    """``config.json`` of a model on this machine; empty for one that would come from the hub."""
    folder = model_folder(config.actor_rollout_ref.model.path)
    return {} if folder is None else _read_json(folder / "config.json")


def model_problems(model: DictConfig) -> Iterator[str]:
    """A model's folder that is missing or incomplete, and its tokenizer. ``model`` is verl's group of that name."""
    yield from _weight_problems(str(model.path))
    yield from _tokenizer_problems(model)


def _weight_problems(model: str) -> Iterator[str]:
    key = f"{_MODEL}.path"
    if not (absent := _absent_files(model_folder(model))):
        return
    if not looks_like_a_path(model):
        if _offline():
            yield MachineProblem(
                f"{key}={model!r}: {absent} is not in the local hub cache and HF_HUB_OFFLINE=1: download it, or give a "
                "folder"
            )
    elif absent == _CONFIG:
        yield MachineProblem(
            f"{key}={model!r} is not a folder with a config.json: give one that holds a model in Hugging Face format "
            "(of a checkpoint `python -m recipe.runner.export` makes one), or a name on the hub"
        )
    else:
        yield MachineProblem(
            f"{key}={model!r} is incomplete: {absent} is missing or a git-lfs pointer; download it again"
        )


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE") == "1"


def _absent_files(folder: Path | None) -> str:
    """What of a model is not in its folder, or a git-lfs pointer; empty if nothing."""
    if folder is None or not (folder / _CONFIG).is_file():
        return _CONFIG
    weights = {file.name: file.stat().st_size for file in (*folder.glob("*.safetensors"), *folder.glob("*.bin"))}
    shards = set(_read_json(folder / "model.safetensors.index.json").get("weight_map", {}).values())
    absent = sorted(name for name in shards | weights.keys() if weights.get(name, 0) < POINTER_BYTES)
    return ", ".join(absent[:3]) or ("" if weights else "weights (*.safetensors or *.bin)")


def takes_text_only(model: str) -> bool:
    """Whether a model on this machine has no processor, without which verl hands it no images, videos or sounds."""
    folder = model_folder(model)
    if folder is None or not (folder / _CONFIG).is_file():
        return False
    named = re.search("vision|image|video|audio", " ".join(_read_json(folder / _CONFIG)))
    return not (named or any((folder / file).is_file() for file in _PROCESSOR_FILES))


def media_problem(path: Path, model: str, columns: Collection[str]) -> str | None:
    """What of a file's columns a model that takes text only cannot take; None if nothing."""
    if takes_text_only(model) and (media := media_columns(path, columns)):
        return (
            f"has {', '.join(media)} in its rows, and the model {model!r} takes text only (it has no "
            f"{_PROCESSOR_FILES[0]}): give a model that takes them, or leave the column out"
        )
    return None


def download_note(model: str) -> str:
    """That the run's processes will download the model, which preflight cannot try for them; empty if it is here."""
    key = f"{_MODEL}.path"
    if looks_like_a_path(model) or not (absent := _absent_files(model_folder(model))):
        return ""
    return (
        f"{key}={model!r}: {absent} is not in the local hub cache. Every node downloads the model after the start, and "
        f"one without a network fails then: download it before (hf download {model} --local-dir FOLDER), and give "
        f"{key}=FOLDER"
    )


def _tokenizer_problems(model: DictConfig) -> Iterator[str]:
    """A tokenizer that is missing, or has no chat template: verl hands it every prompt, a list of messages."""
    name = "tokenizer_path" if model.get("tokenizer_path") else "path"
    key, folder = f"{_MODEL}.{name}={model[name]!r}", model_folder(model[name])
    if folder is None and not (name == "tokenizer_path" and looks_like_a_path(model[name])):
        return  # on the hub, or said of the model
    if folder is None or not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        if not (looks_like_a_path(model[name]) or _offline()):
            return  # the hub's cache has other files of it
        files = ", ".join(_TOKENIZER_FILES)
        yield MachineProblem(f"{key} has no tokenizer: copy its files ({files}) there, or give a name on the hub")
        return
    settings = _read_json(folder / "tokenizer_config.json")
    if not (settings.get("chat_template") or any(folder.glob("chat_template*")) or model.get("custom_chat_template")):
        yield (
            f"{key} has a tokenizer without a chat template, and prompts are lists of messages: add "
            f"chat_template.jinja to the folder, or set {_MODEL}.custom_chat_template"
        )


# ---------------------------------------------------------------- the data


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


def data_problems(config: DictConfig) -> Iterator[str]:
    """Files that are missing or cannot be read; columns that verl or the recipe's reward cannot use; too few rows."""
    if OmegaConf.select(config, "data.custom_cls.path"):  # it reads what it likes
        return
    generated, prompts = generated_files(config.data), config.data.get("prompt_key", "prompt")
    media = [config.data.get(key) or name for key, name in MEDIA.items()]
    reward = config.reward.custom_reward_function.path or ""
    of_text = False
    if reward.startswith(_RECIPES) and not _judges_by_itself(config.reward.reward_manager):
        with contextlib.suppress(BadReward):  # reward_problems says so
            of_text = truth_reader(reward) is not None
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
                        problems.append(f"{problem}, which {_REWARD}.path={reward} reads")
                    if problem := media_problem(path, config.actor_rollout_ref.model.path, media):
                        problems.append(f"{problem} ({_MODEL}.path)")
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


# ---------------------------------------------------------------- the reward


def migrate_rewards(config: DictConfig) -> str | None:
    """Move keys of verl's earlier reward groups to ``reward``, in place, by verl's own function; a note of what moved.

    Raises:
        PreflightError: for keys that verl's function moves nowhere.
    """
    from verl.experimental.reward_loop import migrate_legacy_reward_impl

    if _LEGACY[0] not in config:  # moved before
        return None
    moved = [key for old in _LEGACY for key, value in leaves(config[old], old) if value is not None]
    if moved:
        marked = copy.deepcopy(config)
        with open_dict(config), open_dict(marked):
            for key in moved:
                OmegaConf.update(marked, key, f"<{key}>")
            # verl takes a group whole, with what is null in it.
            for old in ("custom_reward_function", "sandbox_fusion"):
                if any(key.startswith(old) for key in moved):
                    given = {name: value for name, value in config[old].items() if value is not None}
                    config[old] = OmegaConf.merge(config.reward[old], given)
            text = OmegaConf.to_yaml(migrate_legacy_reward_impl(marked).reward)
        if lost := [key for key in moved if f"<{key}>" not in text]:
            raise PreflightError(f"{', '.join(lost)}: verl's main_ppo no longer reads this; leave it out")
    with open_dict(config):
        migrate_legacy_reward_impl(config)
    return f"verl's migration has moved {', '.join(moved)} to reward.*" if moved else None


def reward_problems(config: DictConfig) -> Iterator[str]:
    """A reward that verl could not load or call, or with which no response could earn anything.

    A manager of the user's may call the function with other arguments, or not at all: the function is loaded then, as
    verl does, and not tried.
    """
    if problem := _manager_problem(config.reward.reward_manager):
        yield problem
    custom, model = config.reward.custom_reward_function, config.reward.reward_model.enable
    settings = OmegaConf.to_container(custom.get("reward_kwargs") or OmegaConf.create(), resolve=True)
    is_tried = not _judges_by_itself(config.reward.reward_manager)
    further = ["reward_router_address", "reward_model_tokenizer"] if model else []
    if custom.path:
        path, name = absolute_path(custom.path), str(custom.name)
        # Without their values: a text may be from the environment.
        keywords = f", keys of reward_kwargs: {', '.join(map(str, settings))}" if settings else ""
        setting = f"{_REWARD}.path={custom.path!r}, name={custom.name!r}{keywords}"
    elif model or OmegaConf.select(config, "reward.sandbox_fusion.url") or problem or not is_tried:
        return
    else:
        path, name, settings = *_VERLS, {}
        setting = f"{_REWARD}.path=null, verl's own reward by data_source"
    if path.startswith(_RECIPES):
        if problem := problem_of(path, name, settings if is_tried else None, further):
            yield f"{setting}: {problem}"
        elif is_tried and (reader := truth_reader(path)) is not None:
            yield from (f"{setting}: {text}" for text in _truth_problems(_rows_to_try(config), reader, settings))
        return
    problem, outcome = _tried(path, name, further, (settings, _rows_to_try(config)) if is_tried else (None, []))
    if problem:
        yield f"{setting}: {problem}"
    elif outcome.is_unknown and not custom.path:
        yield f"{setting}: {outcome.failure}: give {_REWARD}.path"
    elif text := outcome.failure or outcome.note:
        how = "was tried on rows of the data, and failed there: " if outcome.failure else ""
        print(f"note: {setting}: {how}{text}", file=sys.stderr, flush=True)


def _rows_to_try(config: DictConfig) -> list[TrialRow]:
    """Rows of each data source of the run's files; none of a file that :func:`data_problems` refuses."""
    if OmegaConf.select(config, "data.custom_cls.path"):
        return []
    files = dict.fromkeys([*data_files(config.data, "train_files"), *data_files(config.data, "val_files")])
    rows: list[TrialRow] = []
    for file in files:
        if "://" not in file and file not in generated_files(config.data):
            with contextlib.suppress(ValueError, OSError, KeyError):
                rows += rows_of_file(Path(file).expanduser())
    return first_rows(rows)


def _truth_problems(rows: Sequence[TrialRow], reader: Callable[..., list[str | None]], settings: Any) -> Iterator[str]:
    """Ground truths with which no response can earn anything, by data source, if the data has no others.

    If it has others, those are a note. Truths that are no text have been named before.
    """
    rows = [row for row in rows if isinstance(row.ground_truth, str)]
    problems = reader([(row.data_source, row.ground_truth) for row in rows], settings) if rows else []
    told = [(row, why, why.startswith(NOTE)) for row, why in zip(rows, problems, strict=True) if why is not None]
    bad = [row for row, _, is_note in told if not is_note]
    for source, of_notes in dict.fromkeys((row.data_source, is_note) for row, _, is_note in told):
        of_one = [(row, why) for row, why, is_note in told if (row.data_source, is_note) == (source, of_notes)]
        row, why = of_one[0]
        n_tried = sum(other.data_source == source for other in rows)
        what = "the ground truth" if of_notes else "no response can earn anything, as the ground truth"
        text = (
            f"data_source={source}: on {len(of_one)} of {n_tried} rows {what} {why.removeprefix(NOTE)} "
            f"({row.place}: {row.ground_truth!r:.100})"
        )
        if len(bad) == len(rows) and not of_notes:
            yield f"{text}: write the answer alone, as text, or give {_REWARD}.path=FILE that reads this ({PAGE})"
        else:
            print(f"note: {_REWARD}.path: {text}", file=sys.stderr, flush=True)


def _judges_by_itself(manager: DictConfig) -> bool:
    """Whether the reward manager is of the user's, and no class of verl's or of a recipe's."""
    path = OmegaConf.select(manager, "module.path")
    return manager.source == "importlib" and bool(path) and not path.startswith(_RECIPES)


def _manager_problem(manager: DictConfig) -> str | None:
    """Why verl could not load the reward manager, which its reward workers try once the models are there."""
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

    source, name, path = manager.source, str(manager.name), OmegaConf.select(manager, "module.path")
    named, verls = f"{_MANAGER}.name={name}", ", ".join(sorted(REWARD_MANAGER))
    of_verl = f"{_MANAGER}.source=register {_MANAGER}.name=naive for verl's, or another of {verls}"
    if source == "register":
        if name not in REWARD_MANAGER:
            like = did_you_mean(name, REWARD_MANAGER)
            return (
                f"{named} with {_MANAGER}.source=register is none of verl's{like}: choose one of {verls}, or give "
                f"{_MANAGER}.source=importlib for a class in {_MANAGER}.module.path={path}"
            )
    elif source != "importlib":
        return f"{_MANAGER}.source={source}: give {of_verl}, or importlib for a class in {_MANAGER}.module.path"
    elif not path:
        return f"{_MANAGER}.module.path={path} with source=importlib: give the module with {name}, or {of_verl}"
    elif problem := class_problem(path, name) if path.startswith(_RECIPES) else _tried(path, name)[0]:
        way = f"correct {_MANAGER}.name or module.path"
        if name in _LIKE_OURS or (path.startswith(_RECIPES) and name not in REWARD_MANAGER):
            way = f"leave {_MANAGER}.name (reward_model.reward_manager) out for the recipe's, or {way}"
        elif name in REWARD_MANAGER:
            way = f"{_MANAGER}.source=register takes verl's {name} (what is lost with it: docs/data-and-rewards.md)"
        return f"{named} with module.path={path}: {problem}; {way}"
    return None


def _tried(path: str, name: str, further: Sequence[str] = (), rows: Any = None) -> tuple[str, Outcome]:
    """What is wrong with a function or a class; ``rows``: a function's settings, and rows to try it on."""
    given = b"" if rows is None else pickle.dumps(rows)
    answer, ended = asked("recipe.runner.launch.reward_trial", path, name, *further, given=given)
    problem, outcome = answer or (ended, {})
    return problem or "", Outcome(**outcome)


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
