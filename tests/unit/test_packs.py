"""Mini-batches over ranks, and the packs of two passes, through verl's own dispatch, splitting and engine."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from composing import composed
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from updates import updates
from verl.protocol import BatchData
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

from recipe.runner.hooks import RunnerHooks

MINI_BATCH, MINI_BATCHES = 64, 4


def lengths() -> list[int]:
    """Long-tailed; the prompts of the first mini-batch have the longest responses."""
    generator = torch.Generator().manual_seed(0)
    of_prompts = torch.randn(MINI_BATCH * MINI_BATCHES // 8, generator=generator).sort(descending=True).values
    spread = torch.randn(MINI_BATCH * MINI_BATCHES, generator=generator) / 2
    return (300 * (of_prompts.repeat_interleave(8) / 2 + spread).exp()).long().clamp(1, 2000).tolist()


def mini_batches_of_ranks(ranks: int) -> list[list[list[int]]]:
    """Rows of each mini-batch on each rank, from verl's rollout batch to where verl's worker updates."""
    batch_size = (f"data.train_batch_size={len(lengths()) // 8}", "actor_rollout_ref.rollout.n=8")
    mini_batch_size = f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH // 8}"
    with patch("recipe.runner.hooks._LOGGERS", {}):  # of the whole process
        config = composed("trainer.default_local_dir=/nowhere", *batch_size, mini_batch_size)
        trainer = type("Trainer", (RunnerHooks, PPOTrainerSync), {"verl_mode": "sync"})(config)
    trainer.tokenizer = SimpleNamespace(eos_token_id=0)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(ranks))})
    tags = [{"seq_len": length, "response_len": length} for length in lengths()]
    metrics: dict[str, Any] = {}
    batch = trainer._balance_batch(KVBatchMeta([str(row) for row in range(len(tags))], tags), metrics)
    assert metrics["global_seqlen/balanced_max"] < 1.02 * metrics["global_seqlen/mean"]

    class Noting(TrainingWorker):
        def __init__(self, rank: int) -> None:
            self.profiler, self.noted = SimpleNamespace(step=lambda: None), []
            self.engine = SimpleNamespace(
                get_data_parallel_size=lambda: ranks,
                get_data_parallel_rank=lambda: rank,
                is_mp_src_rank_with_outputs=lambda: False,
                train_mode=lambda **_: contextlib.nullcontext(),
            )

        def train_batch(self, data: Any) -> None:
            self.noted.append(data["row"].tolist())

    data = TensorDict({"row": torch.tensor([int(key) for key in batch.keys])}, batch_size=len(batch))
    tu.assign_non_tensor(data, mini_batch_size=MINI_BATCH, epochs=1, dataloader_kwargs={"shuffle": False})
    noted = []
    for rank, part in enumerate(BatchData(data).chunk(chunks=ranks)):  # as verl's dispatch does
        worker = Noting(rank)
        worker.train_mini_batch(part.unlock_())
        noted.append(worker.noted)
    return noted


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_mini_batches_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    of_ranks, tokens = mini_batches_of_ranks(ranks), lengths()
    assert [len(of_rank) for of_rank in of_ranks] == [MINI_BATCHES] * ranks
    for index, parts in enumerate(zip(*of_ranks, strict=True)):
        first = index * MINI_BATCH
        assert sorted(row for part in parts for row in part) == list(range(first, first + MINI_BATCH))
        assert all(part == sorted(part) and len(part) == MINI_BATCH // ranks for part in parts)
        of_parts = [sum(tokens[row] for row in part) for part in parts]
        assert max(of_parts) < 1.02 * sum(of_parts) / ranks


@pytest.mark.slow  # a CPU minute
def test_log_probabilities_of_two_passes_are_rounded_alike(tmp_path: Path) -> None:
    """On two ranks, and on two that share each sequence, of which one speaks."""
    found = defaultdict[tuple[int, str], list[list[float]]](list)
    for one in updates(tmp_path, "packs"):
        found[one["ulysses"], one["way"]].append(one["largest"])
    for ulysses, speak in ((1, 2), (2, 1)):
        same, other = found[ulysses, "as the update"], found[ulysses, "as verl"]
        assert same == [[0.0, 0.0, 0.0]] * speak
        assert len(other) == speak and min(map(min, other)) > 0.01  # so the kernel does round by the shape
