"""A micro-batch as verl's engine hands it to a loss, and the actor's settings."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from recipe.fspo.recorder import ROWS

#: Clips of verl's losses that act on the batch below.
CLIPS: dict[str, dict[str, Any]] = {
    "vanilla": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03},
    "gspo": {"clip_ratio_low": 2e-3, "clip_ratio_high": 1e-3},
    "gpg": {},
    "geo_mean": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03},
    "clip_cov": {},
}


def actor(name: str) -> FSDPActorConfig:
    policy_loss = PolicyLossConfig(loss_mode=name)
    batch = {"ppo_micro_batch_size_per_gpu": 1, "rollout_n": 2}
    return FSDPActorConfig(strategy="fsdp2", policy_loss=policy_loss, **batch, **CLIPS.get(name, {}))


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def micro_batch(count: int = 24, seed: int = 0) -> tuple[TensorDict, dict[str, torch.Tensor]]:
    """As verl's engine hands it to a loss, with a row of padding at the end; and log-probabilities of all tokens."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, 60, (count,), generator=generator).tolist()
    prompt = torch.randint(1, 9, (count,), generator=generator).tolist()
    old = [-2 * torch.rand(n, generator=generator) for n in length]
    advantage = torch.randn(count, generator=generator)
    advantage[:3] = 0
    mask = [torch.ones(n, dtype=torch.long) for n in length]
    mask[-1] = torch.zeros(length[-1], dtype=torch.long)
    ones = [torch.ones(n, dtype=torch.long) for n in length]
    columns = {
        "prompts": nested([torch.ones(n, dtype=torch.long) for n in prompt]),
        "responses": nested(ones),
        "response_mask": nested(mask),
        "old_log_probs": nested(old),
        "rollout_is_weights": nested([torch.full((n,), 0.5 + n / 100) for n in length]),
        "advantages": nested([torch.full((n,), float(a)) for n, a in zip(length, advantage, strict=True)]),
        ROWS: nested([torch.tensor([row if row < count - 1 else -1]) for row in range(count)]),
    }
    data = TensorDict(columns, [count])
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=sum(length), global_batch_size=count)
    # Position p - 1 + t of a packed sequence predicts token t of the response.
    new = [row + 0.03 * torch.randn(len(row), generator=generator) for row in old]
    packed = [torch.cat([torch.zeros(p - 1), row, torch.zeros(1)]) for p, row in zip(prompt, new, strict=True)]
    return data, {"log_probs": nested(packed).requires_grad_()}
