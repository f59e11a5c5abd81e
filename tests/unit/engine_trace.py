"""Traces a job's memory in log-probs and update, without a GPU: verl's own engine on tensors that have no content.

usage: python tests/unit/engine_trace.py experiment=qwen3_8b nodes=2 gpus=8 [model_config=PATH] [any Hydra override]

Prints one JSON object: ``phases`` (GiB that the trace found) and ``planner`` (what ``python -m recipe.fspo.plan``
predicts for the same things). Written for FSDP2, flash-attn, packed sequences and logits that are formed. Not covered:
the optimizer's step and Adam's moments (FSDPMemTracker books them in the wrong place), vLLM, CUDA's own, fragmentation,
and torch.compile of the entropy, which needs less.

verl's FSDP engine builds and shards the model, runs a micro-batch of log-probs and one of an update, as the job would,
under torch's FakeTensorMode, a process group that pretends to have the job's ranks, and torch's FSDPMemTracker, which
counts the bytes that are alive. Replaced are the weights, flash-attn's kernels (what they return and keep has the right
size), and the unpacking of a batch of texts. Needs a process of its own: it chooses verl's CPU platform.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

from omegaconf import DictConfig, OmegaConf

from recipe.fspo.job import JOB
from recipe.runner.launch.compose import compose
from recipe.runner.plan.memory import GIB, predict
from recipe.runner.plan.model import ModelShape, read_architecture
from recipe.runner.plan.setup import Hardware, Setup, job_arguments

#: The planner's items that the trace has no part in.
_PLANNER_ONLY: Final = ("Adam moments (shard)", "vLLM asleep", "vLLM's CUDA context", "CUDA, NCCL, fragmentation")


def trace(config: DictConfig, model_config: str | None = None) -> dict[str, Any]:
    """The object that the command prints, for a composed configuration."""
    setup = Setup(config, JOB)
    fields, name = read_architecture(config.actor_rollout_ref.model.path, model_config)
    predicted = predict(ModelShape.from_config(fields, name), setup, Hardware()).items
    phases = _trace(config, setup, fields)
    planner = {
        phase: sum(value for item, value in predicted[phase].items() if item not in _PLANNER_ONLY) for phase in phases
    }
    return {
        name: {phase: round(value / GIB, 3) for phase, value in values.items()}
        for name, values in (("phases", phases), ("planner", planner))
    }


def _trace(config: DictConfig, setup: Setup, fields: Mapping[str, Any]) -> dict[str, float]:
    """Bytes alive at the peak of each phase."""
    os.environ["VERL_PLATFORM"] = "cpu"  # before verl is imported
    _pretend_flash_attention()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from verl.workers.engine.fsdp import transformer_impl

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=setup.ranks)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            Path(folder, "config.json").write_text(json.dumps(dict(fields)), encoding="utf-8")
            engine = engine_of(config, folder)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()))
            stack.enter_context(mock.patch("verl.utils.model.get_hf_auto_model_class", lambda **_: _RandomWeights))
            stack.enter_context(mock.patch.object(transformer_impl, "fsdp2_load_full_state_dict", lambda *_: None))
            stack.enter_context(mock.patch.object(type(engine), "prepare_model_inputs", _packed_inputs))
            engine.module = engine._build_fsdp_module(engine._build_module())
            engine.module.eval()
            tracker = FSDPMemTracker(engine.module)
            with tracker, torch.no_grad():
                _micro_batch(engine, setup.log_prob_tokens * setup.ulysses, entropy=True)
            peaks = {"log_probs": _peak(tracker)}
            engine.module.train()
            for parameter in engine.module.parameters():  # as the micro-batch before has left them
                parameter.grad = torch.zeros_like(parameter)
            tracker = FSDPMemTracker(engine.module)
            with tracker:
                _micro_batch(engine, setup.update_tokens * setup.ulysses, entropy=setup.entropy_in_update).backward()
            return peaks | {"update": _peak(tracker)}
    finally:
        torch.distributed.destroy_process_group()


def _peak(tracker: Any) -> float:
    by_device = tracker.get_tracker_snapshot("peak")
    return float(sum(items["Total"] for device, items in by_device.items() if device.type != "meta"))


def engine_of(config: DictConfig, folder: str) -> Any:
    """verl's FSDP engine of the actor, for the ``config.json`` in ``folder``, before anything is built."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    everything = copy.deepcopy(config.actor_rollout_ref)
    OmegaConf.set_struct(everything, False)
    everything.model.update(path=folder, hf_config_path=None, tokenizer_path=None, load_tokenizer=False)
    everything.actor.fsdp_config.use_torch_compile = False
    actor = omega_conf_to_dataclass(everything.actor)
    return FSDPEngineWithLMHead(omega_conf_to_dataclass(everything.model), actor.engine, actor.optim, actor.checkpoint)


