"""``python -m benchmarks.driver``: what the driver moves for this recipe's statistics in a step of the 8B job's size.

A real TransferQueue holds 8,192 responses of 2,000 to 8,000 tokens as verl's agent loops store them. Measured is what
the trainer reads and writes for outcomes, attributes and samples, beside the same with another reward manager, which
tells no score and no digest, and beside the columns that verl's own metrics read. And what one poll for finished
responses takes, of as many as fit into the planned time of generation.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

os.environ.setdefault("VERL_PLATFORM", "cpu")

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.agent_loop_tq import list_of_dict_to_tensordict

from benchmarks.pages import markdown
from recipe.fspo.accounting import outcomes as accounting
from recipe.fspo.launch.compose import compose
from recipe.fspo.plan.__main__ import plan
from recipe.fspo.plan.setup import Hardware
from recipe.fspo.reward_manager import RESPONSE_DIGEST

GROUPS, RESPONSES, SHORTEST, LONGEST = 1024, 8, 2000, 8000
ATTRIBUTES: Final = ["difficulty", "truncated", "data_source"]
#: Of verl's ``_compute_metrics``.
VERLS: Final = ["prompts", "responses", "response_mask", "rm_scores", "num_turns"]


def row_of(draw: np.random.Generator, told: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields and tag of one response."""
    length, right = int(draw.integers(SHORTEST, LONGEST + 1)), float(draw.random() < 0.4)
    info: dict[str, Any] = {"acc": right, "status": "right" if right else "wrong", "response_length": length}
    if told:
        info |= {"score": right, RESPONSE_DIGEST: f"{draw.integers(2**63):016x}"}
    rm_scores = torch.zeros(length)
    rm_scores[-1] = right
    question = {"role": "user", "content": "x" * 300}
    fields = {
        "prompts": torch.zeros(200, dtype=torch.int64),
        "responses": torch.from_numpy(draw.integers(0, 150_000, length)),
        "response_mask": torch.ones(length, dtype=torch.int64),
        "rm_scores": rm_scores,
        "extra_fields": {"raw_prompt": [question], "reward_extra_info": info},
        "data_source": "math",
        "num_turns": 2,
    }
    return fields, {"status": "success", "response_len": length, "min_global_steps": 3, "max_global_steps": 3}


def fill(partition: str, told: bool) -> KVBatchMeta:
    """Store a step's responses, a group at a time."""
    draw, keys, tags = np.random.default_rng(1), [], []
    for group in range(GROUPS):
        rows = [row_of(draw, told) for _ in range(RESPONSES)]
        names = [f"{partition}{group:05d}_{i}_0" for i in range(RESPONSES)]
        fields = list_of_dict_to_tensordict([each for each, _ in rows])
        tq.kv_batch_put(keys=names, fields=fields, tags=[tag for _, tag in rows], partition_id=partition)
        keys += names
        tags += [tag for _, tag in rows]
    return KVBatchMeta(partition_id=partition, keys=keys, tags=tags)


def size_of(data: TensorDict) -> int:
    """Bytes: of tensors their elements, of the rest its pickle."""
    total = 0
    for value in data.values():
        tensor = value.values() if torch.is_tensor(value) and value.is_nested else value
        total += tensor.numel() * tensor.element_size() if torch.is_tensor(tensor) else len(pickle.dumps(list(value)))
    return total


class Counting:
    """Counts what is read from and written to TransferQueue."""

    def __init__(self) -> None:
        self.bytes = 0
        self._get, self._put, self._list = tq.kv_batch_get, tq.kv_batch_put, tq.kv_list
        tq.kv_batch_get, tq.kv_batch_put, tq.kv_list = self.get, self.put, self.list

    def get(self, **given: Any) -> Any:
        data = self._get(**given)
        self.bytes += size_of(data)
        return data

    def put(self, **given: Any) -> Any:
        self.bytes += size_of(given["fields"])
        return self._put(**given)

    def list(self) -> Any:
        data = self._list()
        self.bytes += len(pickle.dumps(data["told"]))
        return data["told"]


def part(call: Callable[[], Any], counting: Counting, repeats: int) -> tuple[float, float]:
    """Median seconds, and megabytes moved."""
    seconds = []
    for _ in range(repeats):
        counting.bytes, began = 0, time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), counting.bytes / 1e6


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    tq.init(compose(["experiment=demo"]).transfer_queue)
    batches = {told: fill("told" if told else "plain", told) for told in (True, False)}
    counting = Counting()
    read = {told: accounting.read_outcomes(batch, own_agents=not told) for told, batch in batches.items()}

    def samples() -> list[Any]:
        return list(accounting.training_samples("told", read[True], [], 0, 16, 1, 1, lambda ids: str(len(ids))))

    def verls() -> Any:
        batch = batches[True]
        return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=VERLS)

    calls: dict[str, Callable[[], Any]] = {
        "outcomes": lambda: accounting.read_outcomes(batches[True], own_agents=False),
        "attributes": lambda: accounting.send_rows(batches[True], read[True], ATTRIBUTES, LONGEST, 4, 0),
        "16 samples": samples,
        "outcomes, another reward manager and agents": lambda: accounting.read_outcomes(batches[False], True),
        "columns of verl's own metrics": verls,
    }
    config = compose(["experiment=qwen3_8b"])
    planned, rows = plan(config, Hardware())["time_s"], []
    for name, call in calls.items():
        seconds, moved = part(call, counting, repeats)
        rows.append([name, f"{seconds:.2f}", f"{100 * seconds / planned['total']:.2f}", f"{moved:.1f}"])
    tq.kv_clear(partition_id="plain", keys=batches[False].keys)
    seconds, moved = part(tq.kv_list, counting, repeats)
    polls = planned["generation"] / (seconds + config.fspo.poll_interval_s)
    rows.append(
        [f"polling, {polls:.0f} times", f"{polls * seconds:.2f}", "beside the generation", f"{polls * moved:.1f}"]
    )
    print(markdown(["part", "s a step", "% of the step", "MB a step"], rows))
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
