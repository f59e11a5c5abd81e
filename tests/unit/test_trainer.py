"""What trainer and worker add to verl's, as far as it needs no processes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
from composing import composed
from messages import holds
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu

from recipe.fspo import rollout_batch
from recipe.fspo import trainer as trainer_module
from recipe.fspo.trainer import FSPOHooks, FSPOTrainer, PPOTrainerSync
from recipe.fspo.worker import GuardedWorker
from recipe.runner import hooks
from recipe.runner.faults.errors import ExplainedError
from recipe.runner.hooks import RunnerHooks
from recipe.runner.progress import Progress


@pytest.fixture(autouse=True)
def _no_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer points the loggers of its whole process into its run folder."""
    monkeypatch.setattr(hooks, "_LOGGERS", {})
    monkeypatch.setattr(hooks, "PROGRESS", Progress())


def load_data(monkeypatch: pytest.MonkeyPatch, folder: Path, train: int, val: list[int]) -> None:
    """As a trainer does it whose filter leaves so many prompts, and these for validation."""

    def dataloader(self: FSPOTrainer) -> None:
        self.train_dataset, self.val_dataset = range(train), val
        self.steps_per_epoch, self.total_training_steps = train // 32, 20
        torch.utils.data.DataLoader(val, batch_size=len(val))  # as verl does

    monkeypatch.setattr(PPOTrainerSync, "_init_dataloader", dataloader)
    FSPOTrainer(composed(f"trainer.default_local_dir={folder}"))._init_dataloader()


@pytest.mark.parametrize(
    ("train", "val", "says"),
    [(31, 5, ("data.train_files", " 31 ", "max_prompt_length=16", " 32 ")), (32, 0, ("data.val_files", " 0 "))],
)
def test_too_few_prompts_after_the_filter_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: int, val: int, says: tuple[str, ...]
) -> None:
    with pytest.raises(ExplainedError, match=holds(*says)):
        load_data(monkeypatch, tmp_path, train, [0] * val)


def test_problems_of_a_validation_are_counted_after_the_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(list[int]):
        dataframe = datasets.Dataset.from_dict({"data_source": ["a", "b", "a"]})

    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    load_data(monkeypatch, tmp_path, 32, Rows([0, 1, 2]))
    assert json.loads((tmp_path / "run.json").read_text()) == {"validation_problems": {"a": 2, "b": 1}}


class Loop(RunnerHooks, PPOTrainerSync):
    """verl's own loop around steps that do nothing; two steps an epoch."""

    verl_mode = "sync"

    def __init__(self, *overrides: str) -> None:
        super().__init__(composed("trainer.default_local_dir=/nowhere", *overrides))
        self.saved, self.validated = [], []

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> SimpleNamespace:
        return SimpleNamespace(keys=[], partition_id="train")

    def _save_checkpoint(self) -> None:
        self.saved.append(self.global_steps)

    def _validate(self) -> dict[str, float]:
        self.validated.append(self.global_steps)
        return {"accuracy": 1.0}

    def nothing(self, *_: Any, **__: Any) -> None:
        pass

    on_validate_begin = on_validate_end = on_train_begin = on_step_begin = on_step_end = nothing
    _compute_metrics = _start_profiling = _stop_profiling = _shutdown_dump_executor = _check_prompts = nothing


@pytest.mark.parametrize(("epochs", "steps", "last"), [(2, 9, 4), (2, 3, 3), (1, 2, 2), (3, None, 6)])
def test_the_last_step_is_saved_whatever_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, epochs: int, steps: int | None, last: int
) -> None:
    def dataloader(self: Loop) -> None:  # as verl counts
        self.steps_per_epoch, self.val_dataset = 2, None
        self.total_training_steps = steps if steps is not None else 2 * epochs

    monkeypatch.setattr(PPOTrainer, "_init_dataloader", dataloader)
    for name in ("Tracking", "tq"):
        monkeypatch.setattr(trainer_base, name, mock.MagicMock())
    wanted = "null" if steps is None else steps
    loop = Loop(f"trainer.total_epochs={epochs}", f"trainer.total_training_steps={wanted}", "trainer.save_freq=100")
    loop._init_dataloader()
    PPOTrainer.fit(loop, None)
    assert (loop.saved, loop.validated) == ([last], [0, last])
    assert loop.total_training_steps == last


def test_a_schedule_ends_where_the_epochs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def dataloader(self: Loop) -> None:
        self.steps_per_epoch, self.total_training_steps, self.val_dataset = 2, 9, None

    monkeypatch.setattr(PPOTrainer, "_init_dataloader", dataloader)
    loop = Loop("trainer.total_epochs=2", "trainer.total_training_steps=9")
    loop.parameter_sync_step = 3
    loop._init_dataloader()
    assert loop.config.actor_rollout_ref.actor.optim.total_training_steps == 12  # updates, as verl counts


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


class Worker(GuardedWorker):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine


@pytest.mark.parametrize(("lr", "decay", "steps"), [(1e-3, 0.1, 20), (1e-4, 0.5, 40)])
def test_after_loading_the_optimizer_has_the_command_s_settings(lr: float, decay: float, steps: int) -> None:
    saved, never_stopped = Engine(1e-3, 0.1, 20), Engine(lr, decay, steps)
    for engine in (saved, never_stopped):
        for _ in range(5):
            engine.step()
    worker = Worker(Engine(lr, decay, steps))
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


def test_a_gradient_scale_counts_tokens_of_the_model_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tool has written three of a's tokens, and verl's rollout correction empties b's mask before the update."""
    config = composed(
        "trainer.default_local_dir=/nowhere", "fspo.clip_values=published", "fspo.skip_zero_advantage=false"
    )
    masks = {"a_0_0": [1, 0, 0, 0, 1, 1], "b_0_0": [1] * 9}

    def read(keys: list[str], select_fields: list[str], **_: object) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {
            "extra_fields": [{}] * len(keys),
            "data_source": ["math"] * len(keys),
            **{
                name: [torch.tensor(masks[key]) for key in keys] for name in ("response_mask", "responses", "rm_scores")
            },
        }
        nested = {name: torch.nested.nested_tensor(x, layout=torch.jagged) for name, x in [*columns.items()][2:]}
        return {name: (columns | nested)[name] for name in select_fields}

    monkeypatch.setattr(rollout_batch.tq, "kv_batch_get", read)
    monkeypatch.setattr(rollout_batch.tq, "kv_batch_put", lambda **_: KVBatchMeta([*masks], tags, "train"))
    monkeypatch.setattr(trainer_module, "for_workers", lambda batch: batch)
    for name in ("_balance_batch", "_update_actor"):
        monkeypatch.setattr(PPOTrainerSync, name, lambda self, batch, metrics, **_: batch)
    sent: list[float] = []
    trainer = FSPOTrainer(config)
    trainer.global_steps, trainer.parameter_sync_step = 1, 2  # not the last of its cycle
    trainer.actor_rollout_wg = SimpleNamespace(
        begin_update=lambda state, step, scale: sent.append(scale), pop_mini_batches=lambda: [[]]
    )
    tags = [{"response_len": len(mask), "global_steps": 1} for mask in masks.values()]
    batch = FSPOHooks._balance_batch(trainer, KVBatchMeta([*masks], tags, "train"), {})
    masks["b_0_0"] = [0] * 9
    trainer._update_actor(batch, {})
    assert sent == [pytest.approx(1 / 6)]
    assert trainer._records._outcomes[0].length_B.tolist() == [3, 9]
