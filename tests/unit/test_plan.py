"""``python -m recipe.runner.plan``: what fits, what it refuses and which remedy it names, times, bands and output."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from composing import composed, composed_from

from recipe.runner.launch.commands import BadInput
from recipe.runner.plan import __main__ as plan
from recipe.runner.plan import setup
from recipe.runner.plan.memory import PHASES
from recipe.runner.plan.setup import Hardware, NotPlannableError

Run = Callable[..., tuple[int, str, str]]


def planned(*overrides: str, **hardware: float) -> dict[str, Any]:
    return plan.plan(composed("experiment=qwen3_8b", *overrides), Hardware(**hardware))


# ------------------------------------------------------------------ what fits, and what does not


@pytest.mark.parametrize(
    ("overrides", "hardware", "says"),
    [
        (["actor_rollout_ref.rollout.gpu_memory_utilization=0.98"], {}, r"gpu_memory_utilization=0\.95$"),
        (["actor_rollout_ref.rollout.gpu_memory_utilization=0.1"], {}, r"room for 0 tokens .*utilization=0\.15$"),
        (["actor_rollout_ref.model.enable_gradient_checkpointing=false"], {}, r"enable_gradient_checkpointing=true$"),
        (["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=131072"], {}, r"ppo_max_token_len_per_gpu=\d+$"),
        (
            [
                "actor_rollout_ref.actor.use_dynamic_bsz=false",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
            ],
            {},
            r"set actor_rollout_ref\.actor\.ppo_micro_batch_size_per_gpu=8$",
        ),
        (["actor_rollout_ref.rollout.free_cache_engine=false"], {}, r"set .*rollout\.free_cache_engine=true"),
        ([], {"gpu_gb": 24}, r"the optimizer's step needs .*: set trainer\.nnodes=\d+$"),
        (["trainer.nnodes=2"], {"gpu_gb": 28}, r"the update needs .*: set .*\.ppo_max_token_len_per_gpu=\d+$"),
    ],
)
def test_the_remedy_that_is_named_helps(overrides: list[str], hardware: dict[str, float], says: str) -> None:
    problems = planned(*overrides, **hardware)["problems"]
    assert any(re.search(says, problem) for problem in problems), problems
    remedies = {remedy for problem in problems for remedy in problem.rpartition(": set ")[2].split()}
    assert planned(*overrides, *remedies, **hardware)["problems"] == []


def test_devices_that_only_generate_have_vllm_to_themselves() -> None:
    separate = ["mode=separate_async", "actor_rollout_ref.rollout.nnodes=2"]
    together, apart = planned(), planned(*separate)
    assert (together["setup"]["rollout_gpus"], apart["setup"]["rollout_gpus"]) == (0, 16)
    assert {name for name, value in apart["memory"]["rollout"].items() if value} <= {
        "CUDA, NCCL, fragmentation", "vLLM weights", "vLLM keys and values", "vLLM the rest", "total",
    }  # fmt: skip
    assert not any("vLLM" in name for phase in PHASES[1:] for name in apart["memory"][phase])
    # Twice the replicas, and no wait for the longest response; the copies of the weights are on the host.
    assert apart["time_s"]["generation"] <= together["time_s"]["generation"] / 2
    training = sum(apart["time_s"][name] for name in ("log_probs", "update", "offload"))
    assert apart["time_s"]["total"] == max(training, apart["time_s"]["generation"])
    copies = 2 * apart["model"]["parameters"] * apart["setup"]["master_bytes"]
    assert apart["host_bytes_per_node"] - together["host_bytes_per_node"] == pytest.approx(copies)
    assert planned(*separate, "fspo.pi_old=rollout")["host_bytes_per_node"] == together["host_bytes_per_node"]
    assert planned("mode=colocate_async")["time_s"]["generation"] <= together["time_s"]["generation"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.n_gpus_per_node=1"], r"n_gpus_per_node=1 is not a multiple of rollout's parallel sizes=2"),
        (["actor_rollout_ref.actor.ulysses_sequence_parallel_size=3"], r"multiple of ulysses_sequence_parallel_size=3"),
        (["data.max_response_length=40000"], r"= 42048 exceeds the model's max_position_embeddings = 32768"),
    ],
)
def test_settings_that_do_not_go_together_are_problems(overrides: list[str], says: str) -> None:
    problems = planned(*overrides)["problems"]
    assert any(re.search(says, problem) for problem in problems), problems


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["experiment=demo"], r"trainer\.device=cpu: the planner describes runs on GPUs"),
        (["actor_rollout_ref.model.lora_rank=8"], r"lora_rank=8: the planner has no formula"),
        (["actor_rollout_ref.actor.strategy=megatron"], r"strategy=megatron: the planner knows fsdp and fsdp2"),
        (["actor_rollout_ref.actor.fsdp_config.model_dtype=fp8"], r"model_dtype=fp8: the planner knows fp32"),
        (["actor_rollout_ref.actor.policy_loss.clip_low=-1"], r"policy_loss\.clip_low=-1"),
        (["actor_rollout_ref.model.path=Qwen/Qwen3-4B"], r"recipe\.runner\.plan .*model_config=PATH"),
        (["trainer.nnodes=some"], r"trainer\.nnodes=some must be a whole number"),
        (["trainer.total_training_steps=-3"], r"total_training_steps=-3 must be a whole number of 1 or more, or null"),
        (["trainer.total_training_steps=null"], r"total_training_steps=null: give it, or trainer\.total_epochs"),
        (
            ["trainer.test_freq=null", "actor_rollout_ref.model.lora_rank=null"],
            r"lora_rank=null must(.|\n)*test_freq=null",
        ),
        (["trainer.n_gpus_per_node=0"], r"trainer\.n_gpus_per_node=0 must be a whole number of 1 or more"),
    ],
)
def test_what_cannot_be_planned_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        planned(*overrides)


def test_assumptions_are_checked() -> None:
    for values, says in (
        ({"decode_overhead_ms": 0}, "decode_overhead_ms=0 must be above 0"),
        ({"gpu_gb": -80}, "gpu_gb=-80 must be above 0"),
        ({"mfu": 2}, "mfu=2 is a share: give a value up to 1"),
    ):
        with pytest.raises(NotPlannableError, match=says):
            Hardware(**values)
    assert Hardware(reserve_gb=0).reserve_gb == 0


# ------------------------------------------------------------------ time and band


def test_step_time_scales_as_its_assumptions_say() -> None:
    base, twice = planned(), planned("trainer.nnodes=2")
    for part in ("log_probs", "update", "offload"):
        assert twice["time_s"][part] == pytest.approx(base["time_s"][part] / 2)
    assert planned(mfu=0.7)["time_s"]["update"] == pytest.approx(base["time_s"]["update"] / 2)
    # F for the old policy, as much for the reference where it is needed, 4 F for the update
    forward = base["time_s"]["update"] / 4
    for needed, share in (
        ("fspo.kl_to_start=false", 0),
        ("trainer.test_freq=10", 1 / 10),
        ("actor_rollout_ref.actor.use_kl_loss=true", 1),
    ):
        assert planned(needed)["time_s"]["log_probs"] == pytest.approx(forward * (1 + share)), needed
    assert base["tokens_per_step"] == {"expected": 512 * 16 * 2256, "at_most": 512 * 16 * 10_240}
    parts = ("generation", "log_probs", "update", "offload")
    assert base["time_s"]["total"] == pytest.approx(sum(base["time_s"][part] for part in parts))


def test_generation_by_hand() -> None:
    """One replica, nothing but the weights to read, all responses at the maximum."""
    many = planned(gpu_tb_per_s=1e-3, decode_efficiency=1.0, mean_prompt=1, mean_response=8192, gpu_tflops=1e12)
    # 4 replicas of 2 GPUs with 2048 sequences each, as many at once as the cache holds.
    at_once = many["concurrent_sequences_per_replica"]
    assert at_once == many["kv_tokens_per_replica"] // 8193
    step = (2 * 8_190_735_360 + at_once * (1 + 4096) * 144 * 1024) / 2e9 + 2e-3
    assert many["time_s"]["generation"] == pytest.approx(2048 * 8192 / at_once * step, rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "low", "high"),
    [
        (["algo=fspo"], 0.03 * math.sqrt(8192), 0.03 * math.sqrt(8192)),
        (["algo=rloo"], -math.log(0.8), math.log(1.2)),
        (["algo=gspo"], -8192 * math.log1p(-3e-4), 8192 * math.log1p(4e-4)),
        (["algo=gspo_verl"], -8192 * math.log1p(-3e-4), 8192 * math.log1p(4e-4)),
        (["data.max_response_length=1024"], 0.03 * 32, 0.03 * 32),
        (["actor_rollout_ref.actor.policy_loss.clip_high=0.05"], 0.03 * math.sqrt(8192), 0.05 * math.sqrt(8192)),
    ],
)
def test_the_band_at_the_longest_response(overrides: list[str], low: float, high: float) -> None:
    band = planned(*overrides)["band"]
    assert (-band["lower"], band["upper"]) == (pytest.approx(low), pytest.approx(high))
    assert band["ratio_high"] == pytest.approx(math.exp(high))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algo=fspo"], "a constant dual clip at a ratio of 3"),
        (["algo=fspo", "actor_rollout_ref.actor.policy_loss.s_max=2"], "s_max=2 acts inside the band"),
        (["algo=fspo_v1"], "centred at the measured drift"),
        (["algo=fspo_quantile"], r"aims at an acceptance of 0\.85"),
        (["algo=grpo"], r"clipped at 0\.2/0\.2; no band on S"),
    ],
)
def test_notes_on_the_band(overrides: list[str], says: str) -> None:
    assert any(re.search(says, note) for note in planned(*overrides)["band"]["notes"])


def test_acceptance_agrees_with_the_documented_measurement() -> None:
    # docs/algorithms.md: 0.354 measured, 0.350 Gaussian, at L = 8192 without drift correction, 0.682 with it.
    assert planned("algo=fspo")["band"]["acceptance"] == pytest.approx(0.350, abs=2e-3)
    assert planned("algo=fspo_v1")["band"]["acceptance"] == pytest.approx(0.682, abs=2e-3)


# ------------------------------------------------------------------ the command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command on the 8B model: exit status, stdout and stderr."""
    monkeypatch.setattr(setup, "compose", composed_from)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = plan.main(["experiment=qwen3_8b", *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_a_plan_is_printed(run: Run) -> None:
    status, out, err = run("nodes=2", "gpus=8")
    assert (status, err) == (0, "")
    assert "2 x 8 GPUs of 80 GiB" in out
    assert re.search(r"^fits +yes +yes +yes +yes +yes$", out, re.M)
    assert re.search(r"S from -2\.715 to \+2\.715 nats, ratio 0\.0662 to 15\.1; accepts 35%", out)
    assert run("experiment=qwen3_1_7b")[0] == 0
    status, out, err = run("nodes=1", "gpus=1")
    assert status == 2
    assert re.search(r"^fits .*NO", out, re.M)
    assert re.search(r"^error: the update needs \d+\.\d GiB of 80 GiB .*: set trainer\.n_gpus_per_node=4$", err, re.M)


def test_json_holds_everything(run: Run) -> None:
    status, out, err = run("json=true", "nodes=2")
    found = json.loads(out)
    assert (status, err, found["problems"]) == (0, "", [])
    assert found["setup"]["ranks"] == 16
    assert set(found["memory"]) == set(PHASES)
    for items in found["memory"].values():
        total = items.pop("total")
        assert total == pytest.approx(sum(items.values()))
    status, out, err = run("json=true", "nodes=1", "gpus=1")
    assert status == 2
    assert [f"error: {problem}" for problem in json.loads(out)["problems"]] == err.splitlines()


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("mfu=much", r"mfu='much' is not a number"),
        ("json=maybe", r"json='maybe': give true or false"),
        ("nodes=some", r"trainer\.nnodes=some must be a whole number"),
        ("nonsense", r"'nonsense' is not KEY=VALUE"),
        ("no_such_key=1", r"Could not override 'no_such_key'"),
    ],
)
def test_a_bad_argument_is_one_error(run: Run, argument: str, says: str) -> None:
    status, out, err = run(argument)
    assert (status, out) == (2, "")
    assert re.search(rf"^error: {says}", err), err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[]", r"is not a model's config\.json"),
        (b"\xff\xfe{}", r"is not a JSON file .*can't decode"),
        (b'{"model_type": "qwen3", "num_attention_heads": 8, "hidden_size": null}', r"has no hidden_size"),
        (b'{"model_type": "qwen3", "num_attention_heads": 0}', r"num_attention_heads=0 must be a whole number of 1"),
        (None, r"model_config=3: 3 does not exist"),
    ],
)
def test_a_bad_model_config_is_one_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("3").write_bytes(content)
    status, out, err = run("model_config=3")
    assert (status, out) == (2, "")
    assert re.search(rf"^error: .*{says}", err), err


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("nodes", "gpus", "model_config", "json", *Hardware.__dataclass_fields__):
        assert re.search(rf"^  {name} +\S", text, re.M), name
    assert set(Hardware.MEANING) == set(Hardware.__dataclass_fields__)
