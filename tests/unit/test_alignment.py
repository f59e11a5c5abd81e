"""Gradient alignment: mathematics with vectors by hand, gradients against automatic differentiation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks.alignment.gradients import (
    ClippedObjective,
    GradientPlan,
    cosine,
    gradient_coefficients,
    in_columns,
)
from fspo.losses import ALGORITHMS, sequence_policy_loss


def objective(**changes: np.ndarray) -> ClippedObjective:
    """Two folds, two bins of 2 sequences each per fold; short gradients along x, long ones along y."""
    values = {
        "unclipped_JKD": np.array([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]]),
        "clipped_JKD": np.array([[[1.0, 0.0], [0.0, 0.5]]] * 2),  # half of what is long is clipped
        "held_out_HD": np.array([[2.0, 0.0], [0.0, 0.0]]),
        "total_JK": np.full((2, 2), 2.0),
        "accepted_VJK": np.array([[[2.0, 1.0], [2.0, 1.0]], [[2.0, 2.0], [2.0, 2.0]]]),
    } | changes
    return ClippedObjective(**values)


def test_figures_by_hand() -> None:
    figures = objective().figures(np.ones(2), np.ones(2))
    expected = {
        # clipped (1, 1/2), unclipped (1, 1), held-out (1, 0), up to scale
        "cosine": 1.5 / math.sqrt(1.25 * 2),
        "norm_ratio": math.sqrt(1.25 / 2),
        "held_out": 1 / math.sqrt(1.25),
        "held_out_unclipped": 1 / math.sqrt(2),
        "held_out_change": 1 / math.sqrt(1.25) - 1 / math.sqrt(2),
        "share/0": 0.8,  # of (1, 1/2): 1 and 1/4
        "share/1": 0.2,
        "share_unclipped/0": 0.5,
        "share_unclipped/1": 0.5,
        "kappa": math.sqrt(2),  # (1/2 + 1/2) / |(1/2, 1/2)|
        # rates 1 and 1/2, mean 3/4: |4/3 - 1| and |2/3 - 1|
        "symmetric/acceptance": 0.75,
        "symmetric/lre": 1 / 3,
        "symmetric/lre_max": 1 / 3,
        # the clipped gradient of a bin is its rate times the unclipped one: nothing is left for eta
        "symmetric/eta": 0.0,
        "symmetric/r": math.sqrt(2) / 3,
        "symmetric/bound": math.sqrt(1 - 2 / 9),
        "symmetric/mean_bound": math.sqrt(1 - 2 / 9),
        # all counted as accepted: LRE_max is 0, and eta = |(0, 1/2)| / |(1, 1)| says it all
        "active/acceptance": 1.0,
        "active/lre": 0.0,
        "active/lre_max": 0.0,
        "active/eta": 0.5 / math.sqrt(2),
        "active/r": 0.5 / math.sqrt(2),
        "active/bound": math.sqrt(1 - 1 / 8),
        "active/mean_bound": math.sqrt(1 - 1 / 8),
    }
    assert figures == pytest.approx(expected, abs=1e-12)


def test_a_fold_left_out_counts_nowhere() -> None:
    clipped = np.array([[[1.0, 0.0], [0.0, 0.5]], [[-9.0, 1.0], [0.0, 4.0]]])
    total = np.array([[2.0, 2.0], [5.0, 1.0]])
    figures = objective(clipped_JKD=clipped, total_JK=total).figures(np.array([1.0, 0.0]), np.array([1.0, 0.0]))
    assert figures == pytest.approx(objective().figures(np.ones(2), np.ones(2)))


def test_cosine_bounds_are_sharp() -> None:
    """The mean version through three bins, the version with LRE_max through eta alone."""
    r, g = 0.3, np.array([0.3, np.sqrt(1 - 0.09)])
    share, rate = np.array([0.25, 0.5, 0.25]), np.array([0.25, 0.5, 0.75])
    gradient = np.array([[r / 0.5, 0.0], g - [r / 0.5, 0.0], [0.0, 0.0]])
    accepted = share * rate

    def figures(unclipped: np.ndarray, clipped: np.ndarray, total: np.ndarray, kept: np.ndarray) -> dict[str, float]:
        cells = ClippedObjective(unclipped[None], clipped[None], g[None], total[None], np.stack([kept[None]] * 2))
        return cells.figures(np.ones(1), np.ones(1))

    of_bins = figures(gradient, rate[:, None] * gradient, share, accepted)
    assert of_bins["cosine"] == pytest.approx(of_bins["symmetric/mean_bound"], abs=1e-12)
    assert of_bins["cosine"] == pytest.approx(np.sqrt(1 - r**2), abs=1e-12)
    within = figures(g[None], np.array([[0.0, g[1]]]), np.ones(1), np.ones(1))
    assert within["cosine"] == pytest.approx(within["symmetric/bound"], abs=1e-12)


@pytest.mark.parametrize("algo", ["fspo", "seq_rloo", "seq_gspo", "luspo"])
def test_coefficients_give_the_gradient_of_the_training_loss(algo: str) -> None:
    """A linear 'model' theta: log pi = theta x; its gradient through the loss equals the weighted sum of its parts."""
    generator, loss, n, tokens = torch.Generator().manual_seed(0), ALGORITHMS[algo], 24, 12
    mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (n,), generator=generator)[:, None]
    old = -torch.rand(n, tokens, generator=generator, dtype=torch.float64)
    new = old + 0.15 * torch.randn(n, tokens, generator=generator, dtype=torch.float64)
    advantages = torch.randn(n, 1, generator=generator).expand(n, tokens) * mask
    features = torch.randn(n, tokens, 7, generator=generator, dtype=torch.float64)
    theta = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    output = sequence_policy_loss(new + features @ theta, old, advantages, mask, loss)
    (expected,) = torch.autograd.grad(output.loss_B.sum(), theta)

    coefficient_B, recomputed = gradient_coefficients(new, old, advantages, mask, loss)
    parts = (features * mask[..., None]).sum(1)  # d sum_t log pi / d theta
    torch.testing.assert_close(torch.from_numpy(coefficient_B) @ parts, expected)
    clipped = (recomputed.clipped_high_B | recomputed.clipped_low_B).numpy()
    assert clipped.any() and not clipped.all()
    np.testing.assert_array_equal(coefficient_B == 0, clipped)


def test_every_sum_comes_back_from_the_measured_vectors() -> None:
    rng = np.random.default_rng(0)
    n, dim = 40, 6
    gradient = rng.normal(size=(n, dim))
    fold, bin_ = rng.integers(0, 3, n), rng.integers(0, 4, n)
    free_FB, clipped_OB = rng.normal(size=(2, n)), rng.normal(size=(3, n))
    plan = GradientPlan(folds=3, bins=4, family_O=(0, 0, 1))
    held_out = in_columns(free_FB[0], fold, plan.folds)
    vectors = np.concatenate([plan.weights([*free_FB, *clipped_OB], fold, bin_).T @ gradient, held_out.T @ gradient])
    unclipped_FJKD, clipped_OJKD, held_out_HD = plan.split(vectors)
    cell = (fold == 2) & (bin_ == 1)
    np.testing.assert_allclose(unclipped_FJKD[1, 2, 1], free_FB[1][cell] @ gradient[cell])
    np.testing.assert_allclose(clipped_OJKD[2, 2, 1], clipped_OB[2][cell] @ gradient[cell])
    np.testing.assert_allclose(held_out_HD[1], free_FB[0][fold == 1] @ gradient[fold == 1])
    assert cosine(held_out_HD[1], held_out_HD[1]) == pytest.approx(1)


def test_worker_pieces_agree_with_plain_torch() -> None:
    from benchmarks.alignment.worker import flat_gradient, gram_of_shards, rows_of

    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1, bias=False))
    module[0](torch.ones(1, 3)).sum().backward()
    assert flat_gradient(module).tolist() == [1.0] * 8 + [0.0] * 2  # the second layer has no gradient
    module[0].bias.requires_grad_(False)
    assert flat_gradient(module).tolist() == [1.0] * 6 + [0.0] * 2
    gradients = [torch.randn(200_000, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    stacked = torch.stack(gradients).to(torch.float64)
    torch.testing.assert_close(gram_of_shards(gradients), stacked @ stacked.T)
    rows, weights = rows_of(torch.tensor([0.0, 2.0, 0.0, -1.0]), 4)
    assert rows.tolist() == [1, 3, 0, 0] and weights.tolist() == [2.0, -1.0, 0.0, 0.0]
