"""The run folder: no file of the user's is replaced, and a resumed run goes on with its settings."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from composing import composed
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException
from messages import holds
from omegaconf import DictConfig, OmegaConf
from test_checkpoints import write_checkpoint

from fspo.table import FOLDER, TableWriter
from recipe.fspo.job import JOB
from recipe.fspo.main import main as main_of_fspo
from recipe.fspo.trainer import COLUMNS
from recipe.math.data.offline_task import write_dataset
from recipe.runner.checkpoints.integrity import Checkpoint, latest, resumed_from, step_folder
from recipe.runner.faults.errors import TrainingFailed
from recipe.runner.faults.phase import Phase, write_phase
from recipe.runner.faults.preemption import ENDING, Preempted
from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.launch import compose as runner
from recipe.runner.launch import run_folder, run_settings, start
from recipe.runner.launch.commands import launch_or_exit, next_commands
from recipe.runner.launch.compose import Refused, parsed, quoted, text_of
from recipe.runner.launch.inputs import write_offline_task
from recipe.runner.launch.prepare import on_this_machine, prepare, turn_into_evaluation
from recipe.runner.launch.run_folder import Changes, Start
from recipe.runner.launch.run_settings import Resume, resume_of
from recipe.runner.launch.start import launch
from recipe.runner.launch.values import PreflightError
from recipe.runner.main import main
from recipe.runner.progress import PROGRESS, RunLog, step_line, validation_line

SMALL_TASK = ("data.offline_task.n_train=64", "data.offline_task.n_test=8")
LR = "actor_rollout_ref.actor.optim.lr"


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def given(*words: str) -> tuple[DictConfig, list[Override], Resume | None]:
    """What a command makes of its words: the configuration, its new overrides, and the run that it goes on with."""
    overrides = parsed(words)
    if (resume := resume_of(overrides, JOB)) is None:
        return composed(*words), overrides, None
    new = resume.new(overrides)
    return runner.compose(JOB, new, resume.base), new, resume


def prepared(*words: str) -> Start:
    config, new, resume = given(*words)
    return prepare(config, JOB, new, resume=resume)


def ready(folder: Path, *overrides: str) -> DictConfig:
    config = on_this_machine(given(f"run.dir={folder}", *SMALL_TASK, *overrides)[0])
    JOB.complete(config)
    return config


def changed_settings(config: DictConfig) -> Changes:
    """What a start with this configuration would change of the run in its folder."""
    return run_settings.changed_settings(config, resume_of(parsed([f"run.dir={config.run.dir}"]), JOB))


def allowed_changes(config: DictConfig) -> Changes:
    return run_settings.allowed_changes(config, resume_of(parsed([f"run.dir={config.run.dir}"]), JOB))


def begun(folder: Path, *overrides: str, step: int = 1) -> Path:
    """The folder of a run that has done ``step`` steps, made by the code that makes one."""
    words, references = (f"run.dir={folder}", *SMALL_TASK, *overrides), dict[str, str]()
    config = on_this_machine(composed(*words), references=references)
    JOB.complete(config)
    write_dataset(folder / "data", 64, 8, 0)
    run_folder.begin(Start(config, JOB, tuple(parsed(words)), references=references))
    (folder / "metrics.jsonl").write_text('{"step": 1, "metrics": {}}\n' * step)
    return folder


def saved_by(folder: Path, *steps: int) -> Path:
    """Checkpoints that can be resumed, the last of which the tracker names; the folder of the first."""
    first, *_ = [write_checkpoint(folder, step, ranks=1) for step in steps]
    return first


@pytest.mark.parametrize("files", ["both", "train"])
def test_data_files_of_the_user_are_read_and_never_written(tmp_path: Path, files: str) -> None:
    mine = tmp_path / "mine"
    write_dataset(mine, n_train=40, n_test=9, seed=5)
    before = contents(mine)
    own = {"train": f"data.train_files={mine}/train.parquet", "val": f"data.val_files={mine}/test.parquet"}
    overrides = own.values() if files == "both" else [own[files]]
    config = composed(f"run.dir={tmp_path / 'run'}", *SMALL_TASK, *overrides, "trainer.n_gpus_per_node=3")
    with pytest.raises(PreflightError, match="n_gpus_per_node=3"):  # refused, and nothing is written
        launch(prepare(config, JOB))
    assert not (tmp_path / "run").exists()

    config = ready(tmp_path / "run", *overrides)
    write_offline_task(JOB, config.data)
    assert contents(mine) == before
    generated = {"both": [], "train": ["test.parquet"]}[files]
    assert sorted(path.name for path in (tmp_path / "run").rglob("*.parquet")) == generated
    assert config.data.train_files == [f"{mine}/train.parquet"]


def test_a_job_that_writes_no_data_is_not_asked_for_it(tmp_path: Path) -> None:
    config = composed(f"run.dir={tmp_path / 'run'}", *SMALL_TASK)
    with pytest.raises(PreflightError, match=r"data\.offline_task: recipe\.fspo\.main .*data\.train_files"):
        prepare(config, dataclasses.replace(JOB, write_data=None))


NAMES = (
    "config.yaml",
    "run.json",
    "metrics.jsonl",
    "responses/mine.parquet",
    "run.png",
    "launcher.log",
    "progress.log",
    "stop",
)


@pytest.mark.parametrize("name", [*NAMES, "data/train.parquet", "checkpoints/global_step_5/mine.txt"])
def test_a_file_of_the_users_is_in_the_way_of_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")  # this one is not
    with pytest.raises(PreflightError) as refused:
        launch(prepared(f"run.dir={tmp_path}", *SMALL_TASK))
    named = name.removesuffix("/mine.txt").removesuffix("/mine.py").removesuffix("/mine.parquet")
    assert str(tmp_path) in str(refused.value) and named in str(refused.value)
    assert contents(tmp_path) == {name: b"{}", "notes.txt": b"mine"}


def test_a_folder_named_stop_is_left_alone_and_named(tmp_path: Path) -> None:
    (begun(tmp_path) / "stop").mkdir()
    with pytest.raises(PreflightError, match=holds(f"{tmp_path}/stop", "folder", "rename")):
        launch(prepared(f"run.dir={tmp_path}", *SMALL_TASK))
    assert (tmp_path / "stop").is_dir()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["algo=gspo"], ("algo=gspo", "algo cannot change", "run.dir")),
        (["mode=colocate_async"], ("mode=colocate_async", "mode cannot change", "run.dir")),
        (["~experiment"], ("~experiment", "experiment cannot change", "run.dir")),
        (["fspo.algo=gspo"], ("fspo.algo", "'fspo'", "'gspo'", "run.allow_changed=[")),
        (["trainer.resume_mode=disable"], ("resume_mode=disable", "run.dir")),
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/elsewhere/global_step_2"],
            ("resume_from_path=/elsewhere/global_step_2", "run.dir"),
        ),
    ],
)
def test_a_run_is_not_mixed_with_another(tmp_path: Path, changes: list[str], says: tuple[str, ...]) -> None:
    before = contents(begun(tmp_path))
    with pytest.raises((PreflightError, Refused), match=holds(*says)):
        launch(prepared(f"run.dir={tmp_path}", *SMALL_TASK, *changes))
    assert contents(tmp_path) == before


def test_a_group_of_the_run_may_be_named_again_and_no_other(tmp_path: Path) -> None:
    """Also none that would be chosen without the run's words, and not beside one that changes nothing."""
    begun(tmp_path, "algo=gspo")
    assert given(f"run.dir={tmp_path}", "mode=sync", "experiment=demo")[0].fspo.algo == "gspo"
    with pytest.raises(Refused, match=holds("algo=fspo", str(tmp_path), "run.dir")) as refused:
        given(f"run.dir={tmp_path}", "mode=sync", "algo=fspo")
    assert len(refused.value.problems) == 1
    with pytest.raises(Refused, match=holds("algo=gspoo", "gspo")):
        given(f"run.dir={tmp_path}", "algo=gspoo")


