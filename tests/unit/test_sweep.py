"""A sweep: folders of its arms, what is skipped, what a failure and a signal do, and what it ends with."""

from __future__ import annotations

import itertools
import signal
import threading
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from waiting import wait_until

from recipe.runner.launch.settings import Refused
from recipe.runner.launch.sweep import Arm, Sweep

#: Stands in for a run: it notes its words, and ends as its seed says.
RUN = """
import json, sys, time
from pathlib import Path
words = dict(word.split("=", 1) for word in sys.argv[1:])
folder = Path(words["trainer.default_local_dir"].strip("'"))
folder.mkdir(parents=True, exist_ok=True)
status = {"3": 1, "5": 75, "7": 2}.get(words["seed"], 0)
if words["seed"] == "9":
    (folder / "begun").touch()
    import signal
    status = 75 if signal.sigwait({signal.SIGTERM, signal.SIGINT}) else 0
info = {"status": "finished" if not status else "failed", "versions": {}, "overrides": [
    word for word in sys.argv[1:] if "default_local_dir" not in word]}
(folder / "run.json").write_text(json.dumps(info))
with open(folder.parent / "order", "a") as file:
    print(folder.name, file=file)
sys.exit(status)
"""


def sweep(tmp_path: Path, *seeds: int, algos: tuple[str, ...] = ("fspo", "gspo"), more: str = "a.lr=1") -> Sweep:
    (tmp_path / "stand_in.py").write_text(RUN)
    trainer = {"default_local_dir": str(tmp_path / "out"), "experiment_name": "demo"}
    arms = []
    for seed, algo in itertools.product(seeds, algos):
        content = {"seed": seed, "loss": algo, "a": {"lr": 1, "n": 1 if algo == "fspo" else 2}, "trainer": trainer}
        words = (f"seed={seed}", f"x.algo={algo}", more, f"trainer.default_local_dir={tmp_path / 'out'}")
        arms.append(Arm(OmegaConf.create(content), words))
    return Sweep("stand_in", arms, ("loss",))


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("FSPO_STOP", raising=False)
    monkeypatch.delenv("FSPO_RUN_DIR", raising=False)


def test_a_folder_is_named_by_all_swept_words(tmp_path: Path) -> None:
    names = [folder.name for folder in sweep(tmp_path, 1, 2).folders()]
    assert names == ["seed=1,algo=fspo", "seed=1,algo=gspo", "seed=2,algo=fspo", "seed=2,algo=gspo"]
    odd = [folder.name for folder in sweep(tmp_path, 1, algos=("a/b", "a_b")).folders()]
    assert len(set(odd)) == 2 and all("/" not in name for name in odd)


def test_nothing_is_run_twice_and_a_failure_stops_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    order = tmp_path / "out/order"
    assert sweep(tmp_path, 1, 3, 2, algos=("fspo",)).run(False) == 1
    assert order.read_text().split() == ["seed=1", "seed=3", "seed=2"]
    assert sweep(tmp_path, 1, 3, 2, algos=("fspo",)).run(False) == 1
    assert order.read_text().split()[3:] == ["seed=3"]
    assert sweep(tmp_path, 1, 5, 3, algos=("fspo",)).run(False) == 75
    assert sweep(tmp_path, 1, 2, algos=("fspo",)).run(False) == 0
    assert "finished before" in capfd.readouterr().out
    scores = sweep(tmp_path, 1, 2, algos=("fspo",))
    for arm in scores.arms:
        arm.config.evaluate = True
    assert scores.run(False) == 0 and order.read_text().split()[-2:] == ["seed=1", "seed=2"]


def test_a_finished_run_of_other_words_is_no_part_of_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sweep(tmp_path, 1).run(False)
    (note,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("note:"))
    assert "a.n" in note, "what differs beside the loss"
    with pytest.raises(Refused, match=r"a\.lr=2"):
        sweep(tmp_path, 1, more="a.lr=2").run(False)


def test_the_file_of_a_job_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stop").touch()
    monkeypatch.setenv("FSPO_STOP", str(tmp_path / "stop"))
    assert sweep(tmp_path, 1, 2).run(False) == 75 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_is_passed_on_and_no_other_run_starts(tmp_path: Path, signum: signal.Signals, status: int) -> None:
    one, ended = sweep(tmp_path, 9, 1, algos=("fspo",)), list[int]()
    runs = threading.Thread(target=lambda: ended.append(one.run(False)))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signum})  # what it starts inherits that
    try:
        runs.start()
        wait_until((tmp_path / "out/seed=9/begun").exists)
        one.take(signum)
        runs.join(300)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    assert ended == [status] and not (tmp_path / "out/seed=1").exists()


def test_a_dry_run_says_what_the_first_refused_arm_ends_with(tmp_path: Path) -> None:
    assert sweep(tmp_path, 1, 7, algos=("fspo",)).run(True) == 2
