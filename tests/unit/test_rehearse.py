"""``python -m recipe.fspo.rehearse``: planted mistakes are named before anything starts; what the small run keeps."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from composing import composed, composed_from
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoTokenizer

from fspo.rewards.custom import BadReward
from recipe.fspo.job import JOB
from recipe.runner.launch.commands import FAILED, BadInput
from recipe.runner.rehearse import command, material, shrink
from recipe.runner.rehearse.command import Rehearsal, parse
from recipe.runner.rehearse.cpu_run import Failed, verdict
from recipe.runner.rehearse.reward import compute_score

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The 8B job's overrides, with its data and its model made up."""
    job = ["experiment=qwen3_8b", "trainer.nnodes=2"]
    out = tmp_path_factory.mktemp("rehearsal")
    return [*job, *material.stand_ins(composed(*job), out, ["data", "model"], [])]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "compose", lambda _, *rest: composed_from(*rest))


def model_of(overrides: list[str]) -> Path:
    return Path(json.loads(next(o for o in overrides if "model.path" in o).partition("=")[2]))


def found_in(overrides: list[str], out: Path) -> str:
    """What the checks say, as the command would print it."""
    try:
        return Rehearsal(JOB, list(overrides), out).checks()
    except Failed as failed:
        return str(failed)


def test_the_job_itself_passes(stand_ins: list[str], tmp_path: Path) -> None:
    assert found_in(stand_ins, tmp_path) == "16 GPUs, 8.19e9 parameters"


#: Overrides with a mistake, and what names it. Those of a group are made together: all are named at once.
MISTAKES = (
    {
        "data.train_files=/no/such.parquet": r"data\.train_files: /no/such\.parquet .*make it",
        "data.max_response_length=40000": r"42048 .* 32768: shorten",
        f"{_ROLLOUT}.val_kwargs.do_sample=false": r"val_kwargs\.n=8 .*do_sample=true, or n=1",
        f"{_ROLLOUT}.tensor_model_parallel_size=3": r"size=3 .* 32 attention heads: set it to 2",
        "reward.custom_reward_function.path=/no/reward.py": r"custom_reward_function\.path='/no/reward\.py'",
        "trainer.logger=[console,wandb]": r"wandb.*WANDB_API_KEY",
    },
    {
        f"{_ROLLOUT}.dtype=bf61": r"rollout\.dtype=bf61 .*fp32",
        f"+{_ACTOR}.fsdp_config.mixed_precision={{param_dtype:half}}": r"param_dtype=half .*fp32",
        f"{_ACTOR}.optim.lr=1e6-": r"optim\.lr=1e6-",
    },
    {
        "trainer.nnodes=3": r"rollout\.n=2048 .*n_gpus_per_node=24: change",
        "actor_rollout_ref.model.path=/no/model": r"model\.path='/no/model' .*give one",
    },
    {f"{_ROLLOUT}.gpu_memory_utilization=0.98": r"utilization=0\.98 .* GiB .*: lower .*gpu_memory_utilization"},
    {"mode=separate_async": r"mode=separate_async .*mode=colocate_async"},
    {"actor_rollout_ref.model.path=Qwen/Qwen3-9B-Base": r"=Qwen/Qwen3-9B-Base: .*set it to the model.s folder"},
    {f"{_ACTOR}.optim.lrr=1e-6": r"lrr"},
)


