"""A checkpoint callback that a test names in the configuration: what is asked of vLLM before a checkpoint is saved.

Not for separate_async, where verl's manager awaits its own methods.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from verl.checkpoint_engine import CheckpointEngineManager
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback


class SaveProbe(CheckpointCallback):
    """Appends one word to the file named by FSPO_PROBE_FILE whenever vLLM has done what it was asked, and at a save."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        for method, word in (("abort_replicas", "abort"), ("sleep_replicas", "sleep"), ("update_weights", "wake")):
            setattr(CheckpointEngineManager, method, _noting(getattr(CheckpointEngineManager, method), word))

    def on_save(self, trainer: Any, global_step: int, **_: Any) -> None:
        _note(f"save-{global_step}")


def _note(word: str) -> None:
    with open(os.environ["FSPO_PROBE_FILE"], "a") as file:
        file.write(f"{word}\n")


def _noting(original: Any, word: str) -> Any:
    @functools.wraps(original)
    def noting(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        _note(word)
        return result

    return noting
