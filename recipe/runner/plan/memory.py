"""Memory of one GPU in each phase of a training step, in bytes.

The formulas follow what verl 0.9.1's FSDP engine, PyTorch's FSDP2 and transformers' decoder layers allocate; each
function says which. ``b`` is the byte size of the compute type (``fsdp_config.mixed_precision.param_dtype``). Log-probs
and update are checked against verl's engine on tensors without content (``tests/unit/engine_trace.py``);
activations, states and logits also against measured processes (docs/performance.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from recipe.runner.plan.model import ModelShape
from recipe.runner.plan.setup import Hardware, Setup

GIB = 2**30
#: Bytes by what they are for.
Items = dict[str, float]

#: Phases in the order of a step. ``save``: a checkpoint, also after a warning. ``sync``: the new weights go to vLLM.
PHASES = ("rollout", "log_probs", "update", "optimizer", "save", "sync")


@dataclass(slots=True)
class Memory:
    """Bytes by item for every phase, on one GPU; and on the host of one node."""

    items: dict[str, Items] = field(default_factory=lambda: {phase: {} for phase in PHASES})
    kv_tokens: int = 0
    host_bytes: float = 0.0

    def total(self, phase: str) -> float:
        """Bytes of one phase."""
        return sum(self.items[phase].values())


def layer_activations(model: ModelShape, b: int, mask_width: int | None = None) -> int:
    """Bytes per token that autograd keeps of one decoder layer.

    From the operations of transformers' Qwen3 (``modeling_qwen3.py``). A RMSNorm of width W keeps its input in float32
    and the normalised values (4 W + b W; in float32 the first is the residual stream itself), and what it returns is
    kept by the products that take it (b W). Attention keeps rotated queries and keys, values, and its output, and 4
    bytes a head. Without flash-attn, keys and values are repeated for every query head, and sdpa turns a boolean mask
    into numbers anew in every layer, and keeps them (b x its width). The MLP keeps gate, its activation, up and their
    product (4 b I).

    Args:
        model: The shape.
        b: Bytes of one element of the compute type.
        mask_width: Of sdpa's mask: the length of padded sequences, or all tokens of packed ones. None: flash-attn.
    """
    norms = 2 * (4 + 2 * b) * model.hidden
    if model.qk_norm:
        norms += (4 + b) * (model.query + model.key)
    attention = 2 * (model.query + model.key) if mask_width is None else 4 * model.query + mask_width
    return norms + b * attention + 4 * model.heads + 4 * b * model.intermediate


def logits_bytes(b: int, *, flash_cross_entropy: bool, entropy: bool) -> int:
    """Bytes per token and vocabulary entry that the loss of an update needs at its peak.

    flash-attn's cross-entropy works on the logits in the compute type and writes their gradient in place, unless the
    entropy needs them, too (verl's ``inplace_backward``). Without it there are the logits, the float32 log-softmax and
    a gradient of each. An entropy in the update keeps a float32 copy and its softmax.
    """
    plain = b if flash_cross_entropy else 2 * b + 8
    return plain + ((b if flash_cross_entropy else 0) + 8 if entropy else 0)


def _vllm(memory: Memory, model: ModelShape, setup: Setup, hardware: Hardware) -> None:
    """vLLM's share in the rollout: it takes ``gpu_memory_utilization`` of the whole GPU, beside its CUDA context. What
    weights, one forward pass of ``max_num_batched_tokens``, the sampler and CUDA graphs (1 GiB) leave of it is for keys
    and values."""
    share = setup.rollout.gpu_memory_utilization * hardware.gpu_gb * GIB
    weights = model.parameters * setup.vllm_bytes / setup.copy_gpus
    split = setup.rollout.tensor_model_parallel_size
    widths = 2 * model.hidden + 3 * model.intermediate / split
    forward = setup.rollout.max_num_batched_tokens * setup.vllm_bytes * widths
    sampler = 3 * 4.0 * setup.rollout.max_num_seqs * model.vocab
    kv_bytes = max(0.0, share - weights - forward - sampler - GIB)
    heads_split = min(split, model.kv_heads) * (setup.copy_gpus // split)
    memory.kv_tokens = int(kv_bytes / (model.kv_bytes_per_token(setup.vllm_bytes) / heads_split))
    memory.items["rollout"] |= {
        "vLLM weights": weights,
        "vLLM keys and values": kv_bytes,
        "vLLM the rest": max(share, weights) - weights - kv_bytes,
    }


def predict(model: ModelShape, setup: Setup, hardware: Hardware) -> Memory:
    """Memory of every phase.

    Sharded states: master weights (``model_dtype``, float32 by default), gradients of the same type (FSDP2 reduces
    into the shard's type), two Adam moments of the same type: 16 bytes a parameter over the ranks of a shard group.
    Offloaded weights and moments come to the GPU for the update; the moments are absent while log-probs are computed,
    and during a save, for which verl brings the weights back (``FSDPEngine.save_checkpoint``).
    The reference model is always on the host (verl gives a forward-only engine CPUOffloadPolicy): only what is gathered
    of it is on the GPU. The optimizer's step (torch's ``foreach``) needs one more copy of the shard. For vLLM, verl
    gathers one parameter after the other in ``model_dtype`` (the largest is the embedding) and copies it to a bucket.
    """
    memory = Memory()
    fsdp = setup.fsdp
    shard = 0.0 if fsdp.offload_policy else model.parameters * setup.master_bytes / setup.shards
    kept = hardware.vllm_asleep_gb if setup.vllm_sleeps else setup.rollout.gpu_memory_utilization * hardware.gpu_gb
    for phase in PHASES:
        items = memory.items[phase]
        items["CUDA, NCCL, fragmentation"] = hardware.reserve_gb * GIB
        if phase == "rollout" or not setup.rollout_gpus:
            items["vLLM's CUDA context"] = hardware.vllm_context_gb * GIB
        if phase == "rollout" and setup.rollout_gpus:
            continue  # on GPUs that only generate
        # For the synchronisation, too, FSDP2's shards stay where they are: they go to the GPU one by one.
        weights_here = phase not in ("rollout", "sync") or not fsdp.param_offload
        updates = phase in ("update", "optimizer")
        items["weights (shard)"] = shard if weights_here else 0.0
        items["gradients (shard)"] = shard if updates else 0.0
        items["Adam moments (shard)"] = 2 * shard if updates or not fsdp.optimizer_offload else 0.0
        if phase != "rollout" and not setup.rollout_gpus:
            items["vLLM asleep"] = kept * GIB
    _vllm(memory, model, setup, hardware)
    memory.items["log_probs"] |= _log_probs(model, setup)
    memory.items["update"] |= _update(model, setup)
    if fsdp.use_no_sync_for_gradient_accumulation:
        memory.items["update"]["unreduced gradients"] = float(model.parameters * setup.reduce_bytes)
    memory.items["optimizer"]["Adam working copy"] = shard
    memory.items["sync"] |= {
        "gathered parameters": float(setup.master_bytes * model.embedding),
        "bucket of weights": setup.rollout.checkpoint_engine.update_weights_bucket_megabytes * 2.0**20,
    }
    if setup.vllm_sleeps and not setup.rollout_gpus:
        memory.items["sync"]["vLLM weights"] = model.parameters * setup.vllm_bytes / setup.copy_gpus
    weights, moments = (offload or fsdp.offload_policy for offload in (fsdp.param_offload, fsdp.optimizer_offload))
    rank = (weights + 2 * moments) * model.pinned_bytes(setup.master_bytes, setup.shards)
    if setup.has_reference:
        rank += model.pinned_bytes(setup.reference_bytes, setup.shards)
    rank += setup.weight_copies * model.parameters * setup.master_bytes / setup.shards
    memory.host_bytes = rank * setup.trainer.n_gpus_per_node
    return memory


def _largest(*moments: Items) -> Items:
    return max(moments, key=lambda items: sum(items.values()))


def _log_probs(model: ModelShape, setup: Setup) -> Items:
    """Old and reference log-probs, at the largest of three moments: in a layer, around the output head, and after it,
    when the entropy makes three float32 copies of the logits, of all or chunk by chunk.

    FSDP2 holds whole, in the compute type, one layer and the buffer that it or the next one arrived in; the head and
    its buffer likewise. A tied head is the embedding, a part of the root, which is whole throughout.
    """
    b, tokens = setup.compute_bytes, setup.log_prob_tokens
    layer, head, hidden = b * model.layer_parameters, b * model.embedding, float(tokens * b * model.hidden)
    # Gate, its activation, up and their product; sdpa needs what it would keep.
    widths = b * (4 * model.intermediate + model.hidden)
    if setup.mask_width is not None:
        widths = layer_activations(model, b, setup.mask_width)
    logits = 0.0 if setup.model.use_fused_kernels else float(tokens * model.vocab * b)
    at_once = tokens
    if setup.fsdp.entropy_from_logits_with_chunking:
        at_once = min(tokens, setup.fsdp.entropy_from_logits_chunk_size)
    entropy = 12.0 * model.vocab * at_once if logits else 0.0
    return _largest(
        {"gathered parameters": head * model.tied + 2.0 * layer, "activations of a layer": float(tokens * widths)},
        {
            "gathered parameters": head + float(layer if model.tied else head),
            "logits": logits,
            "activations kept": 2 * hidden,
        },
        {"logits": logits, "entropy": entropy, "activations kept": hidden},
    )


def _update(model: ModelShape, setup: Setup) -> Items:
    """Forward and backward of one micro-batch, at the largest of three moments, in the order of the backward pass:

    - around the output head: its weights and their gradient, the next layer, and the logits;
    - when that gradient is reduced, in ``reduce_dtype``: for a tied head at the very end, else before the layers;
    - in a layer: its weights, those of the next one, the gradient of one and its copy in ``reduce_dtype``. With
      gradient checkpointing a layer keeps its input only, and one layer at a time is recomputed.
    """
    b, tokens = setup.compute_bytes, setup.update_tokens
    checkpointing = setup.model.enable_gradient_checkpointing
    layer, head = b * model.layer_parameters, b * model.embedding
    per_layer = layer_activations(model, b, setup.mask_width)
    kept = float(tokens * model.layers * (b * model.hidden if checkpointing else per_layer))
    # Beside what autograd keeps, the backward pass needs two gradients of the MLP's width.
    in_layer = (per_layer if checkpointing else 0) + 2 * b * model.intermediate
    per_entry = logits_bytes(b, flash_cross_entropy=setup.flash_cross_entropy, entropy=setup.entropy_in_update)
    if setup.model.use_fused_kernels:  # they form no logits
        per_entry = 0
    reduced = setup.reduce_bytes * model.embedding * (1 + 1 / setup.shards)
    return _largest(
        {
            "gathered parameters": 2.0 * head + layer,
            "logits": float(tokens * model.vocab * per_entry),
            # What the last RMSNorm and the head keep, and the gradient of the hidden states.
            "activations kept": kept + tokens * (4 + 3 * b) * model.hidden,
        },
        {
            "gathered parameters": head + reduced + (head if model.tied else layer),
            "activations kept": 0.0 if model.tied else kept,
        },
        {
            "gathered parameters": 2.0 * head * model.tied + 3 * layer + setup.reduce_bytes * model.layer_parameters,
            "activations kept": kept,
            "activations of a layer": float(tokens * in_layer),
        },
    )
