"""What ``test_what_works.py`` hands to verl: a tool, a parser of its calls, and rewards.

verl runs this file by its path, in the processes of the agent loop and of the reward.
"""

from __future__ import annotations

import json
import re
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool


def odd_length(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """1 for an answer of odd length: random weights get it half of the time, so that there is something to learn."""
    return float(len(solution_str) % 2)


def odd_length_of_some(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """The same for prompts with an odd answer; for the others 0, so that dynamic sampling has groups to replace."""
    return int(ground_truth) % 2 * float(len(solution_str) % 2)


@function_tool
def double(number: int) -> str:
    """The last two digits of twice a number.

    Args:
        number: The number.
    """
    return f"{2 * number % 100:02d}="  # always three tokens, which the test counts


@ToolParser.register("last_number")
class LastNumber(ToolParser):
    """Each turn of the model calls the tool with its last number: the demo's model can write little but numbers."""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        numbers = re.findall(r"\d+", text)
        calls = [FunctionCall(name="double", arguments=json.dumps({"number": int(numbers[-1])}))] if numbers else []
        return text, calls
