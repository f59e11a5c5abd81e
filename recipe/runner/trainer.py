"""verl's own trainer in the runner's care: ``trainer.v1.trainer_mode=runner``, for a recipe that changes no step."""

from __future__ import annotations

from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from recipe.runner.hooks import RunnerHooks


@register_trainer("runner")
class RunnerTrainer(RunnerHooks, PPOTrainerSync):
    """verl's synchronous trainer."""

    verl_mode = "sync"
