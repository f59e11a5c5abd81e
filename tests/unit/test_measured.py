"""What a run measures and then holds fixed: which responses count, in which step, and what ranks and resumes change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from composing import completed, composed
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import FSDPActorConfig

import fspo.verl
from fspo.audit import minibatch_numbers
from fspo.measured import FIXED_AFTER
from recipe.fspo.config import complete, complete_settings
from recipe.fspo.measured_values import ClipValues, LossScale
from recipe.fspo.recorder import MiniBatch, Recorder, join_ranks

CLIP = "actor_rollout_ref.actor.policy_loss.c_low"
PROMPTS, RESPONSES, MINI_BATCHES, LR = 32, 8, 4, 1e-4
ROWS = PROMPTS * RESPONSES


def mini_batches(step: int, ranks: int = 1, lr: float = LR, count: int = MINI_BATCHES) -> list[MiniBatch]:
    """Those of a step as the driver joins them: S is that of a row, whoever has computed it.

    Some prompts move much farther than others, as in real runs, so that one batch alone is not enough.
    """
    rows, rng = np.arange(ROWS), np.random.default_rng(1000 + step)
    length = np.random.default_rng(step).integers(4, 200, ROWS)
    of_prompt = np.exp(rng.standard_normal(PROMPTS))[rows // RESPONSES]
    s = 0.06 * np.sqrt(length) * of_prompt * rng.standard_normal(ROWS)
    per_rank = []
    for rank in range(ranks):
        parts = []
        for chosen in np.split(rows, count):
            mine = np.random.default_rng(rank).permutation(chosen[rank::ranks])
            columns = {"S": s[mine], "L": length[mine], "A": np.ones(len(mine)), "row": mine}
            parts.append(MiniBatch(columns, 1.0, lr))
        per_rank.append(parts)
    return join_ranks(per_rank)


def add(values: ClipValues, step: list[MiniBatch], number: int) -> str | None:
    """As the driver does after a rollout batch."""
    numbers = minibatch_numbers([mini_batch.moves for mini_batch in step])
    return values.add(step, [one > 0 for one in numbers], None, number)


def fed(values: ClipValues, first: int, last: int, **options: Any) -> list[int]:
    """Feed steps; those after which a line was printed."""
    printed = []
    for step in range(first, last + 1):
        if add(values, mini_batches(step, **options), step) is not None:
            printed.append(step)
    return printed


def test_the_loss_is_divided_by_the_mean_length_of_the_first_batch_and_then_by_no_other() -> None:
    scale, length = LossScale(completed()), torch.tensor([10, 30, 80])
    assert scale.factor == 1
    scale.measure(length)
    assert scale.factor == pytest.approx(1 / 40) and scale.settle() and not scale.settle()
    scale.measure(2 * length)
    assert scale.factor == pytest.approx(1 / 40)
    resumed = LossScale(completed())
    resumed.load_state_dict(scale.state_dict())
    resumed.measure(2 * length)
    assert not resumed.settle() and resumed.factor == scale.factor


def test_updates_with_parts_of_a_rollout_batch_end_with_the_mean_of_all_of_it() -> None:
    scale, factors = LossScale(completed()), []
    for part in ([10, 20], [60], [70, 40]):  # those that end first are the shortest
        scale.measure(torch.tensor(part))
        factors.append(scale.factor)
    assert factors == pytest.approx([1 / 15, 1 / 30, 1 / 40])
    assert scale.settle() and scale.length == 40


@pytest.mark.parametrize(
    ("overrides", "factor"),
    [
        (("fspo.match_scale=native",), 1.0),
        (("algo=rloo",), 1 / 40),
        (("algo=luspo",), 1 / 40),
        (("algo=gspo",), 1.0),  # has 1/L in itself
        (("algo=grpo",), 1.0),  # a mean over tokens
        (("algo=fspo", "actor_rollout_ref.actor.policy_loss.grad_scale='1/L'"), 1.0),
    ],
)
def test_only_losses_that_sum_over_tokens_are_divided(overrides: tuple[str, ...], factor: float) -> None:
    scale = LossScale(completed(*overrides))
    scale.measure(torch.tensor([10, 30, 80]))
    assert scale.factor == pytest.approx(factor)


MULTIPLIER = "actor_rollout_ref.actor.policy_loss.grad_multiplier"
MEANT = 0.025


def plain(*overrides: str) -> DictConfig:
    """The configuration that verl's own command hands to the trainer ``trainer.v1.trainer_mode=fspo``."""
    config = composed(*overrides)
    loss = config.actor_rollout_ref.actor.policy_loss
    with open_dict(config):
        config.actor_rollout_ref.actor.policy_loss = {key: loss[key] for key in loss if loss[key] is not None}
        config.pop("fspo")
        config.trainer.use_v1 = True
    complete(config)
    complete_settings(config)  # as the trainer does
    return config


