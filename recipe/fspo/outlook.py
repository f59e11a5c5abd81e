"""What a run's loss would do that its command does not say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf
from recipe.fspo.state import read_state

from fspo.audit.expected import shares_outside
from fspo.clip import FIXED_AFTER
from fspo.losses import resolve_settings
from fspo.responses import Responses
from fspo.types import NO_CLIP

#: Spread of S in nats per square root of a token: between the 0.034 and 0.039 of published runs of Qwen3 4B and 14B
#: (CTPO, arXiv 2605.07331, figure 1).
SIGMA: Final = 0.036


def outlook(config: DictConfig, checkpoint: Path | None = None) -> Iterator[str]:
    """Two lines of a band: the clip values with their origin, and the shares outside under both means of S.

    The model is that of :mod:`fspo.audit.expected`. A run that measures its own has one line that says so, until the
    ``checkpoint`` that it resumes has some.
    """
    loss = OmegaConf.to_container(config.actor_rollout_ref.actor.policy_loss, resolve=True)
    settings = resolve_settings(loss)
    if settings is None or settings.calibrated or settings.c_high >= NO_CLIP:
        return
    origin = ""
    if config.fspo.clip_values != "published" and (measured := _measured(checkpoint)):
        step, last = measured[-1]["after_step"], measured[-1]
        settings = dataclasses.replace(settings, c_low=last["c_low"], c_high=last["c_high"])
        again = f"set after step {step}, and again after each rollout batch until there are {FIXED_AFTER}"
        origin = f", {again if len(measured) < FIXED_AFTER else f'fixed since step {step}'} (measured by the run)"
    elif config.fspo.clip_values != "published":
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
    yield f"clip values: {values}{origin}"
    yield (
        f"  outside at {' and '.join(map(str, lengths))} tokens with sigma={SIGMA:g}, as in published runs of Qwen3: "
        f"{shares[0]} if the policy moves, {shares[1]} if S is rounding (python -m fspo.audit expected)"
    )


def _measured(checkpoint: Path | None) -> list[dict[str, Any]]:
    """The clip values that a run has measured up to a checkpoint, as run.json has them; none of a damaged one.

    A start names the damage, when it loads the checkpoint.
    """
    try:
        state = (checkpoint and read_state(checkpoint)) or {}
    except ValueError:
        return []
    values: list[dict[str, Any]] = ((state.get("clip_values") or {}).get("measurement") or {}).get("values", [])
    return values
