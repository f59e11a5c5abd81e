"""``python -m recipe.fspo.plan``: what fits, what it refuses and which key it names, times and output."""

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
from recipe.runner.plan.memory import PHASES
from recipe.runner.plan.prediction import Plan, plan
from recipe.runner.plan.setup import Hardware
from recipe.runner.plan.step_time import response_lengths

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
    # Twice the replicas, and no wait for the longest response; the copies of the weights are on the host.
    assert apart.time["generation"] <= together.time["generation"] / 2
    slower = max(apart.time["log_probs"] + apart.time["update"], apart.time["generation"])
    assert apart.time["total"] == slower + apart.time["rest"]
    assert apart.time["gpu_hours"] == 24 * apart.time["hours"]
    copies = 2 * apart.model.parameters * apart.setup.master_bytes
    assert apart.memory.host_bytes - together.memory.host_bytes == pytest.approx(copies)
    assert planned(*separate, "fspo.pi_old=rollout").memory.host_bytes == together.memory.host_bytes
    assert planned("mode=colocate_async").time["generation"] <= together.time["generation"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.n_gpus_per_node=1"], ("n_gpus_per_node=1 ", "=2")),
        ([f"{_ACTOR}.ulysses_sequence_parallel_size=3"], ("ulysses_sequence_parallel_size=3",)),
        (["data.max_response_length=40000"], ("42048", "32768", "max_response_length")),
        (["trainer.max_actor_ckpt_to_keep=12"], ("12 checkpoints", "1098 GiB", "disk_gb=1024", "ckpt_to_keep")),
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


def test_step_time_scales_as_its_assumptions_say() -> None:
    even = {"slowest": 1.0}
    base, twice = planned(**even).time, planned("trainer.nnodes=2", **even).time
    for part in ("log_probs", "update"):
        assert twice[part] == pytest.approx(base[part] / 2)
    assert planned(mfu=0.7, **even).time["update"] == pytest.approx(base["update"] / 2)
    # Padded packs are as many on every rank, so the slowest one's share is in their fill.
    padded = planned(f"{_ACTOR}.pad_to_length=true", slowest=3.0, fill=0.5, fill_log_probs=0.8).time
    for part, fill in (("update", 0.5), ("log_probs", 0.8)):
        assert padded[part] == pytest.approx(base[part] / fill)
        assert planned(slowest=3.0, fill=0.5).time[part] == pytest.approx(base[part] * 3)
    for nodes, fill in ((1, 0.95), (2, 0.93)):  # simulated
        packs = planned(f"trainer.nnodes={nodes}").time
        assert (packs["fill"], packs["slowest"]) == (pytest.approx(fill, abs=0.01), pytest.approx(1, abs=0.002))
    assert planned("actor_rollout_ref.model.use_liger=true").time["update"] < base["update"]
    # F for the old policy, as much for the reference where it is needed, 4 F for the update
    forward = base["update"] / 4
    for needed, share in (
        ("fspo.kl_to_start=false", 1),
        ("trainer.test_freq=10", 1 / 10 + 1),  # where the distance to the start is measured
        ("fspo.kl_to_start=false fspo.pi_old=rollout", 0),
        ("algorithm.use_kl_in_reward=true", 1 + 1),
    ):
        assert planned(*needed.split(), **even).time["log_probs"] == pytest.approx(forward * share), needed
    assert base["tokens"] == pytest.approx(512 * 16 * 2256)
    parts = base["generation"] + base["log_probs"] + base["update"] + base["rest"]
    assert base["total"] == pytest.approx(parts)
    in_all = 300 * parts + 31 * base["validation"] + 60 * base["save"] + base["starts"] * 300
    assert base["hours"] == pytest.approx(in_all / 3600)
    assert base["gpu_hours"] == pytest.approx(8 * base["hours"])
    offload = f"{_ACTOR}.fsdp_config.optimizer_offload=false"
    moved = 4 * 8_190_735_360 * 4 / 8 / 25e9  # to the host and back, before and after
    assert base["rest"] - planned(offload).time["rest"] == pytest.approx(moved)


def test_few_network_cards_make_a_step_wait_for_weights_and_gradients() -> None:
    def update(*overrides: str, rate: float) -> float:
        keys = [f"{_ACTOR}.fsdp_config.{override}" for override in overrides]
        return planned("trainer.nnodes=2", *keys, network_gb_per_s=rate).time["update"]

    fast, slow = update(rate=400), update(rate=5)
    assert fast == pytest.approx(planned().time["update"] / 2, rel=1e-3)
    for remedy in ("fsdp_size=8", "forward_prefetch=true"):
        assert fast <= update(remedy, rate=5) < slow
    assert planned(network_gb_per_s=1).time["update"] == planned().time["update"]  # one node


def test_generation_by_hand() -> None:
    """One replica, nothing but the weights to read, all responses at the maximum."""
    settings = {
        "gpu_tb_per_s": 1e-3,
        "decode_efficiency": 1,
        "mean_prompt": 1,
        "mean_response": 8192,
        "gpu_tflops": 1e12,
    }
    many = planned(**settings)
    # 4 replicas of 2 GPUs with 2048 sequences each, as many at once as the cache holds.
    at_once = many.time["concurrent"]
    assert at_once == many.memory.kv_tokens // 4097
    # Five times as many sequences as there are slots, less a few in the last round; two all-reduces a layer.
    full, rest = divmod(2048, at_once)

    def step(sequences: int) -> float:
        return (2 * 8_190_735_360 + sequences * (1 + 4096) * 144 * 1024) / 2e9 + 2e-3 + 72 * 20e-6

    assert many.time["generation"] == pytest.approx(8192 * (full * step(at_once) + step(rest)), rel=1e-6)
    # Unless the next batch follows: then all slots are busy all the time.
    follows = planned("mode=colocate_async", **settings)
    assert follows.time["generation"] == pytest.approx(2048 * 8192 / at_once * step(at_once), rel=1e-6)
    slow = planned(front_end=1000.0, mean_prompt=1, mean_response=8192)
    assert slow.time["front_end"] == pytest.approx(0.7)
    assert slow.time["generation"] >= 2048 * 8192 / 700


def test_lengths_are_spread_over_prompts_and_have_their_mean() -> None:
    lengths = response_lengths(512, 16, 2000.0, 8192).reshape(512, 16)
    assert (lengths.mean(), lengths.max()) == (pytest.approx(2000), 8192)
    within, between = lengths.std(1).mean(), lengths.mean(1).std()
    assert all(0.4 * 2000 < each < 0.6 * 2000 for each in (within, between))


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
    assert re.search(r"^total +72\.32 +17\.34 +28\.51 +15\.54 +7\.91 +18\.45$", out, re.M)
    assert re.search(r"^fits +yes +yes +yes +yes +yes +yes$", out, re.M)
    assert run("experiment=qwen3_1_7b")[0] == 0
    status, out, err = run("nodes=1", "gpus=1")
    assert status == 2
    assert re.search(r"^fits .*NO", out, re.M)
    assert re.search(r"^error: update: .* \d+\.\d GiB of 79.2.* Adam moments .*trainer\.nnodes$", err, re.M)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("mfu=much", r"mfu='much'"),
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


#: An RTX 4090, the smallest GPU of the first job; docs/clusters.md.
RTX_4090 = "gpus=1 gpu_gb=23.6 gpu_tflops=165 gpu_tb_per_s=1.008 mean_prompt=130 val_prompts=1319"


@pytest.mark.parametrize(
    ("experiment", "fixed"),
    [
        ("qwen3_8b", "gpus=8 actor_rollout_ref.actor.fsdp_config.param_offload=true"),
        ("qwen3_1_7b", "gpus=8"),
        ("gsm8k_0_5b", RTX_4090),
    ],
)
def test_a_shipped_job_is_the_cheapest_layout_that_leaves_memory(run: Run, experiment: str, fixed: str) -> None:
    asked = [f"experiment={experiment}", *fixed.split()]
    status, out, err = run(*asked, "nodes=1", "mode=sync", "search=true")
    assert status == 0, err
    _, header, first, *others = out.splitlines()
    assert header.split()[:2] == ["GPU", "hours"] and len(others) >= 3
    gpu_hours, *_, spare = first.split()[:4]
    assert first.endswith("  as it is") and float(spare) >= 3
    assert [float(line.split()[0]) for line in others] >= [float(gpu_hours)] * len(others)
    # The first and the next one, pasted, are what their lines say.
    for line, overrides in ((first, []), (others[0], others[0].split()[4:])):
        says = re.search(r": ([\d.]+) h, (\S+) GPU hours$", run(*asked, *overrides)[1], re.M)
        assert says and float(says[1]) == pytest.approx(float(line.split()[1]), abs=0.06)
        assert float(says[2]) == pytest.approx(float(line.split()[0]), rel=0.01)


def test_a_search_tries_every_mode(run: Run) -> None:
    status, out, _ = run("search=true")
    assert (status, len(out.splitlines())) == (0, 7) and "mode=colocate_async" in out


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(JOB, "recipe.fspo.plan", ["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("nodes", "gpus", "model_config", *Hardware.model_fields):
        assert re.search(rf"^  {name} +\S", text, re.M), name
