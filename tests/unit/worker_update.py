"""``worker_update.py FOLDER CASE [LOSS...]``: updates of a small model in a process of its own. Prints JSON, by line.

| CASE | what is updated | what is printed |
| --- | --- | --- |
| verl | one batch with each LOSS, by verl's own worker | losses, gradient norms, change of the weights, rows |
| audit, recipe | the same under FSPO_AUDIT; by the recipe's worker (LOSS plain: as verl's own command has it) | |
| ranks | the same by the recipe's worker on two gloo ranks | by the first rank |
| gradient | by the recipe's worker, with all rows and with padding in place of some, for a few losses | of each |
| packs | nothing: two gloo ranks, a learning rate of 0, a kernel that rounds by a pack's tokens | the largest S |
"""

from __future__ import annotations

import collections
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from recipe.fspo.main import composed as compose
from recipe.runner.launch.machine import export_platform

FOLDER, CASE = Path(sys.argv[1]), sys.argv[2]
SEQUENCES, MINI_BATCH, PROMPT, LONGEST = 16, 8, 4, 40
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
CONFIG = compose(
    [
        *("experiment=demo", f"trainer.default_local_dir={FOLDER}", f"{ACTOR}.optim.total_training_steps=1"),
        f"{MODEL}.external_lib=recipe.runner.cpu.engine",
    ]
)
export_platform(CONFIG.trainer)  # before verl is imported
if CASE == "audit":  # and this, too
    facts = {"run": "run", "calls": 1, "limit": LONGEST, "every_mini_batch": "no"}
    os.environ |= {"FSPO_AUDIT": f"{FOLDER}/audit", "FSPO_AUDIT_RUN": json.dumps(facts)}

from composing import here  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from queue_in_memory import Queue  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers import modeling_flash_attention_utils as flash_attention  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.engine_workers import ActorRolloutRefWorker  # noqa: E402
from verl.workers.utils.padding import response_from_nested  # noqa: E402

from benchmarks.versus_verl import plain_verl  # noqa: E402
from fspo.losses import ALGORITHMS  # noqa: E402
from fspo.table import read_table  # noqa: E402
from fspo.types import BandState  # noqa: E402
from recipe.fspo import rollout_batch, zero_advantage  # noqa: E402
from recipe.fspo.plugin import check  # noqa: E402
from recipe.fspo.recorder import ROWS  # noqa: E402
from recipe.fspo.step_records import join_ranks  # noqa: E402
from recipe.fspo.worker import FSPOWorker, RecordingTrainingWorker  # noqa: E402


def started(kind: Any, config: Any, store: Any, rank: int = 0, ranks: int = 1) -> Any:
    """A worker, as a rank of a process group."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    worker = kind(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    if isinstance(worker, FSPOWorker):
        worker.begin_run(str(FOLDER))
    return worker


def batch_of(count: int, first: int = 4, last: int = 16, part: slice = slice(None)) -> TensorDict:
    """What the trainer gives a worker: prompts of four tokens, responses of 1 to ``LONGEST``, A = 1 and -1 in turn."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, LONGEST + 1, (count,), generator=generator).tolist()
    rows = [torch.randint(first, last, (PROMPT + length,), generator=generator) for length in lengths][part]
    lengths = lengths[part]
    columns = {
        "prompts": [row[:PROMPT] for row in rows],
        "responses": [row[PROMPT:] for row in rows],
        "input_ids": rows,
        "position_ids": [torch.arange(len(row)) for row in rows],
        "response_mask": [torch.ones(length, dtype=torch.int64) for length in lengths],
        "loss_mask": [torch.ones(length, dtype=torch.int64) for length in lengths],
        "advantages": [torch.full((length,), 1.0 - 2.0 * (i % 2)) for i, length in enumerate(lengths)],
    }
    nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in columns.items()}
    return TensorDict(nested, batch_size=len(rows))


