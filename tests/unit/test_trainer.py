"""What trainer and worker add to verl's, as far as it needs no processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from composing import completed, composed
from messages import holds
from verl.utils import tensordict_utils as tu

from fspo.files import read_object, write_json
from recipe.fspo.checkpoint import load_state, save_state
from recipe.fspo.step_records import StepRecords
from recipe.fspo.trainer import FSPOTrainer, PPOTrainerSync
from recipe.fspo.worker import GuardedWorker
from recipe.runner import hooks
from recipe.runner.faults.errors import ExplainedError
from recipe.runner.progress import Progress


@pytest.fixture(autouse=True)
def _no_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer points the loggers of its whole process into its run folder."""
    monkeypatch.setattr(hooks, "_LOGGERS", {})
    monkeypatch.setattr(hooks, "PROGRESS", Progress())


def load_data(monkeypatch: pytest.MonkeyPatch, folder: Path, train: int, val: list[int]) -> FSPOTrainer:
    """As a trainer does it whose filter leaves so many prompts, and these for validation; a step has 32."""

    def dataloader(self: FSPOTrainer) -> None:
        self.train_dataset, self.val_dataset = range(train), val
        self.steps_per_epoch, self.total_training_steps = train // 32, 20
        torch.utils.data.DataLoader(val, batch_size=len(val))  # as verl does

    monkeypatch.setattr(PPOTrainerSync, "_init_dataloader", dataloader)
    trainer = FSPOTrainer(composed(f"trainer.default_local_dir={folder}", "trainer.total_epochs=3"))
    trainer.parameter_sync_step = 2
    trainer._init_dataloader()
    return trainer


@pytest.mark.parametrize(
    ("train", "val", "says"),
    [(31, 5, ("data.train_files", " 31 ", "max_prompt_length=16", " 32 ")), (32, 0, ("data.val_files", " 0 "))],
)
def test_too_few_prompts_after_the_filter_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: int, val: int, says: tuple[str, ...]
) -> None:
    with pytest.raises(ExplainedError, match=holds(*says)):
        load_data(monkeypatch, tmp_path, train, [0] * val)


def test_steps_and_problems_are_counted_after_the_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step is that of the last epoch, and the schedule ends there, in updates as verl counts."""

    class Rows(list[int]):
        dataframe = datasets.Dataset.from_dict({"data_source": ["a", "b", "a"]})

    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    trainer = load_data(monkeypatch, tmp_path, 64, Rows([0, 1, 2]))
    assert read_object(tmp_path / "run.json") == {"validation_problems": {"a": 2, "b": 1}}
    assert trainer.total_training_steps == 6
    assert trainer.config.actor_rollout_ref.actor.optim.total_training_steps == 12
    assert load_data(monkeypatch, tmp_path, 320, [0]).total_training_steps == 20, "which comes first"


class Engine:
    """An optimizer and its schedule as verl's engine makes them, loaded as by its checkpoint manager."""

    def __init__(self, lr: float, decay: float, steps: int) -> None:
        from verl.utils.torch_functional import get_cosine_schedule_with_warmup

        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.optimizer = torch.optim.AdamW([self.weight], lr=lr, weight_decay=decay)
        self.lr_scheduler = get_cosine_schedule_with_warmup(self.optimizer, 0, steps)

    def step(self) -> float:
        self.weight.grad = torch.ones(3)
        used = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.lr_scheduler.step()
        return used

    def load_checkpoint(self, saved: Engine, *_: object) -> None:
        self.optimizer.load_state_dict(saved.optimizer.state_dict())
        self.lr_scheduler.load_state_dict(saved.lr_scheduler.state_dict())


@pytest.mark.parametrize(("lr", "decay", "steps"), [(1e-3, 0.1, 20), (1e-4, 0.5, 40)])
def test_after_loading_the_optimizer_has_the_command_s_settings(lr: float, decay: float, steps: int) -> None:
    saved, never_stopped = Engine(1e-3, 0.1, 20), Engine(lr, decay, steps)
    for engine in (saved, never_stopped):
        for _ in range(5):
            engine.step()
    worker = object.__new__(GuardedWorker)
    worker.engine = Engine(lr, decay, steps)
    worker.load_checkpoint(saved)
    (group,) = worker.engine.optimizer.param_groups
    assert (group["weight_decay"], group["initial_lr"]) == (decay, lr)
    moments = worker.engine.optimizer.state[worker.engine.weight]
    assert moments["step"] == 5 and moments["exp_avg"].equal(saved.optimizer.state[saved.weight]["exp_avg"])
    assert [worker.engine.step() for _ in range(5)] == [never_stopped.step() for _ in range(5)]


def test_names_of_prompts_sort_in_the_data_loader_s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(self: FSPOTrainer) -> Any:
        return tu.get_tensordict({"x": torch.zeros(2, 1), "uid": ["one", "two"]})

    monkeypatch.setattr(PPOTrainerSync, "_fetch_one_gen_batch", fetched)
    trainer, names = FSPOTrainer(composed("trainer.default_local_dir=/nowhere")), list[str]()
    for step in (1, 1, 2, 10):
        trainer.global_steps = step
        names += list(trainer._fetch_one_gen_batch()["uid"])
    assert names == sorted(names) and len({*names}) == 8 and not any("_" in name for name in names)


LOSS = "actor_rollout_ref.actor.policy_loss"


@pytest.mark.parametrize("words", ["fspo.accept=0.5", "algo=gspo", f"{LOSS}.c_low=1 {LOSS}.c_high=1"])
def test_what_was_measured_for_other_settings_begins_afresh(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own command has refused what nobody allowed; verl's compares no settings."""
    folder = f"trainer.default_local_dir={tmp_path}"
    (tmp_path / "global_step_1").mkdir()
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: setattr(self, "global_steps", 1))
    trainer = FSPOTrainer(completed(folder, *words.split()))
    trainer._load_checkpoint()  # of verl's own trainer, which writes no such file
    save_state(tmp_path / "global_step_1", StepRecords(completed(folder), tmp_path).stateful_parts())
    write_json(tmp_path / "run.json", {"clip_values_measured": [{"after_step": 1}]})
    trainer._load_checkpoint()
    assert read_object(tmp_path / "run.json")["clip_values_measured"] == []
    del trainer.config.dry_run
    with pytest.raises(ValueError, match="resume with the same"):
        trainer._load_checkpoint()


def test_a_checkpoint_without_what_the_run_measures_is_refused(tmp_path: Path) -> None:
    parts = StepRecords(completed(f"trainer.default_local_dir={tmp_path}"), tmp_path).stateful_parts()
    save_state(tmp_path, {})
    with pytest.raises(ValueError, match="resume with the same"):
        load_state(tmp_path, parts)
    assert load_state(tmp_path, parts, may_differ=True) == sorted(parts) != []
