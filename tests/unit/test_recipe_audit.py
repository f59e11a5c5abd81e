"""What an audit hooks into plain verl: rows of every rank, and numbers of a step in the driver's log."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from audited_loop import MINI_BATCHES, RANKS, Tensors, micro_batch, spoiled
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch as correct
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from fspo.audit import Audit, describe, read_audit
from fspo.table import read_table
from fspo.when_imported import WhenImported
from recipe.fspo import audit, policy_loss
from recipe.fspo.recorder import Recorder


class Engine:
    """A part of verl's FSDP engine: what an audit and TrainingWorker ask it for, and a loss over two micro-batches."""

    optimizer = SimpleNamespace(param_groups=[{"lr": 1e-6}])
    is_mp_src_rank_with_outputs = FSDPEngine.is_mp_src_rank_with_outputs
    get_data_parallel_rank = FSDPEngine.get_data_parallel_rank

    def __init__(self, rank: int, registry: dict[str, Any], loss: str, ulysses_rank: int) -> None:
        self.rank, self.registry, self.loss = rank, registry, loss
        at = {"dp": rank, "sp": ulysses_rank}
        self.ulysses_device_mesh = {name: SimpleNamespace(get_local_rank=at[name].__int__) for name in at}

    def get_data_parallel_size(self) -> int:
        return RANKS


class Worker:
    """In the place of verl's TrainingWorker. Like it, only the first rank of a Ulysses group reports."""

    tensors = staticmethod(micro_batch)

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def train_mini_batch(self, step: int) -> list[Any]:
        return [self.train_batch(100 * step + 10 * index, index > 0) for index in range(MINI_BATCHES)]

    def train_batch(self, seed: int, moved: bool) -> Any:
        for micro in range(2):
            new, old, mask, advantage = self.tensors(1000 * self.engine.rank + seed + micro, moved)
            self.engine.registry[self.engine.loss](
                old, new, advantage[:, None].expand(mask.shape), mask, config=SimpleNamespace(clip_ratio=3e-4,
                clip_ratio_low=None, clip_ratio_high=None),
            )  # fmt: skip
        if self.engine.is_mp_src_rank_with_outputs():
            return self._postprocess_output({"metrics": {"grad_norm": 1.0}}, forward_only=False)
        return None

    def _postprocess_output(self, output: dict[str, Any], *, forward_only: bool) -> dict[str, Any]:
        return output["metrics"]


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Starts a rank in this process: its worker, after ``install`` has wrapped the class."""
    monkeypatch.setenv(audit.FOLDER, str(tmp_path))
    monkeypatch.setenv(audit.RUN, json.dumps({"run": "run"}))

    def loss(old: Any, new: Any, advantages: Any, mask: Any, config: Any = None, **_: Any) -> Any:
        return -(advantages * new).masked_fill(~mask, 0.0).sum(), {}

    def start(rank: int, name: str = "gspo", ulysses_rank: int = 0) -> Worker:
        registry, recorder = {name: loss}, Recorder()

        def enter() -> None:
            for module in (audit, policy_loss):
                monkeypatch.setattr(module, "RECORDER", recorder)
            monkeypatch.setattr(policy_loss, "POLICY_LOSS_REGISTRY", registry)

        enter()
        wrapped = type("Wrapped", (Worker,), {"enter": staticmethod(enter)})
        audit.AuditedWorkers().wrap(wrapped)
        return wrapped(Engine(rank, registry, name, ulysses_rank))

    return start


class Tracking:
    """In the place of verl's."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log(self, data: dict[str, float], step: int) -> None:
        self.logged.append(data)


def tracked() -> Any:
    wrapped = type("Wrapped", (Tracking,), {})
    audit.LiveNumbers().wrap(wrapped)
    return wrapped()


def test_logged_numbers_are_those_of_the_table(verl: Any, tmp_path: Path) -> None:
    tracking, workers = tracked(), [verl(rank) for rank in range(RANKS)]
    for step in (1, 2):
        for worker in workers:
            worker.enter()
            assert worker.train_mini_batch(step) == [{"grad_norm": 1.0}] * MINI_BATCHES, "nothing travels as a metric"
        tracking.log({"actor/grad_norm": 1.0}, step)
    table = read_table(tmp_path)
    assert table.problems == [] and (table.meta["loss"], table.meta["rule"]) == ("gspo", "known")
    assert len(table.batches) == 2 * MINI_BATCHES
    for step, logged in enumerate(tracking.logged, start=1):
        of_step = (table.columns["step"] == step) & (table.columns["minibatch"] > 0)
        assert len(logged) == 1 + 7
        inside, kept = (table.columns[name][of_step].astype(float) for name in ("inside", "kept"))
        assert logged["fspo_audit/accept_rate"] == pytest.approx(inside.mean(), rel=1e-6) and 0 < inside.mean() < 1
        assert logged["fspo_audit/removed"] == pytest.approx(1 - kept.mean(), abs=1e-6)
        assert logged["fspo_audit/lre"] > 0.05
        assert logged["fspo_audit/S_std_long"] > logged["fspo_audit/S_std_short"] > 0


