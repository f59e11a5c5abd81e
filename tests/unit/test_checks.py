"""Bad input is named, with key, value and remedy, before anything expensive starts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from composing import composed, defaults_of
from hydra.utils import instantiate
from messages import holds

from fspo.losses import ALGORITHMS
from recipe.fspo import rules as method
from recipe.fspo.config import complete_loss
from recipe.fspo.job import JOB, choices
from recipe.runner import SUPPORTED_VERL
from recipe.runner.launch import checks, inputs
from recipe.runner.launch.compose import parsed
from recipe.runner.launch.no_effect import judged
from recipe.runner.launch.prepare import check, on_this_machine
from recipe.runner.launch.values import MachineProblem, PreflightError

Problems = Callable[..., list[str]]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
#: As many problems as one step needs, so that they are written quickly.
SMALL_TASK = ["data.offline_task.n_train=32", "data.offline_task.n_test=8"]
#: Micro-batches by number of sequences, as on machines without remove-padding; the demo packs them by tokens.
BY_SEQUENCES = f"{ACTOR}.use_dynamic_bsz=false"
LOSS = f"{ACTOR}.policy_loss"
CORRECTION = "algorithm.rollout_correction"


@pytest.fixture
def problems(tmp_path: Path) -> Problems:
    """Runs every check on the demo with some overrides, and returns what they said."""

    def find(*overrides: str) -> list[str]:
        try:
            config = on_this_machine(composed(f"run.dir={tmp_path}", *SMALL_TASK, *overrides))
            check(config, JOB, refused=judged(config, JOB, parsed(overrides), defaults_of(*overrides))[0])
        except PreflightError as error:
            return list(error.problems)
        return []

    return find


@pytest.mark.parametrize(
    ("nodes", "size", "replicas"),
    [(1, -1, 1), (8, -1, 1), (1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 4, 2), (8, 4, 8), (8, 8, 4), (2, 8, 1), (2, 16, 1)],
)
def test_the_check_of_room_counts_every_replica(tmp_path: Path, nodes: int, size: int, replicas: int) -> None:
    def needed(*overrides: str) -> tuple[float, str]:
        config = on_this_machine(composed(f"run.dir={tmp_path}", "trainer.max_actor_ckpt_to_keep=9999999", *overrides))
        (problem,) = checks.room_problems(config)
        return float(re.search(r"need ([\d.]+) GiB", problem)[1]), problem

    key = f"{ACTOR}.fsdp_config.fsdp_size"
    gib, problem = needed(f"trainer.nnodes={nodes}", "trainer.n_gpus_per_node=4", f"{key}={size}")
    assert gib == pytest.approx(replicas * needed()[0], rel=1e-3)
    assert (f"{replicas} replicas" in problem and f"{key}={size}" in problem and f"{key}=-1" in problem) is (
        replicas > 1
    )


@pytest.mark.parametrize("algo", choices("algo"))
def test_every_algorithm_passes_on_the_demo(problems: Problems, algo: str) -> None:
    assert problems(f"algo={algo}") == []


#: Overrides with a mistake, and what one of the sentences must hold: the key, the value, the remedy.
MISTAKES = (
    # values of another kind, or out of range
    (f"{ROLLOUT}.n=2.5", "rollout.n=2.5 ", "integer"),
    (f"{ROLLOUT}.temperature=0", "rollout.temperature=0 ", "greater than 0"),
    (f"{ACTOR}.optim.lr=0.1", "optim.lr=0.1 ", "less than 0.01"),
    (f"{ACTOR}.fsdp_config.fsdp_size=0", "fsdp_size=0 ", "-1"),
    ("trainer.save_freq=-2", "save_freq=-2 ", "-1"),
    ("actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_alpha=1.5", "lora_alpha=1.5 ", "integer"),
    ("actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_alpha=0", "lora_alpha=0 ", "or equal to 1"),
    ("run.log=few", "run.log=few ", "'headline' or 'all'"),
    ("fspo.kl_to_start=2", "fspo.kl_to_start=2 ", "boolean"),
    (f"{LOSS}.c_low=abc", f"{LOSS}.c_low=abc ", "number"),
    ("+reward.custom_reward_function.reward_kwargs=2", "reward_kwargs=2 ", "dictionary"),
    ("trainer.total_training_steps=null", "total_training_steps=null", "trainer.total_epochs"),
    ("trainer.default_local_dir=/elsewhere", "default_local_dir=/elsewhere", "run.dir=FOLDER"),
    # model, data, disk
    ("actor_rollout_ref.model.path=/no/such/model", "model.path='/no/such/model'", "hub"),
    ("+actor_rollout_ref.model.tokenizer_path=./none", "model.tokenizer_path='./none'", "copy its files"),
    ("data.val_files=file:///no/such.parquet", "data.val_files", "/no/such.parquet"),
    ("data.val_files=null", "data.val_files", "0 rows", "give more data"),
    ("data.train_max_samples=8", "data.train_files: 32 rows", "8 ", "data.train_max_samples", "data.train_batch_size"),
    ("run.dir=/dev/null/run", "run.dir=/dev/null/run", "give another"),
    ("trainer.max_actor_ckpt_to_keep=9999999", "9999999 checkpoint(s)", "make room"),
    # arithmetic
    ("data.train_batch_size=30", "train_batch_size=30 ", "ppo_mini_batch_size=8"),
    (f"trainer.n_gpus_per_node=4 {ACTOR}.fsdp_config.fsdp_size=3", "n_gpus_per_node=4 ", "fsdp_size=3"),
    ("trainer.n_gpus_per_node=3", "rollout.n=64 ", "n_gpus_per_node=3"),
    (f"{BY_SEQUENCES} {ACTOR}.ppo_micro_batch_size_per_gpu=48", "=64 ", "batch_size_per_gpu=48"),
    (BY_SEQUENCES, "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),  # verl's words
    ("data.max_response_length=600", "= 616 ", "max_position_embeddings = 512", "shorten data.max_response_length"),
    (f"{ROLLOUT}.max_model_len=128", "= 272 ", "rollout.max_model_len = 128", "max_model_len=272"),
    (
        f"{ACTOR}.ulysses_sequence_parallel_size=2 {ACTOR}.ppo_max_token_len_per_gpu=100",
        *("= 272 ", "actor.ppo_max_token_len_per_gpu = 100", "2 Ulysses", "ppo_max_token_len_per_gpu=136"),
    ),
    (f"{ROLLOUT}.tensor_model_parallel_size=3", "parallel_size=3 ", "heads", "set it to 2"),
    (f"{ROLLOUT}.tensor_model_parallel_size=3", f"{ROLLOUT}.tensor_model_parallel_size * data_parallel_size", "=3:"),
    (
        "data.max_response_length=600 +actor_rollout_ref.model.override_config.max_position_embeddings=1024",
        *("= 616 ", "max_position_embeddings = 512", "override_config", "config.json"),
    ),
    # what contradicts itself, or is not served
    (f"{ROLLOUT}.val_kwargs.n=2 {ROLLOUT}.val_kwargs.temperature=0", "val_kwargs.n=2 ", "temperature=0", "1.0"),
    (f"{ACTOR}.checkpoint.async_save=true", "async_save=true", "set it to false"),
    ("trainer.max_actor_ckpt_to_keep=1", "max_actor_ckpt_to_keep=1 ", "2 or more"),
    (f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_coef=0", "kl_loss_coef=0 ", "use_kl_loss=true", "0.001"),
    (
        "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.0",
        *("kl_ctrl.kl_coef=0.0 ", "use_kl_in_reward=true", "0.001"),
    ),
    ("algorithm.adv_estimator=foo", "adv_estimator=foo ", "grpo, "),
    # the method
    (f"algo=rloo {ROLLOUT}.n=1", "adv_estimator=rloo ", "rollout.n=1", "2 or more"),
    (f"{ROLLOUT}.top_p=0.9", "rollout.top_p=0.9 ", "top_p=1 "),
    (f"{ROLLOUT}.top_k=50", "rollout.top_k=50 ", "top_k=-1 "),
    (f"{ACTOR}.clip_ratio_high=0.28", "clip_ratio_high=0.28:", "loss_mode=fspo", LOSS),
    (f"algo=gspo_verl {ACTOR}.clip_ratio_low=0.2", "clip_ratio_low=0.2 ", "3e-4"),
    (f"{LOSS}.c_low=3e-4", f"{LOSS}.c_low=0.0003 ", "nearly every", "0.03"),
    (f"{LOSS}.c_high=2", f"{LOSS}.c_high=2", "never clip", "0.03"),
    (f"algo=gspo {LOSS}.c_high=0.03", f"{LOSS}.c_high=0.03 ", "4e-4"),
    (f"{LOSS}.exponent=2", f"{LOSS}.c_low=0.03 ", "never clip", "256 tokens"),
    (f"algo=rloo +{LOSS}.clip_low=0.2", f"{LOSS}.clip_low=0.2 ", "c_low=0.223144"),
    (f"algo=rloo ++{LOSS}.clip_high=0.2", f"{LOSS}.clip_high=0.2 ", "c_high=0.182322"),
    (f"algo=gspo +{LOSS}.clip_low=3e-4", f"{LOSS}.clip_low=0.0003 ", "c_low=0.000300045"),
    (f"algo=fspo_v1 ++{LOSS}.clip_high=0.05", f"{LOSS}.clip_high=0.05 ", "c_high=0.05"),
    (f"{LOSS}.exponent=-1", f"{LOSS}.exponent=-1", "0.5"),
    (f"{LOSS}.exponent=half", f"{LOSS}.exponent=half ", "number"),
    (f"{LOSS}.band=sqrt", f"{LOSS}.band='sqrt' ", "power", "exponent=0.5"),
    (f"{LOSS}.drift=ema", f"{LOSS}.drift='ema' "),
    (f"+{LOSS}.clip=1", f"{LOSS}: ", "'clip'", "docs/algorithms.md"),
    (
        f"{BY_SEQUENCES} {ACTOR}.ppo_micro_batch_size_per_gpu=64 {ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
        *("ppo_micro_batch_size_per_gpu=64 ", "log_prob_micro_batch_size_per_gpu=32"),
    ),
    (f"{ROLLOUT}.log_prob_max_token_len_per_gpu=1024", "ppo_max_token_len_per_gpu=2048 ", "per_gpu=1024"),
    (f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.bypass_mode=True ", "false"),
    (f"{CORRECTION}.rollout_is=token", "rollout_is=token ", "sequence or null"),
    (f"{CORRECTION}.rollout_rs='seq_sum_k1,token_k1'", "rollout_rs=seq_sum_k1,token_k1 ", "seq_..."),
    (f"{CORRECTION}.rollout_rs=seq_mean_k3", CORRECTION, "rollout_rs_threshold must be provided"),
    (f"{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_threshold=0", CORRECTION, "rollout_is_threshold"),
    (f"mode=separate_async {CORRECTION}.rollout_rs=null", "rollout_rs=null ", "seq_sqrt_k1", "allow_uncorrected=true"),
    ("mode=colocate_async fspo.pi_old=rollout", CORRECTION, "fspo.pi_old=rollout", "rollout_rs to null"),
    (f"{CORRECTION}.rollout_is=sequence fspo.pi_old=rollout", CORRECTION, "fspo.pi_old=rollout", "actor"),
    (f"{CORRECTION}.rollout_is=sequence {ROLLOUT}.calculate_log_probs=false", "log_probs=false", CORRECTION, "true"),
    (
        f"fspo.clip_values=measured algo=gspo {ACTOR}.policy_loss.c_low=0.001",
        "fspo.clip_values=measured",
        "c_low=0.001",
        "leave",
    ),
    ("fspo.accept=1.2", "fspo.accept=1.2 ", "less than 1"),
    # what verl refuses
    (f"{ACTOR}.loss_agg_mode=foo", "loss_agg_mode: foo"),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[0])
def test_a_mistake_is_named_with_key_value_and_remedy(problems: Problems, mistake: tuple[str, ...]) -> None:
    sentences = problems(*mistake[0].split())
    assert any(all(part in sentence for part in mistake[1:]) for sentence in sentences), sentences


ONE_UPDATE = f"{ACTOR}.ppo_mini_batch_size=32"


@pytest.mark.parametrize("algo", ["fspo", "fspo_quantile", "gspo", "rloo", "luspo"])
def test_a_clip_that_never_acts_is_refused(algo: str) -> None:
    (problem,) = method.problems(composed("run.dir=/nowhere", f"algo={algo}", ONE_UPDATE))
    assert f"{ONE_UPDATE} " in problem and "data.train_batch_size=32" in problem and "algo=unclipped" in problem


@pytest.mark.parametrize(
    "overrides",
    [
        f"{ACTOR}.ppo_epochs=2",
        "evaluate=true",
        "fspo.pi_old=rollout",
        "mode=colocate_async",
        "mode=separate_async",
        *(f"algo={algo}" for algo in ("unclipped", "grpo", "gspo_verl")),
    ],
)
def test_one_update_a_rollout_batch_passes_otherwise(overrides: str) -> None:
    log_probs = f"{ROLLOUT}.calculate_log_probs=true"
    assert list(method.problems(composed("run.dir=/nowhere", ONE_UPDATE, log_probs, overrides))) == []


def test_a_penalty_without_a_coefficient_of_its_own_has_verls() -> None:
    config = composed("run.dir=/nowhere", f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true")
    assert config.actor_rollout_ref.actor.kl_loss_coef == config.algorithm.kl_ctrl.kl_coef == 0.001
    assert list(checks.setting_problems(config)) == []


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Problems:
    """What a run with such settings says where no package is installed."""

    def find(*overrides: str) -> list[str]:
        config = composed("run.dir=/nowhere", *overrides)  # looks for verl
        with monkeypatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda name: None)
            return list(checks.package_problems(config))

    return find


_ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("experiment=demo", {"vllm": "make setup", "transfer_queue": "TransferQueue"}),
        ("experiment=demo actor_rollout_ref.model.use_liger=true", {"liger_kernel": r"use_liger=true.*liger-kernel"}),
        ("experiment=qwen3_8b", {"flash_attn_2_cuda": r"=flash_attention_2: .*gpu-flash-attn\.txt.*=sdpa"}),
        (f"experiment=qwen3_8b ~{_ATTENTION}", {"flash_attn_2_cuda": "use_remove_padding=true: .*=sdpa"}),
        (f"experiment=qwen3_8b {_ATTENTION}=sdpa", {}),
        ("experiment=qwen3_8b mode=separate_async", {"cupy": r"backend=nccl: .*requirements/gpu\.txt"}),
        ("experiment=demo mode=separate_async", {}),  # through shared memory
    ],
)
def test_a_package_that_is_missing_is_named_with_its_setting(
    missing: Problems, overrides: str, says: dict[str, str]
) -> None:
    sentences = missing(*overrides.split())
    assert all(isinstance(sentence, MachineProblem) for sentence in sentences)  # a dry run may be for another machine
    for package, words in says.items():
        assert [s for s in sentences if f" {package} " in s and re.search(words, s)], (package, sentences)
    optional = {re.search(r"package (\S+) is", sentence)[1] for sentence in sentences} - {"vllm", "transfer_queue"}
    flash = {"flash_attn_2_cuda"} if "qwen3_8b" in overrides and "=sdpa" not in overrides else set()
    assert optional == ({*says} | flash) - {"vllm", "transfer_queue"}


def test_another_release_of_verl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("run.dir=/nowhere")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.8.0")
    assert re.search(holds("verl 0.8.0 ", SUPPORTED_VERL), next(checks.package_problems(config)))


def test_all_problems_are_told_at_once(problems: Problems) -> None:
    sentences = problems("data.train_batch_size=30", "actor_rollout_ref.rollout.top_p=0.9")
    assert len(sentences) == 2
    assert len(problems("data.train_batch_size=0", "seed=abc")) == 2


@pytest.mark.parametrize(
    ("address", "variable", "prepared"),
    [
        (None, None, "local"),  # by itself Ray would join what the temp folder names
        (None, "", "local"),
        ("local", "10.0.0.1:6379", "local"),
        (None, "10.0.0.1:6379", None),
        ("auto", None, "auto"),
        ("10.0.0.1:6379", None, "10.0.0.1:6379"),
    ],
)
def test_a_run_starts_a_ray_of_its_own_unless_it_is_told_a_cluster(
    address: str | None, variable: str | None, prepared: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setenv("FSPO_RUN_ID", "a-run")
    key = "ray_kwargs.ray_init.address"
    override = f"~{key}" if address is None else f"{key}={address}"  # no experiment but the demo has it
    ray_init = on_this_machine(composed(f"run.dir={tmp_path}", *SMALL_TASK, override)).ray_kwargs.ray_init
    assert ray_init.get("address") == prepared
    starts = prepared == "local"
    assert ("num_cpus" in ray_init) == ("num_gpus" in ray_init) == starts, "ray.init refuses both where it joins"
    assert ("FSPO_RUN_ID" in ray_init.runtime_env.env_vars) != starts


def test_one_key_turns_a_loss_of_verls_into_one_of_the_librarys() -> None:
    config = composed("algo=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=fspo", "run.dir=/nowhere")
    assert list(method.problems(config)) == []
    complete_loss(config)
    assert instantiate(config.actor_rollout_ref.actor.policy_loss).settings() == ALGORITHMS["fspo"]


def test_a_run_names_every_setting_of_its_loss() -> None:
    config = composed("algo=rloo", "run.dir=/nowhere", "actor_rollout_ref.actor.policy_loss.c_high=0.3")
    complete_loss(config)
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    named = {field.name: policy_loss[field.name] for field in dataclasses.fields(ALGORITHMS["seq_rloo"])}
    assert named == dataclasses.asdict(ALGORITHMS["seq_rloo"]) | {"c_high": 0.3}


def test_a_quantised_checkpoint_is_no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "read_model_config", lambda config: {"quantization_config": {"quant_method": "fp8"}})
    problems = list(checks.setting_problems(composed(f"actor_rollout_ref.model.path={tmp_path}")))
    assert [
        text for text in problems if re.search(holds(f"model.path={tmp_path} ", "quantization_config", "=fp8"), text)
    ]
