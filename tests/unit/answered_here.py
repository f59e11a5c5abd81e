"""Answers about code of the user's, in place of :func:`recipe.runner.launch.own_process.asked`.

Its process has to import verl for a class or for verl's own reward: five seconds. test_inputs.py starts one for each
kind of question.
"""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

from recipe.runner.launch import reward_trial


def of_rewards(module: str, *arguments: str, given: bytes) -> tuple[Any, None]:
    with mock.patch.object(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given))):
        return reward_trial._answer(*arguments), None
