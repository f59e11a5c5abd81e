"""``python -m recipe.fspo.rehearse``: planted mistakes are named before anything starts; what the small run keeps."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from composing import composed, composed_from
from hydra.errors import HydraException
from omegaconf import OmegaConf
from test_checkpoints import write_checkpoint
from transformers import AutoConfig, AutoTokenizer

from recipe.fspo import rehearse
from recipe.fspo.job import JOB, compose
from recipe.fspo.rehearse import compute_score
from recipe.runner.faults.resources import needs_of
from recipe.runner.launch.commands import BAD_INPUT, FAILED
from recipe.runner.launch.reward_function import BadReward
from recipe.runner.launch.values import PreflightError

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
#: On 16 GPUs; neither its data nor its model are here.
_8B = ("experiment=qwen3_8b", "trainer.nnodes=2")
_QWEN = "Qwen/Qwen3-8B-Base"


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Composed quickly, with an empty cache of the hub, and no account anywhere."""
    monkeypatch.setattr(rehearse, "compose", composed_from)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)


def problems(*overrides: str, substitute: tuple[str, ...] = ("data", "model")) -> str:
    """What the checks say, as the command would print it; the size of the job where they pass."""
    try:
        return rehearse.checked([*_8B, *overrides], substitute)[1]
    except (PreflightError, HydraException) as error:
        return str(error)


def test_the_job_itself_passes_if_its_model_and_data_may_be_made_up() -> None:
    assert problems() == "16 GPUs, 8.19e9 parameters"
    assert re.search(rf"path='{_QWEN}' is not on this machine: .*substitute=model", problems(substitute=("data",)))
    assert re.search(r"data\.train_files: .*dapo_math_17k\.parquet .*make it", problems(substitute=("model",)))
    *_, untried = rehearse.checked(_8B, ["data", "model"])
    assert any(line.startswith(_QWEN) for line in untried)
    assert sum("parquet" in line for line in untried) == 5


#: Overrides with a mistake, and what names it. Those of a group are made together: all are named at once.
MISTAKES = (
    {
        "data.max_response_length=40000": r"42048 .* 32768.*max_response_length",
        f"{_ROLLOUT}.tensor_model_parallel_size=3": r"size=3 .* 32 .* 2",
        "reward.custom_reward_function.path=/no/reward.py": r"custom_reward_function\.path.*/no/reward\.py",
        "trainer.logger=[console,wandb]": r"wandb.*WANDB_API_KEY",
    },
    {
        "mode=separate_async": r"rollout\.nnodes \* actor_rollout_ref\.rollout\.n_gpus_per_node=1 ",
        f"{_ROLLOUT}.n_gpus_per_node=1": r"n_gpus_per_node=1 .*=2",
        f"{_ROLLOUT}.gpu_memory_utilization=0.98": r"utilization=0\.98 .* GiB .*gpu_memory_utilization",
    },
    {
        f"{_ROLLOUT}.dtype=bf61": r"rollout\.dtype=bf61 .*fp32",
        f"+{_ACTOR}.fsdp_config.mixed_precision={{param_dtype:half}}": r"param_dtype=half .*fp32",
        f"{_ACTOR}.optim.lr=1e6-": r"optim\.lr=1e6-",
    },
    {"trainer.nnodes=3": r"rollout\.n=2048 .*n_gpus_per_node=24"},
    {f"{_MODEL}.path=/no/model": r"model\.path=/no/model: .*folder"},
    {f"{_MODEL}.path=Qwen/Qwen3-9B-Base": r"=Qwen/Qwen3-9B-Base: .*folder"},
    {f"{_ACTOR}.optim.lrr=1e-6": r"lrr"},
)


@pytest.mark.parametrize("mistakes", MISTAKES, ids=lambda mistakes: next(iter(mistakes)))
def test_planted_mistakes_are_named_with_their_remedy(mistakes: dict[str, str]) -> None:
    substitute = ("data",) if f"{_MODEL}.path=/no/model" in mistakes else ("data", "model")
    printed = problems(*mistakes, substitute=substitute)
    assert [(mistake, printed) for mistake, says in mistakes.items() if not re.search(says, printed)] == []


def test_what_lies_on_the_disk_is_looked_at(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["1 + 1"] * 512}), tmp_path / "own.parquet")
    write_checkpoint(tmp_path / "run" / "checkpoints", 5, ranks=8)
    assert "is not the folder of a run" in problems(f"run.dir={tmp_path}/run")
    (tmp_path / "run" / "run.json").write_text('{"status": "failed", "versions": {}}')
    (tmp_path / "run" / "config.yaml").write_text(f"run: {{dir: {tmp_path}/run}}")
    printed = problems(f"run.dir={tmp_path}/run")
    assert re.search(r"global_step_5.* 8 .* 16\b", printed)
    printed = problems(f"data.train_files={tmp_path}/own.parquet")
    assert re.search(r"data\.train_files: .*own\.parquet .*prompt", printed)


def test_wrong_arguments_and_failures_end_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for argument in ("substitute=weights", "substitute=", "substitute=5", "substitute=[[data]]"):
        assert rehearse.main([*_8B, argument]) == BAD_INPUT
        assert re.search(r"^error: substitute=.*: give data, model", capsys.readouterr().err)
    for variable in ("VERL_PLATFORM", "VERL_LOGGING_LEVEL"):  # main sets them for the whole process
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    assert rehearse.main([*_8B, "substitute=model", "data.train_files=/no.parquet"]) == FAILED
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(r"^error: data\.train_files: /no\.parquet", printed.err, re.M)


