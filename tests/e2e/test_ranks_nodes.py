"""One recorded batch, the same mini-batches: FSDP ranks and Ray nodes change nothing of an update but its rounding.

Whole runs on one and two ranks cannot be equal: vLLM's replicas draw different tokens, and verl forms other
mini-batches. So the real workers are given the same batch here, without a rollout engine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from real_stack import run_marked

# The recipe's own part, one update joined over ranks, has unit tests; the rest is verl's.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("one_update.py")
#: FSDP ranks and Ray nodes; the first records the batch.
PLACES = ((1, 1), (2, 1), (2, 2))
Results = dict[tuple[int, int], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("updates")
    by_place = {}
    for ranks, nodes in PLACES:
        out = folder / f"{ranks}_{nodes}.npz"
        files = (folder / "batch.pt", out, folder / f"run_{ranks}_{nodes}")  # one batch for all
        run = run_marked(str(PROGRAM), str(ranks), str(nodes), *map(str, files), timeout=280)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
        by_place[ranks, nodes] = dict(np.load(out))
    return by_place


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Distance of two vectors relative to the first one's length."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def test_the_places_are_what_they_are_called(results: Results) -> None:
    for (ranks, nodes), result in results.items():
        assert (result["ranks"], result["nodes"], result["used"]) == (ranks, nodes, nodes)
    one = results[1, 1]
    assert one["gradients"].shape[0] == 2 and (one["grad_norm"] > 0.01).all()
    assert relative(one["gradients"][0], one["gradients"][1]) > 0.1  # the mini-batches are not alike
    assert np.abs(one["change"]).max() > 1e-5


@pytest.mark.parametrize("place", PLACES[1:])
def test_losses_gradients_and_metrics_are_the_same(results: Results, place: tuple[int, int]) -> None:
    one, other = results[1, 1], results[place]
    for name in ("loss", "grad_norm", "actor/pg_loss", "kl_loss"):
        assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    for mini_batch in (0, 1):
        difference = relative(one["gradients"][mini_batch], other["gradients"][mini_batch])
        print(f"mini-batch {mini_batch} on {place}: gradient differs by {difference:.1e}")
        assert difference < 1e-4
    # Adam divides by the gradient's size, so where that is rounding noise the sign of the change is, too.
    change = relative(one["change"], other["change"])
    print(f"on {place}: the change of the weights differs by {change:.1e}")
    assert change < 1e-2
    # S of the second mini-batch, up to 0.1, moves with the change of the weights, so by a hundredth of that at most.
    np.testing.assert_allclose(other["responses"], one["responses"], rtol=1e-4, atol=1e-3)


def test_two_nodes_change_nothing_at_all(results: Results) -> None:
    """The same two ranks on one node and on two: the same numbers in the same order."""
    for name in ("gradients", "change", "loss"):
        assert relative(results[2, 1][name], results[2, 2][name]) < 1e-6, name
