"""Forward + backward of the loss, with diagnostics, against verl's ``vanilla`` and ``gspo`` on the same tensors.

The losses take turns within one process, so that their *ratios* hold on a busy machine. What is timed is what a worker
does per micro-batch: loss, backward to the log-probabilities, the metrics (``Responses.of_output`` here, ``.item()``
calls in verl). docs/tables/loss-cost.csv is the record on a CPU; ``make gpu-check`` measures a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from fspo.check_loss.call import Batch
from fspo.length_bins import FINE_BINS
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.responses import Responses
from fspo.types import BandState

OURS = ("fspo", "fspo_v1", "fspo_quantile", "seq_rloo", "seq_gspo")
REFERENCE = "verl gspo"
_tensors = attrgetter("log_prob_BT", "old_log_prob_BT", "advantages_BT", "mask_BT")


def random_batch(sequences: int, width: int, device: str, dtype: torch.dtype = torch.float32) -> Batch:
    """Lengths uniform up to the width, log-ratios of 0.01 a token."""
    generator = torch.Generator().manual_seed(0)
    log_prob = -torch.rand(sequences, width, generator=generator)
    old = log_prob + 0.01 * torch.randn(sequences, width, generator=generator)
    length = torch.randint(1, width + 1, (sequences, 1), generator=generator)
    mask = torch.arange(width) < length
    advantages = torch.randn(sequences, 1, generator=generator) * mask
    log_prob, old, advantages = (tensor.to(device, dtype) for tensor in (log_prob, old, advantages))
    return Batch(log_prob.requires_grad_(), old, advantages, mask.to(device))


def our_losses(batch: Batch) -> dict[str, Callable[[], torch.Tensor]]:
    """Each of :data:`OURS` as a call that returns the scalar loss and takes the diagnostics."""
    state = BandState(drift_per_token=1e-5, half_width_K=(0.01,) * FINE_BINS)

    def run(name: str) -> torch.Tensor:
        output = sequence_policy_loss(*_tensors(batch), ALGORITHMS[name], state)
        Responses.of_output(output)
        return output.loss_B.sum() / batch.log_prob_BT.shape[0]

    return {name: lambda name=name: run(name) for name in OURS}  # type: ignore[misc]


def verl_losses(batch: Batch, names: Sequence[str] = ("gspo", "vanilla")) -> dict[str, Callable[[], torch.Tensor]]:
    """Losses of verl's registry as verl calls them, with the aggregation of the GSPO paper."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    tokens, rows = int(batch.mask_BT.sum()), batch.log_prob_BT.shape[0]

    def call_of(name: str) -> Callable[[], torch.Tensor]:
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=3e-4,
            clip_ratio_high=4e-4,
            policy_loss=PolicyLossConfig(loss_mode=name),
        )
        config.global_batch_info.update(dp_size=1, batch_num_tokens=tokens, global_batch_size=rows)
        new, old, advantages, mask = _tensors(batch)
        loss = get_policy_loss_fn(name)
        return lambda: loss(old, new, advantages, mask, loss_agg_mode="seq-mean-token-mean", config=config)[0]

    return {f"verl {name}": call_of(name) for name in names}


def step(loss: Callable[[], torch.Tensor], batch: Batch) -> None:
    """One forward and backward; the gradient is dropped."""
    loss().backward()
    batch.log_prob_BT.grad = None


def alternated(
    calls: Mapping[str, Callable[[], object]], device: str, turns: int, warm_up: int
) -> dict[str, list[float]]:
    """Seconds of each call, by turns, so that all see the same load of the machine; warm-up turns are left out."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warm_up + turns):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median_seconds(losses: dict[str, Callable[[], torch.Tensor]], batch: Batch, repeats: int) -> dict[str, float]:
    """Median wall time of forward and backward of each loss, by turns."""
    calls = {name: partial(step, loss, batch) for name, loss in losses.items()}
    seconds = alternated(calls, batch.log_prob_BT.device.type, repeats, warm_up=2)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_bytes(loss: Callable[[], torch.Tensor], batch: Batch) -> int:
    """Peak extra memory of one forward and backward: on CUDA by its counters, else by following every storage."""
    step(loss, batch)
    if batch.log_prob_BT.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(loss, batch)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with MemTracker() as tracker:
        step(loss, batch)
    return int(tracker.get_tracker_snapshot("peak")[batch.log_prob_BT.device]["Total"])
