"""Which sequences a rank gets, and which of them go through the model together.

A *pack* is what one call of the model gets: the sequences of a micro-batch, one after the other. Kernels round
differently at different shapes, so log-probabilities of two passes agree only where both form the same packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
from verl.workers.engine_workers import TrainingWorker


def rows_of_ranks(lengths: Sequence[int], mini_batch: int, ranks: int) -> list[list[int]]:
    """Balance every mini-batch over the ranks.

    verl balances the rollout batch as a whole, and each rank cuts its part into mini-batches, whose members depend on
    the number of ranks. Here mini-batch m consists of the rows from m * ``mini_batch`` on, whatever that number.

    ``lengths``: tokens of each sequence; their number and ``mini_batch``, the sequences of one over all ranks, are
    multiples of ``ranks``. Returns the rows of each rank in the order of its mini-batches, within one in their order.
    """
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(lengths), mini_batch):
        workload = calculate_workload(torch.tensor(lengths[start : start + mini_batch])).tolist()
        for part, rows in zip(parts, get_seqlen_balanced_partitions(workload, ranks, equal_size=True), strict=True):
            part += [start + row for row in rows]
    return parts


class SamePacksWorker(TrainingWorker):
    """``TrainingWorker`` that infers mini-batch by mini-batch where the batch says how large one is.

    ``train_mini_batch`` splits a mini-batch into packs, so a pass over the mini-batches forms the packs of the update.
    What does not divide goes as a whole, as verl has it.
    """

    # upstream: verl.workers.engine_workers "output = self.engine.infer_batch(data, loss_function=loss_function)"
    def infer_batch(self, data: Any) -> Any:
        size = tu.pop(data, key="mini_batch_size", default=None)
        size = len(data) if size is None else size // self.engine.get_data_parallel_size()
        dynamic, micro = self.engine_config.use_dynamic_bsz, self.engine_config.infer_micro_batch_size_per_gpu
        dynamic = tu.get(data, key="use_dynamic_bsz", default=dynamic)
        micro = 1 if dynamic else tu.get(data, key="micro_batch_size_per_gpu", default=micro)
        if size == len(data) or len(data) % size or size % micro:
            return super().infer_batch(data)
        tu.maybe_fix_3d_position_ids(data)
        with self.engine.eval_mode():
            tu.assign_non_tensor(data, disable_auto_offload=True)
            # upstream: verl.utils.tensordict_utils:make_iterator(tensordict, mini_batch_size, epochs)
            parts = tu.make_iterator(data, size, epochs=1)
            outputs = [super(SamePacksWorker, self).infer_batch(part) for part in parts]
        # None where another rank of a Ulysses group speaks for this one.
        return None if outputs[0] is None else tu.concat_tensordict(outputs)
