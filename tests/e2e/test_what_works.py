"""What of verl works here, several features in each start, two steps each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from columns import all_rows
from real_stack import HERE, LATER, MODEL, SMALL, Start, Starter, export

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2 * LATER)]

TOOL = HERE / "calculator.py"
ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"


def rewarded(name: str) -> tuple[str, str]:
    """Random weights get such a reward half of the time, so that there is something to learn."""
    return f"reward.custom_reward_function.path={TOOL}", f"reward.custom_reward_function.name={name}"


def random_model(folder: Path, family: str, **extra: Any) -> str:
    """The word of a command that names a small model with random weights and the demo's tokens."""
    import torch
    import transformers

    from benchmarks.models.char_tokenizer import build_tokenizer

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(vocabulary) + 1, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, dtype=torch.float32,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, **extra,
    )  # fmt: skip
    getattr(transformers, f"{family}ForCausalLM")(config).float().save_pretrained(folder)
    # For Qwen2's tokenizer a line break is this letter, and verl wants it to be a token.
    build_tokenizer("".join(vocabulary[3:]) + "Ċ", max_length=512).save_pretrained(folder)
    return f"actor_rollout_ref.model.path={folder}"


@pytest.fixture(scope="module")
def lora(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """LoRA, and verl's agent loop with a tool that answers once."""
    run = start(
        tmp_path_factory.mktemp("lora"), *SMALL, *rewarded("odd_length"), "trainer.save_freq=2", "trainer.test_freq=2",
        "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16", f"{ACTOR}.optim.lr=1e-3",
        f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        f"{ROLLOUT}.multi_turn.function_tool_path={TOOL}", f"{ROLLOUT}.multi_turn.format=last_number",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=2", "data.max_response_length=128",  # room for the second turn
    )  # fmt: skip
    run.ends_with(0)
    return run


def mini_batches(run: Start) -> Iterator[tuple[int, int, pd.DataFrame]]:
    """Step, index and rows of each update."""
    for (step, update), rows in all_rows(run.folder).groupby(["step", "update"]):
        yield step, update, rows


def assert_trains(run: Start, updates: int = 2, agrees: float = 1e-5) -> None:
    """Two steps, every response counted; vLLM and the actor give the same tokens the same probabilities.

    Args:
        run: The start.
        updates: Of a step.
        agrees: Mean difference of the tokens' probabilities, also after an update.
    """
    steps = run.steps()
    assert sorted(steps) == [1, 2]
    for metrics in steps.values():
        assert metrics["training/rollout_probs_diff_mean"] < agrees
        assert metrics["fspo/grad_norm/max"] > 0
    recorded = [*mini_batches(run)]
    assert [(step, update) for step, update, _ in recorded] == [(s, u) for s in (1, 2) for u in range(updates)]
    for _, update, rows in recorded:
        assert len(rows) == 32  # 4 prompts x 8 responses
        if update == 0:
            assert (rows["inside"][rows["S"].notna()] == 1).all() and (rows["minibatch"] == 0).all()
    assert max(rows["S"].abs().max() for _, update, rows in recorded if update) > 1e-4  # the policy has moved


def test_lora_and_tools_train(lora: Start) -> None:
    assert_trains(lora)
    assert lora.steps()[2]["fspo/kl_to_start"] > 0  # the reference is the actor without its adapter


def test_the_model_s_tokens_count_and_the_tool_s_do_not(lora: Start) -> None:
    counted = all_rows(lora.folder).groupby("step")["L"].sum()
    for step, metrics in lora.steps().items():
        answers = 64 * (metrics["training/num_turns/mean"] - 2) / 2
        assert answers > 0
        assert 64 * metrics["response_length/mean"] - counted[step] == pytest.approx(3 * answers)  # verl counts all


def test_a_lora_export_is_base_and_adapter(lora: Start, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    export(lora.folder, tmp_path / "exported")
    saved = lora.folder / "global_step_2/actor/model_world_size_1_rank_0.pt"
    trained = {name: tensor.to_local() for name, tensor in torch.load(saved, weights_only=False).items()}
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).state_dict()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    written = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.testing.assert_close(written, base, rtol=2**-8, atol=0)  # an export is bf16
    merged = PeftModel.from_pretrained(model, tmp_path / "exported/lora_adapter").merge_and_unload().state_dict()
    for name in (adapters := [name for name in trained if ".lora_A." in name]):
        change = 16 / 8 * trained[name.replace("lora_A", "lora_B")] @ trained[name]
        key = name.removeprefix("base_model.model.").replace("lora_A.default.", "")
        assert (merged[key] - written[key] - change).abs().max() < 0.02 * change.abs().max()
    assert adapters


@pytest.mark.nightly  # one after the other, each has its own tests; together they are verl's to keep
def test_everything_that_changes_a_loss_trains_together(start: Starter, tmp_path: Path) -> None:
    """A mixture of experts; dynamic sampling; penalties; both corrections against vLLM; two epochs over a batch."""
    model = random_model(
        tmp_path / "model", "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, head_dim=32
    )
    run = start(
        tmp_path / "run", *SMALL, model, *rewarded("odd_length_of_some"), "trainer.save_freq=-1",
        "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc", f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.01", f"{ACTOR}.entropy_coeff=0.001",
        f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_rs=seq_sqrt_k1",
        f"{CORRECTION}.rollout_rs_threshold=1.1", f"{ROLLOUT}.calculate_log_probs=true",
    )  # fmt: skip
    run.ends_with(0)
    assert_trains(run, updates=4)
    steps = run.steps()
    assert sum(metrics.get("training/filter_groups/evicted_samples", 0) for metrics in steps.values()) > 0
    assert all((rows["A"] != 0).all() for _, _, rows in mini_batches(run))
    for _, update, rows in mini_batches(run):
        assert (rows["minibatch"] == update).all(), "S = 0 only in the first of the first epoch"
    assert steps[2]["actor/kl_loss"] > 0 and steps[2]["actor/entropy"] > 0
    assert all(metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-3) for metrics in steps.values())


