"""The planner's formulas of a model and of memory, against real modules and hand-made numbers."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import composed
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from recipe.fspo.job import JOB
from recipe.runner.launch.commands import BadInput
from recipe.runner.plan.memory import GIB, layer_activations, logits_bytes, predict
from recipe.runner.plan.model import ModelShape, read_architecture
from recipe.runner.plan.setup import Hardware, Setup

DEMO = str(files("recipe.math.data").joinpath("assets/demo_model"))
QWEN_8B = ModelShape.from_config(*read_architecture("Qwen/Qwen3-8B-Base"))


def setup_of(*settings: str) -> Setup:
    return Setup(composed("experiment=qwen3_8b", *settings), JOB)


def predicted(*settings: str) -> dict[str, dict[str, float]]:
    return predict(QWEN_8B, setup_of(*settings), Hardware()).items


def test_the_demo_s_parameters_are_those_of_its_file() -> None:
    model = ModelShape.from_config(*read_architecture(DEMO))
    weights = load_file(Path(DEMO, "model.safetensors"))
    assert model.parameters == sum(weight.numel() for weight in weights.values())
    assert model.layer_parameters == sum(w.numel() for name, w in weights.items() if name.startswith("model.layers.0."))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 640, 4, 2, 64), (384, 512, 6, 3, 32)])
def test_activations_are_what_autograd_keeps(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    hidden, intermediate, heads, kv_heads, head_dim = shape
    fields: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 64,
        "tie_word_embeddings": True,
    }
    length, sequences = 256, 3
    ids_BT = torch.zeros(sequences, length, dtype=torch.int64)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[0, -1] = 0  # with a mask, as for padded or packed sequences

    def kept(layers: int) -> int:
        config = Qwen3Config(**fields, num_hidden_layers=layers, attn_implementation="sdpa")
        model = Qwen3ForCausalLM(config).to(dtype).train()
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(ids_BT, attention_mask=mask_BT, use_cache=False)
        total = sum(storage.nbytes() for storage in storages.values())
        assert output.logits is not None  # keeps the graph alive until here
        return total

    one_layer = (kept(3) - kept(1)) / 2 / (sequences * length)
    model = ModelShape.from_config(fields | {"num_hidden_layers": 1}, "test")
    assert layer_activations(model, dtype.itemsize, length) == pytest.approx(one_layer, rel=0.02)


def test_a_config_json_takes_the_place_of_the_model(tmp_path: Path) -> None:
    fields, _ = read_architecture("Qwen/Qwen3-8B-Base")
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 2}), encoding="utf-8")
    for path in (tmp_path, tmp_path / "config.json"):
        assert read_architecture("Qwen/Qwen3-8B-Base", str(path))[0]["num_hidden_layers"] == 2
    assert read_architecture(str(tmp_path))[0]["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral'"),
        ({"model_type": "qwen3", "hidden_size": None}, "hidden_size"),
        ({"model_type": "qwen3", "num_attention_heads": 0}, ""),
    ],
)
def test_a_model_that_cannot_be_counted(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=rf"^model/config\.json: .*{says}"):
        ModelShape.from_config(fields, "model/config.json")


_FSDP = "actor_rollout_ref.actor.fsdp_config"


@pytest.mark.parametrize("overrides", [["trainer.nnodes=2"], ["trainer.nnodes=4", f"{_FSDP}.fsdp_size=16"]])
def test_sharded_states_are_sixteen_bytes_a_parameter(overrides: list[str]) -> None:
    items = predicted(*overrides)["update"]
    shard = 8_190_735_360 * 4 / 16
    assert items["weights (shard)"] == items["gradients (shard)"] == shard
    assert items["Adam moments (shard)"] == 2 * shard


def test_offloading_moves_states_to_the_host_while_vllm_generates() -> None:
    weights, moments = (f"{_FSDP}.{states}_offload=false" for states in ("param", "optimizer"))
    shard = 8_190_735_360 * 4 / 8
    for overrides, expected in ([], 0.0), ([weights], shard), ([weights, moments], 3 * shard):
        items = predicted(*overrides)["rollout"]
        assert items["weights (shard)"] + items["Adam moments (shard)"] == expected
    assert predicted()["update"] == predicted(weights, moments)["update"]


def test_a_save_brings_the_weights_back_while_vllm_sleeps() -> None:
    shard = 8_190_735_360 * 4 / 8
    for overrides, moments in ([], 0.0), ([f"{_FSDP}.optimizer_offload=false"], 2 * shard):
        items = predicted(*overrides)["save"]
        assert (items["weights (shard)"], items["Adam moments (shard)"]) == (shard, moments)
        assert items["vLLM asleep"] + items["vLLM's CUDA context"] == 3 * GIB and "vLLM weights" not in items
    # So verl does not let vLLM sleep.
    awake = predicted("actor_rollout_ref.rollout.free_cache_engine=false")["save"]
    assert awake["vLLM asleep"] == pytest.approx(0.85 * 79.2 * GIB)
    apart = predicted("mode=separate_async")["save"]  # vLLM is on other GPUs
    assert sum(apart.values()) == shard + apart["CUDA, NCCL, fragmentation"]


def test_pinned_memory_is_taken_in_powers_of_two() -> None:
    mib = 2**20
    # On one of eight ranks in fp32: query and output 8 MiB each, key and value 2, three matrices of 24, embedding and
    # head of 296.75. Norms are small: 2 KiB, or 64 bytes.
    rank = 36 * ((2 * 8 + 2 * 2 + 3 * 32) * mib + 2 * 2048 + 2 * 64) + 2 * 512 * mib + 2048
    assert QWEN_8B.pinned_bytes(4, 8) == rank
    host = predict(QWEN_8B, setup_of(), Hardware()).host_bytes
    assert host == 8 * (3 * rank + rank / 2)  # weights, two moments, and the reference model in bf16
    in_fp32 = setup_of("actor_rollout_ref.ref.fsdp_config.model_dtype=fp32")
    assert predict(QWEN_8B, in_fp32, Hardware()).host_bytes == 8 * 4 * rank
    assert predict(QWEN_8B, setup_of("fspo.kl_to_start=false"), Hardware()).host_bytes == 8 * 3 * rank


def test_gradient_checkpointing_keeps_one_vector_per_layer_and_token() -> None:
    tokens = 20_480
    at_the_head = 8 * 4096 + 2 * 4096  # the last norm, and the gradient of what it returns
    assert predicted()["update"]["activations kept"] == tokens * (36 * 2 * 4096 + at_the_head)
    without = predicted("actor_rollout_ref.model.enable_gradient_checkpointing=false")["update"]["activations kept"]
    # bf16: 16 H for the norms, 6 (q + k) for those of queries and keys, 4 (q + k) and 4 bytes a head, 8 I.
    per_layer = 16 * 4096 + 6 * 5120 + 4 * 5120 + 4 * 32 + 8 * 12_288
    assert without == tokens * (36 * per_layer + at_the_head)


def test_weights_go_to_vllm_one_by_one_in_their_own_type() -> None:
    items = predicted()["sync"]
    assert items["gathered parameters"] == 4 * 151_936 * 4096  # fp32, as verl keeps them
    # A tensor larger than a bucket would go another way, which nothing here has tried.
    assert items["gathered parameters"] <= items["bucket of weights"] == 2.5 * GIB
    assert items["weights (shard)"] == 0  # offloaded, and with FSDP2 not brought back for this
    assert predicted(f"{_FSDP}.param_offload=false")["sync"]["weights (shard)"] == 8_190_735_360 * 4 / 8
    smaller = predicted("actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=512")["sync"]
    assert smaller["bucket of weights"] == GIB / 2


def test_activations_follow_the_micro_batch_and_ulysses() -> None:
    static = ("actor_rollout_ref.actor.use_dynamic_bsz=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4")
    whole = predicted(*static)["update"]
    assert whole["activations kept"] == 2 * predicted()["update"]["activations kept"]
    halved = predicted(*static, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2")["update"]
    assert halved["activations kept"] == whole["activations kept"] / 2


def test_logits_by_the_way_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = 20_480 * 151_936
    assert predicted()["update"]["logits"] == 2 * entries  # bf16, gradient in place
    assert predicted("actor_rollout_ref.actor.entropy_coeff=0.01")["update"]["logits"] == 12 * entries
    no_flash = "actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    few = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192"  # so that the head decides, not sdpa's layers
    monkeypatch.setattr("recipe.runner.plan.setup.find_spec", lambda _: None)
    without = predicted(no_flash, few)["update"]
    monkeypatch.setattr("recipe.runner.plan.setup.find_spec", lambda _: "its cross-entropy alone")
    assert without["logits"] == 12 * 8192 * 151_936
    assert sum(predicted(no_flash, few)["update"].values()) < sum(without.values()) - 2 * GIB
    assert "logits" not in predicted("actor_rollout_ref.model.use_fused_kernels=true")["update"]
    assert logits_bytes(4, flash_cross_entropy=False, entropy=False) == 16
    chunked, whole = (
        predicted()["log_probs"],
        predicted("actor_rollout_ref.actor.entropy_from_logits_with_chunking=false"),
    )
    assert chunked["entropy"] == 12 * 2048 * 151_936
    assert whole["log_probs"]["entropy"] == 12 * entries


def test_the_cache_is_what_vllms_share_leaves() -> None:
    memory = predict(QWEN_8B, setup_of(), Hardware())
    vllm = {name: value for name, value in memory.items["rollout"].items() if name.startswith("vLLM ")}
    assert sum(vllm.values()) == pytest.approx(0.85 * 79.2 * GIB)
    assert vllm["vLLM weights"] == 8_190_735_360 * 2 / 2
    # Two GPUs split the heads, so each holds 72 KiB of a token.
    assert memory.kv_tokens == int(vllm["vLLM keys and values"] / (72 * 1024))


def test_data_parallel_ranks_of_a_replica_have_a_copy_of_the_weights_each() -> None:
    replica = "actor_rollout_ref.rollout.data_parallel_size=2"
    assert predict(QWEN_8B, setup_of(replica), Hardware()) == predict(QWEN_8B, setup_of(), Hardware())
