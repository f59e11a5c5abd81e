"""The length audit under plain verl: ``FSPO_AUDIT=FOLDER`` in the environment, and nothing else.

verl imports this in every process through its plugins. With the variable set, :func:`install` wraps what verl has no
hook for: the actor's ``TrainingWorker`` (where a mini-batch ends), the losses of the registry, the environment of Ray's
workers, and ``Tracking``, which logs a step. Each rank writes a file (:mod:`fspo.audit`). Each rank also adds its sums
by fine length bin to verl's metrics, and the driver turns these into a handful of numbers.

An error in here is printed once, and the run goes on without an audit.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final

import numpy as np
from recipe.fspo.plain import WhenImported
from recipe.fspo.recorder import RECORDER

from fspo.audit import LIVE_COLUMNS, Audit, live_metrics
from fspo.diagnostics import NormClipWatch

#: Folder of the audit; what the driver tells all processes of the run, in JSON.
FOLDER, RUN = "FSPO_AUDIT", "FSPO_AUDIT_RUN"
#: Prefix of the sums among verl's metrics. verl averages a metric over mini-batches, ranks and updates, but for names
#: that hold "max", "min", "sum" or "total".
RAW: Final = "fspo_audit_raw/"
_WHY_NOT: Final = "install fspo on every node, and let VERL_USE_EXTERNAL_PLUGINS name it (or leave it unset)"


class _State:
    """Of this process."""

    failed = False
    calls = 0
    begins = True
    added = 0
    learning_rate: float | None = None
    logged = False
    norm_clip: NormClipWatch | None = None


@contextmanager
def _on_trial() -> Iterator[None]:
    """What fails inside ends this process's part in the audit, and nothing else."""
    try:
        yield
    except Exception as error:
        if not _State.failed:
            print(f"FSPO_AUDIT: {type(error).__name__}: {error}; this process audits nothing more", flush=True)
        _State.failed = True
        RECORDER.audit = None


# -------------------------------------------------------------------- workers


def _begin(worker: Any) -> None:
    """Before a mini-batch."""
    from recipe.fspo.policy_loss import observe_losses

    observe_losses()
    if RECORDER.audit is None or not RECORDER.audit.loss:  # or it was made for a critic of this process
        run = json.loads(os.environ.get(RUN, "{}"))
        RECORDER.guard = _on_trial
        RECORDER.audit = Audit(
            os.environ[FOLDER],
            rank=worker.engine.get_data_parallel_rank(),
            ranks=worker.engine.get_data_parallel_size(),
            run=run.get("run", ""),
            on_policy=run.get("on_policy", True),
        )
    RECORDER.audit.take()
    _State.added = RECORDER.added
    groups = getattr(worker.engine.optimizer, "param_groups", None)
    _State.learning_rate = float(groups[0]["lr"]) if groups else None


