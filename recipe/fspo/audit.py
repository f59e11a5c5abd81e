"""The length audit under plain verl: ``FSPO_AUDIT=FOLDER`` in the environment, and nothing else.

verl imports this in every process through its plugins. With the variable set, :func:`install` wraps what verl has no
hook for: the actor's ``TrainingWorker`` (where a mini-batch ends), the losses of the registry, the environment of Ray's
workers, the rollout correction, and ``Tracking``, which logs a step. It waits until a process imports these, so that
one that trains nothing needs no more memory than without an audit. Each rank writes rows (:mod:`fspo.audit`); the
driver reads a handful of numbers of a step from what the table has gained.

An error in here is printed once, and the run goes on without an audit.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final

import torch
from recipe.fspo.recorder import RECORDER, weights_moved

from fspo.audit import Audit, live_metrics
from fspo.responses import EVERY_MINI_BATCH, Responses
from fspo.table import read_table
from fspo.when_imported import WhenImported

#: Folder of the audit; what the driver tells all processes of the run, in JSON.
FOLDER, RUN = "FSPO_AUDIT", "FSPO_AUDIT_RUN"
#: Behind the audit's folder: the table of the rollout correction. Not within it, where pandas would read both as one.
CORRECTION: Final = "-correction"
_WHY_NOT: Final = (
    "install fspo on every node, let VERL_USE_EXTERNAL_PLUGINS name it (or leave it unset), and name a folder that all "
    "nodes share"
)


def _run() -> dict[str, Any]:
    """The facts of the run that its driver has put into the environment."""
    return dict(json.loads(os.environ.get(RUN) or "{}"))


class Trial:
    """A context in which an error ends this process's part in the audit, and nothing else."""

    def __init__(self) -> None:
        self.failed = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self.failed:
                print(f"FSPO_AUDIT: {type(error).__name__}: {error}; this process audits nothing more", flush=True)
            self.failed = True
            RECORDER.audit = None


class AuditedWorkers:
    """The audit of a process's workers, of which one is the actor: where its updates and mini-batches begin and end."""

    def __init__(self) -> None:
        self.trial = Trial()
        self._updates, self._in_update = 0, False
        self._learning_rate: float | None = None

    @property
    def audits(self) -> bool:
        """Whether this process audits: nothing has failed in it, and no trainer of this recipe keeps the table."""
        return not (self.trial.failed or RECORDER.is_of_a_trainer)

    def begin_update(self) -> None:
        """Before an update, of whatever model."""
        self._in_update = False

    def begin_mini_batch(self, worker: Any) -> None:
        """Before a mini-batch, of whatever model."""
        from recipe.fspo.policy_loss import observe_losses

        observe_losses(self.trial)
        if RECORDER.audit is None or not RECORDER.audit.loss:  # or it was made for a critic of this process
            run = _run()
            RECORDER.max_response_length = run.get("max_response_length")
            RECORDER.audit = Audit(
                os.environ[FOLDER],
                rank=worker.engine.get_data_parallel_rank(),
                ranks=worker.engine.get_data_parallel_size(),
                run=run.get("run", ""),
                precision=str(getattr(getattr(worker.engine, "engine_config", None), "dtype", "")),
                meta={EVERY_MINI_BATCH: run.get(EVERY_MINI_BATCH, "no")},
            )
        RECORDER.begin_mini_batch()
        groups = getattr(worker.engine.optimizer, "param_groups", None)
        self._learning_rate = float(groups[0]["lr"]) if groups else None

    def end_mini_batch(self, grad_norm: float | None) -> None:
        """After a mini-batch, on a rank that reports it: write its rows."""
        if RECORDER.audit is None or RECORDER.audit.micro_batches == 0:
            return  # of a critic
        self._updates += not self._in_update
        self._in_update = True
        # separate_async updates for every mini-batch, the other modes once for all of a rollout batch.
        step = (self._updates - 1) // _run().get("updates_per_rollout_batch", 1) + 1
        RECORDER.audit.end_mini_batch(step, weights_moved(grad_norm, self._learning_rate))

    def wrap(self, worker_class: Any) -> None:
        """Audit what this class trains."""
        train_mini_batch, train_batch = worker_class.train_mini_batch, worker_class.train_batch
        postprocess = worker_class._postprocess_output

        @wraps(train_mini_batch)
        def update(worker: Any, *args: Any, **kwargs: Any) -> Any:
            self.begin_update()
            return train_mini_batch(worker, *args, **kwargs)

        @wraps(train_batch)
        def mini_batch(worker: Any, *args: Any, **kwargs: Any) -> Any:
            if self.audits:
                with self.trial():
                    self.begin_mini_batch(worker)
            return train_batch(worker, *args, **kwargs)

        @wraps(postprocess)
        def reported(worker: Any, output: Any, *args: Any, forward_only: bool, **kwargs: Any) -> Any:
            if not forward_only and self.audits:
                with self.trial():
                    norm = output["metrics"].get("grad_norm")
                    self.end_mini_batch(None if norm is None else float(norm))
            return postprocess(worker, output, *args, forward_only=forward_only, **kwargs)

        worker_class.train_mini_batch, worker_class.train_batch = update, mini_batch
        worker_class._postprocess_output = reported


