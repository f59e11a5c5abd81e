"""A row of a data file in verl's schema."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
ROW: Row = {
    "data_source": "own/task",
    "prompt": [{"role": "user", "content": "150%44"}],
    "reward_model": {"style": "rule", "ground_truth": "18"},
    "extra_info": {"index": 0},
}
