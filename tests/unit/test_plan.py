"""``python -m recipe.fspo.plan``: what fits, what it refuses and which key it names, times and output."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from composing import composed, composed_from

from recipe.fspo.job import JOB
from recipe.runner.launch.commands import BadInput
from recipe.runner.plan import command, estimate
from recipe.runner.plan.memory import PHASES
from recipe.runner.plan.prediction import Plan, plan
from recipe.runner.plan.setup import Hardware

Run = Callable[..., tuple[int, str, str]]
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"


def planned(*overrides: str, **hardware: float) -> Plan:
    return plan(composed("experiment=qwen3_8b", *overrides), Hardware(**hardware))


# ------------------------------------------------------------------ what fits, and what does not


@pytest.mark.parametrize(
    ("overrides", "hardware", "remedy"),
    [
        ([f"{_ROLLOUT}.gpu_memory_utilization=0.98"], {}, f"lower {_ROLLOUT}.gpu_memory_utilization=0.9"),
        ([f"{_ROLLOUT}.gpu_memory_utilization=0.1"], {}, f"{_ROLLOUT}.gpu_memory_utilization=0.2"),
        ([f"{_CHECKPOINTING}=false"], {}, f"{_CHECKPOINTING}=true"),
        ([f"{_ACTOR}.ppo_max_token_len_per_gpu=131072"], {}, f"lower {_ACTOR}.ppo_max_token_len_per_gpu=40960"),
        ([f"{_ROLLOUT}.free_cache_engine=false"], {}, f"{_ROLLOUT}.free_cache_engine=true"),
        ([], {"gpu_gb": 24}, "raise trainer.n_gpus_per_node or trainer.nnodes=8"),
    ],
)
def test_the_key_that_is_named_helps(overrides: list[str], hardware: dict[str, float], remedy: str) -> None:
    words, _, value = remedy.rpartition("=")
    problems = planned(*overrides, **hardware).problems
    assert any(words in problem for problem in problems), problems
    assert planned(*overrides, f"{words.rpartition(' ')[2]}={value}", **hardware).problems == []


def test_devices_that_only_generate_have_vllm_to_themselves() -> None:
    separate = ["mode=separate_async", f"{_ROLLOUT}.nnodes=2"]
    together, apart = planned(), planned(*separate)
    assert (together.setup.rollout_gpus, apart.setup.rollout_gpus) == (0, 16)
    items = apart.memory.items
    assert {name for name, value in items["rollout"].items() if value} <= {
        "CUDA, NCCL, fragmentation", "vLLM weights", "vLLM keys and values", "vLLM the rest",
    }  # fmt: skip
    assert not any("vLLM" in name for phase in PHASES[1:] for name in items[phase])
    # Twice the replicas, and no wait for the longest response; the copies of the weights are on the host.
    assert apart.time["generation"] <= together.time["generation"] / 2
    assert apart.time["total"] == max(apart.time["log_probs"] + apart.time["update"], apart.time["generation"])
    copies = 2 * apart.model.parameters * apart.setup.master_bytes
    assert apart.memory.host_bytes - together.memory.host_bytes == pytest.approx(copies)
    assert planned(*separate, "fspo.pi_old=rollout").memory.host_bytes == together.memory.host_bytes
    assert planned("mode=colocate_async").time["generation"] <= together.time["generation"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.n_gpus_per_node=1"], r"n_gpus_per_node=1 .* parallel sizes=2"),
        ([f"{_ACTOR}.ulysses_sequence_parallel_size=3"], r"ulysses_sequence_parallel_size=3"),
        (["data.max_response_length=40000"], r"42048 exceeds .* 32768"),
    ],
)
def test_settings_that_do_not_go_together_are_problems(overrides: list[str], says: str) -> None:
    problems = planned(*overrides).problems
    assert any(re.search(says, problem) for problem in problems), problems


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["experiment=demo"], r"trainer\.device=cpu: .*experiment=qwen3_8b"),
        (["actor_rollout_ref.model.lora_rank=8"], r"lora_rank=8: .*give 0"),
        ([f"{_ACTOR}.strategy=fsdp"], r"strategy=fsdp: .*fsdp2"),
        (["actor_rollout_ref.model.override_config.attn_implementation=eager"], r"=eager: .*flash_attention_2"),
        ([f"{_ACTOR}.fsdp_config.model_dtype=fp8"], r"model_dtype=fp8 .*fp32"),
        (["actor_rollout_ref.model.path=Qwen/Qwen3-4B"], r"=Qwen/Qwen3-4B: .*Qwen3-8B.*model_config=PATH"),
        (["trainer.test_freq=null", "actor_rollout_ref.model.lora_rank=null"], r"(?s)lora_rank=null.*test_freq=null"),
    ],
)
def test_what_cannot_be_planned_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        planned(*overrides)


# ------------------------------------------------------------------ time


def test_step_time_scales_as_its_assumptions_say() -> None:
    base, twice = planned().time, planned("trainer.nnodes=2").time
    for part in ("log_probs", "update"):
        assert twice[part] == pytest.approx(base[part] / 2)
    assert planned(mfu=0.7).time["update"] == pytest.approx(base["update"] / 2)
    # F for the old policy, as much for the reference where it is needed, 4 F for the update
    forward = base["update"] / 4
    for needed, share in (
        ("fspo.kl_to_start=false", 0),
        ("trainer.test_freq=10", 1 / 10),
        (f"{_ACTOR}.use_kl_loss=true", 1),
    ):
        assert planned(needed).time["log_probs"] == pytest.approx(forward * (1 + share)), needed
    assert base["tokens"] == 512 * 16 * 2256
    assert base["total"] == pytest.approx(base["generation"] + base["log_probs"] + base["update"])


def test_generation_by_hand() -> None:
    """One replica, nothing but the weights to read, all responses at the maximum."""
    many = planned(gpu_tb_per_s=1e-3, decode_efficiency=1.0, mean_prompt=1, mean_response=8192, gpu_tflops=1e12)
    # 4 replicas of 2 GPUs with 2048 sequences each, as many at once as the cache holds.
    at_once = many.time["concurrent"]
    assert at_once == many.memory.kv_tokens // 8193
    step = (2 * 8_190_735_360 + at_once * (1 + 4096) * 144 * 1024) / 2e9 + 2e-3
    assert many.time["generation"] == pytest.approx(2048 * 8192 / at_once * step, rel=1e-6)


# ------------------------------------------------------------------ the command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command on the 8B model: exit status, stdout and stderr."""
    monkeypatch.setattr(command, "compose", lambda _, *rest: composed_from(*rest))

    def run(*arguments: str) -> tuple[int, str, str]:
        status = command.main(JOB, "", ["experiment=qwen3_8b", *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_a_plan_is_printed(run: Run) -> None:
    status, out, err = run("nodes=2", "gpus=8")
    assert (status, err) == (0, "")
    assert "2 x 8 GPUs of 80 GiB" in out
    assert re.search(r"^total +60\.00 +17\.34 +28\.51 +15\.54 +17\.95$", out, re.M)
    assert re.search(r"^fits +yes +yes +yes +yes +yes$", out, re.M)
    assert run("experiment=qwen3_1_7b")[0] == 0
    status, out, err = run("nodes=1", "gpus=1")
    assert status == 2
    assert re.search(r"^fits .*NO", out, re.M)
    assert re.search(r"^error: update: .* \d+\.\d GiB of 80.* Adam moments .*trainer\.nnodes$", err, re.M)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("mfu=much", r"mfu='much'"),
        ("gpu_gb=-80", r"gpu_gb=-80"),
        ("nodes=some", r"trainer\.nnodes=some"),
        ("nonsense", r"'nonsense' is not KEY=VALUE"),
        ("no_such_key=1", r".*'no_such_key'"),
        ("model_config=3", r"3 .*model_config=PATH"),
        ("model_config=4", r"4 .*model_config=PATH"),
    ],
)
def test_a_bad_argument_is_one_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("4").write_bytes(b"\xff\xfe{}")
    status, out, err = run(argument)
    assert (status, out) == (2, "")
    assert re.search(rf"^error: {says}", err), err


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(JOB, "recipe.fspo.plan", ["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("nodes", "gpus", "model_config", *Hardware.model_fields):
        assert re.search(rf"^  {name} +\S", text, re.M), name


# ------------------------------------------------------------------ for a dry run


def test_an_estimate_is_lines_or_why_there_is_none() -> None:
    lines = estimate(composed("experiment=qwen3_8b", f"{_ROLLOUT}.gpu_memory_utilization=0.98"))
    assert lines[0].startswith("Qwen/Qwen3-8B-Base")
    assert "80 GiB" in lines[-1] and "gpu_memory_utilization=0.98" in lines[-1]
    (line,) = estimate(composed("experiment=demo"))
    assert line.startswith("not planned: trainer.device=cpu")