class LiveNumbers:
    """What the driver logs of the audit, from the files of all ranks."""

    def __init__(self) -> None:
        self.trial = Trial()
        self._last: tuple[int, int] | None = None
        self._warned = False

    def of_update(self) -> dict[str, float]:
        """Live metrics of the mini-batches since the last call."""
        run = _run().get("run", "")
        table = read_table(os.environ[FOLDER], run=run, columns=("minibatch", "L", "inside", "kept"), after=self._last)
        self._last = table.last or self._last
        if not self._warned and len(table.ranks) < max(table.expected, 1):
            self._warned = True
            recorded = f"{len(table.ranks)} of {table.expected} ranks" if table.ranks else "no worker"
            print(f"FSPO_AUDIT: {recorded} recorded the first update in {os.environ[FOLDER]}; {_WHY_NOT}", flush=True)
        if not table.columns or len(table.ranks) < table.expected:
            return {}
        responses = Responses.of_rows(table.columns, table.meta.get(EVERY_MINI_BATCH) == "yes").moved()
        return {f"fspo_audit/{name}": value for name, value in live_metrics(responses).items()}

    def wrap(self, tracking: Any) -> None:
        """Add the audit's metrics to what this class logs."""
        log = tracking.log

        @wraps(log)
        def with_audit(logger: Any, data: Any, step: int, *args: Any, **kwargs: Any) -> None:
            metrics: dict[str, float] = {}
            if "actor/grad_norm" in data and not self.trial.failed:  # an actor's update, and not a critic's before it
                with self.trial():
                    metrics = self.of_update()
            log(logger, {**data, **metrics}, step, *args, **kwargs)

        tracking.log = with_audit


