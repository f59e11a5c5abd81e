"""Rows and measured values for the losses of verl's registry, in a worker of this recipe and in an audit.

:mod:`fspo.verl` registers this package's losses. From this process's recorder they get the band's state and the factor
of ``fspo.match_scale=matched``, and it takes what they made of each sequence. One wrapper (:func:`observe_losses`)
records every loss of the registry with what the loss has handed over, or with what is known of verl's own, so that
references such as GRPO stand in the same tables and figures. The losses themselves are unchanged, but for the factor on
those that sum over tokens.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Final

import torch
from recipe.fspo.recorder import RECORDER

import fspo.verl
from fspo.acceptance import UnclippedWeight, judge, kept_output
from fspo.losses import ALGORITHMS
from fspo.types import SequenceLossOutput, c_of_eps
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

fspo.verl.recorder = RECORDER

#: By what verl's losses weigh a token without their clip; gspo has a band, and bypass_mode is another loss inside.
UNCLIPPED_WEIGHTS: dict[str, UnclippedWeight] = {
    **dict.fromkeys(("vanilla", "dppo_tv", "dppo_kl", "sapo", "clip_cov", "kl_cov", "cispo"), "token"),
    **dict.fromkeys(("gpg", "dro"), "none"),
    "geo_mean": "length_normalised",
}
#: The arguments of verl's losses, in their order.
_ARGUMENTS: Final = (
    *("old_log_prob", "log_prob", "advantages", "response_mask"),
    *("loss_agg_mode", "config", "rollout_is_weights"),
)


def _describe(
    name: str, config: Any, call: Callable[[Mapping[str, Any]], Any], tensors: tuple[torch.Tensor, ...]
) -> SequenceLossOutput | None:
    """What verl's loss ``name`` keeps of each sequence; None if that is not known.

    ``call`` is its call again, with other values for some of verl's arguments.
    """
    if name == "gspo":
        # Where only clip_ratio is set, it holds on both sides.
        low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
        high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
        c_low, c_high = c_of_eps(float(low), float(high))
        return judge(*tensors, dataclasses.replace(ALGORITHMS["seq_gspo"], c_low=c_low, c_high=c_high))
    if name not in UNCLIPPED_WEIGHTS:
        return None

    def gradient(log_prob_BT: torch.Tensor, advantages_BT: torch.Tensor) -> torch.Tensor:
        leaf_BT = log_prob_BT.detach().clone().requires_grad_()
        changed = {"log_prob": leaf_BT, "advantages": advantages_BT, "rollout_is_weights": None}
        # clip_cov draws random numbers, and the training must draw those that it would draw without this.
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            value, _ = call(changed)
        return torch.autograd.grad(value, leaf_BT)[0]

    return kept_output(gradient, *tensors, weight=UNCLIPPED_WEIGHTS[name])


def _verls_names(loss: Callable[..., Any]) -> dict[str, str]:
    """verl's name of each argument of a loss that can be given by position, in order, by the loss's own name for it.

    A loss that takes any number of them (``*tensors``) gets them in verl's order, as does one with names of its own.
    """
    try:
        parameters = inspect.signature(loss).parameters.values()
    except ValueError:  # of a compiled function
        parameters = ()
    own = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    own += [name for name in _ARGUMENTS[len(own) :] if name not in own]
    rest = iter([name for name in _ARGUMENTS if name not in own])
    return {name: name if name in _ARGUMENTS else next(rest, name) for name in own}


def _observed(
    name: str, loss: Callable[..., Any], guard: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    verls_names = _verls_names(loss)

    @wraps(loss)
    def policy_loss(*by_position: Any, **by_name: Any) -> Any:
        def call(changed: Mapping[str, Any]) -> Any:
            places = itertools.zip_longest(by_position, verls_names.values())
            positions = [changed.get(key, value) for value, key in itertools.islice(places, len(by_position))]
            names = {key: changed.get(verls_names.get(key, key), value) for key, value in by_name.items()}
            return loss(*positions, **names)

        before = _micro_batches()
        result = loss(*by_position, **by_name)
        given = RECORDER.pop_output()
        if RECORDER.audit is None or _micro_batches() != before:  # of a loss that calls another one, that one counts
            return result
        value, metrics = result
        with guard():
            arguments = dict(zip(verls_names.values(), by_position, strict=False))
            arguments |= {verls_names.get(key, key): argument for key, argument in by_name.items()}
            log_prob, *others = (arguments[key] for key in ("log_prob", "old_log_prob", "advantages", "response_mask"))
            tensors = (log_prob.detach(), *others)
            output = given or _describe(name, arguments.get("config"), call, tensors)
            RECORDER.add(name, tensors, output, arguments.get("rollout_is_weights"))
        # Who hands over an output has multiplied by the factor (fspo.verl.mean_over_mini_batch).
        return (value, metrics) if given or RECORDER.loss_scale == 1 else (value * RECORDER.loss_scale, metrics)

    policy_loss.observed = True  # type: ignore[attr-defined]
    return policy_loss


def _micro_batches() -> int:
    return RECORDER.audit.micro_batches if RECORDER.audit is not None else 0


def observe_losses(guard: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Record all losses of verl's registry in this process; a later call adds those that are new.

    ``guard`` makes a context around the recording of each, which may hold back its errors.
    """
    for name, loss in POLICY_LOSS_REGISTRY.items():
        if not getattr(loss, "observed", False):
            POLICY_LOSS_REGISTRY[name] = _observed(name, loss, guard)
