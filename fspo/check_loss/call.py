"""A policy loss as verl calls it, on responses made for a test. Defined here.

A loss is a function of verl's registry: it takes ARGUMENTS and returns a scalar, or a tuple of it and metrics.
``config.global_batch_info`` has the sizes of the whole mini-batch, because one call sees one micro-batch of one rank:
verl adds up the gradients of micro-batches and averages those of ranks.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from fspo.check_loss.token_kinds import TokenKinds

#: The keyword arguments with which verl calls a policy loss.
ARGUMENTS: Final = (
    *("old_log_prob", "log_prob", "advantages", "response_mask"),
    *("loss_agg_mode", "config", "rollout_is_weights"),
)


class LossError(Exception):
    """The loss cannot be checked; the message names what is wrong and the remedy, in a sentence."""


class MissingSetting(AttributeError, KeyError):
    """A loss reads a setting that ``config`` lacks; the message ends with its full name, such as policy_loss.beta."""


class Config(dict[str, Any]):
    """A mapping whose keys are attributes too, as in verl's configuration; ``place``: its own key, and a dot."""

    def __init__(self, values: Mapping[str, Any] = MappingProxyType({}), place: str = "", **more: Any) -> None:
        super().__init__(values, **more)
        self.__dict__["place"] = place

    def __missing__(self, name: str) -> Any:
        raise MissingSetting(f"config has no {self.__dict__['place']}{name}")

    __getattr__ = dict.__getitem__


