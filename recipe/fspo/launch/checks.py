"""Checks that end a run before Ray starts, each with one sentence that names the key, the value and the remedy.

What a machine has to hold (packages, files), the arithmetic of batches and lengths, the checkpoint to resume. What the
settings of a loss mean together is checked by :mod:`recipe.fspo.config`. Imports neither verl nor ray: the planner
(:mod:`recipe.fspo.plan`) uses the arithmetic too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from fspo.data.offline_task import SPLITS, Split
from recipe.fspo import SUPPORTED_VERL
from recipe.fspo.checkpoints.integrity import resume_problems

Problems = Iterator[str]

#: Columns of a data file in verl's schema without which training fails minutes later.
REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")


class PreflightError(ValueError):
    """Everything that is wrong with a configuration, one problem a line."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(f"error: {problem}" for problem in self.problems))


def _package_problems(config: DictConfig) -> Problems:
    installed = importlib.metadata.version("verl")
    if installed != SUPPORTED_VERL:
        yield (
            f"verl {installed} is installed, this recipe is written for verl {SUPPORTED_VERL}: "
            f"pip install verl=={SUPPORTED_VERL}"
        )
    for module, remedy in (("vllm", "vLLM"), ("transfer_queue", "TransferQueue>=0.1.10")):
        if importlib.util.find_spec(module) is None:
            yield f"the package {module} is missing ({remedy}): run `make setup`, or install requirements/gpu.txt"
    implementation = OmegaConf.select(config, "actor_rollout_ref.model.override_config.attn_implementation")
    needs_flash = implementation == "flash_attention_2" or config.actor_rollout_ref.model.use_remove_padding
    if config.trainer.device != "cpu" and needs_flash and importlib.util.find_spec("flash_attn") is None:
        yield (
            "flash-attn is not installed, but this experiment removes padding: install requirements/gpu.txt, or set "
            "actor_rollout_ref.model.use_remove_padding=false "
            "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"
        )


def _looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or Path(model).exists()


def read_model_config(config: DictConfig) -> dict[str, object] | None:
    """``config.json`` of a model folder on this machine; None for a model that would come from the hub."""
    path = Path(config.actor_rollout_ref.model.path).expanduser() / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _model_problems(config: DictConfig) -> Problems:
    key, model = "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
    folder = Path(model).expanduser()
    if not _looks_like_a_path(model):
        if os.environ.get("HF_HUB_OFFLINE") == "1" and not _in_hub_cache(model):
            yield f"{key}={model!r} is not in the local hub cache and HF_HUB_OFFLINE=1: download it, or give a folder"
        return
    if not folder.is_dir():
        yield f"{key}={model!r} is not a folder: give one that holds a model in Hugging Face format, or a hub name"
        return
    if not (folder / "config.json").is_file():
        yield f"{key}={model!r} has no config.json: it is not a model in Hugging Face format (export it first)"
        return
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        yield f"{key}={model!r} has no weights (*.safetensors or *.bin)"


def _in_hub_cache(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def data_files(config: DictConfig, key: str) -> list[str]:
    """``data.train_files`` or ``data.val_files``, which may be one path or a list."""
    value = config.data[key]
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


def _data_problems(config: DictConfig) -> Problems:
    generated = generated_files(config)
    for name_of_key, needed in (("train_files", config.data.train_batch_size), ("val_files", 1)):
        key = f"data.{name_of_key}"
        rows = 0
        complete = True
        for name in data_files(config, name_of_key):
            path = Path(name).expanduser()
            if name in generated:
                rows += config.fspo.offline_task[f"n_{generated[name]}"]
                continue
            if not path.is_file():
                yield f"{key}: {name} does not exist; make it with `python -m fspo.data prepare`, or correct the path"
                complete = False
                continue
            if path.suffix != ".parquet":
                complete = False  # json and others: verl's own reader decides
                continue
            import pyarrow.parquet as pq

            try:
                file = pq.ParquetFile(path)
            except Exception as error:
                yield f"{key}: {name} is not a readable parquet file ({error}); make it again"
                complete = False
                continue
            missing = [column for column in REQUIRED_COLUMNS if column not in file.schema_arrow.names]
            if missing:
                yield (f"{key}: {name} has no column {', '.join(missing)}; `python -m fspo.data` writes verl's schema")
            rows += file.metadata.num_rows
        if complete and rows < needed:
            yield (
                f"{key}: {rows} rows, but at least {needed} are needed"
                + (" (data.train_batch_size)" if key == "data.train_files" else "")
                + "; give more data or a smaller batch"
            )


def _length_problems(config: DictConfig) -> Problems:
    return length_problems(config, (read_model_config(config) or {}).get("max_position_embeddings"))


def _checkpoint_problems(config: DictConfig) -> Problems:
    if OmegaConf.select(config, "actor_rollout_ref.actor.checkpoint.async_save"):
        yield (
            "actor_rollout_ref.actor.checkpoint.async_save=true never writes the file that a resume reads (verl issue "
            "7952), so a restarted run would silently begin again: set it to false"
        )
    keep = config.trainer.max_actor_ckpt_to_keep
    if keep is not None and keep < 2:
        yield (
            f"trainer.max_actor_ckpt_to_keep={keep} deletes the old checkpoint before the new one is registered, and a "
            "crash in between loses both: set it to 2 or more, or to null"
        )


def divides(larger_key: str, larger: int, smaller_key: str, smaller: int) -> Problems:
    """A sentence if ``larger`` is not a multiple of ``smaller``."""
    if smaller <= 0 or larger % smaller:
        yield f"{larger_key}={larger} is not a multiple of {smaller_key}={smaller}: change one of them so that it is"


def _ulysses(config: DictConfig) -> int:
    # The actor's key is the older of the two; verl copies it into the other.
    actor = config.actor_rollout_ref.actor
    return int(max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size))


