"""``python -m recipe.runner.rehearse``: planted mistakes are named before anything starts; what the small run keeps."""

from __future__ import annotations

import json
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

from recipe.runner.launch.commands import BadInput
from recipe.runner.rehearse import __main__ as command
from recipe.runner.rehearse import material, shrink
from recipe.runner.rehearse.__main__ import Failed, NotChecked, Rehearsal, parse
from recipe.runner.rehearse.cpu_run import RunFailed, _verdict

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The 8B job's overrides, with its data and its model made up."""
    job = ["experiment=qwen3_8b", "trainer.nnodes=2"]
    out = tmp_path_factory.mktemp("rehearsal")
    return [*job, *material.stand_ins(composed(*job), out, ["data", "model"], [])]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "compose", composed_from)
    monkeypatch.setattr(shrink, "compose", composed_from)


def model_of(overrides: list[str]) -> Path:
    return Path(json.loads(next(o for o in overrides if "model.path" in o).partition("=")[2]))


def verdict(overrides: list[str], out: Path) -> str:
    """What the checks say, as the command would print it."""
    try:
        return Rehearsal(list(overrides), out).checks()
    except Failed as failed:
        return str(failed)


def test_the_job_itself_passes(stand_ins: list[str], tmp_path: Path) -> None:
    assert verdict(stand_ins, tmp_path) == "16 GPUs, 8.19e9 parameters"