@dataclass(frozen=True, slots=True)
class Batch:
    """Responses of a mini-batch as verl hands them to a loss; all [B, T], the mask is bool."""

    log_prob_BT: torch.Tensor
    old_log_prob_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch with a function applied to every tensor."""
        return Batch(*(function(getattr(self, field.name)) for field in dataclasses.fields(self)))

    def to(self, dtype: torch.dtype) -> Batch:
        """The batch with its floating-point tensors in another type."""
        return self.map(lambda one: one.to(dtype) if one.is_floating_point() else one)

    def padding(self, *values: float) -> Batch:
        """The batch with these values of log_prob, old_log_prob and A outside the mask; 0 by default."""
        tensors = zip((self.log_prob_BT, self.old_log_prob_BT, self.advantages_BT), values or (0.0,) * 3, strict=True)
        return Batch(*[x.masked_fill(~self.mask_BT, value) for x, value in tensors], self.mask_BT)  # type: ignore[call-arg]

    def on_policy(self) -> Batch:
        """The batch with log_prob = old_log_prob."""
        return dataclasses.replace(self, log_prob_BT=self.old_log_prob_BT)


def synthetic_batch(
    length_B: Sequence[int], sigma_B: Sequence[float], advantage_B: Sequence[float], seed: int = 0, gaps: bool = False
) -> Batch:
    """Responses of :class:`fspo.check_loss.token_kinds.TokenKinds`, float64; padding is 0, as verl pads.

    Each has a length, a dispersion (the standard deviation of S is about sigma sqrt(L)) and an A. ``gaps`` masks a
    tenth of the tokens inside, as the words of a tool are, and the first token of every third response.
    """
    rng, width = np.random.default_rng(seed), max(length_B)
    rows = [
        TokenKinds.random(sigma, rng, 64).log_probs(np.array([length]), width, rng)
        for length, sigma in zip(length_B, sigma_B, strict=True)
    ]
    log_prob_BT, old_log_prob_BT, mask_BT = (torch.cat(column) for column in zip(*rows, strict=True))
    if gaps:
        mask_BT = mask_BT & torch.from_numpy(rng.random(mask_BT.shape) > 0.1)
        mask_BT[::3, 0] = False
        mask_BT[torch.arange(len(length_B)), torch.tensor(length_B) - 1] = True
    advantages_BT = torch.tensor(advantage_B, dtype=torch.float64)[:, None].expand_as(log_prob_BT)
    apart_BT = 1e-6 * torch.from_numpy(rng.random(mask_BT.shape))  # ties, which the order decides
    return Batch(log_prob_BT - apart_BT, old_log_prob_BT - apart_BT, advantages_BT.contiguous(), mask_BT).padding()


class PolicyLoss:
    """A policy loss with what verl calls it with; LossError if it does not accept verl's keyword arguments.

    Args:
        function: The loss.
        config: An object with ``global_batch_info``, a mapping that is filled before each call as verl does.
        loss_agg_mode: verl's word for how token losses are averaged; a loss may ignore it.
    """

    def __init__(self, function: Callable[..., Any], config: Any, loss_agg_mode: str = "token-mean") -> None:
        self.function, self.config, self.loss_agg_mode = function, config, loss_agg_mode
        try:
            inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
        except TypeError as error:
            names = f"verl calls a policy loss with the keyword arguments {', '.join(ARGUMENTS)}"
            remedy = f"this one cannot be called so ({error}): give them these names, and end its parameters with **_"
            raise LossError(f"{names}, and {remedy}") from None

    def value(
        self, batch: Batch, dp_size: int = 1, whole: Batch | None = None, seed: int = 0, weight_BT: Any = None
    ) -> torch.Tensor:
        """The scalar of one micro-batch of ``whole``, with ``weight_BT`` for rollout_is_weights.

        A loss that draws from torch's CPU generator draws the same with the same ``seed``; the process's state stays.
        LossError if the loss raises, or returns no scalar that depends on log_prob.
        """
        mask_BT = (whole or batch).mask_BT
        sizes = {"batch_num_tokens": int(mask_BT.sum()), "global_batch_size": int(mask_BT.any(dim=1).sum())}
        scale = getattr(self.config, "loss_scale_factor", None)
        self.config.global_batch_info.update(sizes, dp_size=dp_size, loss_scale_factor=scale)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                of_batch = batch.old_log_prob_BT, batch.log_prob_BT, batch.advantages_BT, batch.mask_BT
                rest = self.loss_agg_mode, self.config, weight_BT
                result = self.function(**dict(zip(ARGUMENTS, (*of_batch, *rest), strict=True)))
        except (Exception, SystemExit) as error:
            frames = traceback.extract_tb(error.__traceback__)
            place = next(one for one in reversed(frames) if one.filename != __file__)
            remedy = "it is called as verl calls it, with tensors [responses, tokens] and the settings of the actor"
            if key := self._missing(error):
                remedy = f"a setting that config lacks is given with --config {key}=VALUE"
            elif isinstance(error, AssertionError):
                remedy += "; if it asks for a class of settings, name that by --actor MODULE:CLASS"
            what = " ".join(f"{type(error).__name__} {error}".split())
            raise LossError(f"the loss raises {what} ({place.filename}:{place.lineno}): {remedy}") from error
        scalar = result[0] if isinstance(result, tuple | list) and result else result
        if not isinstance(scalar, torch.Tensor) or scalar.numel() != 1:
            what = str(tuple(scalar.shape)) if isinstance(scalar, torch.Tensor) else type(scalar).__name__
            remedy = "return a scalar tensor, or a tuple of it and a dictionary of metrics"
            raise LossError(f"the loss returns something of shape or type {what}: {remedy}")
        return scalar.reshape(())

    def _missing(self, error: BaseException) -> str | None:
        """Full name of the setting that config lacks, if that is what the error says."""
        if named := re.search(r"\bpolicy_loss\.\w+|(?<=config has no )[\w.]+", str(error)):
            return named[0]
        groups = {id(self.config): "", id(getattr(self.config, "policy_loss", self)): "policy_loss."}
        known = isinstance(error, AttributeError) and id(error.obj) in groups
        return f"{groups[id(error.obj)]}{error.name}" if known else None  # type: ignore[attr-defined]

    def gradient(self, batch: Batch, *args: Any, **others: Any) -> tuple[torch.Tensor, float]:
        """Gradient with respect to log_prob, [B, T], and the loss; arguments as in :meth:`value`."""
        leaf_BT = batch.log_prob_BT.detach().clone().requires_grad_()
        with torch.enable_grad():
            scalar = self.value(dataclasses.replace(batch, log_prob_BT=leaf_BT), *args, **others)
        if not scalar.requires_grad:
            remedy = "do not detach it, and compute it outside torch.no_grad()"
            raise LossError(f"what the loss returns does not depend on log_prob for autograd: {remedy}")
        try:
            (gradient_BT,) = torch.autograd.grad(scalar, leaf_BT, allow_unused=True)
        except RuntimeError as error:  # of autograd: the loss has changed a tensor that it needs
            text = " ".join(str(error).split())
            raise LossError(f"the loss has no gradient ({text}): change no tensor in place") from error
        return torch.zeros_like(leaf_BT) if gradient_BT is None else gradient_BT, float(scalar.detach())
