"""What cannot be seen from a command without a whole run, each by one function: only here are names that move."""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from composing import completed

from recipe.fspo.checkpoint import load_state, save_state
from recipe.fspo.recorder import MiniBatch
from recipe.fspo.step_records import join_ranks

__all__ = ["MiniBatch"]


def _of_rank(part: MiniBatch, rank: int, ranks: int) -> MiniBatch:
    return replace(part, rows={name: np.asarray(column)[rank::ranks] for name, column in part.rows.items()})


def clip_values(
    steps: Sequence[Sequence[MiniBatch]], lr: float, ranks: int = 1, kills: Sequence[int] = ()
) -> tuple[list[dict[str, Any]], float]:
    """The clip values that a run of ``fspo`` has set after these rollout batches, and the factor in force.

    The run is killed after the steps ``kills`` and resumed from their checkpoints.
    """
    from fspo.audit import minibatch_numbers
    from recipe.fspo.measured_values import ClipValues

    config = completed(f"actor_rollout_ref.actor.optim.lr={lr}")
    values = ClipValues(config)
    for number, step in enumerate(steps, 1):
        joined = join_ranks([[_of_rank(part, rank, ranks) for part in step] for rank in range(ranks)])
        moved = [place > 0 for place in minibatch_numbers([part.moves for part in joined])]
        values.add(joined, moved, None, number)
        if number in kills:
            before, values = values, ClipValues(config)
            with tempfile.TemporaryDirectory() as folder:
                save_state(Path(folder), {"clip_values": before})
                load_state(Path(folder), {"clip_values": values})
    return values.values, values.scaled(None).clip_scale


def divisors(lengths: Sequence[Any], kills: Sequence[int] = (), of_one_batch: bool = False) -> list[float]:
    """What a run divides ``fspo`` by in updates with responses of these lengths, each a rollout batch unless said."""
    from recipe.fspo.measured_values import LossScale

    config, used = completed(), []
    scale = LossScale(config)
    for number, length in enumerate(lengths, 1):
        scale.measure(torch.from_numpy(np.asarray(length)))
        used.append(1 / scale.factor)
        if not of_one_batch:
            scale.settle()
        if number in kills:
            state, scale = copy.deepcopy(scale.state_dict()), LossScale(config)
            scale.load_state_dict(state)
    return used


def begun(folder: Path, *words: str) -> Path:
    """The folder of a run that has done one step with these words and then ended, as a run writes it."""
    from omegaconf import OmegaConf

    from recipe.fspo.config import complete
    from recipe.fspo.main import composed
    from recipe.math.data.offline_task import write_dataset
    from recipe.runner.launch import run_folder, secrets
    from recipe.runner.launch.machine import on_this_machine

    given = (f"trainer.default_local_dir={folder}", *words)
    config = composed(given)
    on_this_machine(config)
    start = run_folder.Start(config, secrets.references(config))
    OmegaConf.resolve(config)
    complete(config)
    algo = next((word.removeprefix("algo=") for word in words if word.startswith("algo=")), "fspo")
    write_dataset(folder / "data", 4096, 256, 0)
    start.facts = {"algo": algo}
    run_folder.begin(folder, start, given)
    (folder / "metrics.jsonl").write_text('{"step": 1, "metrics": {}}\n')
    return folder


def saved(folder: Path, step: int, ranks: int = 1) -> Path:
    """A checkpoint as verl's FSDP manager writes it, which the tracker names."""
    place = folder / f"global_step_{step}"
    (place / "actor").mkdir(parents=True)
    for name in (f"{kind}_world_size_{ranks}_rank_" for kind in ("model", "optim", "extra_state")):
        for rank in range(ranks):
            torch.save({"weights": torch.arange(2000.0), "step": step}, place / "actor" / f"{name}{rank}.pt")
    torch.save({"position": step}, place / "data.pt")
    torch.save({"random": step}, place / "fspo_state.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return place


def evicted(
    groups: Mapping[str, int], stale: Collection[str], failed: Collection[str], surplus: Collection[str]
) -> dict[str, int]:
    """Responses by why they were not trained on, where verl's buffer evicts these groups of so many responses."""
    import transfer_queue
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    from fspo.files import read_lines
    from recipe.fspo.replay_buffer import ordered

    def read(keys: list[str], **_: Any) -> dict[str, Any]:
        rows = [torch.ones(3, dtype=torch.int64) for _ in keys]
        return {"response_mask": torch.nested.nested_tensor(rows, layout=torch.jagged)}

    settings = {"max_off_policy_threshold": 2, "max_off_policy_strategy": "drop", "sampler_kwargs": {}}
    ends = Path(tempfile.mkdtemp()) / "ends.jsonl"
    # TransferQueue in memory, of responses of three tokens.
    with patch.multiple(transfer_queue, kv_batch_get=read, kv_clear=lambda **_: None):
        buffer = ordered(ReplayBufferAsync("separate_async", {}, **settings), ends, 2)
        for prompt, count in groups.items():
            buffer.partitions["train"] |= {f"{prompt}_{i}_0": {"response_len": 3} for i in range(count)}
        buffer._evict_terminal_groups(3, "train", ({*stale}, set(), {*failed}, Counter()))
        buffer._clear_groups("train", {*surplus})
    ended: Counter[str] = Counter()
    for line in read_lines(ends):
        ended[line["reason"]] += len(line["lengths"])
    return dict(ended)
