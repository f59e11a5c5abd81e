"""FSPO's trainers in the runner's care, ``mode=sync``, ``colocate_async`` and ``separate_async``.

They have the names of the plain ones (:mod:`recipe.fspo.trainer`) and replace them in verl's registry, whichever module
a process imports first: this one imports the plain one, so it always registers after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from recipe.fspo.in_runner.worker import RunDetachedWorker, RunWorker
from recipe.fspo.reporter import Reporter
from recipe.fspo.trainer import FSPOColocateAsync, FSPOHooks, FSPOSeparateAsync, FSPOTrainer
from recipe.fspo.worker import FSPOWorker
from recipe.runner.hooks import RunnerHooks
from recipe.runner.launch import run_folder
from recipe.runner.launch.progress import PROGRESS
from transfer_queue import KVBatchMeta

from fspo.records import INFO_FILE
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY


class RunReporter(Reporter):
    """Speaks to the launching process, and writes into the run folder."""

    writing = staticmethod(run_folder.writing)

    def __init__(self, config: DictConfig) -> None:
        self.folder = Path(config.trainer.default_local_dir)

    def say(self, text: str) -> None:
        PROGRESS.say(text)

    def note(self, **facts: Any) -> None:
        with self.writing(self.folder / INFO_FILE):
            run_folder.note(str(self.folder), **facts)


class RunHooks(RunnerHooks, FSPOHooks):
    """FSPO's hooks inside the runner's: a check, a save or a limit of the runner's holds for what FSPO adds, too."""

    worker_cls: type[FSPOWorker] = RunWorker
    reporter_cls = RunReporter

    def on_init_end(self) -> None:
        super().on_init_end()
        self.actor_rollout_wg.begin_run(self.config.trainer.default_local_dir)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        # With shuffle, verl's mini-batches are drawn at random.
        if self.config.fspo.pi_old == "actor" and not self.config.actor_rollout_ref.actor.shuffle:
            batch.extra_info["mini_batch_size"] = self.mini_batch
        return super()._compute_old_log_prob(batch, metrics)


class RunTrainer(RunHooks, FSPOTrainer):
    """``mode=sync``."""


class RunColocateAsync(RunHooks, FSPOColocateAsync):
    """``mode=colocate_async``."""


class RunSeparateAsync(RunHooks, FSPOSeparateAsync):
    """``mode=separate_async``."""

    worker_cls = RunDetachedWorker


TRAINER_REGISTRY.update(  # verl's register_trainer refuses a name that is taken
    fspo=RunTrainer, fspo_colocate_async=RunColocateAsync, fspo_separate_async=RunSeparateAsync
)
