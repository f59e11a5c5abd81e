"""Promises 21, 23 and 26: no file of the user's is replaced, a resume has the run's settings, no damage is resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import Ended, files_of, main
from composing import completed
from inside import begun, saved
from omegaconf import OmegaConf

from recipe.runner.verl_patches import shown

pytestmark = pytest.mark.promise(21, 23, 26)
LR = "actor_rollout_ref.actor.optim.lr"
LONGER = "trainer.total_training_steps=99"


@pytest.fixture(scope="module")
def run_of_gspo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begun(tmp_path_factory.mktemp("begun") / "run", "algo=gspo", "seed=7", f"{LR}=2e-4")


@pytest.fixture
def folder(run_of_gspo: Path, tmp_path: Path) -> Path:
    """A run's folder, moved to another place."""
    return Path(shutil.copytree(run_of_gspo, tmp_path / "moved"))


def tried(folder: Path, *words: str) -> Ended:
    """A command that checks, and leaves every file as it was."""
    before = files_of(folder)
    ended = main(*words, "dry_run=true", folder=folder.parent)
    after = files_of(folder)
    after.pop(".lock", None)
    before.pop(".lock", None)
    assert after == before
    return ended


def test_files_of_the_user_s_are_in_the_way_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run/responses").mkdir(parents=True)
    names = ("run.json", "config.yaml", "metrics.jsonl", "responses/mine.parquet", "notes.txt")
    for name in names:
        (tmp_path / "run" / name).write_text("{}")
    ended = tried(tmp_path / "run", f"trainer.default_local_dir={tmp_path}/run")
    assert ended.status == 2 and str(tmp_path) in ended.error
    named = [name for name in names if name.partition("/")[0] in ended.error]
    assert named == [*names[:-1]], ended.error


def test_a_resume_has_the_settings_of_the_run(folder: Path) -> None:
    ended = main(f"resume={folder}", "--cfg", "job", folder=folder.parent)
    assert ended.status == 0, ended.error
    assert "loss_mode: seq_gspo" in ended.out and "seed: 7" in ended.out and "lr: 0.0002" in ended.out
    assert str(folder) in ended.out, "it has moved"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (f"{LR}=1e-5", [f"{LR} was 0.0002 and would be 1e-05"]),
        (
            "algo=fspo mode=colocate_async data.max_response_length=128 trainer.balance_batch=false",
            ["algo was 'gspo'", "trainer.v1.trainer_mode", "data.max_response_length", " 128", "trainer.balance_batch"],
        ),
    ],
)
def test_a_changed_setting_is_refused_with_both_values(words: str, named: list[str], folder: Path) -> None:
    ended = tried(folder, f"resume={folder}", *words.split())
    assert ended.status == 2 and [part for part in named if part not in ended.error] == [], ended.error


def test_length_saving_machine_and_what_is_allowed_may_change(folder: Path) -> None:
    words = (LONGER, "trainer.save_freq=1", "trainer.logger=[file]", "trainer.experiment_name=x", f"{LR}=1e-5")
    ended = tried(folder, f"resume={folder}", *words, f"run.allow_changed=[{LR}]")
    assert ended.status == 0, ended.error
    ended = tried(folder, f"resume={folder}", *words, "run.allow_changed=[trainer.balance_batch]")
    assert ended.status == 2 and f"=[trainer.balance_batch,{LR}]" in ended.error and "save_freq" not in ended.error


def test_the_length_is_a_setting_where_the_learning_rate_hangs_on_it(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine")
    ended = tried(folder, f"resume={folder}", LONGER)
    assert ended.status == 2 and "total_training_steps" in ended.error


def test_the_same_command_goes_on_in_the_folder_of_its_run(folder: Path) -> None:
    """As a job does that is queued again."""
    words = json.loads((folder / "run.json").read_text())["overrides"]
    kept = [word for word in words if "default_local_dir" not in word]
    assert tried(folder, f"trainer.default_local_dir={folder}", *kept).status == 0


def test_a_secret_of_the_environment_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "SECRET1")
    key = "reward.custom_reward_function.reward_kwargs"
    words = [f"++{key}.api_key='${{oc.env:MINE}}'", f"++{key}.header='Bearer ${{oc.env:MINE}}'"]
    folder, config = begun(tmp_path / "run", *words), completed(*words, f"trainer.default_local_dir={tmp_path}/run")
    resolved = OmegaConf.to_container(config, resolve=True)
    assert "Bearer SECRET1" in str(resolved)
    assert "SECRET" not in str(shown.written(resolved)), "as verl prints it"
    assert [name for name, text in files_of(folder).items() if b"SECRET" in text] == []
    monkeypatch.setenv("MINE", "SECRET2")
    ended = tried(folder, f"resume={folder}")
    assert ended.status == 0 and "SECRET" not in ended.said, ended.error


# ---------------------------------------------------------------- 23: checkpoints


@pytest.mark.parametrize("tracker", ["20", ""])
def test_the_newest_whole_checkpoint_is_gone_on_from(tracker: str, folder: Path) -> None:
    saved(folder, 10)
    newest = saved(folder, 20)
    (folder / "latest_checkpointed_iteration.txt").write_text(tracker)  # empty: of a save that was killed
    ended = tried(folder, f"resume={folder}", "trainer.total_training_steps=30")
    assert ended.status == 0 and str(newest) in ended.said and "21" in ended.out, ended


SHARD = "_world_size_1_rank_0.pt"


@pytest.mark.parametrize(
    ("name", "left"),
    [(f"actor/model{SHARD}", 0.999), (f"actor/optim{SHARD}", None), ("data.pt", 0.5), ("fspo_state.pt", 0.5)],
)
def test_a_torn_checkpoint_is_never_resumed(name: str, left: float | None, folder: Path) -> None:
    whole, torn = saved(folder, 10), saved(folder, 20) / name
    if left is None:
        torn.unlink()
    else:
        torn.write_bytes(torn.read_bytes()[: int(left * torn.stat().st_size)])
    ended = tried(folder, f"resume={folder}")
    assert ended.status == 2 and name in ended.error and whole.name in ended.error, ended
    if left is None:
        older = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole}")
        assert tried(folder, f"resume={folder}", *older).status == 0, "what the refusal names"
