"""Every shipped configuration composes, and says what it must."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from composing import composed
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import entropy_from_logits, entropy_from_logits_with_chunking

from recipe.fspo.job import JOB, choices, compose
from recipe.runner.launch.compose import unexpected_key
from recipe.runner.launch.machine import WrongMachineError, platform_environment
from recipe.runner.plan.prediction import plan
from recipe.runner.plan.setup import Hardware


def resolved(*overrides: str) -> DictConfig:
    config = composed("run.dir=/nowhere/run", *overrides)
    OmegaConf.resolve(config)
    return config


#: The algorithm is swapped on GPUs here, and on the demo in refusals.py.
ON_GPUS = "experiment=qwen3_8b"
#: With a model and a machine.
JOBS = [experiment for experiment in choices("experiment") if experiment != "own"]


@pytest.mark.parametrize("experiment", JOBS)
def test_device_decides_attention_and_what_is_of_cpus(experiment: str) -> None:
    config = resolved(f"experiment={experiment}")
    assert config.trainer.experiment_name == experiment
    assert config.trainer.v1.trainer_mode == "fspo"  # mode=sync
    model = config.actor_rollout_ref.model
    on_gpu = config.trainer.device == "cuda"
    assert model.use_remove_padding
    assert model.override_config.attn_implementation == ("flash_attention_2" if on_gpu else "sdpa")
    assert ("worker_extension_cls" in config.actor_rollout_ref.rollout.engine_kwargs.vllm) is not on_gpu
    assert ("recipe.runner.cpu" in OmegaConf.to_yaml(config)) is not on_gpu


@pytest.mark.parametrize("experiment", JOBS)
def test_nothing_is_compiled_for_each_length_of_a_pack(experiment: str) -> None:
    config = resolved(f"experiment={experiment}").actor_rollout_ref
    for role in (config.actor, config.ref):
        engine = omega_conf_to_dataclass(role.fsdp_config)
        assert not engine.use_torch_compile and not engine.pad_to_length  # with which all packs would have one length


def test_verls_entropy_in_chunks_is_compiled_for_each_length() -> None:
    """Why it is not: torch unrolls the loop over the chunks. In one piece one graph serves all lengths."""
    for entropy, most in ((entropy_from_logits_with_chunking, 8), (entropy_from_logits, 1)):
        graphs: list[Any] = []
        torch._dynamo.reset()
        compiled = torch.compile(entropy, dynamic=True, backend=lambda graph, _, to=graphs: to.append(graph) or graph)
        for length in range(4_100, 5_100, 100):
            compiled(torch.zeros(length, 4))
        assert len(graphs) == most
    torch._dynamo.reset()


@pytest.mark.parametrize("experiment", JOBS)
def test_steps_end_a_run_even_if_an_epoch_is_one_step(experiment: str) -> None:
    trainer = resolved(f"experiment={experiment}", "trainer.total_training_steps=5000").trainer
    assert trainer.total_epochs >= trainer.total_training_steps  # verl ends at whichever comes first


@pytest.mark.parametrize("experiment", ["gsm8k_0_5b", "gsm8k_0_6b"])
@pytest.mark.parametrize("gpu_gb", [23.6, 79.2])  # RTX 3090 and 4090; H100
def test_the_jobs_for_one_gpu_fit(experiment: str, gpu_gb: float) -> None:
    planned = plan(composed(f"experiment={experiment}"), JOB, Hardware(gpu_gb=gpu_gb))
    assert (planned.problems, planned.setup.ranks) == ([], 1)


def test_the_first_job_with_qwen3_answers_without_thinking() -> None:
    config = resolved("experiment=gsm8k_0_6b")
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert config.actor_rollout_ref.model.path.endswith("Qwen3-0.6B")


def test_a_key_that_verl_refuses_is_named_with_what_is_like_it() -> None:
    config = composed("run.dir=/nowhere/run", "+actor_rollout_ref.actor.ppo_minibatch_size=4")
    message = unexpected_key(config, "__init__() got an unexpected keyword argument 'ppo_minibatch_size'")
    assert message.endswith("actor.ppo_minibatch_size (did you mean ppo_mini_batch_size?)")
    config = composed("run.dir=/nowhere/run", "+actor_rollout_ref.rollout.val_kwargs.response_length=4")
    message = unexpected_key(config, "SamplingConfig.__init__() got an unexpected keyword argument 'response_length'")
    assert message == ": actor_rollout_ref.rollout.val_kwargs.response_length; leave it out"  # the rollout has one, too


def test_platform_follows_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")  # the user's wins
    environment = platform_environment("cpu")
    assert (environment["VERL_PLATFORM"], environment["VLLM_CPU_KVCACHE_SPACE"]) == ("cpu", "4")
    with pytest.raises(WrongMachineError, match=r"trainer\.device=cuda.*requirements/gpu\.txt"):
        platform_environment("cuda")  # this test environment holds torch's CPU build
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    with pytest.raises(WrongMachineError, match=r"VERL_PLATFORM=cpu .*device=cuda"):
        platform_environment("cuda")
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    with pytest.raises(WrongMachineError, match=r"VERL_PLATFORM=nvidia .*device=cpu"):
        platform_environment("cpu")


#: What swapping `algo` may change: its name, its loss with the loss's settings, and its native advantage estimator.
MAY_DIFFER = {
    "fspo.algo",
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.policy_loss.*",
}
#: verl's token-level losses read their clip values and their averaging from the actor itself.
TOKEN_LEVEL_MAY_DIFFER = MAY_DIFFER | {
    "actor_rollout_ref.actor.clip_ratio_low",
    "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.actor.clip_ratio_c",
    "actor_rollout_ref.actor.loss_agg_mode",
    "critic.loss_agg_mode",  # verl's default follows the actor's; there is no critic here
}
TOKEN_LEVEL = {"gspo_verl", "grpo", "dapo", "gmpo", "cispo", "dppo_tv", "dppo_kl"}


@functools.cache
def leaves_of(*overrides: str) -> dict[str, object]:
    """Every setting of a run on GPUs, by its dotted name."""
    leaves: dict[str, object] = {}

    def walk(node: object, path: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value, f"{path}.{key}" if path else str(key))
        else:
            leaves[path] = node

    walk(OmegaConf.to_container(resolved(ON_GPUS, *overrides)), "")
    return leaves


def differing(a: dict[str, object], b: dict[str, object]) -> set[str]:
    names = {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    prefix = "actor_rollout_ref.actor.policy_loss."
    return {f"{prefix}*" if name.startswith(prefix) else name for name in names}


@pytest.mark.parametrize("algo", [algo for algo in choices("algo") if algo != "fspo"])
def test_swapping_the_algorithm_changes_nothing_else(algo: str) -> None:
    changed = differing(leaves_of("algo=fspo"), leaves_of(f"algo={algo}"))
    assert changed <= (TOKEN_LEVEL_MAY_DIFFER if algo in TOKEN_LEVEL else MAY_DIFFER)
    assert {"fspo.algo", "actor_rollout_ref.actor.policy_loss.*"} <= changed
    assert leaves_of(f"algo={algo}")["fspo.algo"] == algo


def test_native_advantages() -> None:
    native = {algo: leaves_of(f"algo={algo}")["algorithm.adv_estimator"] for algo in choices("algo")}
    assert native == dict.fromkeys(native, "grpo") | {"rloo": "rloo"}


def test_composed_is_what_hydra_composes() -> None:
    overrides = ["seed=7", "trainer.save_freq=3", "+trainer.extra.key=[1,a]", "data.train_files=null", "algo=gspo"]
    overrides += ["experiment=qwen3_8b", "~trainer.device", "++data.seed=4", "trainer.project_name='2026_11_23'"]
    assert OmegaConf.to_container(composed(*overrides)) == OmegaConf.to_container(compose(overrides))


def test_experiment_own_is_verls_defaults_and_the_base() -> None:
    own, bare = (OmegaConf.to_container(compose([word])) for word in ("experiment=own", "~experiment"))
    assert isinstance(own, dict) and isinstance(bare, dict)
    assert own.pop("trainer") == bare.pop("trainer") | {"experiment_name": "own", "total_epochs": 30}
    assert own == bare