def batch_problems(config: DictConfig) -> Problems:
    """Batches into mini-batches, mini-batches over ranks, ranks into vLLM's replicas."""
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    ranks = trainer.n_gpus_per_node * trainer.nnodes
    mini, n = actor.ppo_mini_batch_size, rollout.n
    yield from divides("data.train_batch_size", config.data.train_batch_size, "actor.ppo_mini_batch_size", mini)
    sequences = mini * n
    name = "actor.ppo_mini_batch_size * rollout.n"
    yield from divides(name, sequences, "trainer.nnodes * trainer.n_gpus_per_node", ranks)
    ulysses = _ulysses(config)
    yield from divides("trainer.nnodes * trainer.n_gpus_per_node", ranks, "ulysses_sequence_parallel_size", ulysses)
    micro = actor.ppo_micro_batch_size_per_gpu
    if not actor.use_dynamic_bsz and sequences % ranks == 0:
        if micro is None:
            yield (
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu is not set: give the sequences of one forward "
                "pass, or set actor_rollout_ref.actor.use_dynamic_bsz=true"
            )
        else:
            yield from divides(f"{name} / ranks", sequences // ranks, "actor.ppo_micro_batch_size_per_gpu", micro)
    per_replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    yield from divides("trainer.nnodes * trainer.n_gpus_per_node", ranks, "rollout's parallel sizes", per_replica)


def length_problems(config: DictConfig, max_positions: object) -> Problems:
    """The longest sequence against the model's positions, vLLM's limit and the token budget of a micro-batch.

    Args:
        config: The composed configuration.
        max_positions: The model's ``max_position_embeddings``; anything but an integer: unknown.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    wanted = config.data.max_prompt_length + config.data.max_response_length
    asked = f"data.max_prompt_length + data.max_response_length = {wanted}"
    limits = {
        "the model's max_position_embeddings": max_positions,
        "actor_rollout_ref.rollout.max_model_len": rollout.max_model_len,
    }
    for name, limit in limits.items():
        if isinstance(limit, int) and wanted > limit:
            yield f"{asked} exceeds {name} = {limit}: shorten data.max_response_length"
    if not actor.use_dynamic_bsz:
        return
    # verl does not split a sequence: it stops with an error at the first one that exceeds the budget, maybe days later.
    ulysses = _ulysses(config)
    for key, budget in (
        ("actor.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu),
        ("rollout.log_prob_max_token_len_per_gpu", rollout.log_prob_max_token_len_per_gpu),
    ):
        if budget * ulysses < wanted:
            yield (
                f"actor_rollout_ref.{key}={budget} is less than the longest sequence ({asked}"
                + (f", over {ulysses} Ulysses ranks): " if ulysses > 1 else "): ")
                + f"set it to {-(-wanted // ulysses)} or more"
            )


_CHECKS: tuple[Callable[[DictConfig], Problems], ...] = (
    _package_problems,
    _model_problems,
    _data_problems,
    batch_problems,
    _length_problems,
    _checkpoint_problems,
    resume_problems,
)


def check(config: DictConfig, further: Callable[[DictConfig], Problems]) -> None:
    """Run every check on a resolved configuration, and the ``further`` ones of the command.

    Raises:
        PreflightError: listing all problems found, not only the first.
    """
    problems = [problem for find in (*_CHECKS, further) for problem in find(config)]
    if problems:
        raise PreflightError(problems)