class AuditedCorrection:
    """The audit of verl's rollout correction, in the driver: a table of its own, with a row for each response.

    No worker sees what a rejection has removed: ``response_mask`` comes to it without those tokens, and the engine's
    log-probabilities do not come at all. The driver has both, where verl computes the correction. In this table S is
    log pi_old - log pi_rollout over the response as the engine wrote it, ``kept`` the share of its tokens that
    is left, and ``weight`` the mean of ``rollout_is_weights`` over it. A is not known yet, and 0.
    """

    def __init__(self) -> None:
        self.trial = Trial()
        self._audit: Audit | None = None
        self._step = 0

    def add(self, before_BT: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> None:
        """Write the rows of one rollout batch.

        Args:
            before_BT: The response mask before the correction, [B, T].
            batch: What the correction has made of the batch.
        """
        if self._audit is None:
            folder = os.environ[FOLDER] + CORRECTION
            print(f"FSPO_AUDIT: what the rollout correction does to each response goes to {folder}", flush=True)
            meta = {EVERY_MINI_BATCH: "yes"}
            self._audit = Audit(folder, loss="rollout_correction", run=_run().get("run", ""), meta=meta)
        old_BT, engine_BT = batch["old_log_probs"], batch["rollout_log_probs"]
        left_BT = (batch["response_mask"] != 0).float()
        no_advantage_B = torch.zeros(len(old_BT), device=old_BT.device)
        weight_BT = batch.get("rollout_is_weights", None)
        self._audit.add(old_BT, engine_BT, before_BT, no_advantage_B, kept=left_BT, weight=weight_BT)
        self._step += 1
        self._audit.end_mini_batch(self._step)

    def wrap(self, module: Any) -> None:
        """Audit the correction that this module of verl names."""
        correct = module.compute_rollout_correction_and_add_to_batch

        @wraps(correct)
        def with_audit(batch: Any, *args: Any, **kwargs: Any) -> Any:
            before_BT = batch.batch["response_mask"].clone()
            result = correct(batch, *args, **kwargs)
            if FOLDER in os.environ and not self.trial.failed:  # a trainer of this recipe has deleted it
                with self.trial():
                    self.add(before_BT, result[0].batch)
            return result

        module.compute_rollout_correction_and_add_to_batch = with_audit


# --------------------------------------------------------------------- driver


def _at(config: Any, *keys: str) -> Any:
    """A value of a configuration; None if there is no such key, or no configuration."""
    for key in keys:
        config = config.get(key) if hasattr(config, "get") else None
    return config


def _announce(config: Any) -> None:
    """Say where the audit goes, and tell the workers how the run forms its rollout batches."""
    loss = _at(config, "actor_rollout_ref", "actor", "policy_loss", "loss_mode")
    print(f"FSPO_AUDIT: the responses of the loss {loss or 'of this run'} go to {os.environ[FOLDER]}", flush=True)
    calls = 1
    if _at(config, "trainer", "v1", "trainer_mode") == "separate_async":
        calls = _at(config, "trainer", "v1", "separate_async", "parameter_sync_step") or 1
    by_rollout = bool(_at(config, "algorithm", "rollout_correction", "bypass_mode"))
    run = {"run": uuid.uuid4().hex[:12], "updates_per_rollout_batch": calls}
    run |= {EVERY_MINI_BATCH: "yes" if by_rollout else "no"}
    os.environ[RUN] = json.dumps(run | {"max_response_length": _at(config, "data", "max_response_length")})


def _forward_environment(constants: Any) -> None:
    """verl forwards a fixed list of variables to Ray's workers. A trainer of this recipe keeps a table itself."""
    environment = constants.get_ppo_ray_runtime_env

    @wraps(environment)
    def with_audit(config: Any = None, *args: Any, **kwargs: Any) -> Any:
        runtime_env = environment(config, *args, **kwargs)
        with Trial()():
            from recipe.fspo.config import TRAINER_MODES

            if (mode := _at(config, "trainer", "v1", "trainer_mode")) in TRAINER_MODES:
                folder = _at(config, "trainer", "default_local_dir")
                print(f"FSPO_AUDIT: no audit, because trainer_mode={mode} keeps a table itself: {folder}", flush=True)
                del os.environ[FOLDER]  # before Ray's workers inherit it
                return runtime_env
            _announce(config)
            runtime_env["env_vars"] |= {name: os.environ[name] for name in (FOLDER, RUN)}
        return runtime_env

    constants.get_ppo_ray_runtime_env = with_audit


def install() -> None:
    """Audit every run of verl that this process has a part in."""
    os.environ[FOLDER] = str(Path(os.environ[FOLDER]).absolute())  # workers stand in other folders
    # By the first process of the run. Others inherit it, even if a driver starts Ray without verl's function.
    os.environ.setdefault(RUN, json.dumps({"run": uuid.uuid4().hex[:12]}))
    for module, wrap in (
        ("verl.trainer.constants_ppo", _forward_environment),
        ("verl.workers.engine_workers", lambda workers: AuditedWorkers().wrap(workers.TrainingWorker)),
        ("verl.trainer.ppo.rollout_corr_helper", lambda helper: AuditedCorrection().wrap(helper)),
        ("verl.utils.tracking", lambda tracking: LiveNumbers().wrap(tracking.Tracking)),
    ):
        WhenImported(module, _tried(wrap))


def _tried(wrap: Callable[[Any], None]) -> Callable[[Any], None]:
    """``wrap`` in a :class:`Trial`: whoever imports the module must not get its errors."""

    def try_to(module: Any) -> None:
        with Trial()():
            wrap(module)

    return try_to