#: Keys that the job's command gives, and the group decides.
_GIVEN = (f"{_ACTOR}.ppo_max_token_len_per_gpu=40960", f"{_ROLLOUT}.tensor_model_parallel_size=4", "trainer.nnodes=2")


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_the_small_job_is_the_job_but_for_its_group_and_passes_the_checks_of_a_run(mode: str, tmp_path: Path) -> None:
    from recipe.runner.launch.prepare import check, on_this_machine

    job = [*_8B, *_GIVEN, f"mode={mode}", "algo=gspo", f"{_ACTOR}.optim.lr=3e-6"]
    config, size, _ = rehearse.checked(job, ["data", "model"])
    generating = 8 if mode == "separate_async" else 0
    assert size.startswith(f"{16 + generating} GPUs")
    overrides = rehearse.small_overrides(job, config, tmp_path)
    assert "+rehearse=cpu" in overrides and not set(_GIVEN) & set(overrides)
    small = on_this_machine(compose(overrides), elsewhere=True)
    check(small, JOB)
    assert (small.trainer.nnodes, small.trainer.n_gpus_per_node, small.trainer.device) == (1, 2, "cpu")
    assert needs_of(small).gpus == small.ray_kwargs.ray_init.num_gpus == (4 if generating else 2)
    actor, rollout = small.actor_rollout_ref.actor, small.actor_rollout_ref.rollout
    longest = small.data.max_prompt_length + small.data.max_response_length
    assert (rollout.max_model_len, actor.ppo_max_token_len_per_gpu) == (longest, 2 * longest)
    for key in (
        "fspo.algo", "trainer.v1.trainer_mode", f"{_ACTOR}.optim.lr", f"{_ACTOR}.use_dynamic_bsz", f"{_ROLLOUT}.dtype",
        f"{_ACTOR}.fsdp_config.param_offload", f"{_MODEL}.enable_gradient_checkpointing",
    ):  # fmt: skip
        assert OmegaConf.select(small, key) == OmegaConf.select(config, key), key
    of_both = [c.data.train_batch_size // c.actor_rollout_ref.actor.ppo_mini_batch_size for c in (config, small)]
    assert of_both == [4, 4]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B-Base", "Qwen/Qwen3-1.7B-Base", "Qwen/Qwen2.5-0.5B-Instruct"])
@pytest.mark.parametrize("here", [True, False])
def test_the_small_model_has_the_architecture_and_its_own_tokenizer(tmp_path: Path, name: str, here: bool) -> None:
    origin = rehearse.read_architecture(name)[0]
    own = rehearse.byte_tokenizer(origin["max_position_embeddings"])
    own.add_tokens(["one more"])
    own.save_pretrained(tmp_path / "own")
    (tmp_path / "own" / "config.json").write_text(json.dumps(origin))
    rehearse.small_model(str(tmp_path / "own") if here else name, tmp_path / "small")
    small, tokenizer = (kind.from_pretrained(tmp_path / "small") for kind in (AutoConfig, AutoTokenizer))
    assert small.vocab_size == len(tokenizer) == len(own) - (not here)
    assert len(tokenizer.encode("\n")) == 1 and tokenizer.decode(tokenizer.encode("5é\n")) == "5é\n"  # verl needs it
    assert small.architectures == origin["architectures"]
    assert (small.num_hidden_layers, small.tie_word_embeddings) == (2, origin["tie_word_embeddings"])
    ratio = origin["num_attention_heads"] // origin["num_key_value_heads"]
    assert small.num_attention_heads // small.num_key_value_heads == min(4, ratio)
    assert small.max_position_embeddings == origin["max_position_embeddings"]


def test_the_rows_with_the_shortest_prompts_are_taken_or_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": [{"role": "user", "content": "x" * length}]} for length in range(20, 10, -1)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "own.parquet")
    tokenizer = rehearse.byte_tokenizer(1024)
    config = composed(*_8B, f"data.train_files={tmp_path}/own.parquet", f"data.val_files={tmp_path}/none.parquet")
    monkeypatch.setattr(rehearse, "_ROWS", 3)
    data = rehearse.small_data(config, tmp_path, tokenizer)
    taken, made_up = (pq.read_table(data[f"data.{key}"][0]).to_pylist() for key in ("train_files", "val_files"))
    assert [len(row["prompt"][0]["content"]) for row in taken] == [11, 12, 13]
    assert [row["reward_model"]["ground_truth"] for row in made_up] == ["1", "3", "5"]


def test_the_job_s_reward_is_called_and_a_coin_decides(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def compute_score(solution_str, **row):\n    return {'score': 7, 'seen': row['data_source']}\n")
    score = functools.partial(compute_score, rehearsed_path=str(own), rehearsed_name="compute_score", data_source="x")
    results = [asyncio.run(score(solution_str=str(number))) for number in range(20)]
    assert {result["score"] for result in results} == {0.0, 1.0}
    assert {result["seen"] for result in results} == {"x"}
    own.write_text("def compute_score(solution_str, **row):\n    return 'good'\n")
    with pytest.raises(BadReward, match="good"):
        asyncio.run(score(rehearsed_path=f"file://{own}", solution_str="1"))
