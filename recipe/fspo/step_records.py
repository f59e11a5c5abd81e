"""What the mini-batches of one step add up to: rows of the table, metrics, and the next step's band."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from omegaconf import DictConfig
from recipe.fspo.checkpoint import Stateful
from recipe.fspo.config import policy_loss_settings
from recipe.fspo.measured_values import ClipValues, LossScale
from recipe.fspo.policy_loss import band_of, judged_rows
from recipe.fspo.recorder import MiniBatch
from recipe.fspo.rollout_batch import Outcomes, outcome_metrics, prompt_of
from recipe.runner.progress import PROGRESS, note, writing

from fspo.audit.recording import minibatch_numbers
from fspo.measured import DriftMeasurement
from fspo.metrics import LengthDiagnostics, noise_floor
from fspo.responses import EVERY_MINI_BATCH, Responses
from fspo.table import FOLDER, Rows, TableWriter, join_rows
from fspo.types import BandState

#: Steps over which the length-fairness figures are computed, and past rollout batches that measure the drift.
_WINDOW_STEPS: Final = 20
_CALIBRATION_ROUNDS: Final = 8
#: So many steps in a row whose gradients are all clipped are worth a warning.
_CLIPPED_STEPS: Final = 10


def join_ranks(per_rank: Sequence[Sequence[MiniBatch] | None]) -> list[MiniBatch]:
    """Join what the ranks recorded: entry i of the result holds mini-batch i of the update, over all ranks.

    A rank that another one speaks for has None. Responses stand in the order of their rows in the rollout batch, so
    that no figure depends on the ranks. Raises ValueError if the ranks recorded different numbers of mini-batches.
    """
    joined = []
    for ranks in zip(*(recorded for recorded in per_rank if recorded is not None), strict=True):
        rows = join_rows([one.rows for one in ranks])
        if "row" in rows:
            order = np.argsort(rows["row"], kind="stable")
            rows = {name: values[order] for name, values in rows.items()}
        joined.append(replace(ranks[0], rows=rows))
    return joined


class StepRecords:
    """Rows and metrics of one verl step, and what lasts longer: window of the metrics, measured band and clip values.

    A step has the mini-batches between two transfers of the weights to vLLM: verl's modes ``sync`` and
    ``colocate_async`` update the actor once with all of them, ``separate_async`` once for each.
    """

    def __init__(self, config: DictConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        actor = config.actor_rollout_ref.actor
        #: Of a loss of this package's, and of any loss that has a band.
        self._settings, self._band = policy_loss_settings(actor.policy_loss), band_of(actor)
        #: Whether all mini-batches count, because pi_old is another policy than that of the step's beginning.
        self._every = bool(config.algorithm.rollout_correction.get("bypass_mode"))
        needs_drift = self._settings is not None and self._settings.needs_state
        self._drift = DriftMeasurement(window=_CALIBRATION_ROUNDS) if needs_drift else None
        self.loss_scale = LossScale(config)
        self._clip_values = ClipValues(config) if config.fspo.clip_values == "measured" else None
        self._diagnostics = LengthDiagnostics(window=_WINDOW_STEPS)
        self._warned_margin, self._clipped_steps = math.inf, 0
        self._warned: set[str] = set()
        self._mini_batches: list[MiniBatch] = []
        self._outcomes: list[Outcomes] = []
        self._table: TableWriter | None = None

    @property
    def responses_so_far(self) -> int:
        """Of this step: the row number of the next one."""
        return sum(len(outcomes.keys) for outcomes in self._outcomes)

    @property
    def band_state(self) -> BandState | None:
        """What the updates of this step use; None where nothing of the band has been measured."""
        state = None if self._drift is None else self._drift.state
        return state if self._clip_values is None else self._clip_values.scaled(state)

    def stateful_parts(self) -> dict[str, Stateful]:
        """The parts whose state a checkpoint has."""
        parts = {"drift": self._drift, "clip_values": self._clip_values, "loss_scale": self.loss_scale}
        return {name: part for name, part in parts.items() if part is not None}

    def note(self) -> None:
        """Note the measured values: those of this start, or of the checkpoint that it resumes."""
        clip_values = self._clip_values.values if self._clip_values else []
        divided = {"loss_divided_by": self.loss_scale.length} if self.loss_scale.length else {}
        note(self._folder, clip_values_measured=clip_values, **divided)

    def add(self, outcomes: Outcomes, mini_batches: Sequence[MiniBatch], left_out: Collection[str], step: int) -> None:
        """Take in one update of the actor, with its mini-batches as the workers recorded them, joined over the ranks.

        ``left_out`` are keys of the responses that padding stood in for, because A is 0. Their rows have no S.
        """
        skipped_B = np.isin(outcomes.keys, list(left_out))
        for mini_batch in mini_batches:
            rows, update = self._completed(mini_batch.rows, outcomes, skipped_B), len(self._mini_batches)
            rows |= {name: np.full(len(rows["S"]), n, np.int64) for name, n in (("step", step), ("update", update))}
            if self._band is not None:
                state = self.band_state if self._settings is not None else None
                rows |= judged_rows(rows, self._band, state and state.at_mini_batch(update))
            self._mini_batches.append(replace(mini_batch, rows=rows))
        self._outcomes.append(outcomes)

    def _completed(self, rows: Rows, outcomes: Outcomes, skipped_B: np.ndarray) -> Rows:  # type: ignore[type-arg]
        """Rows with what the rollout batch knows of each response; one without a token left, but not skipped, goes."""
        position_B = rows.get("row", np.empty(0, np.int64)) - self.responses_so_far
        kept_B = (rows["L"] > 0) | skipped_B[position_B]
        rows, position_B = {name: values[kept_B] for name, values in rows.items()}, position_B[kept_B]
        length_B = np.where(skipped_B[position_B], outcomes.length_B.numpy()[position_B], rows["L"])
        limit = self._config.data.max_response_length
        truncated_B = (outcomes.end_B.numpy()[position_B] >= limit).astype(np.float32)
        rows |= {"L": length_B, "A": np.where(skipped_B[position_B], np.float32(0), rows["A"])}
        rows |= {"truncated": truncated_B, "reward": outcomes.reward_B.numpy()[position_B]}
        prompts = [prompt_of(key) for key in outcomes.keys]
        # ``id`` is what verl's dumps of responses have as ``uid``.
        texts = {"prompt": prompts, "id": outcomes.keys, "data_source": outcomes.data_source_B}
        return rows | {name: np.array(values, dtype=object)[position_B] for name, values in texts.items()}

    def _record(self, step: int, numbers: Sequence[int], rows: Rows) -> None:
        """Append the step's responses to the table."""
        with writing(self._folder / FOLDER) as folder:
            if self._table is None:
                loss = str(self._config.actor_rollout_ref.actor.policy_loss.loss_mode)
                meta = {"loss": loss, "rule": "known" if "inside" in rows else "unknown"}
                meta[EVERY_MINI_BATCH] = "yes" if self._every else "no"
                meta |= {"without_S": "A = 0"} if self._config.fspo.skip_zero_advantage else {}
                self._table = TableWriter(folder, meta, run="run", first_step=step)
            if len(rows["S"]):
                self._table.append(rows)
                return
            for update, number in enumerate(numbers):  # a correction has rejected every response
                place = {"step": step, "update": update, "minibatch": number}
                self._table.append(place | {"S": np.empty(0), "L": np.empty(0)})

    def sync(self) -> None:
        """Bring the table to the disk: a checkpoint is about to stand beside it."""
        if self._table is not None:
            self._table.sync()

    def end(self, step: int) -> dict[str, float]:
        """Metrics of the step; its rows go to the run's folder, its statistics into the next step's band."""
        mini_batches, outcomes = self._mini_batches, Outcomes.join(self._outcomes)
        self._mini_batches, self._outcomes = [], []
        if self.loss_scale.settle():
            PROGRESS.say(
                f"gradient scale: the loss is divided by {self.loss_scale.length:.4g}, the mean length of the first "
                "rollout batch (fspo.match_scale=matched)"
            )
            self.note()
        numbers = minibatch_numbers([mini_batch.moves for mini_batch in mini_batches])
        for mini_batch, number in zip(mini_batches, numbers, strict=True):
            mini_batch.rows["minibatch"] = np.full(len(mini_batch.rows["S"]), number, np.int64)
        counts = [number > 0 or self._every for number in numbers]
        rows = join_rows([mini_batch.rows for mini_batch in mini_batches])
        responses = Responses.of_rows(rows, self._every)
        metrics = self._diagnostics.update(responses) | self._noise_floor_metrics(responses)
        if self._clip_values is not None:
            times = len(self._clip_values.values)
            if (line := self._clip_values.add(mini_batches, counts, self.band_state, step)) is not None:
                PROGRESS.say(line)
            if len(self._clip_values.values) > times:
                self.note()
        if self._settings is not None:
            self._warn_once("drift", self._diagnostics.drift_warning(self._settings, self.band_state))
        with_gradient = responses.select(responses.advantage_B != 0)
        if self._drift is not None and with_gradient.moved_B.any():
            self._drift.update(with_gradient)
        metrics |= outcome_metrics(outcomes, self._diagnostics)
        if len(rows["A"]):
            metrics["fspo/advantage_zero_frac"] = float(np.mean(rows["A"] == 0))
            metrics["fspo/truncated_frac"] = float(rows["truncated"].mean())
        if metrics.get("fspo/advantage_zero_frac") == 1:
            self._warn_once(
                "equal",
                f"warning: all advantages of step {step} are 0, because all responses to one prompt have the same "
                "reward: none has a gradient. Look at some (trainer.rollout_data_dir), and at the reward; or give "
                "problems that the model solves sometimes, or more responses (actor_rollout_ref.rollout.n)",
            )
        metrics |= self._norm_metrics([x.grad_norm for x in mini_batches if x.grad_norm is not None])
        self._record(step, numbers, rows)
        return metrics

    def _warn_once(self, name: str, text: str | None) -> None:
        if text is not None and name not in self._warned:
            self._warned.add(name)
            PROGRESS.say(text)

    def _noise_floor_metrics(self, responses: Responses) -> dict[str, float]:
        """How much of S is rounding; a warning if the band is too close to it, again only when it has doubled."""
        unmoved = responses.select(~responses.moved_B & (responses.update_B == 0))
        if not len(unmoved):
            return {}
        floor = noise_floor(unmoved, self._settings, self.band_state)
        if (warning := floor.warning()) is not None and floor.margin < self._warned_margin / 2:
            self._warned_margin = floor.margin
            PROGRESS.say(f"{warning} (actor_rollout_ref.actor.shuffle=false gives the same packs)")
        return floor.metrics()

    def _norm_metrics(self, norms: Sequence[float]) -> dict[str, float]:
        """Of the gradients before clipping; a warning once all of ten steps in a row are longer than the clip."""
        if not norms:
            return {}
        clip = float(self._config.actor_rollout_ref.actor.optim.clip_grad)  # grad_clip is read by nothing in verl
        self._clipped_steps = self._clipped_steps + 1 if min(norms) > clip else 0
        if self._clipped_steps == _CLIPPED_STEPS:
            self._warn_once("norm", _ALL_CLIPPED.format(steps=_CLIPPED_STEPS, clip=clip, norm=min(norms)))
        clipped = sum(not norm <= clip for norm in norms) / len(norms)
        return {"fspo/grad_norm/max": max(norms), "fspo/grad_norm/clipped_share": clipped}


#: A sum over tokens, as FSPO's, has a gradient about L times that of a mean, as GSPO's.
_ALL_CLIPPED: Final = (
    "warning: the gradients of the last {steps} steps were longer than actor.optim.clip_grad={clip:g} (norm now "
    "{norm:.3g}): all steps are equally long, whatever their gradients. Divide the loss by a typical length "
    "(policy_loss.grad_multiplier; in this recipe fspo.match_scale=matched), or raise clip_grad"
)