def inferred(worker: Any, data: TensorDict, **settings: int) -> Any:
    question = data.clone()
    tu.assign_non_tensor(question, calculate_entropy=True, compute_loss=False, temperature=1.0, **settings)
    return worker.compute_log_prob(question)


def for_update(data: TensorDict, mini_batch: int) -> TensorDict:
    size = {"global_batch_size": mini_batch, "mini_batch_size": mini_batch, "epochs": 1, "seed": 1}
    tu.assign_non_tensor(data, calculate_entropy=False, temperature=1.0, dataloader_kwargs={"shuffle": False}, **size)
    return data


def batch(worker: Any) -> TensorDict:
    """pi_old is the policy itself, moved a little, so that ratios mean something."""
    generator = torch.Generator().manual_seed(1)
    data = batch_of(SEQUENCES)
    log_probs = response_from_nested(inferred(worker, data)["log_probs"], data["response_mask"])
    rows = [row + 0.02 * torch.randn(len(row), generator=generator) for row in log_probs.unbind()]
    data["old_log_probs"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    numbers = [torch.tensor([row]) for row in range(SEQUENCES)]
    data[ROWS] = torch.nested.as_nested_tensor(numbers, layout=torch.jagged)
    return data


def whole(tensors: Any) -> torch.Tensor:
    parts = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in tensors]
    return torch.cat([part.detach().flatten() for part in parts]).double()


def of_verls_command() -> Any:
    """What verl's own command gets, once its driver has asked the plugin."""
    plain_verl(FOLDER, "experiment=demo", f"{ACTOR}.optim.total_training_steps=1")
    config = OmegaConf.load(FOLDER / "plain.yaml")
    config.trainer.v1.trainer_mode = "fspo"
    check(config)
    return config


def of_loss(loss: str) -> Any:
    """What the recipe's command gets with this loss."""
    config = CONFIG.copy()
    actor = config.actor_rollout_ref.actor
    if loss in ALGORITHMS:
        actor.policy_loss.loss_mode = loss
    else:
        actor.policy_loss = {"_target_": "verl.workers.config.PolicyLossConfig", "loss_mode": loss}
        actor.update(clip_ratio_low=2e-3, clip_ratio_high=2e-3)
    return here(config)


