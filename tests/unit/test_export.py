"""An export of a LoRA run is the policy that was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from messages import holds
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from recipe.runner.export import describe, merge_adapter, model_card


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


def test_the_card_says_what_the_model_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, exported = tmp_path / "run", tmp_path / "exported"
    interval = {"value": 0.5, "low": 0.25, "high": 0.75}
    result = {"sums": {"problems": 8, "responses": 16, "avg": interval, "pass": {"1": interval}}}
    info = {"algo": "fspo", "seed": 1, "loss": {"c_low": 0.03}, "commit": "abc123", "command": ["python", "-m", "x"]}
    config = "actor_rollout_ref: {model: {path: a/base}, actor: {fsdp_config: {model_dtype: fp32}}}"
    lines = [json.dumps({"step": n, "metrics": {"val-core/sums/acc/mean@1": n / 8, "perf/x": 1}}) for n in (1, 2)]
    for name, kept in ({".": lines, "evaluation": lines[1:], "evaluation_2": lines[:1]}).items():
        (run / name).mkdir(parents=True, exist_ok=True)
        (run / name / "metrics.jsonl").write_text("\n".join(kept))
        (run / name / "evaluation.json").write_text(json.dumps(result))
    (run / "run.json").write_text(json.dumps(info))
    (run / "config.yaml").write_text(config)
    exported.mkdir()
    (exported / "config.json").write_text('{"dtype": "bfloat16"}')
    describe(actor := run / "checkpoints/global_step_2/actor", exported)
    assert OmegaConf.load(exported / "config.yaml") == OmegaConf.create(config)
    card = (exported / "README.md").read_text()
    for part in (
        "base_model: a/base", "| c_low | 0.03 |", "| val-core/sums/acc/mean@1 | 0.25 |", "Weights: bfloat16, half",
        "| sums | 8 | 16 | 0.500 [0.250, 0.750] | 1: 0.500 [0.250, 0.750] |", "Commit: abc123.", "python -m x",
        "config.yaml",
    ):  # fmt: skip
        assert part in card, part
    assert card.count("| sums |") == 1 and "perf/x" not in card, "another step was evaluated; no card of all metrics"
    assert "not recorded" in model_card(tmp_path / "elsewhere/x/global_step_7/actor", exported)
    for name, damaged in (("evaluation/evaluation.json", '{"sums": {}}'), ("config.yaml", "a: [")):
        (run / name).write_text(damaged)
        describe(actor, exported)  # no exception, which would throw the weights away
        assert "README.md" in capsys.readouterr().err
