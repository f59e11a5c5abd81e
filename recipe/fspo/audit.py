"""The length audit under plain verl: ``FSPO_AUDIT=FOLDER`` in the environment, and nothing else.

verl imports this in every process through its plugins. With the variable set, :func:`install` wraps what verl has no
hook for: the actor's ``TrainingWorker`` (where a mini-batch ends), the losses of the registry, the environment of Ray's
workers and ``Tracking``, which logs a step. Each rank writes a file (:mod:`fspo.audit`). Beside verl's metrics travel
the step's sums by fine length bin; the driver turns them into a handful of numbers.

An error in here is printed once, and the run goes on without an audit.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final

import numpy as np

from fspo.audit import LIVE_COLUMNS, Audit, live_metrics
from fspo.diagnostics import NormClipWatch
from recipe.fspo.recorder import RECORDER

#: Folder of the audit, and the identifier of the run that the driver gives to all processes.
FOLDER, RUN = "FSPO_AUDIT", "FSPO_AUDIT_RUN"
#: Prefix of the sums among verl's metrics. No name after it may hold "max" or "min": verl would not average it.
SUMS: Final = "fspo_audit_sums/"
_WHY_NOT: Final = "install fspo on every node, and let VERL_USE_EXTERNAL_PLUGINS name it (or leave it unset)"


class _State:
    """Of this process."""

    failed = False
    update = 0
    learning_rate: float | None = None
    logged = False
    norm_clip: NormClipWatch | None = None


@contextmanager
def _on_trial() -> Iterator[None]:
    """What fails inside ends the audit in this process, and nothing else."""
    try:
        yield
    except Exception as error:
        if not _State.failed:
            print(f"FSPO_AUDIT: {type(error).__name__}: {error}; this process records nothing more", flush=True)
        _State.failed = True
        RECORDER.audit = None


# -------------------------------------------------------------------- workers


def _begin(worker: Any) -> None:
    """Before a mini-batch: open the file with the first one."""
    from recipe.fspo.policy_loss import observe_losses

    observe_losses(guard=_on_trial)
    if RECORDER.audit is None:
        engine = worker.engine
        RECORDER.audit = Audit(
            os.environ[FOLDER],
            rank=engine.get_data_parallel_rank(),
            ranks=engine.get_data_parallel_size(),
            run=os.environ.get(RUN, ""),
        )
    RECORDER.audit.take()
    groups = getattr(worker.engine.optimizer, "param_groups", None)
    _State.learning_rate = float(groups[0]["lr"]) if groups else None


def _end(metrics: dict[str, Any]) -> None:
    """After a mini-batch of a rank that speaks for its sequences: write its line, and add its sums to the metrics."""
    audit = RECORDER.audit
    if audit is None or audit.sums.total("count") == 0:
        return  # of a critic
    norm = metrics.get("grad_norm")
    moves = _State.learning_rate != 0 and (norm is None or bool(np.isfinite(float(norm))))
    sums = audit.end_mini_batch(_State.update, moves)
    # A list, because verl joins what the ranks report as lists.
    values = {"ranks": audit.ranks, "position": audit.mini_batches, "acceptance": audit.knows_acceptance}
    metrics.update({f"{SUMS}{name}": [float(value)] for name, value in values.items()})
    for name in LIVE_COLUMNS:
        for k, value in enumerate(sums.column(name).tolist()):
            metrics[f"{SUMS}{name}/{k}"] = [value]


def _wrap_worker(worker_class: Any) -> None:
    train_mini_batch, train_batch = worker_class.train_mini_batch, worker_class.train_batch
    postprocess = worker_class._postprocess_output

    @wraps(train_mini_batch)
    def numbered(self: Any, *args: Any, **kwargs: Any) -> Any:
        _State.update += 1
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
    """The metrics of a step as a logger gets them: the sums give way to ``fspo_audit/...``.

    verl has averaged every sum over ranks and mini-batches, all with the same weight. Their number times the average is
    the sum; counts are whole numbers, so rounding makes them exact.
    """
    sums = {name.partition(SUMS)[2]: value for name, value in metrics.items() if SUMS in name}
    others = {name: value for name, value in metrics.items() if SUMS not in name}
    if not sums:
        return others
    # The mini-batches of a step report 1, 2, ..., M, whose mean is (M + 1) / 2.
    terms = sums["ranks"] * (2 * sums["position"] - 1)
    fine_bins = sum(name.startswith("count/") for name in sums)
    columns = {name: np.array([sums[f"{name}/{k}"] for k in range(fine_bins)]) * terms for name in LIVE_COLUMNS}
    columns["count"] = np.rint(columns["count"])
    numbers = live_metrics(columns, acceptance=sums["acceptance"] == 1)
    return others | {f"fspo_audit/{name}": value for name, value in numbers.items()}


def _wrap_tracking(tracking: Any) -> None:
    begin, log = tracking.__init__, tracking.log

    @wraps(begin)
    def watching(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        config = kwargs.get("config") or (args[3] if len(args) > 3 else None)
        with _on_trial():
            actor = config["actor_rollout_ref"]["actor"] if config else {}
            _State.norm_clip = NormClipWatch(float(actor["grad_clip"])) if actor else None

    @wraps(log)
    def divided(self: Any, data: Any, step: int, *args: Any, **kwargs: Any) -> None:
        with _on_trial():
            is_update = any(name.startswith("actor/") for name in data)
            if is_update and not _State.logged and not any(SUMS in name for name in data):
                print(f"FSPO_AUDIT: no worker recorded the first update; {_WHY_NOT}", flush=True)
            _State.logged |= is_update
            watch = _State.norm_clip if "actor/grad_norm" in data else None
            if watch is not None and (warning := watch.warning(float(data["actor/grad_norm"]))) is not None:
                print(f"FSPO_AUDIT: {warning}", flush=True)
            data = live(data)
        log(self, data, step, *args, **kwargs)

    tracking.__init__, tracking.log = watching, divided


def _forward_environment(constants: Any) -> None:
    """verl forwards a fixed list of variables to Ray's workers."""
    environment = constants.get_ppo_ray_runtime_env

    @wraps(environment)
    def with_audit(config: Any = None, *args: Any, **kwargs: Any) -> Any:
        runtime_env = environment(config, *args, **kwargs)
        runtime_env["env_vars"] |= {name: os.environ[name] for name in (FOLDER, RUN)}
        with _on_trial():
            loss = config["actor_rollout_ref"]["actor"]["policy_loss"]["loss_mode"] if config else "of this run"
            print(f"FSPO_AUDIT: sums by length of the loss {loss} go to {os.environ[FOLDER]}", flush=True)
        return runtime_env

    constants.get_ppo_ray_runtime_env = with_audit


def install() -> None:
    """Audit every run of verl that this process has a part in."""
    from verl.trainer import constants_ppo
    from verl.utils.tracking import Tracking
    from verl.workers.engine_workers import TrainingWorker

    os.environ[FOLDER] = str(Path(os.environ[FOLDER]).absolute())  # workers stand in other folders
    os.environ.setdefault(RUN, uuid.uuid4().hex[:12])
    _forward_environment(constants_ppo)
    _wrap_worker(TrainingWorker)
    _wrap_tracking(Tracking)
