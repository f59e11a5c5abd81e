"""Rows made around verl's ppo_loss, and what a worker keeps until the trainer asks for it."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from batches import random_batch
from micro_batches import CLIPS, actor, micro_batch, nested
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.utils.losses import ppo_loss

import fspo.verl
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.types import BandState, c_of_eps
from recipe.fspo import recorder as module
from recipe.fspo import worker
from recipe.fspo.policy_loss import band_of, judged_rows
from recipe.fspo.recorder import MiniBatch, Recorder
from recipe.fspo.step_records import join_ranks
from recipe.fspo.worker import recorded

FIXED = [name for name, settings in ALGORITHMS.items() if not settings.needs_state]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(worker, "RECORDER", recorder)
    monkeypatch.setattr(fspo.verl, "recorder", recorder)
    return recorder


def observed(name: str, recorder: Recorder) -> dict[str, np.ndarray]:
    """Rows made around verl's ppo_loss."""
    data, output = micro_batch()
    recorded(partial(ppo_loss, config=actor(name)), output, data)
    return recorder.end_mini_batch(1.0).rows


@pytest.mark.parametrize("name", FIXED)
def test_a_row_is_what_the_loss_did_bit_for_bit(name: str, recorder: Recorder) -> None:
    rows = observed(name, recorder)
    data, output = micro_batch()
    names = ("old_log_probs", "advantages", "response_mask")
    columns = data.select(*names).to_padded_tensor()
    log_prob = module.no_padding_2_padding(output["log_probs"], data)
    loss = sequence_policy_loss(log_prob, *(columns[key] for key in names), ALGORITHMS[name])
    assert rows["row"].tolist() == list(range(23)), "padding has no row"
    rows |= judged_rows(rows, band_of(actor(name)))
    kept_B = ~(loss.clipped_high_B | loss.clipped_low_B)
    columns = {"S": loss.log_ratio_B, "L": loss.length_B, "A": loss.advantage_B}
    columns |= {"inside": loss.accepted_B, "kept": kept_B, "weight": loss.weight_B}
    for key, column in columns.items():
        np.testing.assert_array_equal(rows[key], column.detach()[loss.valid_B].numpy(), err_msg=key)
    assert 0 < rows["inside"].mean() < 1 and 0 < rows["kept"].mean() <= 1
    np.testing.assert_allclose(rows["rollout_weight"], 0.5 + rows["L"] / 100, rtol=1e-6)


@pytest.mark.parametrize("name", [*FIXED, *CLIPS])
def test_value_gradient_metrics_and_draws_are_those_of_verl(name: str, recorder: Recorder) -> None:
    data, output = micro_batch()
    states = []
    for loss in (partial(ppo_loss, config=actor(name)), partial(recorded, partial(ppo_loss, config=actor(name)))):
        torch.manual_seed(0)
        value, metrics = loss(model_output=output, data=data.copy())
        (gradient,) = torch.autograd.grad(value, output["log_probs"])
        numbers = {key: str(metric) for key, metric in metrics.items()}
        states.append((value.detach(), gradient.values(), torch.rand(1), numbers))
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) else one.keys() == other.keys()


def test_the_band_of_verls_gspo_is_that_of_its_clip(recorder: Recorder) -> None:
    band = band_of(actor("gspo"))
    assert band is not None and (band.c_low, band.c_high) == c_of_eps(2e-3, 1e-3)
    rows = observed("gspo", recorder)
    ratio = np.expm1(rows["S"] / rows["L"])
    expected = (ratio >= -2e-3) & (ratio <= 1e-3)
    clear = (abs(ratio + 2e-3) > 1e-6) & (abs(ratio - 1e-3) > 1e-6)
    assert ((judged_rows(rows, band)["inside"] == 1) == expected)[clear].all() and 0 < expected.mean() < 1
    assert band_of(actor("vanilla")) is None


def test_of_a_loss_that_nobody_knows_s_l_and_a_are_recorded(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "mine", lambda log_prob, **_: (log_prob.sum(), {}))
    rows = observed("mine", recorder)
    assert rows.keys() == {"S", "L", "A", "row", "rollout_weight"}
    assert np.isfinite(rows["S"]).all() and len(rows["S"]) == 23


