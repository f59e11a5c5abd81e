"""The demo's reward, judged as mathematical answers are, so that there are judge processes to kill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipe.fspo import reward


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """`recipe.fspo.reward.compute_score` of the response in a box, as an answer to a mathematical problem."""
    # The sum keeps the answer from being decided by a comparison of text, which needs no judge.
    boxed = f"\\boxed{{{solution_str.strip()[:40]} + 0}}"
    return reward.compute_score("math", boxed, ground_truth, extra_info, n_workers=1, **kwargs)
