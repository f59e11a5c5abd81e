"""What an audit hooks into plain verl: rows of every rank, made around the actor's loss function."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from micro_batches import actor, micro_batch
from omegaconf import OmegaConf
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from fspo.losses import ALGORITHMS, judged
from fspo.table import read_table
from recipe.fspo import audit
from recipe.fspo.recorder import ROWS, Recorder

RANKS = 2


class Worker:
    """In the place of verl's TrainingWorker: two mini-batches of two micro-batches; one rank of a group reports.

    Of all its mini-batches the second has a gradient.
    """

    def __init__(self, rank: int, reports: bool = True) -> None:
        optimizer = SimpleNamespace(param_groups=[{"lr": 1e-6}], state={})
        place = {"get_data_parallel_rank": lambda: rank, "get_data_parallel_size": lambda: RANKS}
        self.engine = SimpleNamespace(optimizer=optimizer, **place)
        self.rank, self.reports, self.loss_fn = rank, reports, None

    def set_loss_fn(self, loss_fn: Any) -> None:
        self.loss_fn = loss_fn

    def train_batch(self, data: Any) -> Any:
        losses = []
        for micro in range(2):
            batch, output = micro_batch(8, seed=tu.get(data, "seed") + micro)
            del batch[ROWS]  # which verl's own trainer has not
            losses.append(self.loss_fn(model_output=output, data=batch, dp_group=None)[0])
        state = self.engine.optimizer.state
        state[len(state)] = "moments"
        metrics = {"grad_norm": float(len(state) == 2), "loss": [float(loss.detach()) for loss in losses]}
        return tu.get_tensordict({}, {"metrics": metrics}) if self.reports else None


def train(folder: Path, loss: str, rank: int = 0, steps: int = 2, reports: bool = True) -> list[Any]:
    """Steps of a rank in this process, under an audit."""
    wrapped = type("Wrapped", (Worker,), {})
    audit.AuditedWorkers().wrap(wrapped)
    critic, worker = wrapped(rank), wrapped(rank, reports)
    critic.set_loss_fn(partial(lambda config, **_: (torch.zeros(()), {}), config=SimpleNamespace()))
    worker.set_loss_fn(partial(ppo_loss, config=actor(loss)))
    outputs = []
    for step in range(steps):
        critic.train_batch(tu.get_tensordict({}, {"seed": 0}))
        for index in range(2):
            place = {"seed": 100 * rank + 10 * step + 4 * index, "update_lr_scheduler": index == 1}
            outputs.append(worker.train_batch(tu.get_tensordict({}, place)))
    return outputs


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    recorder = Recorder()
    monkeypatch.setattr(audit, "RECORDER", recorder)
    monkeypatch.setenv(audit.FOLDER, str(tmp_path))
    monkeypatch.setenv(audit.RUN, json.dumps({"run": "run", "calls": 1, "limit": 50, "every_mini_batch": "no"}))
    return tmp_path


@pytest.mark.parametrize("loss", ["seq_gspo", "vanilla"])
def test_every_rank_writes_what_its_loss_did(loss: str, folder: Path) -> None:
    outputs = [train(folder, loss, rank) for rank in range(RANKS)]
    assert all(tu.get(output, "metrics").keys() == {"grad_norm", "loss"} for part in outputs for output in part)
    table = read_table(folder)
    assert table.problems == [] and (table.meta["loss"], table.meta["rule"]) == (loss, "known")
    assert table.meta["every_mini_batch"] == "no" and len(table) == RANKS * 2 * 2 * 2 * 7
    columns = table.columns
    places = {*zip(*(columns[name].tolist() for name in ("step", "update", "minibatch")), strict=True)}
    assert places == {(1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 1)}
    assert ((columns["truncated"] == 1) == (columns["L"] >= 50)).all() and columns["truncated"].any()
    if loss == "seq_gspo":
        tensors = (torch.from_numpy(columns[name]) for name in ("S", "L", "A"))
        output = judged(*tensors, ALGORITHMS["seq_gspo"])
        assert np.array_equal(columns["inside"], output.accepted_B.float().numpy())
    assert 0 < columns["kept"].mean() < 1


def test_the_updates_of_a_rollout_batch_are_one_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As separate_async has them."""
    monkeypatch.setenv(audit.RUN, json.dumps(json.loads(os.environ[audit.RUN]) | {"calls": 2}))
    for rank in range(RANKS):
        train(folder, "gspo", rank, steps=3)
    columns = read_table(folder).columns
    places = {*zip(*(columns[name].tolist() for name in ("step", "update", "minibatch")), strict=True)}
    assert places == {(1, 0, 0), (1, 1, 0), (1, 2, 2), (1, 3, 3), (2, 0, 0), (2, 1, 1)}


def test_a_sequence_counts_once_where_one_rank_reports(folder: Path) -> None:
    for rank in range(RANKS):
        for reports in (True, False):
            train(folder, "gspo", rank, 1, reports)
    assert len(read_table(folder)) == RANKS * 2 * 2 * 7


def test_an_error_ends_the_audit_and_not_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv(audit.FOLDER, str(folder / "file"))  # no folder
    whole = train(folder, "gspo")
    assert capsys.readouterr().out.count("FSPO_AUDIT: ") == 1
    monkeypatch.delattr(audit, "rows_of")
    assert [tu.get(x, "metrics") for x in train(folder, "gspo")] == [tu.get(x, "metrics") for x in whole]
    assert capsys.readouterr().out.count("FSPO_AUDIT: NameError") == 1
    monkeypatch.setattr(audit.RECORDER, "begin_mini_batch", lambda optimizer: optimizer.of_another_kind)
    assert [tu.get(x, "metrics") for x in train(folder, "gspo")] == [tu.get(x, "metrics") for x in whole]
    assert capsys.readouterr().out.count("FSPO_AUDIT: AttributeError") == 1


def announced(mode: str, *more: str) -> dict[str, str]:
    words = ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "data.max_response_length=96")
    v1 = (f"trainer.v1.trainer_mode={mode}", "trainer.v1.separate_async.parameter_sync_step=4")
    return audit.announced(OmegaConf.from_dotlist([*words, *v1, *more]))


def test_rays_workers_are_told_and_the_driver_says_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = announced("separate_async")
    run = json.loads(environment[audit.RUN])
    assert environment[audit.FOLDER] == str(folder) and run["run"]
    assert (run["calls"], run["limit"], run["every_mini_batch"]) == (4, 96, "no")
    assert json.loads(announced("sync")[audit.RUN])["calls"] == 1
    output = capsys.readouterr().out
    assert "gspo" in output and str(folder) in output and output.count("\n") == 2
    bypass = announced("sync", "algorithm.rollout_correction.bypass_mode=true")
    assert json.loads(bypass[audit.RUN])["every_mini_batch"] == "yes", "pi_old is the engine's from the first update on"
    # A trainer of this recipe is not audited; workers on this machine inherit the driver's variables.
    assert announced("fspo_colocate_async") == {} and audit.FOLDER not in os.environ
    assert "fspo_colocate_async" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_to_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(audit.FOLDER, "/dev/null/here")
    with pytest.raises(ValueError, match="FSPO_AUDIT=/dev/null/here"):
        announced("sync")