def test_another_exponent_is_another_run(tmp_path: Path) -> None:
    key = "actor_rollout_ref.actor.policy_loss.exponent"
    begun(tmp_path, f"{key}=0.43")
    with pytest.raises(PreflightError, match=holds(key, "0.43", "0.5", "run.allow_changed=[")):
        launch(prepared(f"run.dir={tmp_path}", *SMALL_TASK, f"{key}=0.5"))


def test_two_starts_do_not_share_a_folder(tmp_path: Path) -> None:
    before = contents(begun(tmp_path))
    with run_folder.locked(str(tmp_path)), pytest.raises(PreflightError, match=f"run.dir={tmp_path}"):
        launch(prepared(f"run.dir={tmp_path}", *SMALL_TASK))
    assert contents(tmp_path) == before
    with run_folder.locked(str(tmp_path)):
        """The one before has ended."""


@pytest.mark.parametrize("moves", [True, False])
def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], moves: bool
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(run_folder, "_OLD_PHASE_S", 2.5)
    begun(tmp_path)
    with run_folder.locked(str(tmp_path)):
        """It ran on this host."""
    assert "note:" in (out := capsys.readouterr().out) and str(tmp_path) in out and "locks" in out
    info = json.loads((tmp_path / "run.json").read_text())
    info["starts"][-1]["host"] = "another-host"
    (tmp_path / "run.json").write_text(json.dumps(info))
    write_phase(tmp_path, Phase(1, "update", time.time() - 9))
    with run_folder.locked(str(tmp_path)):
        """The phase is old."""
    write_phase(tmp_path, Phase(1, "update"))
    if not moves:
        with run_folder.locked(str(tmp_path)):
            """It was killed a moment ago: nothing moves."""
        return
    threading.Timer(0.5, write_phase, (tmp_path, Phase(1, "save"))).start()
    with pytest.raises(PreflightError, match=holds(f"run.dir={tmp_path}", "another-host")):
        run_folder.locked(str(tmp_path)).__enter__()


