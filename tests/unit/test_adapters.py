"""LoRA: an adapter that PEFT could not load, or of another rank, and layers that the model does not have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from composing import composed
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from recipe.runner.launch import adapters
from recipe.runner.launch.prepare import on_this_machine
from recipe.runner.launch.values import MachineProblem

ROOT = Path(__file__).resolve().parents[2]
MODEL = "actor_rollout_ref.model"


def problems(*overrides: str) -> list[str]:
    own = [f"{'+' * word.startswith('+')}{MODEL}.{word.lstrip('+')}" for word in overrides]
    return [*adapters.adapter_problems(on_this_machine(composed("run.dir=/nowhere", f"{MODEL}.lora_rank=4", *own)))]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    base = AutoModelForCausalLM.from_pretrained(ROOT / "recipe/math/data/assets/demo_model")
    get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"])).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("target_modules=[q_projj]", ("q_projj", "did you mean q_proj?")),
        ("target_modules=[q_proj,v_prj]", ("v_prj", "did you mean v_proj?")),  # PEFT itself takes this one
        ("target_modules=all_linear", ("target_modules=all_linear", "q_proj")),
        ("target_modules=[norm]", ("target_modules=['norm']", "all-linear")),
        ("exclude_modules=lm_haed", ("exclude_modules=lm_haed", "lm_head")),
        ("+target_parameters=[mlp.experts.gate]", ("mlp.experts.gate",)),
    ],
)
def test_layers_that_the_model_does_not_have_are_named(override: str, parts: tuple[str, ...]) -> None:
    (problem,) = problems(override)
    assert all(part in problem for part in (f"{MODEL}.", *parts)), problem


@pytest.mark.parametrize("layers", ["all-linear", "[q_proj,v_proj]", r"'.*\.layers\.\d+\..*_proj'"])
def test_layers_that_it_has_get_no_word(layers: str) -> None:
    assert problems(f"target_modules={layers}") == []


def test_an_adapter_that_fits_gets_no_word(adapter: Path) -> None:
    assert problems(f"lora_adapter_path={adapter}") == []


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("target_modules=[q_proj,v_proj,gate_up_proj,c_attn]", "c_attn"),  # for several models
        ("exclude_modules=.*visual.*", "visual"),
    ],
)
def test_layers_that_need_not_be_there_are_noted(override: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(override) == []
    assert word in capsys.readouterr().err


def test_the_layers_are_those_of_verls_class_of_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with a vision part has two classes, and transformers' one for text has no vision."""
    asked = []
    from verl.utils import model

    took = model.get_hf_auto_model_class
    monkeypatch.setattr(model, "get_hf_auto_model_class", lambda settings: asked.append(settings) or took(settings))
    assert problems("target_modules=[q_proj]") == []
    assert len(asked) == 1


def test_an_adapter_of_a_larger_rank_is_named_with_what_to_give(adapter: Path) -> None:
    """verl takes rank and alpha from the adapter, and its own key is vLLM's limit."""
    assert problems(f"lora_adapter_path={adapter}", "lora_rank=8", "lora_alpha=32") == []
    (problem,) = problems(f"lora_adapter_path={adapter}", "lora_rank=2")
    assert all(part in problem for part in (f"{MODEL}.lora_rank=2", f"{MODEL}.lora_rank=4"))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_is_not_whole_may_be_so_on_the_machine_of_the_run(adapter: Path, name: str) -> None:
    (adapter / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    if name == "adapter_config.json":
        (adapter / name).unlink()
    (problem,) = problems(f"lora_adapter_path={adapter}")
    assert isinstance(problem, MachineProblem)
    assert str(adapter) in problem and name in problem


def test_an_adapter_for_other_layers_or_of_no_json_is_refused(adapter: Path) -> None:
    settings = adapter / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"target_modules": ["query_key_value"]}))
    (problem,) = problems(f"lora_adapter_path={adapter}")
    assert str(adapter) in problem and "query_key_value" in problem
    settings.write_text("{")
    (problem,) = problems(f"lora_adapter_path={adapter}")
    assert str(settings.parent) in problem and "no JSON" in problem