def gradient_norm(config: DictConfig, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of the registered loss, with the factor that the trainer of this configuration sends to its workers."""
    scale, length = LossScale(config), torch.tensor([10, 30, 80])
    scale.measure(length)
    recorder = Recorder()
    monkeypatch.setattr(fspo.verl, "recorder", recorder)
    recorder.begin_update(None, step=1, loss_scale=scale.factor)
    recorder.begin_mini_batch()
    loss = instantiate(config.actor_rollout_ref.actor.policy_loss, _convert_="partial")
    actor = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=loss)
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=None, global_batch_size=3, loss_scale_factor=None)
    mask = torch.arange(80) < length[:, None]
    new = torch.zeros(3, 80, dtype=torch.float64, requires_grad=True)
    tensors = {"old_log_prob": torch.zeros_like(new), "log_prob": new, "advantages": torch.ones_like(new)}
    value, _ = POLICY_LOSS_REGISTRY[loss.loss_mode](**tensors, response_mask=mask, config=actor)
    return float(torch.autograd.grad(value, new)[0].norm())


@pytest.mark.parametrize("command", [completed, plain])
def test_a_given_factor_on_the_gradient_is_the_only_one(
    command: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With old log-probabilities that are the policy's, each token's gradient is the factor over the sequences."""
    whole = np.sqrt(10 + 30 + 80) / 3
    matched = gradient_norm(command(), monkeypatch)
    assert matched == pytest.approx(whole / 40)
    assert "grad_multiplier" not in capsys.readouterr().out
    given = command(f"{MULTIPLIER}={MEANT}")
    assert gradient_norm(given, monkeypatch) == pytest.approx(whole * MEANT)
    assert given.fspo.match_scale == "native"
    assert gradient_norm(command(f"{MULTIPLIER}=1.0"), monkeypatch) == pytest.approx(whole), "1 can be given, too"


def test_a_checkpoint_from_before_a_factor_was_given_divides_no_more() -> None:
    scale = LossScale(completed(f"{MULTIPLIER}={MEANT}"))
    scale.load_state_dict({"length": 40.0})
    assert scale.factor == 1


@pytest.mark.parametrize("ranks", [2, 8])
def test_clip_values_are_the_same_for_any_split_into_ranks(ranks: int) -> None:
    one, split = ClipValues(completed()), ClipValues(completed())
    assert fed(one, 1, 12) == fed(split, 1, 12, ranks=ranks) == [1, FIXED_AFTER]
    assert one.values == split.values
    assert one.values[-1]["responses"] == 5 * ROWS * 3 // 4, "the first mini-batch is left out"
    assert 1 < one.values[-1]["c_high"] / 0.06 < 4


def test_clip_values_are_the_same_after_a_kill_in_the_middle_of_measuring() -> None:
    whole, resumed = ClipValues(completed()), ClipValues(completed())
    fed(whole, 1, 12)
    for first, last in ((1, 2), (3, 7), (8, 12)):
        state, resumed = resumed.state_dict(), ClipValues(completed())
        resumed.load_state_dict(state)
        fed(resumed, first, last)
    assert resumed.values == whole.values and len(whole.values) == FIXED_AFTER
    assert resumed.scaled(None).clip_scale == pytest.approx(whole.values[-1]["c_high"] / 0.03)


def test_a_warm_up_of_the_learning_rate_is_not_measured() -> None:
    values = ClipValues(completed())
    for step in range(1, 4):
        assert fed(values, step, step, lr=LR * step / 4) == []
    assert values.scaled(None).clip_scale == float("inf"), "no clip before that"
    assert fed(values, 4, 8) == [4], "the first batch that begins with the full learning rate"
    decayed = ClipValues(completed())
    assert fed(decayed, 1, 1) + fed(decayed, 2, 5, lr=0.9 * LR) == [1], "a schedule that decays after the warm-up"
    assert len(decayed.values) == 5


def test_one_update_a_rollout_batch_leaves_the_published_values_and_says_why() -> None:
    values = ClipValues(completed())
    line = add(values, mini_batches(1, count=1), 1)
    assert line is not None and "published" in line and "one update" in line
    again = ClipValues(completed())
    again.load_state_dict(values.state_dict())
    for one in (values, again):
        assert one.scaled(None).clip_scale == 1 and fed(one, 2, 6) == [] and one.values == []


@pytest.mark.parametrize(
    ("overrides", "clip_values"),
    [
        *((f"algo={algo}", "measured") for algo in ("fspo", "fspo_v1", "gspo", "rloo", "luspo")),
        *((f"algo={algo}", "published") for algo in ("unclipped", "gspo_verl", "grpo")),
        ("fspo.clip_values=published", "published"),
        (f"{CLIP}=0.05", "published"),
        ("evaluate=true", "published"),
    ],
)
def test_run_json_says_where_a_run_s_clip_values_come_from(overrides: str, clip_values: str) -> None:
    """With a note only of a loss that would have measured them."""
    config = composed(overrides)
    notes = [note for note in complete(config) if note.startswith("clip values")]
    assert config.fspo.clip_values == clip_values
    line = {f"{CLIP}=0.05": "c_low=0.05", "evaluate=true": "evaluate=true", "algo=unclipped": "c_low"}.get(overrides)
    assert len(notes) == bool(line) and all(str(line) in note for note in notes)


def test_what_weight_decay_alone_has_moved_is_no_measure() -> None:
    """All rewards of the first prompts are equal: S is 1e-5, and a band as narrow would remove all of the next step."""
    values = ClipValues(completed())
    still = mini_batches(1)
    for mini_batch in still:
        mini_batch.grad_norm = 0.0
        mini_batch.rows["S"] = 1e-5 * np.sqrt(mini_batch.rows["L"])
    assert add(values, still, 1) is None and values.scaled(None).clip_scale == float("inf")
    later = mini_batches(2)
    later[0].grad_norm = 0.0  # the second mini-batch has moved by nothing but the first
    assert add(values, later, 2) is not None
    assert values.values[0]["responses"] == ROWS * 2 // 4
