"""Every shipped configuration composes, and says what it must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composing import composed
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import entropy_from_logits, entropy_from_logits_with_chunking

from recipe.fspo import CONF_DIR
from recipe.fspo.main import composed as compose
from recipe.runner.launch.machine import platform_environment
from recipe.runner.launch.problems import Refused


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def resolved(*overrides: str) -> DictConfig:
    config = composed("trainer.default_local_dir=/nowhere/run", *overrides)
    OmegaConf.resolve(config)
    return config


#: With a model and a machine.
JOBS = choices("experiment")


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


def test_platform_follows_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")  # the user's wins
    environment = platform_environment("cpu")
    assert (environment["VERL_PLATFORM"], environment["VLLM_CPU_KVCACHE_SPACE"]) == ("cpu", "4")
    with pytest.raises(Refused, match=r"trainer\.device=cuda.*requirements/gpu\.txt"):
        platform_environment("cuda")  # this test environment holds torch's CPU build
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    with pytest.raises(Refused, match=r"VERL_PLATFORM=cpu .*device=cuda"):
        platform_environment("cuda")
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    with pytest.raises(Refused, match=r"VERL_PLATFORM=nvidia .*device=cpu"):
        platform_environment("cpu")


def test_native_advantages() -> None:
    native = {algo: composed(f"algo={algo}").algorithm.adv_estimator for algo in choices("algo")}
    assert native == dict.fromkeys(native, "grpo") | {"rloo": "rloo"}


def test_composed_is_what_hydra_composes() -> None:
    overrides = ["seed=7", "trainer.save_freq=3", "+trainer.extra.key=[1,a]", "data.train_files=null", "algo=gspo"]
    overrides += ["experiment=qwen3_8b", "~trainer.device", "++data.seed=4", "trainer.project_name='2026_11_23'"]
    GlobalHydra.instance().clear()
    assert OmegaConf.to_container(composed(*overrides)) == OmegaConf.to_container(compose(overrides))