def _end(metrics: dict[str, Any]) -> None:
    """After a mini-batch, on a rank that reports it: write its line, and add its sums to the metrics."""
    audit = RECORDER.audit
    if audit is None or RECORDER.added == _State.added:
        return  # of a critic
    norm = metrics.get("grad_norm")
    moves = _State.learning_rate != 0 and (norm is None or math.isfinite(float(norm)))
    _State.calls += _State.begins
    _State.begins = False
    # separate_async calls for every mini-batch, the other modes once for all of a rollout batch.
    per_batch = json.loads(os.environ.get(RUN, "{}")).get("updates_per_rollout_batch", 1)
    sums = audit.end_mini_batch((_State.calls - 1) // per_batch + 1, moves)
    # A list, because verl joins what the ranks report as lists.
    metrics[f"{RAW}acceptance"] = [float(audit.knows_acceptance)]
    for name in LIVE_COLUMNS:
        metrics |= {f"{RAW}{name}/{k}": [value] for k, value in enumerate(sums.column(name).tolist())}


def _wrap_worker(worker_class: Any) -> None:
    train_mini_batch, train_batch = worker_class.train_mini_batch, worker_class.train_batch
    postprocess = worker_class._postprocess_output

    @wraps(train_mini_batch)
    def numbered(self: Any, *args: Any, **kwargs: Any) -> Any:
        _State.begins = True
        return train_mini_batch(self, *args, **kwargs)

    @wraps(train_batch)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _State.failed:
            with _on_trial():
                _begin(self)
        return train_batch(self, *args, **kwargs)

    @wraps(postprocess)
    def reported(self: Any, output: Any, *args: Any, forward_only: bool, **kwargs: Any) -> Any:
        if not forward_only and not _State.failed:
            with _on_trial():
                _end(output["metrics"])
        return postprocess(self, output, *args, forward_only=forward_only, **kwargs)

    worker_class.train_mini_batch, worker_class.train_batch = numbered, recorded
    worker_class._postprocess_output = reported


# --------------------------------------------------------------------- driver


def live(metrics: Mapping[str, Any]) -> dict[str, float]:
    """A handful of numbers of a step from the averages that verl made of its sums; empty if there are none.

    All sums are averaged with the same weights, so the ratio of two averages is the ratio of the two sums.
    """
    raw = {name.partition(RAW)[2]: value for name, value in metrics.items() if RAW in name}
    if not raw:
        return {}
    fine_bins = sum(name.startswith("count/") for name in raw)
    columns = {name: np.array([raw[f"{name}/{k}"] for k in range(fine_bins)]) for name in LIVE_COLUMNS}
    numbers = live_metrics(columns, acceptance=raw["acceptance"] == 1)
    return {f"fspo_audit/{name}": value for name, value in numbers.items()}


def _wrap_tracking(tracking: Any) -> None:
    begin, log = tracking.__init__, tracking.log

    @wraps(begin)
    def watching(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        with _on_trial():
            config = kwargs.get("config") or (args[3] if len(args) > 3 else None)
            clip = _at(config, "actor_rollout_ref", "actor", "optim", "clip_grad")
            _State.norm_clip = NormClipWatch(clip) if isinstance(clip, int | float) else None

    @wraps(log)
    def divided(self: Any, data: Any, step: int, *args: Any, **kwargs: Any) -> None:
        logged = {name: value for name, value in data.items() if RAW not in name}
        norm = data.get("actor/grad_norm")  # an actor's update, and not a critic's before it
        if norm is not None and not _State.logged and len(logged) == len(data):
            print(f"FSPO_AUDIT: no worker recorded the first update; {_WHY_NOT}", flush=True)
        _State.logged |= norm is not None
        with _on_trial():
            watch = _State.norm_clip if norm is not None else None
            if watch is not None and (warning := watch.warning(float(norm))) is not None:
                print(f"FSPO_AUDIT: {warning}", flush=True)
            logged |= live(data)
        log(self, logged, step, *args, **kwargs)

    tracking.__init__, tracking.log = watching, divided


def _at(config: Any, *keys: str) -> Any:
    """A value of a configuration; None if there is no such key, or no configuration."""
    for key in keys:
        config = config.get(key) if hasattr(config, "get") else None
    return config


def _announce(config: Any) -> None:
    """Say where the audit goes, and tell the workers how the run forms its rollout batches."""
    loss = _at(config, "actor_rollout_ref", "actor", "policy_loss", "loss_mode")
    print(f"FSPO_AUDIT: sums by length of the loss {loss or 'of this run'} go to {os.environ[FOLDER]}", flush=True)
    calls = 1
    if _at(config, "trainer", "v1", "trainer_mode") == "separate_async":
        calls = _at(config, "trainer", "v1", "separate_async", "parameter_sync_step") or 1
    by_rollout = bool(_at(config, "algorithm", "rollout_correction", "bypass_mode"))
    os.environ[RUN] = json.dumps(
        {"run": uuid.uuid4().hex[:12], "updates_per_rollout_batch": calls, "on_policy": not by_rollout}
    )


def _forward_environment(constants: Any) -> None:
    """verl forwards a fixed list of variables to Ray's workers."""
    environment = constants.get_ppo_ray_runtime_env

    @wraps(environment)
    def with_audit(config: Any = None, *args: Any, **kwargs: Any) -> Any:
        runtime_env = environment(config, *args, **kwargs)
        with _on_trial():
            _announce(config)
            runtime_env["env_vars"] |= {name: os.environ[name] for name in (FOLDER, RUN)}
        return runtime_env

    constants.get_ppo_ray_runtime_env = with_audit


def install() -> None:
    """Audit every run of verl that this process has a part in."""
    from verl.utils.tracking import Tracking
    from verl.workers.engine_workers import TrainingWorker

    os.environ[FOLDER] = str(Path(os.environ[FOLDER]).absolute())  # workers stand in other folders
    # By the first process of the run. Others inherit it, even if a driver starts Ray without verl's function.
    os.environ.setdefault(RUN, json.dumps({"run": uuid.uuid4().hex[:12]}))
    WhenImported("verl.trainer.constants_ppo", _forward_environment)
    _wrap_worker(TrainingWorker)
    _wrap_tracking(Tracking)