class _RandomWeights:
    """Stands for the class with which verl reads a checkpoint."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str, torch_dtype: Any, config: Any, **_: Any) -> Any:
        """A model of that configuration, of the type that verl asks for."""
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(config)
        config._attn_implementation = "sdpa"  # flash-attn is looked for while the model is built
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = "flash_attention_2"
        model.to = lambda *_, **__: model  # it is where it should be, and parameters of no content cannot be moved
        return model


def _packed_inputs(engine: Any, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What verl's ``prepare_model_inputs`` makes of a pack of texts: here of ``micro_batch["tokens"]`` tokens."""
    import torch

    tokens = micro_batch["input_ids"].values().shape[0]
    padding = engine._get_packed_pad_size(tokens)
    on_this_rank = -(-(tokens + padding) // engine.ulysses_sequence_parallel_size)
    ids = torch.zeros(1, on_this_rank, dtype=torch.int64)
    pad_size = on_this_rank * engine.ulysses_sequence_parallel_size - tokens
    inputs = {"input_ids": ids, "attention_mask": None, "position_ids": torch.zeros_like(ids)}
    return inputs, {
        "temperature_is_one": True,
        "temperature_rmpad": torch.ones(on_this_rank),
        "input_ids_rmpad_rolled": ids[0],
        "pad_size": pad_size,
    }


def _micro_batch(engine: Any, tokens: int, *, entropy: bool) -> Any:
    """verl's forward pass of one micro-batch; returns a loss of all log-probabilities (and entropies)."""
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group

    set_ulysses_sequence_parallel_group(engine.ulysses_parallel_group)
    ids = torch.nested.nested_tensor_from_jagged(torch.zeros(tokens, dtype=torch.int64), torch.tensor([0, tokens]))
    micro_batch = TensorDict({"input_ids": ids}, batch_size=[1])
    tensordict_utils.assign_non_tensor(micro_batch, calculate_entropy=entropy)

    def loss(model_output: Mapping[str, Any], **_: Any) -> tuple[Any, dict[str, Any]]:
        return sum(output.values().sum() for output in model_output.values()), {}

    return engine.forward_step(micro_batch, loss_function=loss, forward_only=not torch.is_grad_enabled())[0]


def _pretend_flash_attention() -> None:
    """Put modules in the place of flash-attn, whose functions return and keep tensors of the sizes that it does.

    Attention keeps queries, keys, values, its output and one float32 number per head and token; the cross-entropy keeps
    the logits and one float32 number per token, and writes the gradient over the logits if verl asks for that.
    """
    import torch

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            output = torch.empty_like(query)
            ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
            return output

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))

    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, labels: Any, inplace_backward: bool) -> Any:
            losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
            ctx.save_for_backward(logits, torch.empty_like(losses))
            ctx.inplace_backward = inplace_backward
            return losses

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            logits = ctx.saved_tensors[0]
            return (logits if ctx.inplace_backward else torch.empty_like(logits)), None, None

    def cross_entropy_loss(logits: Any, labels: Any, inplace_backward: bool = False) -> tuple[Any, None]:
        return CrossEntropy.apply(logits, labels, inplace_backward), None

    # First, because it asks while it is imported which flash-attn is installed: none, whatever stands here afterwards.
    importlib.import_module("transformers.modeling_utils")
    path = ("flash_attn", "flash_attn.ops", "flash_attn.ops.triton", "flash_attn.ops.triton.cross_entropy")
    for name in path:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
    sys.modules[path[-1]].cross_entropy_loss = cross_entropy_loss
    from verl.models.transformers import monkey_patch

    # Below verl's own function, which exchanges heads for tokens where Ulysses is on.
    monkey_patch._flash_attention_forward = lambda query, key, value, *_, **__: Attention.apply(query, key, value)


def print_json(own: Collection[str], answer: Callable[[DictConfig, Mapping[str, Any]], dict[str, Any]]) -> None:
    """Print what ``answer`` makes of a job's configuration and of ``own``, this process's arguments."""
    settings, overrides = job_arguments(sys.argv[1:], own)
    with contextlib.redirect_stdout(sys.stderr):  # verl and vLLM print
        result = answer(compose(JOB, overrides, own), settings)
    print(json.dumps(result))


if __name__ == "__main__":
    print_json(["model_config"], lambda config, own: trace(config, own.get("model_config")))
