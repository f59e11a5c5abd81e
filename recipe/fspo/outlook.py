"""What a run's loss would do that its command does not say."""

from __future__ import annotations

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


def outlook(config: DictConfig) -> Iterator[str]:
    """Two lines of a band: the clip values with their origin, and the shares outside under both means of S.

    The model is that of :mod:`fspo.audit.expected`. A run that measures its own has one line that says so.
    """
    loss = OmegaConf.to_container(config.actor_rollout_ref.actor.policy_loss, resolve=True)
    settings = resolve_settings(loss)
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