@pytest.mark.parametrize(
    "words",
    [
        *(("run.dir=",), ("run.dir='  '",), ("run.dir=null",), ("trainer.experiment_name=../../x",), ("resume=",)),
        *(("trainer.project_name=a/../b",), ("trainer.experiment_name=/x",), ("trainer.experiment_name=''",)),
    ],
)
def test_a_folder_without_a_name_and_a_name_that_leads_out_of_it_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    key = words[0].partition("=")[0]
    with pytest.raises(PreflightError, match=key):
        prepared(*SMALL_TASK, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["link", "long", "lock"])
def test_a_place_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    folder = tmp_path / "run"
    if what == "link":
        folder = tmp_path / "runs" / "run"
        folder.parent.symlink_to(tmp_path / "not mounted")
    elif what == "long":
        folder = tmp_path / ("x" * 256)
    else:
        (folder / ".lock").mkdir(parents=True)
    words = (f"run.dir='{folder}'", *SMALL_TASK, "ray_kwargs.ray_init.address=auto")
    with pytest.raises(SystemExit) as ended:
        launch_or_exit(composed(*words), JOB, parsed(words))
    error = capsys.readouterr().err
    place = {"link": str(folder.parent), "long": str(folder), "lock": f"{folder}/.lock"}[what]
    assert ended.value.code == 2 and place in error and "run.dir" in error and "Traceback" not in error


@pytest.mark.parametrize("how", ["finished", "preempted"])
def test_a_run_json_that_cannot_be_written_at_the_end_changes_no_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    def run(config: DictConfig, **_: object) -> None:
        (tmp_path / "run.json").unlink()
        (tmp_path / "run.json").mkdir()
        if how == "preempted":
            error = ray.exceptions.RayError("preempted")
            error.cause = Preempted("it is saved")  # type: ignore[attr-defined]
            raise error

    def conclude(_: DictConfig) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run.png")

    nothing = SimpleNamespace(failure=None, **dict.fromkeys(("start", "stand_down", "close"), lambda: None))
    monkeypatch.setattr(start, "_supervisor", lambda *_: nothing)
    monkeypatch.setattr(start, "run_ppo", run)
    words = (f"run.dir={tmp_path}", *SMALL_TASK, "ray_kwargs.ray_init.address=auto")
    if how == "preempted":
        with pytest.raises(SystemExit) as ended:
            launch_or_exit(composed(*words), JOB, parsed(words))
        assert ended.value.code == 75
    else:
        launch_or_exit(composed(*words), replace(JOB, conclude=conclude), parsed(words))
        assert "run.png" in (out := capsys.readouterr().out) and "run.json" in out
        (tmp_path / "run.json").rmdir()
        words = (f"run.dir={tmp_path}/new", *words[1:])
        monkeypatch.setattr(start, "run_ppo", lambda *_, **__: None)
        with pytest.raises(SystemExit) as ended:
            launch_or_exit(composed(*words, "evaluate=true"), replace(JOB, conclude=conclude), parsed(words))
        assert ended.value.code == 1 and "run.png" in capsys.readouterr().err, "an evaluation leaves nothing else"


def test_run_log_appends_and_writes_only_numbers_on_whole_lines(tmp_path: Path) -> None:
    config = OmegaConf.create({"run": {"dir": str(tmp_path)}})
    log = RunLog(config.run.dir, total_steps=2)
    log.log({"a": np.float64(1.5), "b": float("nan"), "c": np.int64(2)}, step=1)
    RunLog(config.run.dir, total_steps=2).log({"a": 2.0}, step=2)  # a resumed run
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "metrics": {"a": 1.5, "b": None, "c": 2}}, {"step": 2, "metrics": {"a": 2.0}}]


def test_lines_leave_out_what_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_line(3, 20, {"critic/rewards/mean": 0.5, "fspo/lre_debiased": None}) == "step 3/20  reward 0.500"
    monkeypatch.setattr(PROGRESS, "columns", COLUMNS)
    lengths = {"response_length/mean": 72.0, "fspo/length_trained": 36.0}  # half of it a tool's
    assert step_line(3, 20, lengths) == "step 3/20  length 36  clipped -  LRE -"
    nothing_clipped = {"critic/rewards/mean": 0.5, "fspo/clip_frac": 0.0}
    assert step_line(3, 20, nothing_clipped) == "step 3/20  reward 0.500  clipped 0.0%  LRE -"
    assert step_line(3, 20, {"timing_s/step": 2.0}) == "step 3/20  clipped -  LRE -  s 2.0"
    noise = {"fspo/lre_debiased": 0.0, "fspo/lre_ci_low": 0.0, "fspo/lre_ci_high": 0.136}
    assert step_line(2, 20, noise) == "step 2/20  clipped -  LRE < 0.136"
    shown = noise | {"fspo/lre_debiased": 0.1, "fspo/lre_ci_low": 0.05}
    assert step_line(2, 20, shown) == "step 2/20  clipped -  LRE 0.100 [0.050, 0.136]"
    assert validation_line(3, {"critic/rewards/mean": 0.5}) == ""
    assert validation_line(3, {"val-core/a/b/acc/mean@1": 0.25}) == "held-out after step 3:  a/b/acc/mean@1 0.250"


