"""What of verl this recipe does not serve, said before Ray starts: nothing is ignored, and no mode is half served.

docs/what-works.md has the whole table. To lift a refusal, serve the feature, take out its rule here and let its row in
``tests/e2e/test_what_works.py`` run.
"""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.utils import need_critic

from recipe.runner.launch.checks import read_model_config, ulysses

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
#: Values of ``trainer.v1.trainer_mode`` whose trainer keeps the run folder.
TRAINER_MODES = ("fspo", "fspo_colocate_async", "fspo_separate_async")
#: Engines whose optimizer, scaler and parameters :mod:`recipe.fspo.worker` knows.
_STRATEGIES = ("fsdp", "fsdp2")
#: Advantage estimators with a value per token.
_TOKEN_ESTIMATORS = ("gae", "optimal_token_baseline", "tir_optimal_token_baseline")


def unserved(config: DictConfig, *, by_response: bool) -> Iterator[str]:
    """A sentence for everything that ``config`` asks of verl and that this recipe does not serve.

    Args:
        by_response: whether the loss has one advantage for each response, not one for each token.
    """
    yield from _trainer_problems(config)
    yield from _engine_problems(config)
    yield from _model_problems(config)
    yield from _lora_problems(config)
    yield from _advantage_problems(config, by_response)


def _trainer_problems(config: DictConfig) -> Iterator[str]:
    mode = config.trainer.v1.trainer_mode
    if mode not in TRAINER_MODES:
        yield (
            f"trainer.v1.trainer_mode={mode} is a trainer of verl's that would leave the run folder empty, without "
            "metrics, checks or resume: remove it and give mode=sync, colocate_async or separate_async, or train with "
            "plain verl, which knows the losses too (python -m verl.trainer.main_ppo)"
        )
    if not config.trainer.use_v1:
        yield "trainer.use_v1=false is ignored: this recipe extends verl's V1 trainer; remove it"


def _engine_problems(config: DictConfig) -> Iterator[str]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    engine = config.get("model_engine", "dp")
    if engine != "dp" or actor.strategy not in _STRATEGIES:
        key, value = ("model_engine", engine) if engine != "dp" else (f"{_ACTOR}.strategy", actor.strategy)
        yield (
            f"{key}={value} is not served: the metrics by mini-batch, the gradient guard and the export read an FSDP "
            f"engine; set {_ACTOR}.strategy to fsdp2, or train with plain verl, which knows the losses too"
        )
    elif actor.strategy == "fsdp" and config.trainer.device == "cpu":
        yield f"{_ACTOR}.strategy=fsdp, which is FSDP1, needs an accelerator to share its parameters: set it to fsdp2"
    if rollout.name != "vllm":
        yield (
            f"actor_rollout_ref.rollout.name={rollout.name} is not served: the checks, the watch over the processes "
            "and the rollouts on CPUs are written for vllm; set it to vllm, or train with plain verl"
        )
    parts = ulysses(config)
    attention = OmegaConf.select(config, f"{_MODEL}.override_config.attn_implementation")
    if parts > 1 and attention not in (None, "flash_attention_2"):
        yield (
            f"{_ACTOR}.ulysses_sequence_parallel_size={parts} with attn_implementation={attention}: verl exchanges "
            "the parts of a sequence in flash attention only, so that here each rank would attend to its own part and "
            "the log-probabilities would be wrong without a word; set it to 1, or use flash_attention_2 on GPUs"
        )


def _model_problems(config: DictConfig) -> Iterator[str]:
    if (read_model_config(config) or {}).get("model_type") == "mixtral":
        yield (
            f"{_MODEL}.path={config.actor_rollout_ref.model.path} is a mixtral: verl 0.9.1 sends its experts to vLLM "
            "under names that vLLM does not know for it, and the run would wait for ever; Qwen3-MoE works"
        )


def _lora_problems(config: DictConfig) -> Iterator[str]:
    model = config.actor_rollout_ref.model
    rank = model.get("lora_rank", 0)
    if OmegaConf.select(model, "lora.rank"):
        yield (
            f"{_MODEL}.lora.rank={model.lora.rank} is Megatron's key: FSDP would train all weights while vLLM waits "
            f"for an adapter; set {_MODEL}.lora_rank instead"
        )
    if model.get("lora_adapter_path") and not rank:
        yield (
            f"{_MODEL}.lora_adapter_path={model.lora_adapter_path} is not loaded as long as {_MODEL}.lora_rank=0: set "
            "it to the adapter's rank"
        )
    if rank and OmegaConf.select(config, f"{_ACTOR}.checkpoint.save_lora_only"):
        yield (
            f"{_ACTOR}.checkpoint.save_lora_only=true leaves the base weights out of the checkpoints, so that they "
            "cannot be exported: set it to false"
        )


def _advantage_problems(config: DictConfig, by_response: bool) -> Iterator[str]:
    estimator, loss_mode = str(config.algorithm.adv_estimator), config.actor_rollout_ref.actor.policy_loss.loss_mode
    if estimator not in ADV_ESTIMATOR_REGISTRY and not config.actor_rollout_ref.model.external_lib:
        yield f"algorithm.adv_estimator={estimator} is not known; choose one of {', '.join(ADV_ESTIMATOR_REGISTRY)}"
    elif config.trainer.critic_warmup > 1 and not need_critic(config):
        # verl would skip the actor's update, and the responses that it does not return would be under way for ever.
        yield (
            f"trainer.critic_warmup={config.trainer.critic_warmup} lets a critic train alone at first, and with "
            f"algorithm.adv_estimator={estimator} there is none: set it to 0"
        )
    if estimator == "remax":
        yield "algorithm.adv_estimator=remax needs greedy answers that verl's V1 trainer does not draw: set it to rloo"
    if not by_response:
        if config.trainer.device == "cpu" and (estimator == "gae" or config.critic.enable):
            yield (
                f"algorithm.adv_estimator={estimator} with critic.enable={config.critic.enable} needs a critic, and "
                "verl has no engine for one on CPUs: set them to grpo or rloo, and to false"
            )
        return
    if estimator in _TOKEN_ESTIMATORS:
        yield (
            f"algorithm.adv_estimator={estimator} gives an advantage per token, and loss_mode={loss_mode} needs one "
            "per response: set it to grpo or rloo, or use a token-level loss (algo=grpo)"
        )
    elif estimator == "reinforce_plus_plus" and (config.algorithm.gamma != 1 or config.algorithm.use_kl_in_reward):
        yield (
            f"algorithm.adv_estimator={estimator} gives an advantage per token where algorithm.gamma is not 1 or "
            f"algorithm.use_kl_in_reward is true, and loss_mode={loss_mode} needs one per response: set them to 1.0 "
            "and false, or the estimator to grpo or rloo"
        )