#: Features of other starts, each with its model's family, and how closely vLLM and the actor agree.
OTHERS = {
    "llama": (
        *("Llama", 1e-5, f"{ACTOR}.use_torch_compile=true", f"{ACTOR}.fsdp_config.use_torch_compile=true"),
        *("algorithm.use_kl_in_reward=true", f"{ACTOR}.shuffle=true"),
    ),
    "qwen2": (
        *("Qwen2", 1e-5, "actor_rollout_ref.model.use_remove_padding=false", f"{ACTOR}.use_dynamic_bsz=false"),
        *(f"{ACTOR}.ppo_micro_batch_size_per_gpu=16", f"{ACTOR}.fsdp_config.full_determinism=true"),
        *("algorithm.adv_estimator=reinforce_plus_plus", "trainer.logger=[console,tensorboard,wandb]"),
        *("global_profiler.tool=torch", "global_profiler.steps=[2]", f"{ACTOR}.profiler.enable=true"),
        f"{ACTOR}.profiler.tool_config.torch.contents=[cpu]",
    ),
    "fp16": (
        *("Qwen2", 2e-3, f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp16", f"{ROLLOUT}.dtype=float16"),
        "trainer.n_gpus_per_node=2",
    ),
}


@pytest.mark.nightly  # what is verl's or transformers' own; the loop is that of the other starts
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_numbers_and_loggers_train(start: Starter, tmp_path: Path, name: str) -> None:
    family, agrees, *words = OTHERS[name]
    words += [random_model(tmp_path / "model", family), f"global_profiler.save_path={tmp_path}/profile"]
    run = start(tmp_path / "run", *SMALL, *rewarded("odd_length"), "trainer.save_freq=-1", *words, WANDB_MODE="offline")
    run.ends_with(0)
    assert_trains(run, agrees=agrees)
    if name == "qwen2":
        assert (
            [*tmp_path.rglob("*.json*")] and [*tmp_path.rglob("events.out.tfevents.*")] and [*tmp_path.rglob("*.wandb")]
        )
