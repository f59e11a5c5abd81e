"""The acceptance band of the composed algorithm at the longest response."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, Final

import torch
from omegaconf import DictConfig, OmegaConf

from fspo.clipping import acceptance_band
from fspo.losses import resolve_settings
from fspo.types import SequenceLossSettings
from recipe.runner.plan.setup import NotPlannableError

#: verl's constant dual clip of token-level losses, on the ratio.
_VERL_DUAL_CLIP = 3.0
#: Beyond it an exponential is no float.
_LARGEST_EXPONENT: Final = 700.0


def settings_of(config: DictConfig) -> SequenceLossSettings | None:
    """The loss library's settings; None for the losses that have no band on S.

    Raises:
        NotPlannableError: for a value out of range; a run refuses it in the same words.
    """
    actor = config.actor_rollout_ref.actor
    loss = OmegaConf.to_container(actor.policy_loss, resolve=True)
    if loss["loss_mode"] == "gspo":  # verl's own, with the same band as ours
        loss = {"loss_mode": "seq_gspo", "clip_low": actor.clip_ratio_low, "clip_high": actor.clip_ratio_high}
    try:
        return resolve_settings(loss)
    except (TypeError, ValueError) as error:
        raise NotPlannableError(f"actor_rollout_ref.actor.policy_loss.{error}") from None


def describe(config: DictConfig, sigma: float) -> dict[str, Any]:
    """The band at ``data.max_response_length``.

    Returns:
        ``length``, ``loss_mode``, and for a sequence-level loss: ``lower`` and ``upper`` (nats, about the drift),
        ``ratio_low`` and ``ratio_high`` (their exponentials), ``acceptance`` (the share of Gaussian S inside the band
        if a token's log-ratio has standard deviation ``sigma`` and, since E[exp S] = 1, S has the mean -L sigma^2 / 2;
        docs/algorithms.md measures the same), and ``notes``.
    """
    length = config.data.max_response_length
    settings = settings_of(config)
    described: dict[str, Any] = {"length": length, "loss_mode": config.actor_rollout_ref.actor.policy_loss.loss_mode}
    if settings is None:
        actor = config.actor_rollout_ref.actor
        clip = f"{actor.clip_ratio_low:g}/{actor.clip_ratio_high:g}"
        does = {
            "vanilla": f"token-level loss: each token's ratio is clipped at {clip}",
            "cispo": f"the weight of each token is clipped at {clip}",
            "geo_mean": f"each token's log-ratio is clipped at {clip}",
            "dppo_tv": f"tokens whose probability moves by more than {clip} are left out",
            "dppo_kl": f"tokens with a divergence above {clip} are left out",
            "sapo": "each token's weight falls off softly with its ratio",
        }.get(described["loss_mode"], "not a member of this family")
        return described | {"notes": [f"{does}; no band on S"]}
    _, lower_B, upper_B = acceptance_band(torch.tensor([length]), settings, dtype=torch.float64)
    lower, upper = float(lower_B), float(upper_B)
    spread, drift = sigma * math.sqrt(length), -length * sigma**2 / 2
    mean = 0.0 if settings.drift == "kl" else drift
    normal = NormalDist(mean, spread)
    return described | {
        "band": settings.band,
        "lower": lower,
        "upper": upper,
        "ratio_low": math.exp(lower),
        "ratio_high": math.exp(upper) if upper < _LARGEST_EXPONENT else math.inf,
        "acceptance": normal.cdf(upper) - normal.cdf(lower),
        "notes": list(_notes(settings, length, upper)),
    }


def _notes(settings: SequenceLossSettings, length: int, upper: float) -> list[str]:
    notes = []
    if settings.calibrated:
        notes.append(
            f"band={settings.band} is measured during training; before the first rollout batch it is this sqrt(L) "
            f"band, and then aims at an acceptance of {settings.target_acceptance:g}"
        )
    if settings.drift == "kl":
        notes.append("the band is centred at the measured drift; the edges above are about it")
    per_length = settings.weight == "length_normalised"
    log_weight = upper / length if per_length else upper
    if log_weight > settings.s_max:
        notes.append(f"the clamp s_max={settings.s_max:g} acts inside the band, at a log-weight of {log_weight:.1f}")
    if not per_length and upper > math.log(_VERL_DUAL_CLIP):
        notes.append(
            f"a constant dual clip at a ratio of {_VERL_DUAL_CLIP:g}, as token-level losses use, would act "
            "inside this band"
        )
    return notes
