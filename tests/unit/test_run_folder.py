"""The folder of a run: one start at a time, what it records, and what a start that goes on may change."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from composing import completed, here
from inside import begun
from messages import holds
from omegaconf import DictConfig, OmegaConf

from recipe.runner.checkpoints.integrity import Checkpoint
from recipe.runner.launch import run_folder
from recipe.runner.launch.settings import Refused


def settings(folder: Path, *words: str) -> DictConfig:
    return here(completed(f"trainer.default_local_dir={folder}", *words))


def info_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())  # type: ignore[no-any-return]


def test_a_second_start_in_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with run_folder.locked(tmp_path / "run"), (tmp_path / "run/.lock").open("a") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(Refused, match="another start"), run_folder.locked(tmp_path / "run"):
            pytest.fail("begun")
    with run_folder.locked(tmp_path / "run"):
        pass


def test_every_start_is_recorded_with_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = begun(tmp_path / "run", "seed=7")
    assert info_of(folder)["overrides"][1:] == ["seed=7"] and info_of(folder)["status"] == "running"
    run_folder.end(folder, "preempted")
    begun(folder, "seed=7")
    for change in (("lr", 1, 2), ("lr", 2, 3)):
        config = settings(folder, "seed=7")
        run_folder.begin(folder, run_folder.Start(config, {}, changed=[change]), ["seed=7"])
    run_folder.end(folder, "failed", "why\nmore")
    assert [change["new"] for change in info_of(folder)["changed"]] == [2, 3], "of every start"
    assert "note: lr was 2, from step " in capsys.readouterr().out
    starts = info_of(folder)["starts"]
    assert [start.get("status") for start in starts] == ["preempted", None, None, "failed"]
    assert starts[-1]["error"] == "why"
    assert all(start.get("ended", start["started"]) >= start["started"] for start in starts)
    assert {"verl", "torch", "python"} <= info_of(folder)["versions"].keys()


def test_a_run_has_its_steps_counted(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:  # lines that are no step's
        file.write('3\n{"step": null, "metrics": {}}\n{"step": 2}\n')
    assert run_folder.last_steps(folder) == (0, 1) and run_folder.status_after_failure(folder) == 75
    (folder / "global_step_2").mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    assert run_folder.last_steps(folder) == (2, 2)
    (folder / "config.yaml").write_text("[")
    with pytest.raises(Refused, match=holds("config.yaml", "restore it")):
        run_folder.settings_of_the_run(folder)
    (folder / "global_step_2").rmdir()
    (folder / "metrics.jsonl").unlink()
    assert not run_folder.has_results(folder) and run_folder.settings_of_the_run(folder) is None
    assert run_folder.status_after_failure(folder) == 1


def test_which_checkpoint_a_start_begins_with(tmp_path: Path) -> None:
    """That of another run once; what was saved since comes first in the same command, at every start."""
    other, mode = tmp_path / "other/global_step_3", "trainer.resume_mode=resume_path"
    words = (mode, f"trainer.resume_from_path={other}")
    folder = begun(tmp_path / "run", *words)
    first = run_folder.settings_of_the_run(folder)

    def chosen(*words: str) -> DictConfig:
        config = settings(folder, *words)
        run_folder.choose_checkpoint(config.trainer, first)
        return config

    def named(config: DictConfig) -> tuple[str, str | None]:
        return config.trainer.resume_mode, config.trainer.resume_from_path

    assert named(chosen(*words)) == ("resume_path", str(other))
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    for _ in range(3):
        config = chosen(*words)
        assert named(config) == ("auto", str(other)), "which the next start knows again"
        run_folder.begin(folder, run_folder.Start(config, {}, facts={"algo": "fspo"}), words)
        first = run_folder.settings_of_the_run(folder)
    own = str(folder / "global_step_2")
    assert named(chosen(mode, f"trainer.resume_from_path={own}")) == ("resume_path", own)
    another = f"trainer.resume_from_path={tmp_path}/x/global_step_1"
    for says, *refused in (
        ("another run's", "trainer.resume_mode=disable"),
        ("another run's", mode, another),
        *(("give auto, ", f"trainer.resume_mode={name}") for name in ("latest", "null")),
    ):
        with pytest.raises(Refused, match=says):
            chosen(*refused)
    # A path without its mode has no effect.
    (problem,) = run_folder.path_without_effect(settings(folder, another).trainer, first)
    assert "give resume_mode=resume_path" in problem


def test_an_evaluation_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """What is in it: e2e/test_train.py."""
    folder = begun(tmp_path / "run")
    with pytest.raises(Refused, match="no checkpoint"):
        run_folder.turn_into_evaluation(settings(folder), None)
    for name in ("evaluation", "evaluation_2"):
        config = settings(folder)
        run_folder.turn_into_evaluation(config, Checkpoint(folder / "global_step_2"))
        assert config.trainer.default_local_dir == f"{folder}/{name}"
        assert config.data.train_files == [f"{folder}/data/train.parquet"]
        (folder / name / "validation").mkdir(parents=True)
        (folder / name / "validation/0.jsonl").touch()


def test_resume_is_the_words_of_the_run_and_then_the_command(tmp_path: Path) -> None:
    given = ["algo=gspo", "~data.x", "++a.b=1", "run.allow_changed=[x]", "trainer.default_local_dir=/old", "a.c=/old/x"]
    folder = begun(tmp_path / "run", "seed=1").rename(tmp_path / "a run, seed=1")
    info = info_of(folder)
    (folder / "run.json").write_text(json.dumps(info | {"overrides": [*given, "--config-dir=/mine", "seed=1"]}))
    words = run_folder.with_words_of_the_run([f"resume='{folder}'", "seed=2", "+a.b=3", "--cfg", "job"])
    assert words == [
        *("algo=gspo", "~data.x", f"a.c='{folder}/x'", "--config-dir=/mine", f"trainer.default_local_dir='{folder}'"),
        *("seed=2", "+a.b=3", "--cfg", "job"),
    ]
    for word in (f"resume={folder}", f"+resume={folder}"):
        assert words[4] in run_folder.with_words_of_the_run([word]), "a shell takes the quotes away"
    assert run_folder.with_words_of_the_run(["seed=2"]) == ["seed=2"]
    with pytest.raises(Refused, match=holds("resume=", "run.json")):
        run_folder.with_words_of_the_run([f"resume={tmp_path}"])
    with pytest.raises(Refused, match=holds("resume=", f"{run_folder.RUN}=other", "leave")):
        run_folder.with_words_of_the_run([f"resume={folder}", f"{run_folder.RUN}=other"])


def test_a_new_file_is_dirt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"  # a repository that holds the package
    checkout.mkdir()
    monkeypatch.setattr(run_folder, "__file__", str(checkout / "module.py"))
    (checkout / "module.py").touch()
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # of a hook of this repository
        monkeypatch.delenv(name)
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "-m", "first", "--no-gpg-sign")):
        subprocess.run(["git", "-C", checkout, "-c", "user.name=x", "-c", "user.email=x@x", *words], check=True)
    before = run_folder.code_state()
    (checkout / "new.py").touch()
    assert len(before["commit"]) == 40 and before["dirty"] is False
    assert run_folder.code_state() == before | {"dirty": True}


def test_a_variable_that_a_shell_lacks_is_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_folder.settings_of_the_run(begun(tmp_path / "run"))
    assert before is not None
    before = OmegaConf.to_container(OmegaConf.create(dict(before)))
    before["actor_rollout_ref"]["model"]["path"] = "${oc.env:FSPO_MODEL}"  # type: ignore
    with pytest.raises(Refused, match=r"model\.path was '\$\{oc\.env:FSPO_MODEL\}'"):
        run_folder.changed_settings(settings(tmp_path / "run"), before, {}, "fspo")  # type: ignore[arg-type]


def test_words_of_one_meaning_are_those_of_one_run() -> None:
    ours, sweeps = ["a.b=false", "++c=[x,1]", "~d", "seed=1"], ["seed=1", "a.b=False", "++c=[x,1]", "~d"]
    assert run_folder.comparable(ours) == run_folder.comparable(sweeps) != run_folder.comparable([*ours[:-1], "seed=2"])
    length = "trainer.total_training_steps"
    assert run_folder.comparable([f"{length}=2"]) != run_folder.comparable([f"{length}=4"])
