"""A policy loss as verl calls it, on responses made for a test. Defined here.

A loss takes the keyword arguments ARGUMENTS and returns a scalar, or a tuple of it and metrics. One call sees one
micro-batch of one rank: verl adds up the gradients of micro-batches and averages those of ranks, so that the loss is
to divide by the sizes of the whole mini-batch, ``config.global_batch_info``.
"""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

#: The arguments that every loss has.
TENSORS: Final = ("old_log_prob", "log_prob", "advantages", "response_mask")
#: The keyword arguments with which verl calls a policy loss.
ARGUMENTS: Final = (*TENSORS, "loss_agg_mode", "config", "rollout_is_weights")


class LossError(Exception):
    """The loss cannot be checked; the message names what is wrong and the remedy, in a sentence."""


class Config(dict[str, Any]):
    """A mapping whose keys are attributes too, as in verl's configuration."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"config has no {name}")
        return self[name]


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
    """Responses whose token log-ratios are normal with mean -sigma**2 / 2, so that E_old[exp S] = 1; float64, 0-padded.

    The standard deviation of S is sigma sqrt(L), in nats. ``gaps`` masks a tenth of the tokens inside, as the words of
    a tool are, and the first token of every third response.
    """
    rng, shape = np.random.default_rng(seed), (len(length_B), max(length_B))
    mask_BT = torch.arange(shape[1]) < torch.tensor(length_B)[:, None]
    if gaps:
        mask_BT = mask_BT & torch.from_numpy(rng.random(shape) > 0.1)
        mask_BT[::3, 0] = False
        mask_BT[torch.arange(shape[0]), torch.tensor(length_B) - 1] = True
    sigma_B1 = np.array(sigma_B)[:, None]
    d_BT = torch.from_numpy(rng.normal(-(sigma_B1**2) / 2, sigma_B1, shape))
    old_BT = torch.from_numpy(rng.uniform(-3.0, -0.05, shape)) - d_BT.clamp(min=0)  # no probability exceeds 1
    advantages_BT = torch.tensor(advantage_B, dtype=torch.float64)[:, None].expand(shape)
    return Batch(old_BT + d_BT, old_BT, advantages_BT.contiguous(), mask_BT).padding()


class PolicyLoss:
    """A policy loss with what verl calls it with; LossError if it does not accept these keyword arguments.

    Args:
        function: The loss. Without a parameter ``config`` it gets those of ARGUMENTS that it has parameters for.
        config: An object with ``global_batch_info``, a mapping that is filled before each call as verl does.
        loss_agg_mode: verl's word for how token losses are averaged; a loss may ignore it.
        caller_averages: The loss is a mean over the rows that it gets, and its caller averages over micro-batches and
            ranks, as TRL does. Each call then counts by its share of the responses.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        config: Any,
        loss_agg_mode: str = "token-mean",
        caller_averages: bool = False,
    ) -> None:
        self.function, self.config, self.loss_agg_mode = function, config, loss_agg_mode
        self.caller_averages = caller_averages
        parameters = inspect.signature(function).parameters
        takes_all = "config" in parameters or any(x.kind is x.VAR_KEYWORD for x in parameters.values())
        self.names = ARGUMENTS if takes_all else tuple(x for x in ARGUMENTS if x in parameters)
        self.takes_mode = "loss_agg_mode" in parameters
        try:
            inspect.signature(function).bind(**dict.fromkeys({*TENSORS, *self.names}))
        except TypeError as error:
            names = f"a policy loss is called with the keyword arguments {', '.join(ARGUMENTS)}"
            remedy = "give them these names, and end its parameters with **_; or take the first four alone"
            raise LossError(f"{names}, and this one cannot be called so ({error}): {remedy}") from None

    def value(
        self, batch: Batch, dp_size: int = 1, whole: Batch | None = None, seed: int = 0, weight_BT: Any = None
    ) -> torch.Tensor:
        """The scalar of one micro-batch of ``whole``, with ``weight_BT`` for rollout_is_weights.

        A loss that draws random numbers draws the same with the same ``seed``. LossError if the loss raises, or returns
        no scalar.
        """
        mask_BT = (whole or batch).mask_BT
        sizes = {"batch_num_tokens": int(mask_BT.sum()), "global_batch_size": int(mask_BT.any(dim=1).sum())}
        scale = getattr(self.config, "loss_scale_factor", None)
        self.config.global_batch_info.update(sizes, dp_size=dp_size, loss_scale_factor=scale)
        tensors = batch.old_log_prob_BT, batch.log_prob_BT, batch.advantages_BT, batch.mask_BT
        given = dict(zip(ARGUMENTS, (*tensors, self.loss_agg_mode, self.config, weight_BT), strict=True))
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                result = self.function(**{name: given[name] for name in self.names})
        except (Exception, SystemExit) as error:
            frames = traceback.extract_tb(error.__traceback__)
            place = next(one for one in reversed(frames) if one.filename != __file__)
            what = " ".join(f"{type(error).__name__} {error} ({place.filename}:{place.lineno})".split())
            remedy = "give a setting that config lacks with --config KEY=VALUE (such as policy_loss.KEY=VALUE), and a "
            remedy += "class of settings that it asks for with --actor MODULE:CLASS; tensors are [responses, tokens]"
            raise LossError(f"the loss raises {what}: {remedy}") from error
        scalar = result[0] if isinstance(result, tuple | list) and result else result
        if not isinstance(scalar, torch.Tensor) or scalar.numel() != 1:
            what = str(tuple(scalar.shape)) if isinstance(scalar, torch.Tensor) else type(scalar).__name__
            remedy = "return a scalar tensor, or a tuple of it and a dictionary of metrics"
            raise LossError(f"the loss returns something of shape or type {what}: {remedy}")
        share = len(batch.mask_BT) / sizes["global_batch_size"] * dp_size if self.caller_averages else 1.0
        return share * scalar.reshape(())

    def gradient(self, batch: Batch, *args: Any, **others: Any) -> tuple[torch.Tensor, float]:
        """Gradient with respect to log_prob, [B, T], and the loss; arguments as in :meth:`value`.

        LossError if the scalar does not depend on log_prob for autograd.
        """
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
