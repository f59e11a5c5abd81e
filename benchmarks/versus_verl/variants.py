"""What is compared: the command, configuration and environment of each variant."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.fspo.launch.compose import compose
from recipe.fspo.launch.machine import CPU_ENVIRONMENT, platform_environment

STEPS = 5
#: Settings of every variant: the demo without validation and checkpoints, which are not compared.
SHARED = (
    "fspo.log=all",
    "experiment=demo",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=[file]",
)
#: Keys of ``policy_loss`` that verl's own configuration has.
_LOSS_OF_VERL = "verl.workers.config.PolicyLossConfig"
#: Settings of `verl, as first run`: what made verl run on a CPU before anything was tuned for speed.
_UNTUNED = (
    "actor_rollout_ref.model.use_remove_padding=false",
    "actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.actor.use_dynamic_bsz=false",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64",
    "~actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend",
)
_OF_THE_RECIPE = ("fspo", "evaluate", "seed")
#: What the recipe does on a CPU that is no setting of verl: a start without it has a fingerprint of its own.
_FORKED = ("Ray's workers", "vLLM's engine")
_ON_CPUS = "attention over packs, log-probabilities of many tokens at once, agent loops without Hydra"


@dataclass(frozen=True)
class Variant:
    """One of the things compared."""

    name: str
    title: str
    plain: bool
    overrides: tuple[str, ...] = ()
    tuned_environment: bool = True


VARIANTS = (
    Variant("verl", "plain verl, same settings", True, ("algo=gspo_verl",)),
    Variant("recipe", "this recipe", False, ("algo=gspo",)),
    Variant("verl_untuned", "plain verl, as first run", True, ("algo=gspo_verl", *_UNTUNED), tuned_environment=False),
)


def user_environment() -> dict[str, str]:
    """This process's environment without what it sets for itself."""
    return {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}


def plain_config(overrides: Sequence[str], run_dir: Path, tuned_environment: bool) -> tuple[DictConfig, dict[str, str]]:
    """Configuration and environment for ``python -m verl.trainer.main_ppo``; writes the task's data.

    The CPU platform stays, since verl has none: its engine comes by ``external_lib``, its vLLM worker as in the demo.
    """
    config = compose([*overrides, f"fspo.run_dir={run_dir}"])
    environment = platform_environment("cpu", config.trainer.n_gpus_per_node)
    if not tuned_environment:
        # Without what is for speed: threads for Ray's workers, no idle workers.
        environment = {name: value for name, value in CPU_ENVIRONMENT.items() if not name.startswith("RAY_")}
    os.environ["VERL_PLATFORM"] = "cpu"  # before verl is imported by what follows
    from recipe.fspo.launch.start import prepare, write_offline_task

    prepare(config)
    write_offline_task(config)
    with open_dict(config):
        config.trainer.v1.trainer_mode = "sync"
        config.actor_rollout_ref.model.external_lib = "recipe.fspo.cpu.engine"
        if not tuned_environment:
            for name in config.ray_kwargs.ray_init.runtime_env.env_vars.copy():
                if name not in environment:
                    config.ray_kwargs.ray_init.runtime_env.env_vars.pop(name)
            config.ray_kwargs.ray_init.pop("include_dashboard")
        assert config.actor_rollout_ref.actor.policy_loss._target_ == _LOSS_OF_VERL
        for key in _OF_THE_RECIPE:
            config.pop(key, None)
    return config, environment


def command(variant: Variant, run_dir: Path, extra: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a start of ``variant`` that logs each step to ``run_dir/steps.jsonl``."""
    overrides = [*SHARED, *variant.overrides, *extra]
    logger = {"VERL_FILE_LOGGER_PATH": str(run_dir / "steps.jsonl")}
    if not variant.plain:
        words = [sys.executable, "-m", "recipe.fspo.main", f"fspo.run_dir={run_dir}", *overrides]
        return words, {**user_environment(), **logger}
    config, environment = plain_config(overrides, run_dir, variant.tuned_environment)
    OmegaConf.save(config, run_dir / "plain.yaml")
    words = [sys.executable, "-m", "verl.trainer.main_ppo", f"--config-path={run_dir}", "--config-name=plain"]
    return [*words, f"hydra.run.dir={run_dir}"], {**user_environment(), **environment, **logger}


def fingerprint(variant: Variant, extra: Sequence[str] = ()) -> str:
    """Changes with the settings of a variant, so that old rows are told from today's.

    Of the recipe's own settings only those count that change how a run is started; the rest is not verl's and costs
    nothing that a start or a step would show.
    """
    config = compose([*SHARED, *variant.overrides, *extra, "fspo.run_dir=RUN"])
    own = None if variant.plain else (_FORKED if config.fspo.fork_workers else None, _ON_CPUS)
    with open_dict(config):
        for key in _OF_THE_RECIPE:
            config.pop(key)
    # Not resolved: what is left refers to keys that are gone.
    text = OmegaConf.to_yaml(config, sort_keys=True) + repr((sorted(CPU_ENVIRONMENT.items()), variant, own))
    return hashlib.sha256(text.encode()).hexdigest()[:10]