#: Overrides with a mistake, and what is said of it. Those of a group are made at once: all are told at once.
MISTAKES = (
    {
        "data.train_files=/no/such.parquet": r"data\.train_files: /no/such\.parquet does not exist; make it",
        "data.train_batch_size=500": r"train_batch_size=500 is not a multiple of .*ppo_mini_batch_size=128: change",
        "data.max_response_length=40000": r"max_response_length = 42048 exceeds .*_embeddings = 32768: shorten",
        f"{_ROLLOUT}.max_model_len=4096": r"exceeds actor_rollout_ref\.rollout\.max_model_len = 4096: set it to \d+",
        f"{_ACTOR}.ppo_max_token_len_per_gpu=8192": r"=8192 is less than the longest .*set it to 42048 or more",
        f"{_ACTOR}.optim.lr=1": r"optim\.lr=1 must be a number above 0 and below 0\.01: 1e-6 is usual",
        f"{_ACTOR}.policy_loss.clip_low=0.2": r"clip_low=0\.2 is per sqrt\(token\) .*about 0\.03",
        f"{_ACTOR}.policy_loss.clip_high=3e-4": r"clip_high=0\.0003 is per sqrt\(token\) .*about 0\.03",
        f"{_ROLLOUT}.top_p=0.95": r"top_p=0\.95 .*set it to 1",
        f"{_ROLLOUT}.val_kwargs.do_sample=false": r"val_kwargs\.n=8 with do_sample=false .*do_sample=true, or n=1",
        f"{_ROLLOUT}.tensor_model_parallel_size=3": r"size=3 does not divide .* 32 attention heads: set it to 2",
        "reward.custom_reward_function.path=/no/reward.py": r"custom_reward_function\.path='/no/reward\.py'",
        "trainer.logger=[console,wandb]": r"no login for api\.wandb\.ai, .*`wandb login`, or set WANDB_API_KEY",
        "fspo.run_dir=/dev/null/run": r"/dev/null is not a folder that can be written to; give another",
    },
    {
        "trainer.nnodes=3": r"rollout\.n=2048 is not a multiple of .*n_gpus_per_node=24: change",
        f"{_ROLLOUT}.dtype=bf61": r"rollout\.dtype=bf61 is not a type of numbers: choose one of fp32",
        f"+{_ACTOR}.fsdp_config.mixed_precision={{param_dtype:half}}": r"param_dtype=half is not a type of numbers: ch",
        f"{_ACTOR}.optim.lr=1e6-": r"optim\.lr=1e6- must be a number",
        "data.prompt_key=question": r"question",
        "reward.custom_reward_function.name=score": r"name='score'",
        "algo=gspo": "",
        f"{_ACTOR}.policy_loss.clip_high=0.2": r"clip_high=0\.2 is per token .*3e-4 and 4e-4",
        "actor_rollout_ref.model.path=/no/model": r"model\.path='/no/model' is not a folder: give one",
    },
    {
        f"{_ROLLOUT}.gpu_memory_utilization=0.98": r"gpu_memory_utilization=0\.98: .* GiB: set .*utilization=0\.\d+",
        "fspo.run_dir=/tmp/full": r"run_dir=/tmp/full: .* GiB are free .*: make room, or give another folder",
        "trainer.max_actor_ckpt_to_keep=99999": r"99999 checkpoint\(s\) need",
    },
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
    found = verdict([*stand_ins, *mistakes], tmp_path)
    assert [(mistake, found) for mistake, says in mistakes.items() if not re.search(says, found)] == []


def test_an_incomplete_model_is_named(stand_ins: list[str], tmp_path: Path) -> None:
    folder = shutil.copytree(model_of(stand_ins), tmp_path / "model")
    job = [*stand_ins, f"actor_rollout_ref.model.path={folder}"]
    (folder / "chat_template.jinja").unlink()
    (folder / "model.safetensors").write_text("version https://git-lfs")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = verdict(job, tmp_path)
    assert re.search(r"without a chat template, .*add chat_template\.jinja", found)
    assert re.search(
        r"incomplete: model-00001-of-00002\.safetensors, model\.safetensors is missing or a git-lfs", found
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert re.search(r"model\.path='.*' has no tokenizer: copy its files", verdict(job, tmp_path))


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
    overrides = ["model.path=Qwen/Qwen3-8B-Base", f"train_files={tmp_path}/own.parquet", f"run_dir={tmp_path}/run"]
    keys = ("actor_rollout_ref", "data", "fspo")
    found = verdict([*stand_ins, *map(".".join, zip(keys, overrides, strict=True))], tmp_path)
    assert "is not in the local hub cache and HF_HUB_OFFLINE=1: download it, or give a folder" in found
    assert re.search(r"data\.train_files: .*own\.parquet has no column .*prompt", found)
    assert "was saved by 8 FSDP rank(s) and this run has 16" in found
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = verdict([*stand_ins, "actor_rollout_ref.model.path=Qwen/Qwen3-8B-Base"], tmp_path)
    assert re.search(r"model\.path='Qwen/Qwen3-8B-Base' is not on this machine, .*add substitute=model", found)


def test_weights_that_travel_between_gpus_are_not_rehearsed(stand_ins: list[str], tmp_path: Path) -> None:
    with pytest.raises(NotChecked, match="mode=separate_async"):
        Rehearsal([*stand_ins, "mode=separate_async"], tmp_path / "out").steps()


def test_a_reward_that_raises_is_shown_before_ray_starts(stand_ins: list[str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    1 / 0\n"
    )
    job = Rehearsal([*stand_ins, f"reward.custom_reward_function.path={tmp_path}/own.py"], tmp_path / "out")
    with pytest.raises(Failed, match=r'(?s)own\.py, .*ZeroDivisionError: division by zero.*own\.py", line 2'):
        job.steps()


# ---------------------------------------------------------------- what the small run is


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_small_run_keeps_the_job_s_ratios(stand_ins: list[str], ranks: int) -> None:
    config = composed(*stand_ins)
    changes = shrink.changes(config, Path("/out/run"), Path("/out/model"), {}, 100, ranks)
    small = composed(*stand_ins, *(change.override() for change in changes))
    for both in (config, small):
        assert both.data.train_batch_size / both.actor_rollout_ref.actor.ppo_mini_batch_size == 4
        longest = both.data.max_prompt_length + both.data.max_response_length
        assert both.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 2 * longest
        assert both.actor_rollout_ref.actor.fsdp_config.pad_to_length_bucket == 2 * longest
        assert both.actor_rollout_ref.rollout.max_model_len == longest
    assert small.trainer.n_gpus_per_node == ranks
    assert small.trainer.nnodes == 1
    for key, value in shrink.as_is(config, changes):
        assert OmegaConf.select(small, key) == OmegaConf.select(config, key) == value
    kept = dict(shrink.as_is(config, changes))
    assert kept[f"{_ROLLOUT}.dtype"] == "bfloat16"
    assert {f"{_ACTOR}.pad_to_length", f"{_ACTOR}.use_dynamic_bsz"} <= kept.keys()


def test_only_changes_that_are_named_are_made(stand_ins: list[str]) -> None:
    config = composed(*stand_ins, "fspo.run_dir=/job")
    changes = shrink.changes(config, Path("/out/run"), Path("/out/model"), {}, 100, 2)
    small = composed(*stand_ins, "fspo.run_dir=/job", *(change.override() for change in changes))
    keys = {change.key for change in changes}
    from recipe.runner.launch.run_settings import changes as differences

    for key, *_ in differences(OmegaConf.to_container(config), OmegaConf.to_container(small)):
        assert any(key == known or known.startswith(f"{key}.") for known in keys), key


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


def test_each_source_of_a_file_is_kept(tmp_path: Path, stand_ins: list[str]) -> None:
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": "x" * length}],
            "reward_model": {"ground_truth": "1"},
        }
        for source, lengths in (("a", range(10, 20)), ("b", range(50, 60)))
        for length in lengths
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "own.parquet")
    tokenizer = AutoTokenizer.from_pretrained(model_of(stand_ins))
    config = composed(*stand_ins, f"data.train_files={tmp_path}/own.parquet", f"data.val_files={tmp_path}/own.parquet")
    data, longest = material.small_data(config, tmp_path / "small", tokenizer, 3)
    table = pq.read_table(data["train_files"][0])
    assert sorted(table["data_source"].to_pylist()) == ["a", "a", "b"]
    assert longest == 51  # and the "=" of the template


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
    stand_ins: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not command.rehearse(Rehearsal([*stand_ins, "data.train_files=/no.parquet"], tmp_path))
    printed = capsys.readouterr()
    assert re.search(r"checks and planner \(\d+ s\) FAILED\n$", printed.out)
    assert printed.err.startswith("error: data.train_files: /no.parquet does not exist")


def test_what_a_run_left_undone_is_said(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "metrics": {"actor/grad_norm": 1.0}}) + "\n")
    (tmp_path / "run.json").write_text('{"algo": "fspo", "status": "failed"}')
    (tmp_path / "stdout.log").write_text("")
    with pytest.raises(RunFailed, match=r"run\.json says failed"):
        _verdict(tmp_path)
