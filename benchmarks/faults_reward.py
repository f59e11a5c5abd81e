"""Rewards of the demo for faults: judged as mathematical answers are, so that there are judges to kill; or hanging."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe.math import reward


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """`recipe.math.reward.compute_score` of the response in a box, as an answer to a mathematical problem."""
    # The sum keeps the answer from being decided by a comparison of text, which needs no judge.
    boxed = f"\\boxed{{{solution_str.strip()[:40]} + 0}}"
    return reward.compute_score("math", boxed, ground_truth, extra_info, n_workers=1, **kwargs)


def hang_or_score(**row: Any) -> dict[str, Any]:
    """The demo's reward, until the file FSPO_FAULTS_HANG is there, which says how to hang."""
    if (trigger := Path(os.environ["FSPO_FAULTS_HANG"])).exists():
        hang(trigger.read_text(encoding="utf-8"))
    return reward.compute_score(**row)


def hang(how: str) -> None:
    """Never return: sleep, or keep Python's lock busy."""
    while how == "loops":
        pass
    time.sleep(3600)