def test_the_folder_alone_restores_the_settings(tmp_path: Path) -> None:
    begun(tmp_path, "algo=gspo", "seed=7", "~data.return_multi_modal_inputs", "+data.mine=1")
    repeated = [
        f"run.dir={tmp_path}",
        *SMALL_TASK,
        "algo=gspo",
        "seed=7",
        "~data.return_multi_modal_inputs",
        "+data.mine=1",
    ]
    for command in ([f"run.dir={tmp_path}"], [f"resume={tmp_path}"], repeated, [f"run.dir={tmp_path}", "mode=sync"]):
        config, _, resume = given(*command)
        assert (config.fspo.algo, config.seed, config.run.dir) == ("gspo", 7, str(tmp_path))
        assert config.data.mine == 1 and "return_multi_modal_inputs" not in config.data
        config = on_this_machine(config)
        JOB.complete(config)
        assert run_settings.changed_settings(config, resume) == []
    assert given(f"run.dir={tmp_path}/new")[0].fspo.algo == "fspo"
    elsewhere = tmp_path.rename(f"{tmp_path}_moved")
    config = given(f"resume={elsewhere}")[0]
    assert config.trainer.default_local_dir == str(elsewhere)
    assert config.data.train_files == [f"{elsewhere}/data/train.parquet"]
    assert changed_settings(on_this_machine(config)) == []


def test_what_is_of_one_start_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, leave = "++ray_kwargs.ray_init.address=auto", f"run.allow_changed=[{LR}]"
    monkeypatch.setenv(RUN_ID_VARIABLE, "one")
    begun(tmp_path, joined, leave, "algo=gspo")
    config = given(f"resume={tmp_path}", f"{LR}=1e-3")[0]
    ray_init = config.ray_kwargs.ray_init
    assert (config.fspo.algo, ray_init.address, ray_init.num_cpus) == ("gspo", "local", 32), "of the experiment"
    with pytest.raises(PreflightError, match=holds(LR, "0.0001", "0.001", "run.allow_changed")):
        allowed_changes(on_this_machine(config))
    again = given(joined, f"run.dir={tmp_path}", leave, "algo=gspo")[0]  # as a job does that is started again
    assert again.ray_kwargs.ray_init.address == "auto" and again.run.allow_changed == [LR]
    monkeypatch.setenv(RUN_ID_VARIABLE, "another")  # every start has its own, which Ray hands to the nodes
    assert changed_settings(ready(tmp_path, joined, leave, "algo=gspo")) == []


def test_what_the_command_says_wins_over_what_the_folder_keeps(tmp_path: Path) -> None:
    steps, longer = "trainer.total_training_steps=30", "trainer.total_training_steps=40"
    first = (f"run.dir={tmp_path}", *SMALL_TASK, "algo=gspo", steps, "+data.mine=1")
    begun(tmp_path, *first[3:])
    config = given(f"resume={tmp_path}", longer, "data.mine=2")[0]
    assert (config.trainer.total_training_steps, config.data.mine) == (40, 2)
    with pytest.raises(Refused, match=holds("trainer.total_steps", "no such key")):
        given(f"resume={tmp_path}", "trainer.total_steps=40")
    start = prepared(f"resume={tmp_path}", longer)
    assert [key for key, *_ in start.changed] == ["trainer.total_training_steps"]
    run_folder.begin(start)
    overrides = json.loads((tmp_path / "run.json").read_text())["overrides"]
    assert longer in overrides and steps not in overrides and "algo=gspo" in overrides
    assert given(f"resume={tmp_path}")[0].trainer.total_training_steps == 40
    assert given(*first)[0].trainer.total_training_steps == 30, "the first command, repeated, is no repetition any more"


