"""The worker of a gradient alignment: gradients of weighted sums of log-likelihoods, kept as this rank's shards.

A sequence-level policy gradient is ``sum_i c_i grad log pi(y_i)``. The trainer computes the coefficients c from the
training loss (:mod:`benchmarks.alignment.gradients`); here the real engine takes the gradient, as in an update but
without the optimizer's step. Only inner products leave the worker.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, dispatch_lazy_compute_data_proto, register
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from recipe.fspo.worker import FSPOWorker

#: Field of the batch with one column per gradient: the coefficient of each sequence, 0 where it has no part in it.
WEIGHTS_FIELD = "alignment_weights"
_COEFFICIENT = "alignment_coefficient"
#: Parameters whose products are formed at a time, in float64.
_CHUNK = 2**16


def _every_rank(_: Any, output: list[Any]) -> list[Any]:
    return output


def weighted_log_likelihood(
    model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """``sum_i c_i sum_t log pi(y_it)`` over the response tokens, in the form of verl's loss functions.

    Not a mean, so that it adds up over micro-batches; verl averages gradients over ranks, hence the factor ``dp_size``.
    """
    log_prob_BT = no_padding_2_padding(model_output["log_probs"], data)
    mask_BT = data.select("response_mask").to_padded_tensor()["response_mask"].to(torch.bool)
    likelihood_B = log_prob_BT.masked_fill(~mask_BT, 0.0).sum(dim=-1)
    return (likelihood_B * data[_COEFFICIENT].to(likelihood_B.dtype)).sum() * data["dp_size"], {}


def flat_gradient(module: torch.nn.Module) -> torch.Tensor:
    """This rank's shard of the gradient as one float32 vector in the host's memory; 0 for parameters without one.

    Frozen ones, such as those below an adapter, are left out.
    """
    parts = []
    for parameter in filter(lambda each: each.requires_grad, module.parameters()):
        tensor = parameter if parameter.grad is None else parameter.grad
        local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().reshape(-1)
        parts.append(torch.zeros(local.numel()) if parameter.grad is None else local.to("cpu", torch.float32))
    return torch.cat(parts)


def gram_of_shards(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Inner products of vectors [D], accumulated in float64."""
    gram_VV = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for start in range(0, gradients[0].numel(), _CHUNK):
        block_VD = torch.stack([gradient[start : start + _CHUNK] for gradient in gradients]).to(torch.float64)
        gram_VV += block_VD @ block_VD.T
    return gram_VV


def rows_of(weights_B: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows with a weight and their weights, filled up to ``count`` with rows of weight 0.

    Every rank must pass equally many rows through the engine, or the others wait for ever.
    """
    rows = weights_B.nonzero().flatten()
    fill = torch.zeros(count - len(rows), dtype=rows.dtype)
    return torch.cat([rows, fill]), torch.cat([weights_B[rows], torch.zeros(len(fill), dtype=weights_B.dtype)])


class AlignmentWorker(FSPOWorker):
    """``FSPOWorker`` that measures gradients and leaves weights and optimizer as they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gradients: list[torch.Tensor] = []

    @register(
        dispatch_mode={"dispatch_fn": partial(dispatch_lazy_compute_data_proto, "actor"), "collect_fn": _every_rank}
    )
    def add_gradients(self, data: TensorDict) -> None:
        """Measure one gradient per column of WEIGHTS_FIELD and keep it."""
        weights_BV = data.pop(WEIGHTS_FIELD)
        weights_BV = torch.stack(list(weights_BV.unbind())).cpu()
        tu.maybe_fix_3d_position_ids(data)
        config = self.actor.engine_config
        tu.assign_non_tensor(  # what ``TrainingWorker.train_batch`` adds to a mini-batch
            data,
            use_remove_padding=self.actor.model_config.get("use_remove_padding", False),
            use_dynamic_bsz=config.use_dynamic_bsz,
            max_token_len_per_gpu=config.max_token_len_per_gpu,
            micro_batch_size_per_gpu=config.micro_batch_size_per_gpu,
            use_fused_kernels=config.use_fused_kernels,
            calculate_entropy=False,
        )
        # Where micro-batches have a fixed size, only whole ones pass.
        size = 1 if config.use_dynamic_bsz else config.micro_batch_size_per_gpu
        counts_V = (weights_BV != 0).sum(dim=0)
        torch.distributed.all_reduce(counts_V, op=torch.distributed.ReduceOp.MAX)
        engine = self.actor.engine
        with engine.train_mode():
            for weights_B, count in zip(weights_BV.T, counts_V.tolist(), strict=True):
                engine.optimizer_zero_grad()
                if count:
                    rows, coefficient = rows_of(weights_B, -(-count // size) * size)
                    part = tu.index_select_tensor_dict(data, rows)
                    part[_COEFFICIENT] = coefficient
                    engine.forward_backward_batch(part, weighted_log_likelihood, forward_only=False)
                self._gradients.append(flat_gradient(engine.module))
            engine.optimizer_zero_grad()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pop_gram(self) -> np.ndarray:
        """Inner products of all gradients kept, summed over the ranks' shards; they are given up."""
        gradients, self._gradients = self._gradients, []
        gram_VV = gram_of_shards(gradients)
        torch.distributed.all_reduce(gram_VV)
        return gram_VV.numpy()
