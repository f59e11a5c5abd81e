"""Token-level clips described by sequence, and verl's own losses observed without being changed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fspo.sums import SequenceSums
from fspo.token_level import token_level_output


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


#: In a process of its own: observing replaces entries of verl's registry.
OBSERVED = """
import torch
from types import SimpleNamespace
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
import recipe.fspo.policy_loss
from recipe.fspo.policy_loss import observe_verl_losses
from recipe.fspo.recorder import RECORDER
from verl.workers.config import FSDPActorConfig

clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **clips)
config.global_batch_info.update(dp_size=1, batch_num_tokens=None, global_batch_size=4, loss_scale_factor=None)
torch.manual_seed(0)
old, advantages = torch.randn(4, 8) - 2, torch.randn(4, 1).expand(4, 8).contiguous()
mask = (torch.arange(8) < torch.tensor([[8], [5], [2], [7]])).float()
noise = 0.3 * torch.randn(4, 8)

def run(name):
    new = (old + noise).requires_grad_()
    loss, _ = get_policy_loss_fn(name)(old, new, advantages, mask, "seq-mean-token-mean", config=config)
    loss.backward()
    return loss.detach(), new.grad

before = {name: run(name) for name in ("vanilla", "gspo")}
observe_verl_losses()
RECORDER.enable(8)
for name, (loss, grad) in before.items():
    RECORDER.begin_mini_batch()
    again = run(name)
    assert torch.equal(again[0], loss) and torch.equal(again[1], grad), name
vanilla, gspo = RECORDER.pop()
from fspo.sums import FIELDS
def share(arrays, name):
    return float(arrays[0][:, FIELDS.index(name)].sum())
assert share(vanilla, "count") == share(gspo, "count") == 4
ratio = noise.exp()
inside = (((ratio - 1).abs() <= 0.2) * mask).sum(-1) / mask.sum(-1)
assert abs(share(vanilla, "accepted") - inside.sum()) < 1e-5
mean = (noise * mask).sum(-1) / mask.sum(-1)
assert share(gspo, "accepted") == int(((mean.exp() - 1).abs() <= 0.2).sum())
print("observed")
"""


def test_verls_losses_are_observed_and_unchanged() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OBSERVED],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("observed")
