"""An export of a LoRA run is the policy that was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from messages import holds
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from recipe.runner.export import merge_adapter


@pytest.fixture
def merged_by_verl(tmp_path: Path) -> Path:
    """A folder as verl's merger leaves it: the base weights in bf16, and the adapter in ``lora_adapter``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    base = LlamaForCausalLM(config).bfloat16()
    base.save_pretrained(tmp_path)
    policy = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    policy.save_pretrained(tmp_path / "lora_adapter")
    return tmp_path


def test_the_adapter_is_added_to_the_base(merged_by_verl: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(merged_by_verl).state_dict()
    adapter = load_file(merged_by_verl / "lora_adapter" / "adapter_model.safetensors")
    merge_adapter(merged_by_verl)
    after = AutoModelForCausalLM.from_pretrained(merged_by_verl).state_dict()
    assert not (merged_by_verl / "lora_adapter").exists()
    adapted = [name for name in after if f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight" in adapter]
    assert len(adapted) == 7
    for name, weight in after.items():
        wanted = before[name].float()
        if name in adapted:
            head = f"base_model.model.{name.removesuffix('.weight')}"
            wanted += 8 / 4 * adapter[f"{head}.lora_B.weight"].float() @ adapter[f"{head}.lora_A.weight"].float()
        torch.testing.assert_close(weight, wanted.bfloat16())


def test_an_adapter_without_scale_or_base_is_refused(merged_by_verl: Path) -> None:
    config = merged_by_verl / "lora_adapter" / "adapter_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"lora_alpha": 0}))  # what verl's merger writes where it does not know it
    scale = merged_by_verl / "lora_train_meta.json"
    with pytest.raises(ValueError, match=holds(f"{scale} is missing", "global_step_N")):
        merge_adapter(merged_by_verl, scale)
    scale.write_text(json.dumps({"r": 4, "lora_alpha": 0}))  # what verl saves of 0.5
    with pytest.raises(ValueError, match=holds(f"{scale} ", "lora_alpha above 0", "whole number")):
        merge_adapter(merged_by_verl, scale)
    config.write_text(json.dumps(settings))
    weights = load_file(merged_by_verl / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, merged_by_verl / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        merge_adapter(merged_by_verl)
