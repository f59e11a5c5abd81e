"""The job's reward function, called on every response of the rehearsal, with a coin's score in place of its own.

A model with random weights never earns a reward, and groups of equal rewards have no gradient: nothing would move.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import zlib
from typing import Any

from fspo.rewards.custom import BadReward, load, result_problem

_load = functools.cache(load)


async def compute_score(*, rehearsed_path: str, rehearsed_name: str, **arguments: Any) -> Any:
    """What the function ``rehearsed_name`` of ``rehearsed_path`` returns, its score replaced by a coin: 0.0 or 1.0.

    Raises:
        BadReward: if verl could not use what it returns.
    """
    function = _load(rehearsed_path, rehearsed_name)
    if inspect.iscoroutinefunction(function):
        result = await function(**arguments)
    else:  # in a thread, as verl calls it
        result = await asyncio.to_thread(function, **arguments)
    if problem := result_problem(result):
        raise BadReward(problem)
    coin = float(zlib.crc32(arguments["solution_str"].encode()) % 2)
    return {**result, "score": coin} if isinstance(result, dict) else coin
