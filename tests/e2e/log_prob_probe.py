"""A checkpoint callback that a test names in the configuration: three policies' log-probs of the same tokens.

For the responses of the step just trained: vLLM's (``rollout``), the actor's before the update (``actor``, from the
same weights that vLLM had been sent) and the start's (``reference``).
"""

from __future__ import annotations

import json
import os
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

FIELDS = {"rollout": "rollout_log_probs", "actor": "old_log_probs", "reference": "ref_log_prob"}


class LogProbProbe(CheckpointCallback):
    """Appends one JSON line per checkpoint to the file named by FSPO_PROBE_FILE."""

    def on_save(self, trainer: Any, global_step: int, **_: Any) -> None:
        tags = tq.kv_list("train")["train"]
        keys = [key for key, tag in tags.items() if not tag.get("is_prompt", False)]
        if not keys:  # a save between two steps, by a run that was asked to stop
            return
        data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=[*FIELDS.values(), "response_mask"])
        mask = data["response_mask"].values().bool()
        record = {name: data[field].values()[mask].tolist() for name, field in FIELDS.items()}
        with open(os.environ["FSPO_PROBE_FILE"], "a") as file:
            file.write(json.dumps({"step": global_step, **record}) + "\n")
