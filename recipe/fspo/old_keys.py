"""Keys of verl's earlier releases that nothing reads now, with what to use instead."""

from __future__ import annotations

from typing import Final

#: The recipe's own setting in place of DAPO's overlong buffer.
OVERLONG: Final = (
    "for a soft overlong penalty give +reward.custom_reward_function.reward_kwargs.overlong_buffer=TOKENS "
    "+reward.custom_reward_function.reward_kwargs.max_response_length=TOKENS (docs/data-and-rewards.md)"
)
_ADVANTAGE: Final = "write algorithm.adv_estimator=grpo for what was shared; native is the default"

OLD_KEYS: Final = {
    "reward_model.overlong_buffer": OVERLONG,
    "reward_model.reward_kwargs": OVERLONG,
    # Groups of configuration files that this recipe once had.
    "clip_values": "write fspo.clip_values=measured or published",
    "match_scale": "write fspo.match_scale=matched or native",
    "advantage": _ADVANTAGE,
    # Settings that it once had.
    "fspo.advantage": _ADVANTAGE,
    "fspo.drop": "trainer.v1.sampler.max_off_policy_strategy says what becomes of old responses (docs/async.md)",
    "fspo.accept_uncorrected": "write fspo.allow_uncorrected=true",
}
#: Keys of this recipe's own that have gone, which its rules refuse with what they know of the loss.
FORMER_KEYS: Final = tuple(f"actor_rollout_ref.actor.policy_loss.{key}" for key in ("clip_low", "clip_high"))
#: Keys that only verl's own reward managers read.
INSTEAD: Final = {"reward.reward_kwargs": OVERLONG}
