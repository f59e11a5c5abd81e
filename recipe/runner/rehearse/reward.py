"""The job's reward function, called on every response of the rehearsal, with a coin's score in place of its own.

A model with random weights never earns a reward, and groups of equal rewards have no gradient: nothing would move.

``python -m recipe.runner.rehearse.reward REWARD FILE ...`` calls it on each row of small Parquet files before Ray
starts and prints what is wrong with a call, or nothing. REWARD is a JSON object of ``rehearsed_path``,
``rehearsed_name`` and the function's keywords.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import sys
import zlib
from typing import Any

from fspo.rewards.custom import BadReward, describe, load, result_problem

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


def main() -> None:
    """Score a response of one word for every row, until one fails."""
    import pyarrow.parquet as pq

    reward = json.loads(sys.argv[1])
    for file in sys.argv[2:]:
        for number, row in enumerate(pq.read_table(file).to_pylist()):
            asked = {"data_source": row["data_source"], "ground_truth": row["reward_model"]["ground_truth"]}
            info = {**(row.get("extra_info") or {}), "response_length": 1}
            try:
                asyncio.run(compute_score(**reward, **asked, solution_str="none", extra_info=info))
            except Exception as error:
                print(f"row {number} of {file} ({asked}): {describe(error)}")
                return


if __name__ == "__main__":
    main()
