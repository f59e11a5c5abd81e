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
from messages import holds
from omegaconf import OmegaConf
from test_checkpoints import write_checkpoint
from transformers import AutoConfig, AutoTokenizer

from fspo.rewards.custom import BadReward
from recipe.fspo.job import JOB
from recipe.runner.faults.resources import needs_of
from recipe.runner.launch.commands import FAILED, BadInput
from recipe.runner.launch.values import PreflightError
from recipe.runner.rehearse import command, material, shrink
from recipe.runner.rehearse.cpu_run import Failed, verdict
from recipe.runner.rehearse.reward import compute_score

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
#: On 16 GPUs; neither its data nor its model are here.
_8B = ("experiment=qwen3_8b", "trainer.nnodes=2")
_QWEN = "Qwen/Qwen3-8B-Base"


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Composed quickly, with an empty cache of the hub, and no account anywhere."""
    monkeypatch.setattr(command, "compose", lambda _, *rest: composed_from(*rest))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)


def problems(*overrides: str, substitute: tuple[str, ...] = ("data", "model")) -> str:
    """What the checks say, as the command would print it; the size of the job where they pass."""
    try:
        return command.checked(JOB, [*_8B, *overrides], substitute)[1]
    except (PreflightError, HydraException) as error:
        return str(error)


def test_the_job_itself_passes_if_its_model_and_data_may_be_made_up() -> None:
    assert problems() == "16 GPUs, 8.19e9 parameters"
    assert re.search(rf"path='{_QWEN}' is not on this machine, .*add substitute=model", problems(substitute=("data",)))
    assert re.search(r"data\.train_files: .*dapo_math_17k\.parquet .*make it", problems(substitute=("model",)))
    *_, not_covered = command.checked(JOB, _8B, ["data", "model"])
    assert any(line.startswith(_QWEN) for line in not_covered)
    assert sum("parquet" in line for line in not_covered) == 5


#: Overrides with a mistake, and what names it. Those of a group are made together: all are named at once.
MISTAKES = (
    {
        "data.max_response_length=40000": r"42048 .* 32768.*max_response_length",
        f"{_ROLLOUT}.tensor_model_parallel_size=3": r"size=3 .* 32 .* 2",
        "reward.custom_reward_function.path=/no/reward.py": r"custom_reward_function\.path.*/no/reward\.py",
        "trainer.logger=[console,wandb]": r"wandb.*WANDB_API_KEY",
    },
    {
        "mode=separate_async": r"rollout\.nnodes \* rollout\.n_gpus_per_node=1 ",
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
    said = problems(*mistakes, substitute=substitute)
    assert [(mistake, said) for mistake, says in mistakes.items() if not re.search(says, said)] == []


def test_what_lies_on_the_disk_is_looked_at(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["1 + 1"] * 512}), tmp_path / "own.parquet")
    write_checkpoint(tmp_path / "run" / "checkpoints", 5, ranks=8)
    assert "is not the folder of a run" in problems(f"run.dir={tmp_path}/run")
    (tmp_path / "run" / "run.json").write_text('{"status": "failed", "versions": {}}')
    said = problems(f"run.dir={tmp_path}/run")
    assert re.search(r"global_step_5.* 8 .* 16\b", said)
    said = problems(f"data.train_files={tmp_path}/own.parquet")
    assert re.search(r"data\.train_files: .*own\.parquet .*prompt", said)


def test_wrong_arguments_and_failures_end_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for argument in ("substitute=weights", "substitute=", "substitute=5", "substitute=[[data]]", f"out={tmp_path}"):
        with pytest.raises(BadInput, match=f"^{argument.partition('=')[0]}=.*: give "):
            command.parse([*_8B, argument])
    monkeypatch.setattr(command, "end_on_signals", lambda: None)
    for variable in ("VERL_PLATFORM", "VERL_LOGGING_LEVEL", "TQDM_DISABLE"):  # main sets them for the whole process
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    out = tmp_path / "out"
    assert command.main(JOB, "", [*_8B, "substitute=model", "data.train_files=/no.parquet", f"out={out}"]) == FAILED
    printed = capsys.readouterr()
    assert printed.out == f"checks and planner ...\nwritten to {out}\n"
    assert re.search(r"^error: data\.train_files: /no\.parquet", printed.err, re.M)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_the_small_job_keeps_the_job_s_ratios_and_passes_the_checks_of_a_run(
    nodes: int, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipe.runner.launch.prepare import prepare
    from recipe.runner.launch.start import check

    overrides: list[str] = []
    monkeypatch.setattr(command.cpu_run, "run", lambda _, small, folder: overrides.extend(small) or "it ran")
    job = [*_8B, f"trainer.nnodes={nodes}", f"mode={mode}"]
    config, size, _ = command.checked(JOB, job, ["data", "model"])
    generating = 8 if mode == "separate_async" else 0
    assert size.startswith(f"{8 * nodes + generating} GPUs")
    said = command.small_run(JOB, job, config, tmp_path)
    assert said.startswith("it ran") and "\n  trainer.device: cuda -> cpu\n" in said
    small = prepare(composed(*overrides), elsewhere=True)
    check(small, JOB)
    for both in (config, small):
        assert both.data.train_batch_size / both.actor_rollout_ref.actor.ppo_mini_batch_size == 4
        longest = both.data.max_prompt_length + both.data.max_response_length
        assert both.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 2 * longest
        assert both.actor_rollout_ref.rollout.max_model_len == longest
        assert both.actor_rollout_ref.rollout.dtype == "bfloat16"
        assert both.actor_rollout_ref.actor.use_dynamic_bsz
    assert small.trainer.v1.trainer_mode == config.trainer.v1.trainer_mode
    assert (small.trainer.nnodes, small.trainer.n_gpus_per_node, small.trainer.device) == (1, 2, "cpu")
    assert needs_of(small).gpus == small.ray_kwargs.ray_init.num_gpus == (4 if generating else 2)


def test_a_cpu_s_settings_are_those_of_the_demo() -> None:
    demo = composed("experiment=demo")
    for key, value in shrink.OF_A_CPU.items():
        if not key.endswith(("parallel_size", "use_fused_kernels")):  # which the demo leaves as they are
            assert OmegaConf.select(demo, key) == value, key


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B-Base", "Qwen/Qwen3-1.7B-Base", "Qwen/Qwen2.5-0.5B-Instruct"])
@pytest.mark.parametrize("here", [True, False])
def test_the_small_model_has_the_architecture_and_its_own_tokenizer(tmp_path: Path, name: str, here: bool) -> None:
    origin = material.read_architecture(name)[0]
    own = material.byte_tokenizer(origin["max_position_embeddings"])
    own.add_tokens(["one more"])
    own.save_pretrained(tmp_path / "own")
    (tmp_path / "own" / "config.json").write_text(json.dumps(origin))
    material.small_model(str(tmp_path / "own") if here else name, tmp_path / "small")
    small, tokenizer = (kind.from_pretrained(tmp_path / "small") for kind in (AutoConfig, AutoTokenizer))
    assert small.vocab_size == len(tokenizer) == len(own) - (not here)
    assert len(tokenizer.encode("\n")) == 1 and tokenizer.decode(tokenizer.encode("5é\n")) == "5é\n"  # verl needs it
    assert small.architectures == origin["architectures"]
    assert (small.num_hidden_layers, small.tie_word_embeddings) == (2, origin["tie_word_embeddings"])
    ratio = origin["num_attention_heads"] // origin["num_key_value_heads"]
    assert small.num_attention_heads // small.num_key_value_heads == min(4, ratio)
    assert small.max_position_embeddings == origin["max_position_embeddings"]


def test_the_rows_with_the_shortest_prompts_are_taken_or_made_up(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "x" * length}]} for length in range(20, 10, -1)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "own.parquet")
    tokenizer = material.byte_tokenizer(1024)
    config = composed(*_8B, f"data.train_files={tmp_path}/own.parquet", f"data.val_files={tmp_path}/none.parquet")
    data, longest = material.small_data(config, tmp_path / "small", tokenizer, 3)
    taken, made_up = (pq.read_table(data[f"data.{key}"][0]).to_pylist() for key in ("train_files", "val_files"))
    assert [len(row["prompt"][0]["content"]) for row in taken] == [11, 12, 13]
    assert [row["reward_model"]["ground_truth"] for row in made_up] == ["1", "3", "5"]
    template = {"add_generation_prompt": True, "return_dict": False}
    assert longest == len(tokenizer.apply_chat_template(made_up[0]["prompt"], **template))


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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"actor/grad_norm": 0.0}, "2: 0.0"),
        ({"actor/grad_norm": float("nan")}, "2: nan"),
        ({"training/rollout_probs_diff_mean": 0.2}, "rollout_probs_diff_mean=0.2"),
        ({"val-core/x": None}, "validation"),
        ({"steps": 1}, "[1]"),
    ],
)
def test_what_a_run_left_undone_is_named(tmp_path: Path, change: dict[str, float | None], says: str | None) -> None:
    metrics = {"actor/grad_norm": 1.0, "training/rollout_probs_diff_mean": 1e-3, "val-core/x": 0.5} | change
    metrics = {name: value for name, value in metrics.items() if value is not None}
    lines = [json.dumps({"step": step, "metrics": metrics}) + "\n" for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines[: metrics.pop("steps", 2)]))
    write_checkpoint(tmp_path / "checkpoints", 2)
    if says is None:
        assert "1 validation scores" in verdict(tmp_path)
    else:
        with pytest.raises(Failed, match=holds(says, str(tmp_path))):
            verdict(tmp_path)
