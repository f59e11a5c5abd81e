"""``python -m recipe.fspo.plan``: what fits, what it refuses and which key it names, and output."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from composing import composed, composed_from
from messages import holds

from recipe.fspo.job import JOB
from recipe.runner.launch.commands import BadInput
from recipe.runner.plan import command
from recipe.runner.plan.memory import GIB, PHASES
from recipe.runner.plan.model import ModelShape, read_architecture
from recipe.runner.plan.prediction import Plan, plan
from recipe.runner.plan.setup import Hardware

Run = Callable[..., tuple[int, str, str]]
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"


def planned(*overrides: str, **hardware: float) -> Plan:
    return plan(composed("experiment=qwen3_8b", *overrides), JOB, Hardware(**hardware))


@pytest.mark.parametrize(
    ("overrides", "hardware", "remedy"),
    [
        ([f"{_ROLLOUT}.gpu_memory_utilization=0.98"], {}, f"lower {_ROLLOUT}.gpu_memory_utilization=0.9"),
        ([f"{_ROLLOUT}.gpu_memory_utilization=0.1"], {}, f"{_ROLLOUT}.gpu_memory_utilization=0.2"),
        ([f"{_CHECKPOINTING}=false"], {}, f"{_CHECKPOINTING}=true"),
        ([f"{_ACTOR}.ppo_max_token_len_per_gpu=131072"], {}, f"lower {_ACTOR}.ppo_max_token_len_per_gpu=40960"),
        ([f"{_ROLLOUT}.free_cache_engine=false"], {}, f"{_ROLLOUT}.free_cache_engine=true"),
        (
            [f"{_ROLLOUT}.gpu_memory_utilization=0.7"],
            {"gpu_gb": 24},
            "raise trainer.n_gpus_per_node or trainer.nnodes=8",
        ),
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
        "CUDA, NCCL, fragmentation", "vLLM's CUDA context", "vLLM weights", "vLLM keys and values", "vLLM the rest",
    }  # fmt: skip
    assert not any("vLLM" in name for phase in PHASES[1:] for name in items[phase])
    # The copies of the weights are on the host.
    copies = 2 * apart.model.parameters * apart.setup.master_bytes
    assert apart.memory.host_bytes - together.memory.host_bytes == pytest.approx(copies)
    assert planned(*separate, "fspo.pi_old=rollout").memory.host_bytes == together.memory.host_bytes


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.n_gpus_per_node=1"], ("n_gpus_per_node=1 ", "=2")),
        ([f"{_ACTOR}.ulysses_sequence_parallel_size=3"], ("ulysses_sequence_parallel_size=3",)),
        (["data.max_response_length=40000"], ("42048", "32768", "max_response_length")),
    ],
)
def test_settings_that_do_not_go_together_are_problems(overrides: list[str], says: tuple[str, ...]) -> None:
    problems = planned(*overrides).problems
    assert any(re.search(holds(*says), problem) for problem in problems), problems


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["experiment=demo"], ("trainer.device=cpu", "experiment=qwen3_8b")),
        (["actor_rollout_ref.model.lora_rank=8"], ("lora_rank=8", " 0")),
        ([f"{_ACTOR}.strategy=fsdp"], ("strategy=fsdp:", "fsdp2")),
        (["actor_rollout_ref.model.override_config.attn_implementation=eager"], ("=eager", "flash_attention_2")),
        ([f"{_ACTOR}.fsdp_config.model_dtype=fp8"], ("model_dtype=fp8", "fp32")),
        (["actor_rollout_ref.model.path=Qwen/Qwen3-4B"], ("=Qwen/Qwen3-4B", "Qwen3-8B", "model_config=PATH")),
        (["trainer.test_freq=null", "actor_rollout_ref.model.lora_rank=null"], ("lora_rank=null", "test_freq=null")),
    ],
)
def test_what_cannot_be_planned_is_refused(overrides: list[str], says: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match=holds(*says)):
        planned(*overrides)


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
    assert "2 x 8 GPUs of 79.2 GiB" in out
    memory = planned("trainer.nnodes=2").memory
    totals = [f"{memory.total(phase) / GIB:.2f}" for phase in PHASES]
    assert f"\ntotal {' '.join(totals)}\n" in re.sub(" +", " ", out)
    assert re.search(r"^fits +yes +yes +yes +yes +yes +yes$", out, re.M)
    assert run("experiment=qwen3_1_7b")[0] == 0
    status, out, err = run("nodes=1", "gpus=1")
    assert status == 2
    assert re.search(r"^fits .*NO", out, re.M)
    assert re.search(r"^error: update: .* \d+\.\d GiB of 79.2.* Adam moments .*trainer\.nnodes$", err, re.M)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("reserve_gb=much", r"reserve_gb='much'"),
        ("gpu_gb=-80", r"gpu_gb=-80"),
        ("nodes=some", r"trainer\.nnodes=some"),
        ("nonsense", r"'nonsense' .*KEY=VALUE"),
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


def test_positions_are_those_of_the_model_by_its_name() -> None:
    names = ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B-Base")
    assert [read_architecture(name)[0]["max_position_embeddings"] for name in names] == [40960, 32768] * 2


def test_a_config_that_asks_for_flash_attention_is_counted_without_it() -> None:
    fields, name = read_architecture("Qwen/Qwen3-1.7B-Base")
    asks = fields | {"attn_implementation": "flash_attention_2"}
    assert ModelShape.from_config(asks, name).parameters == ModelShape.from_config(fields, name).parameters


def test_no_remedy_is_set_already() -> None:
    problems = planned(f"{_ACTOR}.ppo_max_token_len_per_gpu=10240", gpu_gb=20).problems
    assert problems and not any(f"{_CHECKPOINTING}=true" in problem for problem in problems)
    update = [problem for problem in problems if "ppo_max_token_len_per_gpu" in problem and "lower" in problem]
    assert not update, "a budget of one sequence cannot be lower"
