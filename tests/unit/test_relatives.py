"""VESPO and CTPO-LA against plain formulas, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from messages import holds

from benchmarks.relatives import POLICY_LOSSES, CtpoSettings, VespoSettings, ctpo_la_loss, vespo_loss
from fspo.acceptance import kept_output
from fspo.losses import UnusableRowsError
from fspo.responses import Responses
from fspo.types import SequenceLossOutput

F64 = torch.float64
LOSSES = {"vespo": (vespo_loss, VespoSettings), "ctpo_la": (ctpo_la_loss, CtpoSettings)}
assert LOSSES.keys() == POLICY_LOSSES.keys()
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def batch(spread: float = 0.1, rows: int = 40, width: int = 25) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(rows, width, generator=generator, dtype=F64)
    new = old + spread * torch.randn(rows, width, generator=generator, dtype=F64)
    mask = torch.rand(rows, width, generator=generator) < torch.rand(rows, 1, generator=generator)
    advantage = torch.randn(rows, 1, generator=generator, dtype=F64)
    advantage[::7] = 0.0
    return new, old, advantage.expand(rows, width).contiguous(), mask


def phi(w: float, k: float, rate: float) -> float:
    return math.exp(rate) * w**k * math.exp(-rate * w)


def vespo_by_token(d: list[float], a: float, s: VespoSettings) -> tuple[list[float], float]:
    """Slope of each token and the share kept."""
    k, rate = (s.k_pos, s.lambda_pos) if a >= 0 else (s.k_neg, s.lambda_neg)
    w = math.exp(sum(d))
    return [-a * phi(w, k, rate)] * len(d), min(phi(w, k, rate) / w, 1.0)


def ctpo_by_token(d: list[float], a: float, s: CtpoSettings) -> tuple[list[float], float]:
    slopes, kept, whole, c = [], 0.0, 0.0, 0.0
    for t, difference in enumerate(d, start=1):
        c += difference
        room = t**s.power
        removed = c > s.clip_high * room if a >= 0 else c < -s.clip_low * room or c > s.clip_dual * room
        slopes.append(0.0 if removed else -a * math.exp(c))
        whole += math.exp(c)
        kept += 0.0 if removed else math.exp(c)
    return slopes, kept / whole


def run(
    name: str, inputs: Inputs, settings: object = None, **more: torch.Tensor
) -> tuple[SequenceLossOutput, torch.Tensor]:
    loss, cls = LOSSES[name]
    leaf = inputs[0].clone().requires_grad_()
    output = loss(leaf, *inputs[1:], settings or cls(), **more)  # type: ignore[operator]
    return output, torch.autograd.grad(output.loss_B.sum(), leaf)[0]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("grad_scale", "multiplier"), [("1", 1.0), ("1/L", 0.25)])
def test_gradient_and_kept_against_a_plain_formula(name: str, grad_scale: str, multiplier: float) -> None:
    inputs = new, old, advantages, mask = batch()
    settings = LOSSES[name][1](grad_scale=grad_scale, grad_multiplier=multiplier)  # type: ignore[operator]
    by_token = vespo_by_token if name == "vespo" else ctpo_by_token
    output, gradient = run(name, inputs, settings)
    lost = 0
    for i in range(len(new)):
        here = mask[i]
        length = int(here.sum())
        if not length:
            assert not gradient[i].any() and not output.valid_B[i] and output.loss_B[i] == 0
            continue
        d, a = (new - old)[i][here].tolist(), float(advantages[i, 0])
        slopes, kept = by_token(d, a, settings)  # type: ignore[operator]
        h = multiplier / (length if grad_scale == "1/L" else 1)
        assert gradient[i][here].tolist() == pytest.approx([h * slope for slope in slopes], rel=1e-9)
        assert not gradient[i][~here].any()
        assert name != "vespo" or float(output.loss_B[i]) == pytest.approx(h * slopes[0], rel=1e-9)
        assert float(1 - output.clipped_high_B[i] - output.clipped_low_B[i]) == pytest.approx(kept if a else 1.0)
        lost += kept < 0.9 and a != 0
    assert lost > 5


@pytest.mark.parametrize("name", LOSSES)
def test_kept_is_what_the_gradient_says(name: str) -> None:
    inputs = batch()
    output, _ = run(name, inputs)

    def gradient(log_prob: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return run(name, (log_prob, inputs[1], advantages, inputs[3]))[1]

    judged = kept_output(gradient, *inputs, "sequence" if name == "vespo" else "prefix")
    for field in ("accepted_B", "clipped_high_B", "clipped_low_B", "weight_B", "log_ratio_B", "advantage_B"):
        torch.testing.assert_close(getattr(judged, field), getattr(output, field), rtol=1e-9, atol=1e-9)
    responses = Responses.of_output(output)
    assert responses.rule_known and len(responses) == int(output.valid_B.sum())


def test_rollout_weights() -> None:
    inputs = batch()
    v = torch.linspace(0.5, 1.5, 40, dtype=F64)[:, None].expand_as(inputs[0])
    _, weighted = run("ctpo_la", inputs, rollout_is_weights_BT=v)
    torch.testing.assert_close(weighted, v * run("ctpo_la", inputs)[1])
    # In VESPO they are part of w: the same as moving the log-ratio of one token.
    _, weighted = run("vespo", inputs, rollout_is_weights_BT=v)
    first = inputs[3].float().argmax(1)
    moved = inputs[1].clone()
    moved[torch.arange(40), first] -= v[:, 0].log()
    _, expected = run("vespo", (inputs[0], moved, *inputs[2:]))
    torch.testing.assert_close(weighted, expected)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("S", [1e4, -1e4, 50.0, -50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
def test_extremes_are_finite_and_bad_rows_are_named(name: str, S: float, dtype: torch.dtype) -> None:
    old = torch.full((2, 30), -1.0, dtype=dtype)
    advantages = torch.tensor([[1.0], [-1.0]], dtype=dtype).expand(2, 30)
    inputs = (old + S / 30, old, advantages, torch.ones(2, 30, dtype=torch.bool))
    output, gradient = run(name, inputs)
    assert bool(torch.isfinite(output.loss_B.detach()).all()) and bool(torch.isfinite(gradient).all())
    broken = old.clone()
    broken[1, 3] = torch.nan
    with pytest.raises(UnusableRowsError, match=holds("row 1", "log_prob_BT", "nan")):
        run(name, (broken, *inputs[1:]))
    with pytest.raises(UnusableRowsError, match="advantages_BT"):
        run(name, (old, old, torch.rand(2, 30).to(dtype), inputs[3]))


@pytest.mark.parametrize(
    ("cls", "values", "says"),
    [
        (VespoSettings, {"k_pos": 0}, "k_pos=0"),
        (VespoSettings, {"grad_scale": "L"}, "grad_scale='L' .*1/L"),
        (CtpoSettings, {"clip_low": -0.1}, r"clip_low=-0\.1"),
        (CtpoSettings, {"power": "half"}, "power='half'"),
    ],
)
def test_settings_are_checked(cls: type, values: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        cls(**values)