def test_a_sequence_counts_once_in_a_ulysses_group(verl: Any, tmp_path: Path) -> None:
    for rank, ulysses_rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        verl(rank, ulysses_rank=ulysses_rank).train_mini_batch(1)
    tensors = [micro_batch(1000 * rank + 100 + 10 + micro) for rank in range(RANKS) for micro in range(2)]
    columns = read_table(tmp_path).columns
    of_batch = (columns["step"] == 1) & (columns["update"] == 1)
    assert of_batch.sum() == sum(int(mask.any(1).sum()) for _, _, mask, _ in tensors)


@pytest.mark.parametrize("name", ["gspo", "gpg", "mine"])
def test_one_value_that_is_not_finite_ends_no_audit_of_verl(
    name: str, verl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def first_spoiled(seed: int, moved: bool = True) -> Tensors:
        return spoiled(float("nan"), "old") if seed == 110 else micro_batch(seed, moved)

    worker = verl(0, name)
    monkeypatch.setattr(Worker, "tensors", staticmethod(first_spoiled))
    worker.train_mini_batch(1)
    assert "audits nothing more" not in capsys.readouterr().out
    table = read_table(tmp_path)
    assert (table.left_out, len(table.batches)) == (1, MINI_BATCHES)
    assert all(np.isfinite(table.columns[name]).all() for name in ("S", "A"))


def test_of_an_unknown_loss_only_s_l_and_a_are_known(verl: Any, tmp_path: Path) -> None:
    for rank in range(RANKS):
        verl(rank, "mine").train_mini_batch(1)
    assert read_table(tmp_path).meta["rule"] == "unknown"
    tracking = tracked()
    tracking.log({"actor/grad_norm": 1.0}, 1)
    assert set(tracking.logged[0]) == {"actor/grad_norm"} | {
        f"fspo_audit/{name}" for name in ("length_short", "length_long", "S_std_short", "S_std_long")
    }


@pytest.mark.parametrize("where", ["the folder", "the rows"])
def test_an_error_ends_the_audit_and_not_the_run(
    where: str, verl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if where == "the folder":
        tmp_path.joinpath("file").touch()
        monkeypatch.setenv(audit.FOLDER, str(tmp_path / "file"))  # no folder
    else:
        monkeypatch.delattr(Audit, "add")
    assert verl(0).train_mini_batch(1) == [{"grad_norm": 1.0}] * MINI_BATCHES
    assert capsys.readouterr().out.count("FSPO_AUDIT: ") == 1


@pytest.mark.parametrize(("ranks", "says"), [(0, "no worker"), (1, f"1 of {RANKS} ranks"), (RANKS, "")])
def test_the_driver_says_once_whose_rows_are_not_there(
    ranks: int, says: str, verl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracking = tracked()
    before = [{"val-core/acc": 1.0}, {"actor/entropy": 0.1}]  # a critic may train alone at first
    for metrics in before:
        tracking.log(metrics, 0)
    for rank in range(ranks):
        verl(rank).train_mini_batch(1)
    assert capsys.readouterr().out == ""
    for step in (1, 2):
        tracking.log({"actor/grad_norm": 2.0}, step)
    output = capsys.readouterr().out
    assert output.count("FSPO_AUDIT: ") == bool(says) and says in output
    assert not says or (str(tmp_path) in output and "install fspo on every node" in output and "share" in output)
    *unchanged, first, second = tracking.logged
    assert unchanged == before and second == {"actor/grad_norm": 2.0}
    assert ("fspo_audit/lre" in first) == (ranks == RANKS)


def test_a_file_that_cannot_be_read_ends_neither_the_numbers_nor_the_run(
    verl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracking = tracked()
    (tmp_path / "responses-run-00000-000000-000000.parquet").write_text("none of an audit\n")
    for step in (1, 2):
        tracking.log({"actor/grad_norm": 2.0}, step)
    assert tracking.logged == [{"actor/grad_norm": 2.0}] * 2
    assert capsys.readouterr().out.count("FSPO_AUDIT: ") == 1


def test_rays_workers_get_the_variables_and_the_driver_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(audit.FOLDER, str(tmp_path))
    monkeypatch.setenv(audit.RUN, "")
    constants = SimpleNamespace(get_ppo_ray_runtime_env=lambda config=None: {"env_vars": {"A": "1"}})
    audit._forward_environment(constants)
    actor = {"actor": {"policy_loss": {"loss_mode": "gspo"}}}
    v1 = {"trainer_mode": "separate_async", "separate_async": {"parameter_sync_step": 4}}
    config = {"actor_rollout_ref": actor, "trainer": {"v1": v1}, "data": {"max_response_length": 96}}
    environment = constants.get_ppo_ray_runtime_env(config=config)["env_vars"]
    assert (environment["A"], environment[audit.FOLDER]) == ("1", str(tmp_path))
    run = json.loads(environment[audit.RUN])
    assert run["run"] and (run["updates_per_rollout_batch"], run["every_mini_batch"]) == (4, "no")
    assert run["max_response_length"] == 96
    output = capsys.readouterr().out
    assert "gspo" in output and str(tmp_path) in output and output.count("\n") == 1


def test_a_trainer_of_this_recipe_is_not_audited_beside_its_own_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Both would write what one recorder collects; workers on this machine inherit the driver's variables."""
    monkeypatch.setenv(audit.FOLDER, str(tmp_path))
    constants = SimpleNamespace(get_ppo_ray_runtime_env=lambda config=None: {"env_vars": {"A": "1"}})
    audit._forward_environment(constants)
    config = {"trainer": {"v1": {"trainer_mode": "fspo_colocate_async"}, "default_local_dir": "saved/here"}}
    assert constants.get_ppo_ray_runtime_env(config)["env_vars"] == {"A": "1"} and audit.FOLDER not in os.environ
    output = capsys.readouterr().out
    assert "fspo_colocate_async" in output and "saved/here" in output


@pytest.mark.parametrize("reject", ["seq_sum_k1", "seq_mean_k1", "token_k1"])
def test_what_verls_rollout_correction_does_is_recorded_by_response(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reject: str
) -> None:
    """S of a token is 0.01, but 0.21 of four tokens of a long response: 0.02 of a short one, and 1.6 of a long one."""
    monkeypatch.setenv(audit.FOLDER, str(tmp_path / "audit"))
    monkeypatch.setenv(audit.RUN, json.dumps({"run": "run"}))
    helper = SimpleNamespace(compute_rollout_correction_and_add_to_batch=correct)
    audit.AuditedCorrection().wrap(helper)
    mask = torch.arange(80) < torch.tensor([2, 80, 0] * 16)[:, None]
    engine, extra = torch.full(mask.shape, -1.0), 0.2 * (torch.arange(80) % 20 == 19)
    thresholds = {"seq_sum_k1": "0.9_1.1", "seq_mean_k1": "0.985_1.015", "token_k1": "0.9_1.1"}
    kinds = {"rollout_is": "sequence", "rollout_is_threshold": 2.0, "rollout_rs": reject}
    for _ in range(2):
        tensors = {"old_log_probs": engine + 0.01 + extra, "rollout_log_probs": engine, "response_mask": mask.long()}
        batch = DataProto.from_dict(tensors)
        batch, metrics = helper.compute_rollout_correction_and_add_to_batch(
            batch, kinds | {"rollout_rs_threshold": thresholds[reject]}
        )
        assert metrics
    columns = read_table(tmp_path / "audit-correction").columns
    assert columns["step"].tolist() == [1] * 32 + [2] * 32
    assert columns["L"].tolist() == [2, 80] * 32  # a rejected response, too, and as long as the engine wrote it
    np.testing.assert_allclose(columns["S"], [0.02, 1.6] * 32, rtol=1e-5)
    np.testing.assert_allclose(columns["weight"], [np.exp(0.02), 2.0] * 32, rtol=1e-5)
    np.testing.assert_allclose(columns["kept"], [1.0, 0.95 if reject == "token_k1" else 0.0] * 32, rtol=1e-5)
    text = describe(read_audit(tmp_path / "audit-correction"))
    assert "mean weight" in text and "A > 0" not in text


def test_the_logger_is_wrapped_when_a_process_imports_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what cannot be wrapped, in another verl, ends the audit of this process and not its import."""
    import verl.utils.tracking as original

    for name in (audit.FOLDER, audit.RUN):
        monkeypatch.setenv(name, str(tmp_path) if name == audit.FOLDER else "")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(audit.AuditedWorkers, "wrap", lambda *_: None)
    monkeypatch.setattr(audit, "_forward_environment", lambda constants: constants.not_there)
    monkeypatch.delitem(sys.modules, "verl.utils.tracking")
    monkeypatch.setattr(sys.modules["verl.utils"], "tracking", original)
    audit.install()
    assert "verl.utils.tracking" not in sys.modules
    again = importlib.import_module("verl.utils.tracking")
    assert again.Tracking.log.__wrapped__.__code__ == original.Tracking.log.__code__
    importlib.import_module("verl.trainer.constants_ppo")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("FSPO_AUDIT: AttributeError") and "not_there" in line


def test_a_module_that_is_already_imported_is_wrapped_at_once() -> None:
    modules: list[Any] = []
    WhenImported("json", modules.append)
    assert modules == [json]
