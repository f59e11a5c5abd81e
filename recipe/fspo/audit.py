"""The length audit under plain verl: ``FSPO_AUDIT=FOLDER`` in the environment, and nothing else.

Once a process imports verl's ``TrainingWorker``, :mod:`recipe.fspo.plugin` has it wrapped: rows are made around its
loss function as in a run of this recipe's trainers (:mod:`recipe.fspo.recorder`), and each rank writes its own. An
error in here is printed once, and the run goes on without an audit.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from recipe.fspo import TRAINER_MODES
from recipe.fspo.policy_loss import band_of, judged_rows
from recipe.fspo.recorder import RECORDER, MiniBatch, rows_of
from recipe.fspo.rollout_batch import lengths_and_ends

from fspo.audit.recording import minibatch_numbers
from fspo.files import folder_problem
from fspo.responses import EVERY_MINI_BATCH
from fspo.table import TableWriter
from verl.utils import tensordict_utils as tu

#: Folder of the audit; what the driver tells all processes of the run, in JSON.
FOLDER, RUN = "FSPO_AUDIT", "FSPO_AUDIT_RUN"


class AuditedWorkers:
    """The audit of a process's workers, of which one is the actor: where its updates and mini-batches begin and end."""

    def __init__(self) -> None:
        self._writer: TableWriter | None = None
        self._updates, self._failed = 0, False
        self._steps: dict[int, list[bool]] = {}

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Around what must not reach verl: an error here ends the audit of this process."""
        try:
            yield
        except Exception as error:
            print(f"FSPO_AUDIT: {type(error).__name__}: {error}; this process audits nothing more", flush=True)
            self._failed = True

    def _loss(self, loss_fn: Callable[..., Any], model_output: Any, data: Any, dp_group: Any = None) -> Any:
        result = loss_fn(model_output=model_output, data=data, dp_group=dp_group)
        if not self._failed:
            with self.trial():
                rows = rows_of(model_output["log_probs"].detach(), data, loss_fn.keywords["config"])  # type: ignore[attr-defined]
                length_B, end_B = (column.numpy() for column in lengths_and_ends(data["response_mask"].cpu()))
                limit = json.loads(os.environ[RUN])["limit"] or float("inf")
                RECORDER.parts.append(rows | {"truncated": (end_B[length_B > 0] >= limit).astype("float32")})
        return result

    def _write(self, worker: Any, mini_batch: MiniBatch) -> None:
        """The rows of a mini-batch, into a folder that all ranks share."""
        run = json.loads(os.environ[RUN])
        # separate_async updates for every mini-batch, the other modes once for all of a rollout batch.
        step = self._updates // run["calls"] + 1
        self._steps = {step: [*self._steps.get(step, []), mini_batch.moves]}
        numbers, actor, rows = minibatch_numbers(self._steps[step]), worker.audited, mini_batch.rows
        if (band := band_of(actor)) is not None and not band.needs_state:
            rows |= judged_rows(rows, band)
        if self._writer is None:
            meta = {"loss": actor.policy_loss.loss_mode, "rule": "known" if "inside" in rows else "unknown"}
            engine, precision = worker.engine, getattr(getattr(worker.engine, "engine_config", None), "dtype", "")
            meta |= {"precision": str(precision), EVERY_MINI_BATCH: run[EVERY_MINI_BATCH]}
            place = {"rank": engine.get_data_parallel_rank(), "ranks": engine.get_data_parallel_size()}
            self._writer = TableWriter(os.environ[FOLDER], meta, run=run["run"], **place)
        self._writer.append({"step": step, "update": len(numbers) - 1, "minibatch": numbers[-1], **rows})

    def wrap(self, worker_class: Any) -> None:
        """Audit what this class trains by a policy loss."""
        # upstream: verl.workers.engine_workers:TrainingWorker.set_loss_fn(loss_fn)
        # upstream: verl.workers.engine_workers:TrainingWorker.train_batch(data)
        set_loss_fn, train_batch = worker_class.set_loss_fn, worker_class.train_batch

        @wraps(set_loss_fn)
        def with_rows(worker: Any, loss_fn: Callable[..., Any]) -> Any:
            config = getattr(loss_fn, "keywords", {}).get("config")
            worker.audited = config if hasattr(config, "policy_loss") else None
            return set_loss_fn(worker, partial(self._loss, loss_fn) if worker.audited else loss_fn)

        @wraps(train_batch)
        def mini_batch(worker: Any, data: Any) -> Any:
            ends, audited = tu.get(data, "update_lr_scheduler"), getattr(worker, "audited", None)
            if audited and not self._failed:
                with self.trial():
                    RECORDER.begin_mini_batch(worker.engine.optimizer)
            output = train_batch(worker, data)
            if audited and not self._failed:
                with self.trial():
                    metrics = {} if output is None else tu.get(output, "metrics")
                    mini_batch = RECORDER.end_mini_batch(metrics.get("grad_norm"))
                    if output is not None:  # else another rank has seen the same
                        self._write(worker, mini_batch)
                        self._updates += bool(ends)
            return output

        worker_class.set_loss_fn, worker_class.train_batch = with_rows, mini_batch


def announced(config: Any) -> dict[str, str]:
    """What Ray's workers get in their environment; ValueError if nothing can be written to the folder."""
    folder, select = os.environ[FOLDER], partial(OmegaConf.select, OmegaConf.create(config or {}))
    if (mode := select("trainer.v1.trainer_mode")) in TRAINER_MODES:
        print(f"FSPO_AUDIT: no audit, because trainer_mode={mode} keeps a table itself", flush=True)
        del os.environ[FOLDER]  # before Ray's workers inherit it
        return {}
    if problem := folder_problem(Path(folder)):
        raise ValueError(f"FSPO_AUDIT={folder}: {problem}")
    loss = select("actor_rollout_ref.actor.policy_loss.loss_mode")
    print(f"FSPO_AUDIT: the responses of the loss {loss or 'of this run'} go to {folder}", flush=True)
    calls = select("trainer.v1.separate_async.parameter_sync_step") if mode == "separate_async" else None
    every = "yes" if select("algorithm.rollout_correction.bypass_mode") else "no"
    facts = {"run": uuid.uuid4().hex[:12], "limit": select("data.max_response_length")}
    facts |= {"calls": calls or 1, EVERY_MINI_BATCH: every}
    os.environ[RUN] = json.dumps(facts)
    return {name: os.environ[name] for name in (FOLDER, RUN)}
