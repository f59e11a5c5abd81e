"""TRL's GRPOTrainer with FSPO's loss and the audit, on a small model with random weights; one minute on a CPU.

    pip install '.[trl]' && python examples/trl_fspo.py

In an environment without verl, which does not start where TRL 1.x can be imported. Put your model, reward and data in
the places of these; leave out ``rule`` to audit TRL's own loss.
"""

from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl import GRPOConfig

from fspo.audit import describe, read_audit
from fspo.clip_value import needed_scale, scale_for, scaled
from fspo.losses import ALGORITHMS
from fspo.trl import FSPOTrainer
from fspo.types import eps_of_c

VOCABULARY = ["<pad>", "<eos>", *"0123456789+="]
characters = Tokenizer(models.WordLevel({token: number for number, token in enumerate(VOCABULARY)}, "<pad>"))
characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
set_seed(1)
model = Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
)


def digits(completions: list[str], **_: object) -> list[float]:
    """Reward: the sum of the digits of a completion."""
    return [float(sum(map(int, filter(str.isdigit, completion)))) for completion in completions]


trainer = FSPOTrainer(
    model,
    digits,
    args=GRPOConfig(
        "trl",
        steps_per_generation=4,  # with one update per generation S is 0, and no clip acts
        max_steps=28,  # 21 of them after a moved weight: the audit concludes from 20 on
        per_device_train_batch_size=32,
        num_generations=4,
        max_completion_length=48,
        learning_rate=3e-4,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to=[],
    ),
    train_dataset=Dataset.from_dict({"prompt": ["1+1=", "2+3=", "10+4=", "7+8="] * 8}),
    processing_class=tokenizer,
    rule=ALGORITHMS["fspo"],
    audit="audit",
)
trainer.train()
print(describe(read_audit("audit")))

# The clip values with which 85% of these responses lie inside, as GSPO in TRL takes them.
moved, gspo = read_audit("audit").responses.moved(), ALGORITHMS["seq_gspo"]
band = scaled(gspo, scale_for(needed_scale(moved.s_B, moved.length_B, gspo), accept=0.85))
epsilon, epsilon_high = eps_of_c(band.c_low, band.c_high)
print(f"GRPOConfig(epsilon={epsilon:.3g}, epsilon_high={epsilon_high:.3g})")
