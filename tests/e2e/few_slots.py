"""Gives vLLM's servers eight slots where verl gives them 1,000, named in VERL_USE_EXTERNAL_MODULES.

192 requests at once are then what 24,000 are in a real run: far more than a server has slots.
"""

from __future__ import annotations

from verl.workers.rollout.replica import RolloutReplica

RolloutReplica.max_concurrency = property(lambda self: 8)  # type: ignore[method-assign,assignment]