def test_the_folders_of_the_user_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's settings come from the run's groups, and a folder that has moved is given again."""
    (tmp_path / "mine/experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults: [demo]\nray_kwargs: {ray_init: {num_cpus: 9}}\ntrainer: {save_freq: 3}\n"
    (tmp_path / "mine/experiment/mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    words = ("hydra.searchpath=[mine]", "experiment=mine")
    command = parsed([f"run.dir={tmp_path}/run", *SMALL_TASK, *words])
    run_folder.begin(prepare(runner.compose(JOB, command), JOB, command))
    monkeypatch.chdir("/")
    config = given(f"resume={tmp_path}/run")[0]
    assert (config.ray_kwargs.ray_init.num_cpus, config.trainer.save_freq) == (9, 3)
    moved = (tmp_path / "mine").rename(tmp_path / "moved")
    with pytest.raises(HydraException, match=f"{tmp_path}/mine"):
        given(f"resume={tmp_path}/run")
    assert given(f"resume={tmp_path}/run", f"hydra.searchpath=[{moved}]")[0].ray_kwargs.ray_init.num_cpus == 9


def test_an_override_of_a_resume_changes_what_refers_to_its_key(tmp_path: Path) -> None:
    """As in a new run: config.yaml holds values, and the groups hold the references."""
    begun(tmp_path / "run", "data.max_response_length=64", "actor_rollout_ref.rollout.seed=5")
    config = given(
        f"resume={tmp_path / 'run'}",
        "evaluate=true",
        "data.max_response_length=128",
        "seed=7",
        "run.dir=" + str(tmp_path / "run"),
    )[0]
    assert (config.actor_rollout_ref.rollout.response_length, config.data.seed) == (128, 7)
    assert config.actor_rollout_ref.rollout.seed == 5, "the run's own value, and no reference"
    other = on_this_machine(given(f"resume={tmp_path / 'run'}", "data.max_response_length=128")[0])
    with pytest.raises(PreflightError, match=holds("data.max_response_length", "rollout.response_length")):
        allowed_changes(other)


def test_a_run_without_a_result_is_begun_again_by_its_commands(tmp_path: Path) -> None:
    """Also with another group; what its first command chose stays where the new one is silent."""
    begun(tmp_path, "algo=rloo", "seed=7", "data.max_response_length=64", step=0)
    config, new, resume = given(f"resume={tmp_path}", "algo=gspo", "data.max_response_length=128")
    assert resume is not None and not resume.measured
    assert (config.fspo.algo, config.seed, config.run.dir) == ("gspo", 7, str(tmp_path))
    assert config.actor_rollout_ref.rollout.response_length == 128
    start = prepare(config, JOB, new, resume=resume)
    assert start.changed == () and text_of(start.overrides[-1]) == f"run.dir='{tmp_path}'"


def test_a_run_folder_that_a_file_or_a_reference_names_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path / "run", f"{LR}=2e-4")
    monkeypatch.setenv("PLACE", str(tmp_path))
    named = "run.dir='${oc.env:PLACE}/run'"
    main(JOB, lambda: "", "", [named, *SMALL_TASK, "--cfg", "job", "--package", "actor_rollout_ref.actor.optim"])
    assert "lr: 0.0002" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(JOB, lambda: "", "", [named, *SMALL_TASK, f"{LR}=1e-3", "dry_run=true"])
    assert f"{LR} was 0.0002 and would be 0.001" in capsys.readouterr().err


def test_a_key_that_is_newer_than_the_run_is_named(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("  calibration_rounds: 8\n", ""))
    with pytest.raises(PreflightError, match=holds("fspo.calibration_rounds", "8", "run.allow_changed=[")):
        prepared(f"resume={folder}")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [("experiment_name: demo", "experiment_name: ${seed}", "${seed}"), ("\nreward:", "\nreward: 5\nold:", "reward")],
)
def test_settings_that_no_run_writes_are_damage(tmp_path: Path, old: str, new: str, says: str) -> None:
    folder = begun(tmp_path)
    text = (folder / "config.yaml").read_text()
    assert old in text
    (folder / "config.yaml").write_text(text.replace(old, new))
    with pytest.raises(PreflightError, match=holds(f"{folder}/config.yaml", says, "run.dir")):
        given(f"resume={folder}")


LONGER, COSINE = "trainer.total_training_steps=99", "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"


@pytest.mark.parametrize(
    ("before", "change", "refused"),
    [
        ([], [LONGER, "trainer.logger=[file]", "trainer.nnodes=2", "trainer.save_freq=1"], ""),
        ([], [LONGER, f"{LR}=1e-5"], LR),
        ([], [LONGER, f"{LR}=1e-5", f"run.allow_changed=[{LR}]"], ""),
        ([], ["trainer.balance_batch=false"], "trainer.balance_batch"),
        ([COSINE], [COSINE, LONGER], "trainer.total_training_steps"),  # another learning rate
        ([COSINE], [COSINE, LONGER, "run.allow_changed=[trainer.total_training_steps]"], ""),
    ],
)
def test_length_logs_and_machine_may_change_and_what_is_allowed(
    tmp_path: Path, before: list[str], change: list[str], refused: str
) -> None:
    begun(tmp_path, *before)
    config = ready(tmp_path, *change)
    if not refused:
        assert {key for key, _, _ in allowed_changes(config)} >= {
            key for key in (words.partition("=")[0] for words in change[1:]) if key != "run.allow_changed"
        }
        return
    with pytest.raises(PreflightError) as caught:
        allowed_changes(config)
    error = str(caught.value)
    assert f"; {refused} was" in error.replace(": ", "; ") and f"'run.allow_changed=[{refused}]'" in error


def test_changes_are_recorded_with_their_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun(tmp_path)
    saved_by(tmp_path, 10, 20)
    back = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_10")
    run_folder.begin(prepared(f"resume={tmp_path}", *back, "trainer.save_freq=5"))
    assert "trainer.save_freq was 10, from step 11 on it is 5" in capsys.readouterr().out
    start = prepared(f"resume={tmp_path}")
    assert start.step == 20 and start.changed == ()
    run_folder.begin(start)
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["changed"] == [{"after_step": 10, "key": "trainer.save_freq", "old": 10, "new": 5}]
    assert {f"run.dir={tmp_path}", "trainer.save_freq=5"} <= {*info["overrides"]}
    assert not {*back} & {*info["overrides"]}, "of one start"


def test_a_part_of_a_step_holds_a_run_to_its_settings(tmp_path: Path) -> None:
    begun(tmp_path, "algo=gspo", step=0)
    assert given(f"resume={tmp_path}")[0].fspo.algo == "gspo", "it begins again with its settings"
    assert changed_settings(ready(tmp_path, f"{LR}=1e-3")) == []
    TableWriter(tmp_path / FOLDER, {}, run="run").append({"step": 1, "update": 0, "minibatch": 0, "S": 0.1, "L": 3})
    assert LR in [key for key, _, _ in changed_settings(ready(tmp_path, f"{LR}=1e-3"))]
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(PreflightError, match=r"config\.yaml"):
        ready(tmp_path)


def test_a_run_that_was_killed_while_it_began_is_begun_by_its_command(tmp_path: Path) -> None:
    (begun(tmp_path, step=0) / "config.yaml").unlink()
    assert given(f"run.dir={tmp_path}", "algo=gspo")[0].fspo.algo == "gspo"
    with pytest.raises(PreflightError, match=holds(f"{tmp_path}/config.yaml", "run.dir")):
        given(f"resume={tmp_path}")


def test_a_run_may_be_continued_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    write_dataset(mine, 40, 9, 5)
    (mine / "reward.py").write_text("def compute_score(**row):\n    return 0.0\n")
    (mine / "tokenizer").mkdir()
    overrides = (
        "data.train_files=[train.parquet]",
        "data.val_files=test.parquet",
        "reward.custom_reward_function.path=reward.py",
        "actor_rollout_ref.model.path=pkg://recipe.math.data/assets/demo_model",
        "+actor_rollout_ref.model.tokenizer_path=tokenizer",
        "algo=gspo",
    )
    monkeypatch.chdir(mine)
    begun(tmp_path / "run", *overrides)
    monkeypatch.chdir(tmp_path)
    for again in ((), overrides):
        config = ready(tmp_path / "run", *again)
        assert config.data.train_files == [f"{mine}/train.parquet"] and changed_settings(config) == []
    other = ready(tmp_path / "run", "data.train_files=[other.parquet]")
    assert [key for key, _, _ in changed_settings(other)] == ["data.train_files"]


def test_a_run_has_one_folder(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    for order in (1, -1):
        with pytest.raises(PreflightError, match=r"resume=.*run\.dir="):
            resume_of(parsed([f"resume={run}", f"run.dir={tmp_path}/mine"][::order]), JOB)
    assert given(f"resume={run}/", f"run.dir={run}")[0].run.dir == str(run)
    with pytest.raises(PreflightError, match=r"trainer\.default_local_dir=/big.*run\.dir="):
        prepared("trainer.default_local_dir=/big", *SMALL_TASK)
    with pytest.raises(PreflightError, match=holds("default_local_dir=/big", "data.train_batch_size=30")) as error:
        prepared("trainer.default_local_dir=/big", "data.train_batch_size=30", *SMALL_TASK)
    assert len(error.value.problems) == 2, "all at once"


def test_what_verl_reads_of_a_model_elsewhere_is_not_checked_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(*_: object, **__: object) -> None:
        raise InstantiationException("critic") from OSError("no connection to the hub\nand more")

    monkeypatch.setattr("verl.utils.config.validate_config", reads)
    config = composed(f"run.dir={tmp_path}", *SMALL_TASK)
    (left,) = prepare(config, JOB, elsewhere=True).unsettled
    assert "no connection to the hub" in left
    with pytest.raises(PreflightError, match="no connection to the hub"):
        prepare(config, JOB)


def test_a_run_ends_with_the_commands_that_are_true_for_it(tmp_path: Path) -> None:
    config = ready(begun(tmp_path / "a b", step=0))
    (commands,) = next_commands(config, JOB, finished=False)
    assert commands.startswith("begin again (nothing was saved): python -m recipe.fspo.main 'resume=")
    (tmp_path / "a b" / "metrics.jsonl").write_text('{"step": 1, "metrics": {}}\n')
    saved_by(tmp_path / "a b", 2)
    commands = next_commands(config, JOB, finished=True)
    assert [line.partition(":")[0] for line in commands] == ["continue", "export", "report"]
    assert commands[0].endswith(" trainer.total_training_steps=N")
    grid = {"overrides": [], "runs": [{"path": "a b", "algo": "fspo", "seed": 1}]}
    (tmp_path / "grid.json").write_text(json.dumps(grid))
    assert next_commands(config, JOB, finished=True) == [], "its runs would differ in length"
    (commands,) = next_commands(config, JOB, finished=False)
    assert f"the grid in {tmp_path}" in commands and "resume=" not in commands
    (tmp_path / "grid.json").write_text(json.dumps(grid | {"runs": []}))
    assert len(next_commands(config, JOB, finished=True)) == 3, "another run that lies in the grid's folder"


@pytest.mark.parametrize(
    ("steps", "saved", "every", "says"),
    [
        (0, 0, 5, ("first step", "nothing saved")),
        (3, 0, 5, ("after step 3", "nothing is saved", "after step 5", "trainer.save_freq=5")),
        (3, 0, -1, ("after step 3", "nothing is saved", "trainer.save_freq=-1")),
        (3, 2, 2, ("after step 3", "of step 2")),
        (4, 4, 2, ("after step 4", "is saved")),
        (3, 4, 2, ("after step 4", "is saved")),  # killed between the save and the line of the step
    ],
)
def test_a_run_that_is_interrupted_says_once_how_far_it_came(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    saved: int,
    every: int,
    says: tuple[str, ...],
) -> None:
    folder = begun(tmp_path, step=0)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "metrics": {{}}}}\n' for n in range(steps + 1)))
    if saved:
        saved_by(folder, saved)
    monkeypatch.setattr(ENDING, "signals", [signal.SIGINT])

    def interrupt(*_: object) -> None:
        raise Preempted("by a first Ctrl-C")

    monkeypatch.setattr(start, "launch", interrupt)
    words = (f"run.dir={folder}", *SMALL_TASK, f"trainer.save_freq={every}", "run.allow_changed=[trainer.save_freq]")
    with pytest.raises(SystemExit) as left:
        launch_or_exit(composed(*words, "ray_kwargs.ray_init.address=auto"), JOB)
    assert left.value.code == 130
    sentence, *rest = capsys.readouterr().err.splitlines()
    assert sentence.startswith("interrupted ")
    assert ENDING.how_far().splitlines() == [sentence.removeprefix("interrupted "), *rest], "ended at once, the same"
    assert re.search(holds(*says), sentence), sentence
    assert [line for line in rest if f"resume={folder}" in line] and str(folder) not in sentence


@pytest.mark.parametrize(("of_process", "steps", "status"), [(True, 1, 75), (True, 0, 1), (False, 1, 1)])
def test_a_death_after_a_finished_step_is_worth_another_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_process: bool, steps: int, status: int
) -> None:
    def fail(*_: object) -> None:
        raise TrainingFailed("a process died", of_process)

    monkeypatch.setattr(start, "launch", fail)
    folder = begun(tmp_path, step=0)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "metrics": {{}}}}\n' for n in range(steps + 1)))
    with pytest.raises(SystemExit) as left:
        launch_or_exit(composed(f"run.dir={folder}", *SMALL_TASK, "ray_kwargs.ray_init.address=auto"), JOB)
    assert left.value.code == status


@pytest.mark.parametrize("evaluate", [False, True])
def test_an_evaluation_that_fails_prints_no_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, evaluate: bool
) -> None:
    """Its folder is no run that could be continued."""

    def fail(*_: object) -> None:
        raise TrainingFailed("a process died")

    monkeypatch.setattr(start, "launch", fail)
    saved_by(begun(tmp_path), 1)
    words = (f"evaluate={evaluate}".lower(), "ray_kwargs.ray_init.address=auto")
    overrides = (f"run.dir={tmp_path}", *SMALL_TASK, *words)
    with pytest.raises(SystemExit):
        launch_or_exit(composed(*overrides), JOB)
    error = capsys.readouterr().err
    assert "error: a process died" in error and ("resume=" in error) is not evaluate


@pytest.mark.parametrize("name", ["plain-1.2", "a,b (1)=[x]#&!", "it's"])
def test_the_command_that_is_printed_can_be_pasted(tmp_path: Path, name: str) -> None:
    config = ready(tmp_path, f"run.dir={quoted(tmp_path / name)}")
    run_folder.begin(Start(config, JOB))
    (command,) = next_commands(config, JOB, finished=False)
    *_, argument = shlex.split(command.partition(": ")[2])  # what a shell makes of it
    assert ("'" in command) == (name != "plain-1.2"), "quotes only where they are needed"
    assert given(argument)[0].run.dir == str(tmp_path / name)


def test_an_evaluation_leaves_the_one_before_it(tmp_path: Path) -> None:
    for name in ("evaluation", "evaluation_2", "evaluation_3"):
        config = composed(f"run.dir={tmp_path}", "evaluate=true")
        turn_into_evaluation(config, None)
        assert config.run.dir == f"{tmp_path}/{name}"
        dumps = Path(config.trainer.validation_data_dir)
        dumps.mkdir(parents=True)
        (dumps / "8.jsonl").touch()


def continues_from(monkeypatch: pytest.MonkeyPatch, *command: str) -> Path | None:
    """What a start with this command line is told to continue from; it is interrupted then."""
    checkpoints = []

    def run(config: DictConfig, **_: object) -> None:
        checkpoints.append(resumed_from(config.trainer))
        raise KeyboardInterrupt

    nothing = SimpleNamespace(failure=None, **dict.fromkeys(("start", "stand_down", "close"), lambda: None))
    monkeypatch.setattr(start, "_supervisor", lambda *_: nothing)
    monkeypatch.setattr(start, "run_ppo", run)
    with pytest.raises(KeyboardInterrupt):
        launch(prepared(*command))
    return checkpoints[0] and checkpoints[0].folder


def test_a_run_that_began_with_anothers_weights_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begins, run = saved_by(tmp_path / "other", 12), tmp_path / "run"
    where = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={begins}")
    command = (f"run.dir={run}", *SMALL_TASK, *where)
    assert continues_from(monkeypatch, *command) == begins
    (run / "metrics.jsonl").write_text('{"step": 13, "metrics": {}}\n')
    for later in (command, (f"resume={run}",)):
        assert continues_from(monkeypatch, *later) == begins, "it has saved nothing"
    assert continues_from(monkeypatch, f"resume={run}", "evaluate=true") == begins
    own = saved_by(run, 20)
    tracker = own.parent / "latest_checkpointed_iteration.txt"
    for more in ((), ("evaluate=true",)):  # killed between its first save and verl's note of it
        tracker.unlink()
        assert continues_from(monkeypatch, f"resume={run}", *more) == own and tracker.read_text() == "20"
    for later in (command, (f"resume={run}",), command):
        assert continues_from(monkeypatch, *later) == own
    assert continues_from(monkeypatch, f"resume={run}", "evaluate=true") == own
    with pytest.raises(PreflightError, match=holds("/unsaved", "run.dir")):
        continues_from(monkeypatch, f"resume={begun(tmp_path / 'unsaved')}", "evaluate=true")
    assert continues_from(monkeypatch, *command, "evaluate=true") == begins, "as it is told"
    with pytest.raises(PreflightError, match=r"trainer\.resume_mode=.*run\.dir"):
        continues_from(monkeypatch, f"resume={run}", where[0], f"{where[1][:-2]}11")
    info = json.loads((run / "run.json").read_text())
    assert info["status"] == "failed" and [entry["status"] for entry in info["starts"]] == ["failed"] * 7


def test_a_dry_run_names_the_step_that_a_resume_would_begin_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the tracker names an older step, or a start would repair it first; a dry run writes nothing."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")  # what it sets is undone

    def printed(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["main", *words, "dry_run=true"])
        main_of_fspo()
        return capsys.readouterr().out

    assert "begins with step" not in printed(f"run.dir={tmp_path / 'new'}", *SMALL_TASK)
    run = begun(tmp_path / "run")
    assert "begins with step 1:" in printed(f"resume={run}")
    earlier = saved_by(run, 12, 19)
    tracker = earlier.parent / "latest_checkpointed_iteration.txt"
    commands = (f"resume={run}",), (f"run.dir={run}", *SMALL_TASK)
    for left, step in ((None, 19), ("19", 19), ("12", 12)):
        tracker.write_text(left) if left else tracker.unlink()
        for command in commands:
            line = f"begins with step {step + 1}: it loads {step_folder(earlier.parent, step)}"
            assert line in printed(*command).splitlines()
        assert tracker.exists() is (left is not None)
    assert f"evaluates step 12: it loads {earlier}" in printed(f"resume={run}", "evaluate=true").splitlines()
    where = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={earlier}")
    assert "begins with step 13:" in printed(f"run.dir={tmp_path / 'other'}", *SMALL_TASK, *where)


@pytest.mark.parametrize(
    ("more", "last"),
    [
        ((), 20),
        (("trainer.total_training_steps=21",), None),
        (("trainer.total_training_steps=15",), 15),
        (("trainer.total_training_steps=40", "trainer.total_epochs=7"), 14),  # of two steps each
    ],
)
def test_a_dry_run_of_a_finished_run_says_that_no_step_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    last: int | None,
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")  # what it sets is undone
    saved_by(begun(tmp_path), 20)
    monkeypatch.setattr(sys, "argv", ["main", f"resume={tmp_path}", *more, "dry_run=true"])
    main_of_fspo()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("begins with step 21: ") for line in lines) is (last is None)
    left = [line for line in lines if line.startswith("no step is left: ")]
    assert len(left) == (last is not None) and all(f" step {last}, " in line and " step 20" in line for line in left)


def test_a_healthy_resume_opens_each_file_of_its_checkpoint_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_by(begun(tmp_path), 10, 20)
    opened, is_zipfile = [], zipfile.is_zipfile

    def counted(file: Any) -> bool:
        opened.append(Path(file.name))
        return is_zipfile(file)

    monkeypatch.setattr(zipfile, "is_zipfile", counted)
    start = prepared(f"run.dir={tmp_path}", *SMALL_TASK)
    assert start.checkpoint == Checkpoint(tmp_path / "global_step_20") and start.step == 20
    assert sorted(opened) == sorted(start.checkpoint.folder.rglob("*.pt"))


def test_a_run_that_went_back_continues_with_what_it_did_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = saved_by(begun(tmp_path), 12, 20)
    where = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={earlier}")
    command = (f"run.dir={tmp_path}", *SMALL_TASK, *where)
    assert continues_from(monkeypatch, *command, "evaluate=true") == earlier
    assert latest(earlier.parent) == Checkpoint(step_folder(earlier.parent, 20)), (
        "an evaluation leaves the run as it is"
    )
    assert continues_from(monkeypatch, *command) == earlier
    for later in (command, (f"resume={tmp_path}",)):
        assert continues_from(monkeypatch, *later) == earlier, "nothing of what came after it"
    own = saved_by(tmp_path, 16)
    assert continues_from(monkeypatch, f"resume={tmp_path}") == own
    (own / "data.pt").unlink()
    with pytest.raises(PreflightError, match=f"trainer.resume_from_path={step_folder(own.parent, 20)}"):
        continues_from(monkeypatch, f"resume={tmp_path}")
    assert continues_from(monkeypatch, *command) == earlier, "what was saved since cannot be resumed"
