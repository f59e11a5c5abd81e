"""One recorded batch, the same mini-batches: FSDP ranks and Ray nodes change nothing of an update but its rounding.

Whole runs on one and two ranks cannot be equal: vLLM's replicas draw different tokens, and verl forms other
mini-batches. So the real workers are given the same batch here, without a rollout engine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from columns import in_order
from real_stack import run_marked

from fspo.table import read_table

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("one_update.py")
#: FSDP ranks and Ray nodes; the first records the batch.
PLACES = ((1, 1), (2, 1), (2, 2))
#: In the folder of all tests: every program updates with one batch.
BATCH = "batch.pt"
Results = dict[tuple[int, int], dict[str, np.ndarray]]
#: Two losses of this package, two of verl's. The first one's update is compared between the places.
LOSSES = ("fspo", "seq_gspo", "gspo", "vanilla")


def update(factory: pytest.TempPathFactory, ranks: int, nodes: int, out: Path, folder: Path, kind: str) -> None:
    words = [str(ranks), str(nodes), str(factory.getbasetemp() / BATCH), str(out), str(folder), kind, *LOSSES]
    run = run_marked(str(PROGRAM), *words, timeout=280)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("updates")
    by_place = {}
    for ranks, nodes in PLACES:
        out = folder / f"{ranks}_{nodes}.npz"
        update(tmp_path_factory, ranks, nodes, out, folder / f"run_{ranks}_{nodes}", "recipe")
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
    np.testing.assert_allclose(other["responses"][0], one["responses"][0], rtol=1e-4, atol=1e-3)


def test_two_nodes_change_nothing_at_all(results: Results) -> None:
    """The same two ranks on one node and on two: the same numbers in the same order."""
    for name in ("gradients", "change", "loss"):
        assert relative(results[2, 1][name], results[2, 2][name]) < 1e-6, name


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_an_audit_of_verls_workers_has_the_rows_of_ours(
    tmp_path_factory: pytest.TempPathFactory, results: Results, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("FSPO_AUDIT", str(folder / f"audit_{ranks}"))
    update(tmp_path_factory, ranks, 1, folder / "none.npz", folder / f"verl_{ranks}", "verl")
    ours, table = results[ranks, 1]["responses"], read_table(folder / f"audit_{ranks}")
    assert table.problems == [] and table.meta["rule"] == "known"
    for step in range(len(LOSSES)):
        for index in range(2):
            of_batch = (table.columns["step"] == step + 1) & (table.columns["update"] == index)
            theirs = in_order({name: values[of_batch] for name, values in table.columns.items()})
            assert theirs.shape[1] == 16
            # On CPUs the recipe takes the log-probabilities of many tokens at once, which rounds otherwise; every loss
            # begins with the weights that the one before has left.
            np.testing.assert_allclose(ours[step, index], theirs, rtol=1e-2, atol=1e-4, err_msg=LOSSES[step])