def part_of(data: TensorDict, rank: int, ranks: int) -> TensorDict:
    """A rank's rows, such that every mini-batch has the same rows on any number of ranks."""
    index = np.arange(SEQUENCES).reshape(-1, ranks, MINI_BATCH // ranks)[:, rank].flatten()
    rows = {name: column.unbind() for name, column in data.items()}
    part = {name: [column[i] for i in index] for name, column in rows.items()}
    nested = {name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in part.items()}
    return TensorDict(nested, batch_size=len(index))


def update(rank: int, losses: list[str], ranks: int) -> None:
    is_ours = CASE in ("recipe", "ranks")
    for loss in losses:
        config = of_verls_command() if loss == "plain" else of_loss(loss)
        store = dist.FileStore(f"{FOLDER}/store_of_{loss}", ranks)
        worker = started(FSPOWorker if is_ours else ActorRolloutRefWorker, config, store, rank, ranks)
        data = for_update(part_of(batch(worker), rank, ranks), MINI_BATCH)
        if is_ours:
            worker.begin_update(BandState(clip_scale=3.0), 3)
        before = whole(worker.actor.engine.module.parameters())
        metrics = worker.update_actor(data)["metrics"]
        rows, recorded = [], []
        if is_ours:
            of_ranks = [[]] * ranks
            dist.all_gather_object(of_ranks, worker.pop_mini_batches())
            recorded = join_ranks(of_ranks)
            rows = [part.rows for part in recorded]
        elif CASE == "audit":
            columns = read_table(FOLDER / "audit").columns
            rows = [{name: column[columns["step"] == columns["step"].max()] for name, column in columns.items()}]
        names = ("S", "L", "A", "inside", "kept", "weight")
        joined = {name: [x for part in rows for x in part[name].tolist()] for name in names if rows and name in rows[0]}
        change = whole(worker.actor.engine.module.parameters()) - before
        printed = {"loss": metrics["actor/pg_loss"], "grad_norm": metrics["grad_norm"], "rows": joined}
        printed["momentum"] = [part.momentum for part in recorded]
        if rank == 0:
            print(json.dumps(printed | {"change": change.tolist()}), flush=True)
        dist.destroy_process_group()


class KeepingWorker(RecordingTrainingWorker):
    """Keeps the gradient of each mini-batch, and moves no weight."""

    def reset(self) -> None:
        super().reset()
        self.gradients: list[torch.Tensor] = []

        def keep() -> float:
            parameters = self.engine.module.parameters()
            self.gradients.append(whole(one.grad for one in parameters if one.grad is not None))
            return float(self.gradients[-1].norm())

        self.engine.optimizer_step = keep


class Worker(FSPOWorker):
    actor_worker_cls = KeepingWorker


def reduced(data: TensorDict, queue: Queue) -> TensorDict:
    """As the trainer makes it, through the queue: of the first mini-batch half of the rows stay, of the second none."""
    names = [name for name in [*data.keys()] if torch.is_tensor(data[name])]
    scores = torch.tensor([[0.7 if i >= MINI_BATCH // 2 else i % 2] for i in range(SEQUENCES)])
    keys = [f"{i // 2}_{i % 2}_0" for i in range(SEQUENCES)]
    meta = queue.kv_batch_put(keys, "train", data.select(*names).set("rm_scores", scores), [{}] * SEQUENCES)
    for row in queue.rows.values():
        row |= {"extra_fields": {}, "data_source": "math"}
    outcomes, padding = rollout_batch.read_outcomes(meta), zero_advantage.Padding()
    padding.put(meta, zero_advantage.equal_rewards(outcomes), outcomes, 3)
    for key in padding.stand_ins.values():
        queue.rows[key] |= {"advantages": torch.zeros(1), "old_log_probs": torch.zeros(1)}
    return queue.kv_batch_get(padding.in_place(meta).keys, "train", names).to_tensordict()


def gradient() -> None:
    """Whether the gradients of both mini-batches are equal bit for bit, with one row a pack; else how far apart."""
    queue = rollout_batch.tq = zero_advantage.tq = Queue()
    worker = started(Worker, here(CONFIG), dist.HashStore())
    everything = batch(worker)
    lengths = everything["responses"].offsets().diff().tolist()
    advantage = [(1.0 if i % 2 else -1.0) * (i < MINI_BATCH // 2) for i in range(SEQUENCES)]
    rows = [torch.full((length,), value) for length, value in zip(lengths, advantage, strict=True)]
    everything["advantages"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    some = reduced(everything, queue)
    config = worker.actor.loss_fn.args[0].keywords["config"]  # what is recorded is verl's
    for loss, mode in (("fspo", "token-mean"), ("vanilla", "token-mean"), ("vanilla", "seq-mean-token-mean")):
        object.__setattr__(config.policy_loss, "loss_mode", loss)
        object.__setattr__(config, "loss_agg_mode", mode)
        for alone in (True, False):
            gradients, records = [], []
            for data in (everything, some):
                data = for_update(data.clone(), MINI_BATCH)
                tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1 if alone else MINI_BATCH)
                worker.actor.gradients.clear()
                worker.begin_update(BandState(clip_scale=3.0), 3, loss_scale=0.1)
                worker.update_actor(data)
                gradients.append([*worker.actor.gradients])
                records.append([int((part.rows["L"] > 0).sum()) for part in worker.pop_mini_batches()])
            largest = float(gradients[0][0].abs().max())
            off = max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True)) / largest
            printed = {"loss": f"{loss} {mode}", "alone": alone, "rows": records, "largest": largest, "off": off}
            print(json.dumps(printed | {"second": float(gradients[1][1].abs().max())}), flush=True)


def split_k(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A matrix product in as many parts as its number of rows asks for, each rounded: what kernels of GPUs do."""
    parts = 1 + input.shape[-2] % 5
    products = [a @ b.T for a, b in zip(input.chunk(parts, -1), weight.chunk(parts, -1), strict=True)]
    total = sum(products[1:], start=products[0])
    return total if bias is None else total + bias


def varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **named: Any) -> torch.Tensor:
    """``flash_attn_varlen_func`` by torch: attention within each of the sequences that lie one after the other."""
    assert named.pop("causal") and set(named) <= {"max_seqlen_q", "max_seqlen_k", "softmax_scale", "dropout_p"}, named
    outputs = []
    for begin, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        one = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
        attended = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def dense(*_: Any, **__: Any) -> None:
    raise AssertionError("the sequences of the pack were not kept apart")


def a_small_model() -> None:
    """In ``FOLDER``; its flash-attn is :func:`varlen`."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).to(torch.bfloat16).save_pretrained(FOLDER)
    takes = collections.defaultdict(bool, dict.fromkeys(("dropout_p", "max_seqlen_q", "max_seqlen_k"), True))
    take = functools.partial(flash_attention._process_flash_attention_kwargs, supports_mapping=takes)
    flash_attention.lazy_import_flash_attention = lambda *_, **__: ((dense, varlen, None, None, None), take)


def packs(rank: int, ulysses: int) -> None:
    """The largest |S| of each mini-batch, on each rank that speaks, with pi_old from packs as in the update or of all.

    The 8B job's settings on a small model in bf16.
    """
    settings = [
        *("experiment=qwen3_8b", f"{MODEL}.path={FOLDER}", f"+{MODEL}.load_tokenizer=false"),
        f"{MODEL}.override_config.attn_implementation=sdpa",  # flash-attn is not installed
        *(f"{ACTOR}.fsdp_config.use_torch_compile=false", f"{ACTOR}.ppo_max_token_len_per_gpu=96"),
        *(f"{ACTOR}.optim.lr=0", f"{ACTOR}.optim.total_training_steps=1"),
        f"{ACTOR}.ulysses_sequence_parallel_size={ulysses}",
    ]
    worker = started(FSPOWorker, compose(settings), dist.FileStore(f"{FOLDER}/store{ulysses}", 2), rank, 2)
    for module in worker.actor.engine.module.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_attention_2"
    torch.nn.functional.linear = split_k
    for way, of_packs in (("as the update", {"mini_batch_size": 16}), ("as verl", {})):
        data = batch_of(48, 0, 512, slice(rank // ulysses, None, 2 // ulysses))
        answers = [inferred(worker, data, **of_packs)]
        if ulysses > 1:
            dist.broadcast_object_list(answers, src=0)  # verl hands on what the first rank of a group answers
        data["old_log_probs"] = response_from_nested(answers[0]["log_probs"], data["response_mask"])
        worker.begin_update(None, 0)
        worker.update_actor(for_update(data, 16))
        if parts := worker.pop_mini_batches():
            largest = [float(np.nanmax(np.abs(part.rows["S"]))) for part in parts]
            print(json.dumps({"ulysses": ulysses, "way": way, "largest": largest}) + "\n", end="", flush=True)


if __name__ == "__main__":
    ranks = functools.partial(torch.multiprocessing.start_processes, nprocs=2, start_method="fork")
    if CASE == "packs":
        a_small_model()
        for size in (1, 2):
            ranks(packs, (size,))
    elif CASE == "gradient":
        gradient()
    elif CASE == "ranks":
        ranks(update, (sys.argv[3:], 2))
    else:
        update(0, sys.argv[3:], 1)
    os._exit(0)
