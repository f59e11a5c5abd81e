"""Gradient alignment: mathematics with vectors by hand, gradients against automatic differentiation, command line."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.alignment.__main__ import BadInput, configure, main, parse
from benchmarks.alignment.gradients import (
    ClippedObjective,
    GradientPlan,
    Jackknife,
    assign_bins,
    cosine,
    cosine_bound,
    embed,
    gradient_coefficients,
    interaction_error,
    mean_cosine_bound,
    mean_over_rounds,
    noise_ceiling,
    split_half_cosine,
    whole_from_half,
    without_clip,
)
from fspo.losses import ALGORITHMS, sequence_policy_loss

FIXED = ("fspo", "seq_rloo", "seq_gspo", "luspo")


# ---------------------------------------------------------------- the mathematics


def test_embedding_keeps_inner_products() -> None:
    vectors = np.random.default_rng(0).normal(size=(5, 300))
    embedded = embed(vectors @ vectors.T)
    np.testing.assert_allclose(embedded @ embedded.T, vectors @ vectors.T, rtol=1e-10)
    assert cosine(embedded[0], embedded[1]) == pytest.approx(cosine(vectors[0], vectors[1]))


def test_cosine_bounds_are_sharp() -> None:
    """The mean version through three bins, the version with LRE_max through eta alone."""
    r, g = 0.3, np.array([0.3, np.sqrt(1 - 0.09)])
    p, deviation = np.array([0.25, 0.5, 0.25]), np.array([-0.5, 0.0, 0.5])
    weighted = np.array([[r / 0.5, 0.0], [0.0, 0.0], [0.0, 0.0]])
    weighted[1] = g - weighted[0]
    g_BD, a = weighted / p[:, None], 0.5 * (1 + deviation)
    assert cosine(p @ (a[:, None] * g_BD), p @ g_BD) == pytest.approx(np.sqrt(1 - r**2), abs=1e-12)
    assert mean_cosine_bound(p, a, g_BD) == pytest.approx(np.sqrt(1 - r**2), abs=1e-12)
    clipped = np.array([[0.0, g[1]]])
    eta = interaction_error([1.0], [1.0], g[None], clipped)
    assert cosine(clipped, g) == pytest.approx(cosine_bound(1.0, 0.0, eta), abs=1e-12)


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
    found = objective().figures(np.ones(2), np.ones(2))
    # clipped (1, 1/2), unclipped (1, 1), held-out (1, 0), up to scale
    assert found["cosine"] == pytest.approx(1.5 / math.sqrt(1.25 * 2))
    assert found["norm_ratio"] == pytest.approx(math.sqrt(1.25 / 2))
    assert found["held_out"] == pytest.approx(1 / math.sqrt(1.25))
    assert found["held_out_unclipped"] == pytest.approx(1 / math.sqrt(2))
    assert found["held_out_change"] == pytest.approx(1 / math.sqrt(1.25) - 1 / math.sqrt(2))
    assert [found["share/0"], found["share/1"]] == pytest.approx([0.8, 0.2])  # of (1, 1/2): 1 and 1/4
    assert [found["share_unclipped/0"], found["share_unclipped/1"]] == pytest.approx([0.5, 0.5])
    assert found["kappa"] == pytest.approx(math.sqrt(2))  # (1/2 + 1/2) / |(1/2, 1/2)|
    # rates 1 and 1/2, mean 3/4: |4/3 - 1| and |2/3 - 1|
    assert found["symmetric/acceptance"] == pytest.approx(0.75)
    assert found["symmetric/lre_max"] == pytest.approx(1 / 3)
    # the clipped gradient of a bin is its rate times the unclipped one: nothing is left for eta
    assert found["symmetric/eta"] == pytest.approx(0.0, abs=1e-12)
    assert found["symmetric/bound"] == pytest.approx(math.sqrt(1 - 2 / 9))
    assert found["symmetric/bound"] < found["cosine"]
    # all counted as accepted: LRE_max is 0, and eta = |(0, 1/2)| / |(1, 1)| says it all
    assert found["active/lre_max"] == 0
    assert found["active/eta"] == pytest.approx(0.5 / math.sqrt(2))
    assert found["active/bound"] == pytest.approx(math.sqrt(1 - 1 / 8))
    assert found["active/bound"] < found["cosine"]


def test_a_fold_left_out_counts_nowhere() -> None:
    clipped = np.array([[[1.0, 0.0], [0.0, 0.5]], [[-9.0, 1.0], [0.0, 4.0]]])
    total = np.array([[2.0, 2.0], [5.0, 1.0]])
    found = objective(clipped_JKD=clipped, total_JK=total).figures(np.array([1.0, 0.0]), np.array([1.0, 0.0]))
    assert found == pytest.approx(objective().figures(np.ones(2), np.ones(2)))


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.floats(0.0, 0.5))
def test_cosine_bounds_hold_whatever_is_clipped(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    n, folds, bins, dim = 60, 3, 4, 5
    gradient = rng.normal(size=(n, dim)) + 2  # one direction in common, so that r is often below 1
    fold, bin_ = np.arange(n) % folds, rng.integers(0, bins, n)
    assume(len(set(bin_)) == bins)
    kept, accepted = rng.random(n) >= share, rng.random(n) >= share
    assume(accepted.any() and kept.any())

    def cells(values: np.ndarray) -> np.ndarray:
        out = np.zeros((folds, bins, *values.shape[1:]))
        np.add.at(out, (fold, bin_), values)
        return out

    found = ClippedObjective(
        unclipped_JKD=cells(gradient),
        clipped_JKD=cells(gradient * kept[:, None]),
        held_out_HD=rng.normal(size=(2, dim)),
        total_JK=cells(np.ones(n)),
        accepted_VJK=np.stack([cells(accepted.astype(float)), cells(kept.astype(float))]),
    ).figures(np.ones(folds), np.ones(2))
    assert found["kappa"] >= 1
    for view in ("symmetric", "active"):
        assert found["cosine"] >= found[f"{view}/bound"] - 1e-12
        assert found[f"{view}/mean_bound"] >= found[f"{view}/bound"] - 1e-12
        assert found["cosine"] >= found[f"{view}/mean_bound"] - 1e-12


def test_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = np.array([1.0, 2.0, 4.0, 9.0])
    knife = Jackknife.of(lambda keep_J, _: {"x": float(keep_J @ values / keep_J.sum())}, 4)
    assert knife.variance("x") == pytest.approx(values.var(ddof=1) / 4)
    interval = mean_over_rounds([knife], "x")
    assert interval.value == pytest.approx(4.0)
    assert interval.high - 4.0 == pytest.approx(3.1824 * math.sqrt(values.var(ddof=1) / 4), rel=1e-4)  # t of 3
    # two rounds: half the variance of the mean, twice the degrees of freedom
    assert mean_over_rounds([knife, knife], "x").high - 4.0 == pytest.approx(
        2.4469 * math.sqrt(values.var(ddof=1) / 8), rel=1e-4
    )


def test_no_interval_for_maxima_and_none_beyond_one_for_cosines() -> None:
    knife = Jackknife.of(
        lambda keep_J, _: {"cosine": 1.0 - 0.2 * float(keep_J[0]), "symmetric/lre_max": float(keep_J[0])}, 3
    )
    assert math.isnan(mean_over_rounds([knife], "symmetric/lre_max").low)
    assert mean_over_rounds([knife], "cosine").high == 1.0


def test_split_halves_and_ceiling() -> None:
    rng = np.random.default_rng(1)
    direction = rng.normal(size=2000)
    first, second = (direction + rng.normal(size=(16, 2000)) * 6 for _ in range(2))
    expected = noise_ceiling(split_half_cosine(first), split_half_cosine(second))
    assert cosine(first.sum(0), second.sum(0)) == pytest.approx(expected, abs=0.03)
    assert expected < 0.5
    # Two halves s + e1 and s + e2 with |e|^2 = |s|^2 agree by 1/2, two wholes s + (e1 + e2) / 2 by 1 / (1 + 1/2).
    assert whole_from_half(0.5) == pytest.approx(2 / 3)
    assert whole_from_half(-0.1) == 0
    assert noise_ceiling(0.5, 1.0) == pytest.approx(math.sqrt(2 / 3))


def test_bins_of_equal_mass() -> None:
    # 1 1 | 5 5 5 | 9 9 30: the borders nearest to 8/3 and 16/3 of 8 sequences
    np.testing.assert_array_equal(assign_bins([9, 1, 5, 5, 1, 9, 30, 5], 3), [2, 0, 1, 1, 0, 2, 2, 1])


# ---------------------------------------------------------------- gradients


def batch(seed: int = 0, n: int = 24, tokens: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, tokens + 1, (n,), generator=generator)
    mask = torch.arange(tokens) < length[:, None]
    old = -torch.rand(n, tokens, generator=generator, dtype=torch.float64)
    drift = 0.15 * torch.randn(n, tokens, generator=generator, dtype=torch.float64)
    advantage = torch.randn(n, 1, generator=generator).expand(n, tokens) * mask
    return {"log_prob": old + drift, "old": old, "advantages": advantage, "mask": mask}


@pytest.mark.parametrize("algo", FIXED)
def test_coefficients_give_the_gradient_of_the_training_loss(algo: str) -> None:
    """A linear 'model' theta: log pi = theta x; its gradient through the loss equals the weighted sum of its parts."""
    data, loss = batch(), ALGORITHMS[algo]
    features = torch.randn(*data["old"].shape, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    theta = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    log_prob = data["log_prob"] + features @ theta
    output = sequence_policy_loss(log_prob, data["old"], data["advantages"], data["mask"], loss)
    (expected,) = torch.autograd.grad(output.loss_B.sum(), theta)

    coefficient_B, said = gradient_coefficients(*data.values(), loss)
    parts = (features * data["mask"][..., None]).sum(1)  # d sum_t log pi / d theta
    torch.testing.assert_close(torch.from_numpy(coefficient_B) @ parts, expected)
    clipped = (said.clipped_high_B | said.clipped_low_B).numpy()
    assert clipped.any() and not clipped.all()
    np.testing.assert_array_equal(coefficient_B == 0, clipped)


def test_algorithms_with_one_weight_share_an_unclipped_objective() -> None:
    assert without_clip(ALGORITHMS["fspo"]) == without_clip(ALGORITHMS["seq_rloo"])
    assert len({without_clip(ALGORITHMS[algo]) for algo in FIXED}) == 3


def test_plan_and_weights_find_every_sum_again() -> None:
    rng = np.random.default_rng(0)
    n, dim = 40, 6
    gradient = rng.normal(size=(n, dim))
    fold, bin_ = rng.integers(0, 3, n), rng.integers(0, 4, n)
    free_FB, clipped_OB = rng.normal(size=(2, n)), rng.normal(size=(3, n))
    plan = GradientPlan(folds=3, bins=4, family_O=(0, 0, 1))
    held_out, held_out_fold = rng.normal(size=10), rng.integers(0, 3, 10)
    other = rng.normal(size=(10, dim))
    vectors = np.concatenate(
        [
            plan.weights(free_FB, clipped_OB, fold, bin_).T @ gradient,
            plan.held_out_weights(held_out, held_out_fold).T @ other,
        ]
    )
    unclipped_FJKD, clipped_OJKD, held_out_HD = plan.split(vectors)
    cell = (fold == 2) & (bin_ == 1)
    np.testing.assert_allclose(unclipped_FJKD[1, 2, 1], free_FB[1][cell] @ gradient[cell])
    np.testing.assert_allclose(clipped_OJKD[2, 2, 1], clipped_OB[2][cell] @ gradient[cell])
    np.testing.assert_allclose(held_out_HD[1], held_out[held_out_fold == 1] @ other[held_out_fold == 1])


def test_worker_pieces_agree_with_plain_torch() -> None:
    from benchmarks.alignment.worker import flat_gradient, gram_of_shards, rows_of

    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1, bias=False))
    module[0](torch.ones(1, 3)).sum().backward()
    module[0].bias.requires_grad_(False)
    assert flat_gradient(module).tolist() == [1.0] * 6 + [0.0] * 2
    module[0].bias.requires_grad_(True)
    flat = flat_gradient(module)
    assert flat.tolist() == [1.0] * 8 + [0.0] * 2  # the second layer has no gradient
    gradients = [torch.randn(200_000, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    stacked = torch.stack(gradients).to(torch.float64)
    torch.testing.assert_close(gram_of_shards(gradients), stacked @ stacked.T)
    rows, weights = rows_of(torch.tensor([0.0, 2.0, 0.0, -1.0]), 4)
    assert rows.tolist() == [1, 3, 0, 0] and weights.tolist() == [2.0, -1.0, 0.0, 0.0]


# ---------------------------------------------------------------- the command line


def run_folder(folder: Path) -> Path:
    """A run folder that has a checkpoint by name only."""
    actor = folder / "checkpoints" / "global_step_3" / "actor"
    actor.mkdir(parents=True)
    for name in ("model", "optim", "extra_state"):
        (actor / f"{name}_world_size_1_rank_0.pt").write_bytes(b"PK cut")
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")
    (folder / "config.yaml").write_text(
        "actor_rollout_ref: {actor: {ppo_mini_batch_size: 8, checkpoint: {load_contents: [model]}}}\n"
        "trainer: {nnodes: 1, n_gpus_per_node: 1}\nrun: {dir: run}\n"
        "data: {train_files: none, train_batch_size: 8}\n"
    )
    return folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "first argument"),
        (["RUN", "algos=[foo]"], "'foo'"),
        (["RUN", "algos=[fspo_quantile]"], "fspo_quantile"),
        (["RUN", "rounds=0"], "rounds=0"),
        (["RUN", "folds=65"], "prompts=64"),
        (["RUN", "target_clip_rate=1"], "target_clip_rate"),
        (["/nowhere"], "/nowhere"),
        (["RUN", "prompts=12", "folds=8"], "16"),  # a multiple of the run's mini-batch
        (["RUN", "trainer.nnodes=2"], "2"),  # the checkpoint has one rank's files
        (["RUN"], "checkpoint"),  # damaged
    ],
)
def test_bad_command_lines(
    tmp_path: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = run_folder(tmp_path / "run")
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARN")  # main sets both for the whole process
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "argv", ["alignment", *(str(run) if each == "RUN" else each for each in arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and said in printed and len(printed.splitlines()) == 1
    assert not (run / "alignment").exists()


def test_a_run_is_measured_where_it_is_in_its_own_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.alignment.__main__.checkpoint_damage", lambda *_: [])
    run = str(run_folder(tmp_path / "run"))
    config = Path(run, "config.yaml")
    config.write_text(
        config.read_text().replace("dir: run", "dir: /old").replace("none", "/old/data/a.parquet")
        + "ray_kwargs: {ray_init: {address: auto, runtime_env: {env_vars: {VERL_PLATFORM: cuda, FSPO_RUN_ID: one}}}}\n"
    )
    measured = configure(*parse([run]))
    assert measured.data.train_files == f"{run}/data/a.parquet"
    assert measured.trainer.default_local_dir == f"{run}/alignment/checkpoints"
    environment = {"env_vars": {"VERL_PLATFORM": "cuda"}}
    assert measured.ray_kwargs.ray_init == {"address": None, "num_gpus": None, "runtime_env": environment}
    assert configure(*parse([run, "++ray_kwargs.ray_init.address=auto"])).ray_kwargs.ray_init.address == "auto"
    config.write_text("trainer: [")
    with pytest.raises(BadInput, match="is not the configuration of a run"):
        configure(*parse([run]))
