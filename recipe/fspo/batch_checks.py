"""The arithmetic that batch sizes, lengths and numbers of GPUs have to satisfy, from the composed configuration alone.

Imports neither verl nor anything heavy: a run's checks (:mod:`recipe.fspo.preflight`) and the planner
(:mod:`recipe.fspo.plan`) share it. Each check yields sentences that name the keys, the values and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

Problems = Iterator[str]


def divides(larger_key: str, larger: int, smaller_key: str, smaller: int) -> Problems:
    """A sentence if ``larger`` is not a multiple of ``smaller``."""
    if smaller <= 0 or larger % smaller:
        yield f"{larger_key}={larger} is not a multiple of {smaller_key}={smaller}: change one of them so that it is"


def _ulysses(config: DictConfig) -> int:
    # The actor's key is the older of the two; verl copies it into the other.
    actor = config.actor_rollout_ref.actor
    return int(max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size))


def batch_problems(config: DictConfig) -> Problems:
    """Batches into mini-batches, mini-batches over ranks, ranks into vLLM's replicas."""
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    ranks = trainer.n_gpus_per_node * trainer.nnodes
    mini, n = actor.ppo_mini_batch_size, rollout.n
    yield from divides("data.train_batch_size", config.data.train_batch_size, "actor.ppo_mini_batch_size", mini)
    sequences = mini * n
    name = "actor.ppo_mini_batch_size * rollout.n"
    yield from divides(name, sequences, "trainer.nnodes * trainer.n_gpus_per_node", ranks)
    ulysses = _ulysses(config)
    yield from divides("trainer.nnodes * trainer.n_gpus_per_node", ranks, "ulysses_sequence_parallel_size", ulysses)
    micro = actor.ppo_micro_batch_size_per_gpu
    if not actor.use_dynamic_bsz and sequences % ranks == 0:
        if micro is None:
            yield (
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu is not set: give the sequences of one forward "
                "pass, or set actor_rollout_ref.actor.use_dynamic_bsz=true"
            )
        else:
            yield from divides(f"{name} / ranks", sequences // ranks, "actor.ppo_micro_batch_size_per_gpu", micro)
    per_replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    yield from divides("trainer.nnodes * trainer.n_gpus_per_node", ranks, "rollout's parallel sizes", per_replica)


def length_problems(config: DictConfig, max_positions: object) -> Problems:
    """The longest sequence against the model's positions, vLLM's limit and the token budget of a micro-batch.

    Args:
        config: The composed configuration.
        max_positions: The model's ``max_position_embeddings``; anything but an integer: unknown.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    wanted = config.data.max_prompt_length + config.data.max_response_length
    asked = f"data.max_prompt_length + data.max_response_length = {wanted}"
    limits = {
        "the model's max_position_embeddings": max_positions,
        "actor_rollout_ref.rollout.max_model_len": rollout.max_model_len,
    }
    for name, limit in limits.items():
        if isinstance(limit, int) and wanted > limit:
            yield f"{asked} exceeds {name} = {limit}: shorten data.max_response_length"
    if not actor.use_dynamic_bsz:
        return
    # verl does not split a sequence: it stops with an error at the first one that exceeds the budget, maybe days later.
    ulysses = _ulysses(config)
    for key, budget in (
        ("actor.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu),
        ("rollout.log_prob_max_token_len_per_gpu", rollout.log_prob_max_token_len_per_gpu),
    ):
        if budget * ulysses < wanted:
            yield (
                f"actor_rollout_ref.{key}={budget} is less than the longest sequence ({asked}"
                + (f", over {ulysses} Ulysses ranks): " if ulysses > 1 else "): ")
                + f"set it to {-(-wanted // ulysses)} or more"
            )
