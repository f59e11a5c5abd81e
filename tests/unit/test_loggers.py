"""What verl's own loggers write, and where: the real Tracking, as the trainer hands it its metrics."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from composing import composed

from recipe.runner.launch import loggers
from recipe.runner.launch.loggers import problems, run_name
from recipe.runner.launch.problems import MachineProblem

METRICS = {"critic/rewards/mean": 0.5, "val-core/mine/acc/mean@1": 0.25, "fspo/accept/bin_00": 0.9, "actor/mine": 2.0}


@pytest.fixture
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TENSORBOARD_DIR", "WANDB_DIR", "MLFLOW_TRACKING_URI", "SWANLAB_LOG_DIR"):
        monkeypatch.setenv(name, "")  # so that what the code sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_clean")
def test_tensorboard_of_a_run_is_in_its_folder(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from verl.utils.tracking import Tracking

    config = composed(f"trainer.default_local_dir={tmp_path}/run")
    loggers.point_into(config.trainer.default_local_dir)  # from here on as FSPOTrainer and verl's do it
    tracking = Tracking("fspo", run_name(config), ["tensorboard"], config={"trainer": {}})
    for step in (1, 2):
        tracking.log(METRICS, step)
    tracking.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing elsewhere"
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(METRICS)
    assert [event.step for event in events.Scalars("critic/rewards/mean")] == [1, 2]


@pytest.mark.usefixtures("_clean")
def test_a_place_that_the_user_has_chosen_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "mine"))
    loggers.point_into("/runs/x")
    assert os.environ["TENSORBOARD_DIR"] == str(tmp_path / "mine")
    assert os.environ["WANDB_DIR"] == "/runs/x"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/home/me/runs/demo/20260131-120000", "demo/20260131-120000"),
        ("/home/me/runs/compare/demo/matched/fspo/seed1", "demo/matched/fspo/seed1"),
        ("/scratch/grid/default/fspo/seed1", "demo/default/fspo/seed1"),
        ("/data/x", "demo/data/x"),
    ],
)
def test_each_run_has_a_name_of_its_own(folder: str, name: str) -> None:
    assert run_name(composed(f"trainer.default_local_dir={folder}")) == name


@pytest.mark.parametrize(
    ("logger", "says"),
    [
        ("[console,wnadb]", ("wnadb", "wandb")),
        ("[clearml]", ("clearml", "pip install clearml")),
        ("[console,tensorboard]", ()),
    ],
)
def test_what_cannot_be_logged_is_refused(logger: str, says: tuple[str, ...]) -> None:
    sentences = list(problems(composed(f"trainer.logger={logger}")))
    assert len(sentences) == bool(says) and all(part in sentences[0] for part in says), sentences
    # A dry run for another machine passes what that one decides: packages.
    assert all(isinstance(sentence, MachineProblem) is ("wnadb" not in says) for sentence in sentences)
