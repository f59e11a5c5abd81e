"""The rehearsal of a GPU job, on a machine without a GPU, before the job is queued.

usage: python -m recipe.fspo.rehearse experiment=qwen3_8b nodes=2 gpus=8 [substitute=data,model] [any Hydra override]

Makes all checks of the job and the planner's, and then becomes a run of two steps on CPUs: the job with +rehearse=cpu
(conf/rehearse/cpu.yaml), a small model with random weights and the job's tokenizer, a few rows of its data, and a coin
in place of its rewards' scores. substitute: what is made up where it is not on this machine.
Exit status: 0 if nothing failed, 1 if the job would fail, 2 for a wrong argument, 130 if it was interrupted.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from recipe.fspo import CONF_DIR
from recipe.fspo.job import JOB, compose
from recipe.runner.faults.resources import needs_of, rollout_only_ranks
from recipe.runner.launch import compose as runner
from recipe.runner.launch import loggers
from recipe.runner.launch.commands import BAD_INPUT, FAILED, BadInput
from recipe.runner.launch.data_files import read_table
from recipe.runner.launch.end_of_turn import generation_eos
from recipe.runner.launch.inputs import MODEL_AND_DATA, data_files, generated_files, model_folder
from recipe.runner.launch.reward_function import BadReward, load, result_problem
from recipe.runner.launch.run_settings import with_settings_of_run
from recipe.runner.launch.values import PreflightError
from recipe.runner.plan.model import read_architecture
from recipe.runner.plan.prediction import plan
from recipe.runner.plan.setup import job_arguments

_MODEL, _REWARD, _FILES = "actor_rollout_ref.model.path", "reward.custom_reward_function", ("train_files", "val_files")
#: Rows of a small file, more than two steps need; rows of a file among which the shortest prompts are chosen.
_ROWS, _SEARCHED = 16, 2048
_load = functools.cache(load)


async def compute_score(*, rehearsed_path: str, rehearsed_name: str, **arguments: Any) -> Any:
    """What the job's reward function returns, its score replaced by a coin, 0.0 or 1.0: random weights never earn one,
    and groups of equal rewards have no gradient. BadReward if verl could not use what the function returns."""
    function = _load(rehearsed_path, rehearsed_name)
    if inspect.iscoroutinefunction(function):
        result = await function(**arguments)
    else:  # in a thread, as verl calls it
        result = await asyncio.to_thread(function, **arguments)
    if problem := result_problem(result):
        raise BadReward(problem)
    coin = float(zlib.crc32(arguments["solution_str"].encode()) % 2)
    return {**result, "score": coin} if isinstance(result, dict) else coin


def checked(overrides: Sequence[str], substitute: Collection[str] = ()) -> tuple[DictConfig, str, list[str]]:
    """The prepared job, its size in words, and what this machine cannot try; ``substitute`` says what may be made up.
    PreflightError names every problem of the job's checks and the planner, or else of model and data."""
    from recipe.runner.launch.prepare import prepare  # imports verl

    problems: list[str] = []
    config = compose(overrides)
    try:
        planned = plan(config, JOB)
        problems += planned.problems
    except BadInput as error:
        problems += str(error).splitlines()
    try:
        start = prepare(config, JOB, overrides, elsewhere=True)
    except PreflightError as error:
        problems += error.problems
    problems += loggers.problems(config)  # a login node knows the logins of the job
    if problems:
        raise PreflightError(*dict.fromkeys(problems))
    config, path = start.config, start.config.actor_rollout_ref.model.path
    absent = [path] if "model" in substitute and model_folder(path) is None else []
    if "data" in substitute and not generated_files(config.data):
        absent += [file for key in _FILES for file in data_files(config.data, key) if not Path(file).is_file()]
    of_inputs = [problem for rule in MODEL_AND_DATA for problem in rule(config)]
    problems = [problem for problem in of_inputs if not any(name in problem for name in absent)]
    if model_folder(path) is None and path not in absent and not any(_MODEL in problem for problem in problems):
        problems.append(f"{_MODEL}={path!r} is not on this machine: download it, give its folder, or substitute=model")
    if problems:
        raise PreflightError(*problems)
    size = f"{needs_of(config).gpus} GPUs, {planned.model.parameters / 1e9:.2f}e9 parameters"
    untried = [*start.unsettled, *(f"{name}: only its size or its columns are real" for name in absent)]
    return config, size, [line for line in untried if line not in of_inputs]


def small_overrides(overrides: Sequence[str], config: DictConfig, out: Path) -> list[str]:
    """The ``overrides`` of a checked job but for keys of ``+rehearse=cpu``, with what is made for it in ``out``."""
    group = OmegaConf.merge(*map(OmegaConf.load, (runner.CONF_DIR / "cpu.yaml", CONF_DIR / "rehearse/cpu.yaml")))
    keys = runner.parsed(overrides)
    kept = [key.input_line for key in keys if OmegaConf.select(group, key.key_or_group, default=keys) is keys]
    custom = config.reward.custom_reward_function
    made: dict[str, Any] = {
        "run.dir": str(out / "run"),
        _MODEL: str(out / "model"),
        f"{_REWARD}.reward_kwargs.rehearsed_path": custom.path or "pkg://verl.utils.reward_score",
        f"{_REWARD}.reward_kwargs.rehearsed_name": custom.name if custom.path else "default_compute_score",
    }
    if rollout_only_ranks(config):
        made["actor_rollout_ref.rollout.nnodes"] = 1
    made |= small_data(config, out, small_model(config.actor_rollout_ref.model.path, out / "model"))
    return [*kept, "+rehearse=cpu", *(f"++{key}={json.dumps(value)}" for key, value in made.items())]


