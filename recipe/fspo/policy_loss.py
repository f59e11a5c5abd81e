"""What the losses of verl's registry do to a response: those with a band by its rule, others by their gradient.

:mod:`fspo.verl` registers this package's losses and reads the band's state and the factor of
``fspo.match_scale=matched`` from this process's recorder (:mod:`recipe.fspo.recorder`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch

from fspo.kept import UnclippedWeight, kept_output
from fspo.losses import ALGORITHMS, judged, resolve_settings
from fspo.table import Rows
from fspo.types import BandState, SequenceLossSettings, c_of_eps
from verl.trainer.ppo.core_algos import get_policy_loss_fn

#: By what verl's token-level losses weigh a token without their clip; bypass_mode is another loss inside.
UNCLIPPED_WEIGHTS: Final[dict[str, UnclippedWeight]] = {
    **dict.fromkeys(("vanilla", "dppo_tv", "dppo_kl", "sapo", "clip_cov", "kl_cov", "cispo"), "token"),
    **dict.fromkeys(("gpg", "dro"), "none"),
    "geo_mean": "length_normalised",
}


def kept_by_gradient(
    log_prob_BT: torch.Tensor, old_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor, config: Any
) -> dict[str, torch.Tensor]:
    """Columns ``inside``, ``kept`` and ``weight`` of a token-level loss of verl; none of any other loss.

    The function of its name in verl's registry is asked for the gradient (:func:`fspo.kept.kept_output`).
    """
    name = config.policy_loss.get("loss_mode", "vanilla")
    if name not in UNCLIPPED_WEIGHTS:
        return {}

    def gradient(log_prob_BT: torch.Tensor, advantages_BT: torch.Tensor) -> torch.Tensor:
        leaf_BT = log_prob_BT.detach().clone().requires_grad_()
        # clip_cov draws random numbers, and the training must draw those that it would draw without this.
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            value, _ = get_policy_loss_fn(name)(
                old_log_prob=old_BT,
                log_prob=leaf_BT,
                advantages=advantages_BT,
                response_mask=mask_BT,
                loss_agg_mode=config.loss_agg_mode,
                config=config,
                rollout_is_weights=None,
            )
        return torch.autograd.grad(value, leaf_BT)[0]

    tensors = (log_prob_BT, old_BT, advantages_BT, mask_BT)
    return kept_output(gradient, *tensors, UNCLIPPED_WEIGHTS[name]).judgement()


def band_of(actor: Any) -> SequenceLossSettings | None:
    """The settings of the loss that ``actor_rollout_ref.actor`` names, if its rule is a band on S; else None."""
    name = actor.policy_loss.get("loss_mode", "vanilla")
    if name != "gspo":
        return resolve_settings(actor.policy_loss)
    # Where only clip_ratio is set, it holds on both sides.
    low, high = (actor.clip_ratio if eps is None else eps for eps in (actor.clip_ratio_low, actor.clip_ratio_high))
    c_low, c_high = c_of_eps(float(low), float(high))
    return dataclasses.replace(ALGORITHMS["seq_gspo"], c_low=c_low, c_high=c_high)


def judged_rows(rows: Rows, settings: SequenceLossSettings, state: BandState | None = None) -> Rows:
    """Columns ``inside``, ``kept`` and ``weight`` of rows, by the band with which the loss has judged them."""
    s_B, length_B, advantage_B = (torch.from_numpy(rows[name]) for name in ("S", "L", "A"))
    columns, known_B = judged(s_B, length_B, advantage_B, settings, state).judgement(), ~s_B.isnan()
    return {name: torch.where(known_B, column.float(), torch.nan).numpy() for name, column in columns.items()}
