"""Every shipped configuration composes, and says what it must."""

from __future__ import annotations

import pytest
from composing import composed
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from recipe.fspo import CONF_DIR
from recipe.runner.launch.machine import platform_environment
from recipe.runner.launch.settings import Refused


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml")))
def test_device_decides_attention_and_what_is_of_cpus(experiment: str) -> None:
    """And nothing is compiled, or padded, for each length of a pack."""
    config = composed("trainer.default_local_dir=/nowhere/run", f"experiment={experiment}")
    OmegaConf.resolve(config)
    assert config.trainer.experiment_name == experiment
    assert config.trainer.v1.trainer_mode == "fspo"  # mode=sync
    policy, on_gpu = config.actor_rollout_ref, config.trainer.device == "cuda"
    assert policy.model.use_remove_padding
    assert policy.model.override_config.attn_implementation == ("flash_attention_2" if on_gpu else "sdpa")
    assert ("worker_extension_cls" in policy.rollout.engine_kwargs.vllm) is not on_gpu
    assert ("recipe.runner.cpu" in OmegaConf.to_yaml(config)) is not on_gpu
    for role in (policy.actor, policy.ref):
        engine = omega_conf_to_dataclass(role.fsdp_config)
        assert not engine.use_torch_compile and not engine.pad_to_length  # with which all packs would have one length


def test_platform_follows_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")  # the user's wins
    for ranks in (1, 0, "two", None):  # of which the checks come later
        environment = platform_environment("cpu", ranks)
    assert (environment["VERL_PLATFORM"], environment["VLLM_CPU_KVCACHE_SPACE"]) == ("cpu", "4")
    for platform, device, says in (
        (None, "cuda", r"trainer\.device=cuda.*requirements/gpu\.txt"),  # here is torch's CPU build
        ("cpu", "cuda", r"VERL_PLATFORM=cpu .*device=cuda"),
        ("nvidia", "cpu", r"VERL_PLATFORM=nvidia .*device=cpu"),
    ):
        if platform is not None:
            monkeypatch.setenv("VERL_PLATFORM", platform)
        with pytest.raises(Refused, match=says):
            platform_environment(device)