def small_model(path: str, folder: Path) -> Any:
    """Write two layers of the model's architecture with random weights, and its tokenizer; returns the latter.
    Heads to a key head, tied embeddings, biases, norms and positions stay. Without the model: a byte tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    fields, _ = read_architecture(path)
    own = model_folder(path)
    tokenizer = byte_tokenizer(fields["max_position_embeddings"]) if own is None else AutoTokenizer.from_pretrained(own)
    heads, kv_heads = fields["num_attention_heads"], fields.get("num_key_value_heads") or fields["num_attention_heads"]
    hidden = min(kv_heads, 2) * min(heads // kv_heads, 4) * 32  # a head size that vLLM's attention for CPUs has
    fields = {name: value for name, value in fields.items() if name not in ("layer_types", "max_window_layers")} | {
        "num_hidden_layers": min(fields["num_hidden_layers"], 2),
        "num_key_value_heads": min(kv_heads, 2),
        "num_attention_heads": hidden // 32,
        "head_dim": 32,
        "intermediate_size": hidden * fields["intermediate_size"] // fields["hidden_size"],
        "hidden_size": hidden,
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.bfloat16)
    if own is not None:
        model.generation_config.eos_token_id = generation_eos(str(own), trust_remote_code=False) or None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def byte_tokenizer(max_length: int) -> Any:
    """A tokenizer of Qwen's kind (transformers insists on the model's) with a token a byte; its eos ends no turn."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocab = {symbol: number for number, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokens = dict.fromkeys(("eos_token", "pad_token"), "<|endoftext|>") | {"unk_token": None}
    tokens["additional_special_tokens"] = ["<|im_start|>", "<|im_end|>"]
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], model_max_length=max_length, **tokens)
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def small_data(config: DictConfig, folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Write the rows with the shortest prompts of each data file, or sums for a file that is not here; their settings.
    None where the run writes the files of an embedded task itself."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def addition(number: int) -> dict[str, Any]:
        prompt = [{"role": "user", "content": f"What is {number} + {number + 1}?"}]
        truth = {"style": "rule", "ground_truth": str(2 * number + 1)}
        row = {"data_source": "math_dapo", "ability": "math", "reward_model": truth}  # verl's own reward knows it, too
        return row | {config.data.prompt_key: prompt, "extra_info": {"index": number}}

    def small(name: str, file: Path) -> str:
        table = read_table(file).slice(0, _SEARCHED) if file.is_file() else pa.Table.from_pylist(sums)
        prompts = table[config.data.prompt_key].to_pylist()
        lengths = [len(tokenizer.apply_chat_template(prompt, **template)) for prompt in prompts]
        shortest = sorted(range(len(lengths)), key=lengths.__getitem__)[:_ROWS]
        pq.write_table(table.take(shortest), folder / f"{name}-{file.stem}.parquet")
        return str(folder / f"{name}-{file.stem}.parquet")

    if generated_files(config.data):
        return {}
    template = {"add_generation_prompt": True, "return_dict": False, **(config.data.apply_chat_template_kwargs or {})}
    sums = [addition(row) for row in range(_ROWS)]
    files = {key: enumerate(map(Path, data_files(config.data, key))) for key in _FILES}
    return {f"data.{key}": [small(f"{key}-{number}", file) for number, file in files[key]] for key in _FILES}


def main(arguments: Sequence[str]) -> int:
    """Check a job, and become its small run; returns the exit status if a check fails."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__, end="")
        return 0
    environment = {name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "RAY_ADDRESS")}
    try:
        own, overrides = job_arguments(arguments, ["substitute"])
        substitute = names.split(",") if isinstance(names := own.get("substitute", []), str) else names
        if not isinstance(substitute, list) or any(name not in ("data", "model") for name in substitute):
            raise BadInput(f"substitute={names}: give data, model or both")
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_LOGGING_LEVEL": "WARN"}  # before verl is imported
    try:
        overrides = with_settings_of_run(overrides)
        config, size, untried = checked(overrides, substitute)
    except (PreflightError, HydraException, OmegaConfBaseException) as error:
        print(error if isinstance(error, PreflightError) else f"error: {error}", file=sys.stderr)
        return FAILED
    out = Path(tempfile.mkdtemp(prefix="fspo-rehearsal-"))
    command = [sys.executable, "-m", JOB.command, *small_overrides(overrides, config, out)]
    untried = [f"not tried: {line}" for line in untried]
    print(f"the checks pass: {size}", *untried, f"two steps on CPUs, in {out}", sep="\n", flush=True)
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
