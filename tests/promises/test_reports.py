"""Promise 10: ``python -m fspo.report`` of a sweep, of one run, of broken runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from commands import files_of, run
from recorded_runs import write_run

pytestmark = pytest.mark.promise(10)


LAST = {"fspo": (0.50, 0.51, 0.52), "seq_rloo": (0.60, 0.63, 0.62)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for loss, of_seeds in LAST.items():
        for seed, accuracy in enumerate(of_seeds):
            run = write_run(folder / loss / f"seed{seed}", loss, seed, accuracy)
            config = {"run": {"dir": str(run)}, "data": {"seed": seed, "file": "x"}, "micro": seed // 2}
            config |= {"optim": {"lr": 0.1 if loss == "fspo" else 0.2}, "trainer": {"default_local_dir": str(run)}}
            (run / "config.yaml").write_text(json.dumps(config))
    return folder


def page(out: Path) -> str:
    """The text of the page, which loads nothing from elsewhere, and in which a folder's name is text."""
    source = (out / "report.html").read_text(encoding="utf-8")
    addresses = re.findall(r'(?:src|srcset|href)="([^"]*)"', source)
    assert addresses and all(address.startswith("data:image/png;") for address in addresses) and "<b>" not in source
    return re.sub(r"<[^>]*>", " ", source)


def test_a_sweep_has_each_loss_and_their_paired_difference(runs: Path, tmp_path: Path) -> None:
    ended = run("fspo.report", runs, "--out", "out", folder=tmp_path)
    assert ended.status == 0 and not [line for line in ended.error.splitlines() if str(runs) in line]
    text = page(tmp_path / "out")
    assert all(name in text for name in ("fspo", "rloo"))
    means = [np.mean(LAST[loss]) for loss in LAST]
    assert all(f"{mean:.3f}" in text for mean in means), "the last held-out accuracies"
    assert re.search(rf"[-\u2212]{means[1] - means[0]:.3f}", text), "FSPO's is lower"
    assert (tmp_path / "out/report.html").read_text().count("data:image/png;") == 7
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    differing = {head: values for head, _, values in summary["settings"]["rows"]}
    assert differing["lr"] == ["0.1", "0.2"] and differing["micro"] == ["0 or 1", "0 or 1"]
    assert differing.keys() == {"seeds", "steps", "status", "lr", "micro"}
    assert summary["problems"] == summary["follows"] == []


def test_one_run_has_a_page(runs: Path, tmp_path: Path) -> None:
    ended = run("fspo.report", runs / "fspo/seed1", "--out", "out", folder=tmp_path)
    assert ended.status == 0 and "0.510" in page(tmp_path / "out")


def test_broken_runs_are_named_and_the_others_reported(runs: Path, tmp_path: Path) -> None:
    cut = write_run(tmp_path / "cut", "fspo", 7, 0.44)
    (cut / "metrics.jsonl").write_bytes((cut / "metrics.jsonl").read_bytes()[:-20])
    (cut / "run.json").write_text("{")
    (tmp_path / "empty<b>").mkdir()
    ended = run("fspo.report", runs / "fspo/seed0", cut, "empty<b>", "absent", "--out", "out", folder=tmp_path)
    said = ended.error + page(tmp_path / "out")
    assert ended.status == 0 and all(name in said for name in ("cut/metrics.jsonl", "cut/run.json", "empty", "absent"))
    assert "0.500" in said and "Traceback" not in said
    assert run("fspo.report", "empty<b>", "absent", "--out", "nothing", folder=tmp_path).status == 2
    assert not (tmp_path / "nothing/report.html").exists()


def test_a_page_of_somebodys_own_is_not_replaced(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/report.html").write_text("mine")
    before = files_of(tmp_path)
    assert run("fspo.report", runs / "fspo/seed0", "--out", "out", folder=tmp_path).status == 2
    assert files_of(tmp_path) == before
