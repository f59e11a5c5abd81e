"""Settings and algorithms of this recipe's earlier versions, and of verl's, with what to use instead."""

from __future__ import annotations

from typing import Final

from recipe.runner.launch.removed import EarlierNames

#: The recipe's own setting in place of DAPO's overlong buffer.
OVERLONG: Final = (
    "for a soft overlong penalty give +reward.custom_reward_function.reward_kwargs.overlong_buffer=TOKENS "
    "+reward.custom_reward_function.reward_kwargs.max_response_length=TOKENS (docs/data-and-rewards.md)"
)

EARLIER_NAMES: Final = EarlierNames(
    removed={
        "fspo.offline_task.name": "leave it out for remainders; sorted words are experiment=demo_words",
        "algo=fspo_adaptive": "use algo=fspo_quantile, whose acceptance meets its target without Gaussian tails",
        "fspo.attributes": "use fspo.record_sequences=true, which keeps S, L and A of every sequence",
        "actor_rollout_ref.actor.policy_loss.dual_clip": "use clip_high and s_max; no run has needed a second clip",
        "actor_rollout_ref.actor.policy_loss.staleness": "bound the staleness with trainer.v1.sampler (docs/async.md)",
        "fspo.samples": "use trainer.rollout_data_dir and trainer.validation_data_dir, of which the report shows some",
        "fspo.lre_bins": "leave it out: live metrics have eight length bins of equal mass, as a report has",
        "fspo.poll_interval_s": "leave it out: the trainer asks every 0.05 s on CPUs and every 0.5 s on GPUs",
        "fspo.wait_for_resources_s": "leave it out: a run waits 120 s for Ray's nodes, GPUs and CPUs",
        "fspo.fork_workers": "leave it out: on CPUs the workers are forked, as they are for a Ray that the run starts",
        "reward_model.overlong_buffer": OVERLONG,
        "reward_model.reward_kwargs": OVERLONG,
    },
    renamed={
        "grad_scale": "match_scale",
        "fspo.grad_scale": "fspo.match_scale",
        "fspo.offline_task": "data.offline_task",
        "fspo.run_dir": "run.dir",
        "fspo.hang_after_s": "run.hang_after_s",
        "fspo.restarts": "run.restarts",
        "fspo.log": "run.log",
        "fspo.allow_changed": "run.allow_changed",
    },
    modules=(r"\brecipe\.fspo\.(?=(?:launch|checkpoints|faults|cpu|plan|rehearse)\b)", "recipe.runner."),
    settings_class="recipe.fspo.config.SequencePolicyLossConfig",
)
