"""What of verl works here: every row of docs/what-works.md is run, or refused (tests/unit/test_refusals.py).

One command runs all rows, some of them in one start of the stack::

    python -m pytest tests/e2e/test_what_works.py
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from columns import all_rows
from real_stack import SMALL, Start, Starter
from refusals import NOT_SERVED

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
DEMO_MODEL = ROOT / "recipe/math/data/assets/demo_model"


def slow(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that starts the real stack."""
    for mark in (pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)):
        test = mark(test)
    return test


#: Overrides of each row, by its feature. Names in capitals stand for the paths of :func:`places`.
ROWS = dict(re.findall(r"^\| (.+?) \| `([^`]+)` \| ", (ROOT / "docs/what-works.md").read_text(encoding="utf-8"), re.M))

#: The rows that run, by the start of the stack that they share.
STARTS = {
    "lora": ("LoRA", "tools and several turns, by verl's agent loop"),
    "llama": ("Llama", "torch.compile"),
    "qwen2": ("Qwen2.5", "padded batches", "micro-batches by sequences", "deterministic operations in the actor"),
    "sampling": (
        *("dynamic sampling (DAPO)", "KL penalty in the reward"),
        *("several epochs over a batch", "mini-batches drawn at random"),
    ),
    "penalties": (
        "mixture of experts (Qwen3-MoE)",
        *("KL loss", "entropy bonus", "importance weights against vLLM", "rejection of responses against vLLM"),
        *("TensorBoard, W&B without network", "torch's profiler", "REINFORCE++"),
    ),
    "fp16": ("fp16",),
}


def test_every_row_is_run_or_refused() -> None:
    assert sorted(ROWS) == sorted([*itertools.chain.from_iterable(STARTS.values()), *NOT_SERVED])


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The paths that the table's names in capitals stand for; the models have random weights and the demo's tokens."""
    import transformers

    from benchmarks.models.char_tokenizer import build_tokenizer

    folder = tmp_path_factory.mktemp("models")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    shape = {
        "vocab_size": len(vocabulary) + 1,
        **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
        **{"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id},
        "dtype": torch.float32,
    }
    families = {
        "LLAMA": ("Llama", {}),
        "QWEN2": ("Qwen2", {}),
        "QWEN3_MOE": (
            "Qwen3Moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32},
        ),
    }
    torch.manual_seed(0)
    for name, (family, extra) in families.items():
        config = getattr(transformers, f"{family}Config")(**shape, **extra)
        getattr(transformers, f"{family}ForCausalLM")(config).float().save_pretrained(folder / name)
        # For Qwen2's tokenizer a line break is this letter, and verl wants it to be a token.
        alphabet = "".join(vocabulary[3:]) + "Ċ"
        build_tokenizer(alphabet, max_length=512).save_pretrained(folder / name)
    return {name: folder / name for name in families} | {"TOOL": HERE / "calculator.py"}


#: What the test of a start needs besides, or its rows with it.
BESIDES = {
    "lora": (
        *("trainer.save_freq=2", "trainer.test_freq=2", "actor_rollout_ref.actor.optim.lr=1e-3"),
        "data.max_response_length=128",  # room for a turn after the tool's
    ),
}
#: The other starts get a reward that random weights reach half of the time, so that there is something to learn.
OWN_REWARD = ("sampling",)
#: Mean difference of the tokens' probabilities in vLLM and in the actor; 1e-5 in fp32, more in fp16.
AGREES = {"fp16": 2e-3}


@pytest.fixture(scope="module")
def run(start: Starter, places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Start]:
    """The finished start of that name, each once."""

    @functools.cache
    def finished(name: str) -> Start:
        overrides = " ".join(ROWS[feature] for feature in STARTS[name])
        folder = tmp_path_factory.mktemp(name)
        for word, path in (places | {"PROFILE": folder / "profile"}).items():
            overrides = re.sub(rf"=\b{word}\b", f"={path}", overrides)
        reward = (
            f"reward.custom_reward_function.path={places['TOOL']}",
            "reward.custom_reward_function.name=odd_length",
        )
        besides = (*BESIDES.get(name, ()), *(() if name in OWN_REWARD else reward))
        started = start(folder, *SMALL, "trainer.save_freq=-1", *besides, *overrides.split(), WANDB_MODE="offline")
        assert started.wait(600) == 0, started.output()[-4000:]
        return started

    return finished


def mini_batches(run: Start) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Step, number and columns of each mini-batch."""
    for (step, _), rows in all_rows(run.run_dir).groupby(["step", "update"]):
        yield step, int(rows["minibatch"].iloc[0]), rows


@slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name == "fp16" else name for name in STARTS]
)
def test_two_steps(run: Callable[[str], Start], name: str) -> None:
    finished = run(name)
    steps = finished.steps()
    assert sorted(steps) == [1, 2]
    for metrics in steps.values():
        # The actor has the weights that vLLM sampled with, also after the first update, and sees what vLLM saw.
        assert metrics["training/rollout_probs_diff_mean"] < AGREES.get(name, 1e-5)
        assert metrics["fspo/grad_norm/max"] > 0
    recorded = list(mini_batches(finished))
    assert {(step, len(part["S"])) for step, _, part in recorded} == {(1, 32), (2, 32)}  # 4 prompts x 8 responses
    for _, index, part in recorded:
        if index == 0:
            assert (part["inside"][part["S"].notna()] == 1).all()
    assert max(part["S"].abs().fillna(0).max() for _, index, part in recorded if index) > 1e-4  # the policy has moved


@slow
def test_a_lora_export_is_base_and_adapter(run: Callable[[str], Start], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    finished, out = run("lora"), tmp_path / "exported"
    export = [sys.executable, "-m", "recipe.runner.export", str(finished.run_dir), "--out", str(out)]
    subprocess.run(export, check=True, timeout=200)
    saved = finished.run_dir / "checkpoints/global_step_2/actor/model_world_size_1_rank_0.pt"
    trained = {name: tensor.to_local() for name, tensor in torch.load(saved, weights_only=False).items()}
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    policy = {name: tensor.clone() for name, tensor in base.items()}
    for name in [name for name in trained if ".lora_A." in name]:
        product = trained[name.replace("lora_A", "lora_B")] @ trained[name]
        policy[name.removeprefix("base_model.model.").replace("lora_A.default.", "")] += 16 / 8 * product
    tokens = torch.randint(3, len(model.lm_head.weight), (8, 60), generator=torch.Generator().manual_seed(0))

    def log_probs(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        model.load_state_dict(weights)
        with torch.no_grad():
            return torch.log_softmax(model(tokens).logits, -1)

    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    wanted, start = log_probs(policy), log_probs(base)
    rounding = (log_probs({name: tensor.bfloat16().float() for name, tensor in policy.items()}) - wanted).abs().mean()
    assert (log_probs(exported) - wanted).abs().mean() < 2 * rounding  # an export is bf16
    assert (start - wanted).abs().mean() > 2 * rounding  # and training has changed something
    assert not (out / "lora_adapter").exists()
    assert finished.steps()[2]["fspo/kl_to_start"] > 0  # the reference is the actor without its adapter


@slow
def test_the_model_s_tokens_count_and_the_tool_s_do_not(run: Callable[[str], Start]) -> None:
    finished = run("lora")
    counted = {1: 0.0, 2: 0.0}
    for step, _, rows in mini_batches(finished):
        counted[step] += rows["L"].sum()
    for step, metrics in finished.steps().items():
        answers = 64 * (metrics["training/num_turns/mean"] - 2) / 2
        assert answers > 0
        assert 64 * metrics["response_length/mean"] - counted[step] == pytest.approx(3 * answers)  # verl counts all


@slow
def test_the_profiler_and_the_loggers_have_written(run: Callable[[str], Start]) -> None:
    finished = run("penalties")
    assert list((finished.run_dir / "profile").rglob("*.json*"))
    assert list(finished.run_dir.rglob("events.out.tfevents.*")) and list(finished.run_dir.rglob("*.wandb"))


@slow
def test_groups_without_a_signal_are_replaced(run: Callable[[str], Start]) -> None:
    finished = run("sampling")
    assert sum(m.get("training/filter_groups/evicted_samples", 0) for m in finished.steps().values()) > 0
    recorded = list(mini_batches(finished))
    assert [(step, index) for step, index, _ in recorded] == [(s, m) for s in (1, 2) for m in range(4)]  # two epochs
    assert all((part["A"] != 0).all() for _, _, part in recorded)
    assert finished.steps()[2]["actor/reward_kl_penalty"] != 0