@pytest.mark.parametrize("mistakes", MISTAKES, ids=lambda mistakes: next(iter(mistakes)))
def test_planted_mistakes_are_named_with_their_remedy(
    mistakes: dict[str, str], stand_ins: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    found = found_in([*stand_ins, *mistakes], tmp_path)
    assert [(mistake, found) for mistake, says in mistakes.items() if not re.search(says, found)] == []


def test_what_another_machine_may_have_is_not_covered(stand_ins: list[str], tmp_path: Path) -> None:
    for override, says in (
        ("run.dir=/dev/null/run", r"run\.dir=/dev/null/run: /dev/null .*give another"),
        ("trainer.max_actor_ckpt_to_keep=99999", r"GiB are free .*99999 checkpoint\(s\) .*make room"),
    ):
        rehearsal = Rehearsal(JOB, [*stand_ins, override], tmp_path)
        assert rehearsal.checks()
        assert any(re.search(says, line) for line in rehearsal.not_covered), rehearsal.not_covered


def test_an_incomplete_model_is_named(stand_ins: list[str], tmp_path: Path) -> None:
    folder = shutil.copytree(model_of(stand_ins), tmp_path / "model")
    job = [*stand_ins, f"actor_rollout_ref.model.path={folder}"]
    (folder / "chat_template.jinja").unlink()
    (folder / "model.safetensors").write_text("version https://git-lfs")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = found_in(job, tmp_path)
    assert re.search(r"without a chat template, .*add chat_template\.jinja", found)
    assert re.search(
        r"incomplete: model-00001-of-00002\.safetensors, model\.safetensors is missing or a git-lfs", found
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert re.search(r"model\.path='.*' has no tokenizer: copy its files", found_in(job, tmp_path))


def test_what_lies_on_the_disk_is_looked_at(
    stand_ins: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pq.write_table(pa.table({"question": ["1 + 1"] * 512}), tmp_path / "own.parquet")
    actor = tmp_path / "run" / "checkpoints" / "global_step_5" / "actor"
    actor.mkdir(parents=True)
    for rank in range(8):
        torch.save({}, actor / f"model_world_size_8_rank_{rank}.pt")
    (actor.parents[1] / "latest_checkpointed_iteration.txt").write_text("5")
    overrides = ["model.path=Qwen/Qwen3-8B-Base", f"train_files={tmp_path}/own.parquet", f"dir={tmp_path}/run"]
    keys = ("actor_rollout_ref", "data", "run")
    found = found_in([*stand_ins, *map(".".join, zip(keys, overrides, strict=True))], tmp_path)
    assert "is not in the local hub cache and HF_HUB_OFFLINE=1: download it, or give a folder" in found
    assert re.search(r"data\.train_files: .*own\.parquet has no column .*prompt", found)
    assert "was saved by 8 FSDP rank(s) and this run has 16" in found
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = found_in([*stand_ins, "actor_rollout_ref.model.path=Qwen/Qwen3-8B-Base"], tmp_path)
    assert re.search(r"model\.path='Qwen/Qwen3-8B-Base' is not on this machine, .*add substitute=model", found)


# ---------------------------------------------------------------- what the small run is


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_small_run_keeps_the_job_s_ratios(stand_ins: list[str], ranks: int) -> None:
    config = composed(*stand_ins)
    settings = shrink.shrunk(config, ranks, 100) | shrink.replaced(config, ranks, Path("/out/run"))
    small = composed(*stand_ins, *shrink.as_overrides(settings))
    for both in (config, small):
        assert both.data.train_batch_size / both.actor_rollout_ref.actor.ppo_mini_batch_size == 4
        longest = both.data.max_prompt_length + both.data.max_response_length
        assert both.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 2 * longest
        assert both.actor_rollout_ref.actor.fsdp_config.pad_to_length_bucket == 2 * longest
        assert both.actor_rollout_ref.rollout.max_model_len == longest
        assert both.actor_rollout_ref.rollout.dtype == "bfloat16"
        assert both.actor_rollout_ref.actor.pad_to_length and both.actor_rollout_ref.actor.use_dynamic_bsz
    assert (small.trainer.nnodes, small.trainer.n_gpus_per_node, small.trainer.device) == (1, ranks, "cpu")


def test_a_cpu_s_settings_are_those_of_the_demo() -> None:
    demo = composed("experiment=demo")
    for key, value in shrink.OF_A_CPU.items():
        if not key.endswith(("parallel_size", "use_fused_kernels")):  # which the demo leaves as they are
            assert OmegaConf.select(demo, key) == value, key


def test_the_small_model_has_the_architecture_and_its_own_tokenizer(stand_ins: list[str], tmp_path: Path) -> None:
    origin = AutoConfig.from_pretrained(model_of(stand_ins))
    material.small_model(str(model_of(stand_ins)), tmp_path)
    small = AutoConfig.from_pretrained(tmp_path)
    assert small.architectures == origin.architectures == ["Qwen3ForCausalLM"]
    assert (small.num_hidden_layers, small.tie_word_embeddings) == (2, origin.tie_word_embeddings)
    ratio = origin.num_attention_heads // origin.num_key_value_heads
    assert small.num_attention_heads // small.num_key_value_heads == ratio
    assert small.max_position_embeddings == origin.max_position_embeddings
    assert small.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path))


def test_the_rows_with_the_shortest_prompts_are_taken(tmp_path: Path, stand_ins: list[str]) -> None:
    rows = [{"prompt": [{"role": "user", "content": "x" * length}]} for length in range(20, 10, -1)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "own.parquet")
    tokenizer = AutoTokenizer.from_pretrained(model_of(stand_ins))
    config = composed(*stand_ins, f"data.train_files={tmp_path}/own.parquet", f"data.val_files={tmp_path}/own.parquet")
    data, longest = material.small_data(config, tmp_path / "small", tokenizer, 3)
    table = pq.read_table(data["data.train_files"][0])
    assert [len(prompt[0]["content"]) for prompt in table["prompt"].to_pylist()] == [11, 12, 13]
    assert longest == 14  # and the "=" of the template


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


# ---------------------------------------------------------------- arguments and verdicts


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("ranks=8", "ranks=8: give 1 to 4"),
        ("substitute=weights", "'weights' is not known"),
        ("out=/tmp", "exists already"),
    ],
)
def test_wrong_arguments(argument: str, says: str) -> None:
    with pytest.raises(BadInput, match=re.escape(says)):
        parse(["experiment=qwen3_8b", argument])


def test_a_part_that_fails_ends_the_rehearsal(
    stand_ins: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "end_on_signals", lambda: None)
    monkeypatch.setattr(command.os, "environ", dict(os.environ))
    assert command.main(JOB, "", [*stand_ins, "data.train_files=/no.parquet", f"out={tmp_path / 'out'}"]) == FAILED
    printed = capsys.readouterr()
    assert printed.out == f"checks and planner ...\nwritten to {tmp_path / 'out'}\n"
    assert printed.err.startswith("error: data.train_files: /no.parquet")


def test_what_a_run_left_undone_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "metrics": {"actor/grad_norm": 1.0}}) + "\n")
    (tmp_path / "run.json").write_text('{"algo": "fspo", "status": "failed"}')
    (tmp_path / "stdout.log").write_text("")
    with pytest.raises(Failed, match=r"run\.json says failed"):
        verdict(tmp_path)