def test_a_response_without_a_token_or_not_finite_has_no_s(recorder: Recorder) -> None:
    data, output = micro_batch(6)
    mask = [row.clone() for row in data["response_mask"].unbind()]
    mask[2][:] = 0  # a correction, or padding that stands in for it
    data["response_mask"] = nested(mask)
    values = [row.detach().clone() for row in output["log_probs"].unbind()]
    values[1][:] = math.nan
    rows = module.rows_of(nested(values), data, actor("mine"))
    assert rows["row"].tolist() == [0, 1, 2, 3, 4]
    assert np.isnan(rows["S"]).tolist() == [False, True, True, False, False] and rows["L"][2] == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_loss_has_verl_s_metrics_and_the_recorder_s_state_and_scale(name: str, recorder: Recorder) -> None:
    state, config = BandState(drift_per_token=1e-3, clip_scale=2.0), actor(name)
    recorder.begin_update(state, step=1, loss_scale=0.25)
    config.global_batch_info.update(global_batch_size=20, dp_size=2)
    new, old, advantages, mask = random_batch(6, 12, scale=0.02, shortest=1)
    mask[5] = False
    value, metrics = get_policy_loss_fn(name)(old, new, advantages, mask, config=config)
    output = sequence_policy_loss(new, old, advantages, mask, ALGORITHMS[name], state)
    assert torch.equal(value, output.loss_B.sum() / 20 * 2 * 0.25)
    assert metrics == {  # 5 of 6 rows have tokens
        "actor/pg_clipfrac": pytest.approx(float((output.clipped_high_B | output.clipped_low_B).sum()) / 5),
        "actor/ppo_kl": pytest.approx(float(-output.log_ratio_B.sum() / output.length_B.sum())),
        "actor/seq_outside_band": pytest.approx(1 - float(output.accepted_B.sum()) / 5),
    }


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("rule", ["seq_sum_k1", "seq_mean_k1", "seq_max_k3"])
def test_verl_s_rollout_correction_weighs_and_removes_whole_responses(rule: str) -> None:
    new, old, advantages, mask = random_batch(6, 12, scale=0.02, shortest=1)
    gap_B1 = torch.tensor([[0.9], [0.01], [-0.02], [0.03], [-0.03], [0.0]])  # of one response only is it large
    columns = {"old_log_probs": old, "rollout_log_probs": old - gap_B1, "response_mask": mask}
    threshold = 1.5 if "k1" in rule else 0.3
    correction = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs=rule, rollout_rs_threshold=threshold)
    data, _ = compute_rollout_correction_and_add_to_batch(DataProto.from_dict(columns), correction)
    kept_B = data.batch["response_mask"].any(1)
    assert kept_B.tolist() == [False, True, True, True, True, True]

    def gradient_BT(mask_BT: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        log_prob, config = new.clone().requires_grad_(), actor("fspo")
        loss, _ = get_policy_loss_fn("fspo")(
            old, log_prob, advantages, mask_BT, config=config, rollout_is_weights=weights
        )
        return torch.autograd.grad(loss, log_prob)[0]

    weight_B1 = (gap_B1 * mask.sum(1, keepdim=True)).exp().clamp(max=2) * kept_B[:, None]
    plain_BT = gradient_BT(mask, None)
    assert plain_BT.any()
    corrected_BT = gradient_BT(data.batch["response_mask"], data.batch["rollout_is_weights"])
    assert torch.allclose(corrected_BT, plain_BT * weight_B1, rtol=1e-5)


def test_band_state_follows_the_mini_batch(recorder: Recorder) -> None:
    """Within an update, and over updates of one step each, as separate_async has them."""
    state = BandState(drift_by_mini_batch=(0.0, 0.5))
    assert recorder.current_band_state() is None
    for step, expected in ((1, (0.0, 0.5, 0.5)), (2, (0.0,)), (2, (0.5,)), (3, (0.0,))):
        recorder.begin_update(state, step)
        for drift in expected:
            assert recorder.current_band_state().drift_per_token == drift  # type: ignore[union-attr]
            recorder.end_mini_batch(None)


def test_ranks_are_joined_by_mini_batch_in_order_of_rows() -> None:
    def of_rank(rows: list[int]) -> MiniBatch:
        return MiniBatch({"S": np.array(rows) / 2, "L": np.array(rows) + 1, "row": np.array(rows)}, 1.5)

    first, second = join_ranks([[of_rank([3, 0]), of_rank([5])], [of_rank([1]), of_rank([4])], None])
    assert first.rows["row"].tolist() == [0, 1, 3] and first.rows["S"].tolist() == [0, 0.5, 1.5]
    assert second.rows["row"].tolist() == [4, 5] and first.grad_norm == 1.5
    with pytest.raises(ValueError):
        join_ranks([[of_rank([1])], []])


def test_a_step_without_a_gradient_moves_nothing() -> None:
    """One rule for the table, the metrics and the clip values: weight decay alone moves by rounding."""
    steps = [(1.0, 1e-6), (None, None), (1.0, 0.0), (math.nan, 1e-6), (0.0, 1e-6)]
    assert [MiniBatch({}, *step).moves for step in steps] == [True, True, False, False, False]


@pytest.mark.parametrize(("kind", "last"), [("AdamW", 3), ("SGD", 1)])
def test_momentum_moves_weights_without_a_gradient(kind: str, last: int, recorder: Recorder) -> None:
    """Of a checkpoint, too: the last update is the first of another start."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = getattr(torch.optim, kind)([weight], lr=1e-3)
    for number, gradient in enumerate((0.0, 1.0, 0.0, 0.0)):
        before, weight.grad = weight.item(), torch.full((1,), gradient)
        recorder = Recorder() if number == 3 else recorder
        recorder.begin_mini_batch(optimizer)
        optimizer.step()
        moved = abs(weight.item() - before) > 1e-4  # weight decay moves it by 1e-5
        assert recorder.end_mini_batch(gradient).moves == moved == (1 <= number <= last)
