"""TRL's trainer with this package's losses, and with the audit: two updates per generation, so that S is not 0.

Run by test_trl.py where TRL is importable.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from fspo.audit import Audit
from fspo.losses import ALGORITHMS
from fspo.table import read_table
from fspo.trl import FSPOTrainer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "recipe/math/data/assets/demo_model"
GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}


def digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within a group."""
    return [float(sum(map(int, filter(str.isdigit, completion)))) for completion in completions]


def trainer(
    folder: Path, rule: str | None = None, audit: bool = True, kind: type[Any] = FSPOTrainer, **settings: Any
) -> Any:
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4}
    sizes |= {"max_completion_length": 24, "num_iterations": 2, "learning_rate": 2e-3, "max_steps": 4}
    here = {"use_cpu": True, "bf16": False, "logging_steps": 1, "save_strategy": "no", "report_to": [], "seed": 0}
    config = GRPOConfig(str(folder / "trl"), **{**sizes, **here, "temperature": 1.0, **settings})
    return kind(
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        digits,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["1+1=", "2+3=", "10+4=", "7+8="] * 8}),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        rule=None if rule is None else ALGORITHMS[rule],
        audit=folder / "audit" if audit else None,
    )


def gradients(run: FSPOTrainer, spread: float) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the weights on one micro-batch whose old log-probabilities differ by noise."""
    generator = torch.Generator().manual_seed(0)
    prompt, completion = (torch.randint(3, 12, (6, width), generator=generator) for width in (5, 40))
    mask = (torch.arange(40) < torch.tensor([[1], [4], [9], [20], [33], [40]])).long()
    run.model.train()
    run.current_gradient_accumulation_steps = 2
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0]),
        "num_items_in_batch": mask.sum(),
    }
    ids = torch.cat([prompt, completion], 1)
    with torch.no_grad():
        log_prob, *_ = run._get_per_token_logps_and_entropies(run.model, ids, torch.ones_like(ids), 40)
    inputs["old_per_token_logps"] = log_prob + spread * torch.randn(log_prob.shape, generator=generator)
    loss = run._compute_loss(run.model, inputs)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None])


def test_gspo_of_trl_and_ours_have_one_loss_and_one_gradient(tmp_path: Path) -> None:
    theirs, their_gradient = gradients(trainer(tmp_path, audit=False, **GSPO), 0.001)
    ours, our_gradient = gradients(trainer(tmp_path, "seq_gspo", audit=False), 0.001)
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert float((our_gradient - their_gradient).norm()) <= 1e-5 * float(their_gradient.norm()) > 0


@pytest.mark.parametrize(
    ("rule", "settings", "loss"),
    [
        ("fspo", {}, "fspo"),
        (None, GSPO, "trl sequence grpo"),
        (None, {"loss_type": "cispo", "epsilon_high": 5.0}, "trl token cispo"),  # S alone is known
    ],
)
def test_training_is_audited(rule: str | None, settings: dict[str, Any], loss: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, rule, **settings)
    before = torch.cat([p.detach().flatten().clone() for p in run.model.parameters()])
    run.train()
    after = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    assert float((after - before).norm()) > 0
    table = read_table(tmp_path / "audit")
    known = "cispo" not in loss
    assert table.problems == [] and table.meta["rule"] == ("known" if known else "unknown")
    assert table.meta["loss"] == loss
    assert table.columns["step"].tolist() == [1] * 32 + [2] * 32
    assert table.columns["update"].tolist() == ([0] * 16 + [1] * 16) * 2
    first_B = table.columns["update"] == 0
    assert np.abs(table.columns["S"][first_B]).max() < 1e-3 < np.abs(table.columns["S"][~first_B]).max()
    inside_B = table.columns["inside"][table.columns["minibatch"] > 0]
    assert inside_B.mean() < 1 if known else np.isnan(inside_B).all()  # the rule acts


class WithEngine(FSPOTrainer):
    """The engine's log-probabilities are the model's with noise: vLLM is not installed here."""

    def _generate(self, prompts: list[Any]) -> Any:
        self.use_vllm = False
        result = list(super()._generate(prompts))
        self.use_vllm, result[4] = True, []
        generator = torch.Generator().manual_seed(0)
        for prompt, completion in zip(result[0], result[1], strict=True):
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            result[4].append((chosen + 0.01 * torch.randn(len(chosen), generator=generator)).tolist())
        return tuple(result)


def test_trls_correction_is_audited_by_the_method_of_the_page(tmp_path: Path) -> None:
    (method,) = re.findall(r"```text\n(    def .*?)```", (ROOT / "docs/trl.md").read_text(encoding="utf-8"), re.S)
    exec("class Corrected(WithEngine):\n" + method, namespace := {"WithEngine": WithEngine})
    run = trainer(tmp_path, kind=namespace["Corrected"], max_steps=2, vllm_importance_sampling_mode="sequence_mask")
    run.vllm_importance_sampling_correction, run.vllm_importance_sampling_clip_max = True, 1.01
    run.correction = Audit(tmp_path / "correction", loss="vLLM correction")
    run.train()
    columns = read_table(tmp_path / "correction").columns
    ratio, kept = np.exp(columns["S"]), columns["kept"] == 1
    np.testing.assert_allclose(columns["weight"], ratio * kept, atol=1e-5)
    assert 1.01 - ratio[kept].max() > -1e-6 and ratio[~kept].min() - 1.01 > -1e-6


def test_training_goes_on_without_an_audit_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(Audit, "end_mini_batch")
    run = trainer(tmp_path, "fspo", max_steps=2)
    assert run.train().global_step == 2
    assert capsys.readouterr().out.count("audits nothing more") == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("beta", 0.1), ("top_entropy_quantile", 0.5), ("off_policy_mask_threshold", 0.5), ("rule", "fspo_v1")],
)
def test_what_the_loss_would_leave_out_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{key}=" + f"{value}: " * (key != "rule")):
        trainer(tmp_path, **{"rule": "fspo", key: value})
