"""Token-level clips described by sequence, and verl's own losses observed without being changed."""

from __future__ import annotations

import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import FSDPActorConfig

from fspo.sums import SequenceSums
from fspo.token_level import token_level_output
from recipe.fspo import policy_loss
from recipe.fspo.recorder import Recorder


def test_shares_of_tokens_by_hand() -> None:
    ratio = torch.tensor([[1.0, 1.3, 0.7, 9.0], [1.3, 1.3, 0.5, 1.0], [5.0, 5.0, 5.0, 5.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    advantage = torch.tensor([1.0, -2.0, 1.0])[:, None].expand(3, 4)
    output = token_level_output(ratio.log(), torch.zeros(3, 4), advantage, mask, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(output.accepted_B[:2], torch.tensor([1 / 3, 1 / 4]))
    torch.testing.assert_close(output.clipped_high_B[:2], torch.tensor([1 / 3, 0.0]))
    torch.testing.assert_close(output.clipped_low_B[:2], torch.tensor([0.0, 1 / 4]))
    torch.testing.assert_close(output.advantage_B, torch.tensor([1.0, -2.0, 0.0]))
    torch.testing.assert_close(output.log_ratio_B[0], ratio[0, :3].log().sum())
    assert output.valid_B.tolist() == [True, True, False]
    assert output.length_B.tolist() == [3, 4, 0]
    sums = SequenceSums.zeros().add_(output)
    assert sums.total("count") == 2
    assert sums.total("accepted") == pytest.approx(1 / 3 + 1 / 4)


def test_micro_batches_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    new, old = torch.randn(6, 9, generator=generator) * 0.3, torch.randn(6, 9, generator=generator) * 0.3
    mask = torch.arange(9) < torch.randint(1, 10, (6, 1), generator=generator)
    advantage = torch.randn(6, 1, generator=generator).expand(6, 9)

    def sums(rows: slice) -> SequenceSums:
        part = (x[rows] for x in (new, old, advantage, mask))
        return SequenceSums.zeros().add_(token_level_output(*part, 0.2, 0.28))

    whole, halves = sums(slice(None)), sums(slice(0, 2)) + sums(slice(2, 6))
    torch.testing.assert_close(whole.sums_KF, halves.sums_KF)


def test_negative_clip_is_refused() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"clip_low=-0\.1"):
        token_level_output(one, one, one, one, -0.1, 0.2)


def test_verls_losses_are_observed_and_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = dict(core_algos.POLICY_LOSS_REGISTRY)
    monkeypatch.setattr(policy_loss, "POLICY_LOSS_REGISTRY", registry)
    recorder = Recorder()
    monkeypatch.setattr(policy_loss, "RECORDER", recorder)
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **clips)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=None, global_batch_size=4, loss_scale_factor=None)
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(4, 8, generator=generator) - 2
    advantages = torch.randn(4, 1, generator=generator).expand(4, 8).contiguous()
    mask = (torch.arange(8) < torch.tensor([[8], [5], [2], [7]])).float()
    noise = 0.3 * torch.randn(4, 8, generator=generator)

    def run(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        new = (old + noise).requires_grad_()
        loss, _ = registry[name](old, new, advantages, mask, "seq-mean-token-mean", config=config)
        loss.backward()
        return loss.detach(), new.grad

    before = {name: run(name) for name in ("vanilla", "gspo")}
    policy_loss.observe_verl_losses.__wrapped__()
    recorder.enable(8)
    for name, (loss, gradient) in before.items():
        recorder.begin_mini_batch()
        again = run(name)
        assert torch.equal(again[0], loss) and torch.equal(again[1], gradient), name
    vanilla, gspo = (mini_batch.sums for mini_batch in recorder.pop())
    assert vanilla.total("count") == gspo.total("count") == 4
    inside = (((noise.exp() - 1).abs() <= 0.2) * mask).sum(-1) / mask.sum(-1)
    assert vanilla.total("accepted") == pytest.approx(float(inside.sum()), abs=1e-5)
    mean = (noise * mask).sum(-1) / mask.sum(-1)
    assert gspo.total("accepted") == int(((mean.exp() - 1).abs() <= 0.2).sum())
