"""The losses of verl's registry, ours included, for ``python -m fspo.check_loss ... --like NAME``."""

from __future__ import annotations

from typing import Any, Final

import recipe.fspo.policy_loss  # noqa: F401  (registers ours)
from recipe.fspo.recorder import RECORDER

from fspo.check_loss.call import LossError, PolicyLoss
from fspo.losses import ALGORITHMS
from fspo.types import BandState
from fspo.verl import SequencePolicyLossConfig
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

#: What a loss needs that verl has no default for.
_NEEDED: Final[dict[str, dict[str, Any]]] = {"dro": {"dro_beta": 0.1}, "bypass_mode": {"rollout_correction": {}}}
#: GSPO as its authors give it; verl's defaults are PPO's.
_ACTORS: Final[dict[str, dict[str, Any]]] = {
    "gspo": {"loss_agg_mode": "seq-mean-token-mean", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
}


def registered(name: str) -> PolicyLoss:
    """The loss of the registry that a name stands for, with verl's defaults; LossError if there is none."""
    if name not in POLICY_LOSS_REGISTRY:
        raise LossError(f"--like {name} is no loss of verl's registry: {', '.join(POLICY_LOSS_REGISTRY)}")
    RECORDER.begin_update(BandState(), step=0)  # as a trainer that measures bands has it before any data
    kind = SequencePolicyLossConfig if name in ALGORITHMS else PolicyLossConfig
    settings = {"loss_agg_mode": "token-mean"} | _ACTORS.get(name, {})
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=kind(loss_mode=name, **_NEEDED.get(name, {})),
        **settings,
    )
    return PolicyLoss(POLICY_LOSS_REGISTRY[name], actor, settings["loss_agg_mode"])
