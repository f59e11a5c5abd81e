"""The planner's memory formulas against measured processes: plain Qwen3 modules with random weights, on the CPU.

``python -m benchmarks.memory`` starts one fresh process per case. Each builds a model (float32, transformers' Qwen3 in
eager mode or with sdpa), takes two AdamW steps of two accumulated micro-batches with verl's own log-probabilities, and
reports the peak resident size minus that before the model was built, and the peak of live tensors. What is checked:
weights, gradients, moments, AdamW's working copy, activations with and without gradient checkpointing, logits. What is
not, because one process on a CPU has none of it: FSDP's gathered parameters, bf16, flash-attn, vLLM, CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from recipe.fspo.plan.memory import final_norm, layer_activations, logits_bytes, working_bytes
from recipe.fspo.plan.model import ModelShape

MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One process: a model's architecture, the micro-batch, and what the layers keep."""

    hidden: int
    layers: int
    sequences: int
    length: int
    checkpointing: bool
    attention: str = "sdpa"
    vocab: int = 4096

    def config(self) -> dict[str, Any]:
        """Fields of the model's ``config.json``: heads of 64, half as many for keys, an MLP three times as wide."""
        heads = self.hidden // 64
        return {
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": 64,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
            "max_position_embeddings": self.length,
        }


SIZES = ((256, 4, 4, 1024), (512, 5, 4, 512), (768, 8, 2, 512))
CASES = [
    *(Case(*size, checkpointing=checkpointing) for size in SIZES for checkpointing in (True, False)),
    Case(512, 5, 4, 512, checkpointing=False, attention="eager"),
]


def predicted(case: Case) -> dict[str, float]:
    """Bytes by item, as the planner has them for one rank without FSDP, in float32 and without flash-attn."""
    model, b, tokens = ModelShape.from_config(case.config(), "benchmark"), 4, case.sequences * case.length
    per_layer = layer_activations(model, b, case.attention, case.length)
    kept = model.layers * (b * model.hidden if case.checkpointing else per_layer) + final_norm(model, b)
    in_layer = (per_layer if case.checkpointing else 0) + working_bytes(model, b, case.attention, case.length)
    logits = logits_bytes(b, flash_cross_entropy=False, entropy=False) * model.vocab
    # A gradient that is added to an accumulated one exists on its own for a moment: of the head, or of one MLP matrix.
    at_head = tokens * (kept + logits) + b * model.embedding
    at_layer = tokens * (kept + in_layer) + b * model.hidden * model.intermediate
    states = 4 * b * model.parameters
    return {
        "parameters": model.parameters,
        "states": states,
        "activations": max(at_head, at_layer),
        "peak": states + max(at_head, at_layer, b * model.parameters),
    }


def run(case: Case) -> dict[str, float]:
    """Measure in this process, which must be fresh."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from verl.utils.torch_functional import logprobs_from_logits

    from benchmarks.loss import _PeakMemory

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def build(layers: int, hidden: int) -> tuple[Any, torch.optim.Optimizer]:
        fields = case.config() | {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 3 * hidden}
        model = Qwen3ForCausalLM(Qwen3Config(**fields, attn_implementation=case.attention))
        if case.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        # The implementation that torch takes on a GPU; on a CPU it would loop over parameters.
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def micro_batch(model: Any, ids_BT: torch.Tensor) -> None:
        labels = ids_BT.roll(-1, dims=1).flatten()
        mask_BT = torch.ones_like(ids_BT)
        mask_BT[0, -1] = 0  # a mask, as padded and packed sequences have it
        logits = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits.flatten(0, 1)
        loss = -logprobs_from_logits(logits, labels).mean()
        del logits
        loss.backward()

    def steps(model: Any, optimizer: torch.optim.Optimizer, ids_BT: torch.Tensor, count: int = 2) -> None:
        for _ in range(count):
            for _ in range(2):
                micro_batch(model, ids_BT)
            optimizer.step()
            optimizer.zero_grad()

    steps(*build(1, 64), torch.randint(0, case.vocab, (1, 8)))  # loads what torch loads at first use
    ids_BT = torch.randint(0, case.vocab, (case.sequences, case.length))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model, optimizer = build(case.layers, case.hidden)
    steps(model, optimizer, ids_BT)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    resident = sum(p.nbytes for p in model.parameters())
    resident += sum(v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
    with _PeakMemory() as mode:
        mode.watch([*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())])
        steps(model, optimizer, ids_BT, count=1)  # the moments are there by now
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "resident": peak,
        "tensors": resident + mode.peak,
    }


def measured(case: Case) -> dict[str, float]:
    """Measure in a fresh process, in which freed memory goes back to the system at once."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VERL_PLATFORM": "cpu",
        "VERL_LOGGING_LEVEL": "ERROR",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory", "--case", json.dumps(asdict(case))]
    finished = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(finished.stdout.splitlines()[-1])


def main() -> None:
    """Entry point of ``python -m benchmarks.memory``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(run(Case(**arguments.case))))
        return
    print(
        "| parameters | micro-batch | attention | checkpointing | states MiB | predicted peak MiB | measured RSS MiB "
        "| measured tensors MiB | predicted / RSS | predicted / tensors |"
    )
    print("|" + " --- |" * 10)
    for case in CASES:
        expected, found = predicted(case), measured(case)
        peak, checkpointing = expected["peak"], "yes" if case.checkpointing else "no"
        if expected["parameters"] != found["parameters"]:
            sys.exit(f"error: the planner counts {expected['parameters']} parameters, torch {found['parameters']}")
        print(
            f"| {expected['parameters'] / 1e6:.1f}e6 | {case.sequences} x {case.length} | {case.attention} "
            f"| {checkpointing} | {expected['states'] / MIB:.0f} | {peak / MIB:.0f} "
            f"| {found['resident'] / MIB:.0f} | {found['tensors'] / MIB:.0f} "
            f"| {peak / found['resident']:.2f} | {peak / found['tensors']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
