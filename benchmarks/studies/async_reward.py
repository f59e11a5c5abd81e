"""The demo's reward after a wait per token of the response, for docs/results.md.

It stands for a decoder that is slow beside the update, as those of large models are: the demo's model has written its
longest response before a mini-batch is done.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from recipe.fspo import reward

SECONDS_PER_TOKEN: Final = 0.15


async def score_later(**given: Any) -> dict[str, Any]:
    """The demo's verdict, ``SECONDS_PER_TOKEN`` times the response's length later."""
    await asyncio.sleep(SECONDS_PER_TOKEN * given["extra_info"]["response_length"])
    return reward.compute_score(**given)
