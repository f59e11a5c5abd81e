"""TRL's GRPOTrainer with FSPO's loss and the audit, on the embedded model of 0.8M parameters; one minute on a CPU.

    pip install '.[trl]' && python examples/trl_fspo.py

In an environment without verl, which does not start where TRL 1.x can be imported. Put your model, reward and data in
the places of these; leave out ``rule`` to audit TRL's own loss.
"""

from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

import fspo.data
from fspo.audit import describe, read_audit
from fspo.losses import ALGORITHMS
from fspo.trl import FSPOTrainer

MODEL = Path(fspo.data.__file__).parent / "assets/demo_model"


def digits(completions: list[str], **_: object) -> list[float]:
    """Reward: the sum of the digits of a completion."""
    return [float(sum(map(int, filter(str.isdigit, completion)))) for completion in completions]


trainer = FSPOTrainer(
    AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
    digits,
    args=GRPOConfig(
        "trl",
        num_iterations=2,  # with one update per generation S is 0, and no clip acts
        max_steps=4,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=24,
        learning_rate=2e-3,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to=[],
    ),
    train_dataset=Dataset.from_dict({"prompt": ["1+1=", "2+3=", "10+4=", "7+8="] * 8}),
    processing_class=AutoTokenizer.from_pretrained(MODEL),
    rule=ALGORITHMS["fspo"],
    audit="audit",
)
trainer.train()
print(describe(read_audit("audit")))
