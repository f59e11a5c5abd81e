"""What a run's loss would do that its command does not say. Imports verl only to look at a loss of its registry."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from typing import Final

from omegaconf import DictConfig, OmegaConf

from fspo.audit.expected import shares_outside
from fspo.losses import resolve_settings
from fspo.responses import Responses
from fspo.types import NO_CLIP

#: Spread of S in nats per square root of a token: between the 0.034 and 0.039 of published runs of Qwen3 4B and 14B
#: (CTPO, arXiv 2605.07331, figure 1).
SIGMA: Final = 0.036
#: verl 0.9.1's ``loss_agg_mode``.
VERLS_MODE: Final = "token-mean"


def outlook(config: DictConfig) -> Iterator[str]:
    """Two lines of a band: the clip values with their origin, and the shares outside under both means of S.

    The model is that of :mod:`fspo.audit.expected`. A run that measures its own has one line that says so. One line of
    a loss that reads ``loss_agg_mode``, if its tokens are not weighed as verl weighs them by default: a command of
    ``main_ppo`` that relies on the default would train another loss.
    """
    loss = OmegaConf.to_container(config.actor_rollout_ref.actor.policy_loss, resolve=True)
    settings = resolve_settings(loss)
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    if settings is None and mode != VERLS_MODE and _reads_mode(str(loss["loss_mode"])):
        key = "actor_rollout_ref.actor.loss_agg_mode"
        yield f"{key}={mode}: a script that relies on verl's default needs {key}={VERLS_MODE}"
    if settings is None or settings.calibrated or settings.c_high >= NO_CLIP:
        return
    if config.fspo.clip_values != "published":
        yield (
            "clip values: none until a rollout batch that begins with the full learning rate has ended; then the run's "
            f"own, with which {config.fspo.accept:.0%} of its responses lie inside, fixed after ten rollout batches"
        )
        return
    longest = config.data.max_response_length
    usual = min(config.run.mean_response or longest / 2, longest)
    lengths = sorted({round(usual), longest})
    shares = [
        ", ".join(f"{share:.0%}" for share in shares_outside(Responses.normal(SIGMA, lengths, drift=moves), settings))
        for moves in (True, False)
    ]
    values = f"c_low={settings.c_low:.3g} c_high={settings.c_high:.3g} nats per token^{settings.exponent:g}"
    yield f"clip values: {values}"
    yield (
        f"  outside at {' and '.join(map(str, lengths))} tokens with sigma={SIGMA:g}, as in published runs of Qwen3: "
        f"{shares[0]} if the policy moves, {shares[1]} if S is rounding (python -m fspo.audit expected)"
    )


def _reads_mode(name: str) -> bool:
    """Whether a loss of verl's registry uses its argument ``loss_agg_mode``; some have a mean of their own.

    True of a loss whose code is not to be seen, False of one that is not registered in this process.
    """
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    if (loss := POLICY_LOSS_REGISTRY.get(name)) is None:
        return False
    code = getattr(inspect.unwrap(loss), "__code__", None)
    steps = dis.get_instructions(code) if code else ()
    return code is None or any(step.argval == "loss_agg_mode" and step.opname.startswith("LOAD") for step in steps)
