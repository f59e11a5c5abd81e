"""The reward manager as a reward worker of verl runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager

from recipe.runner.faults.errors import ExplainedError


class Tokenizer:
    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return "".join(chr(i) for i in ids.tolist())


def manager(path: str, **reward_kwargs: Any) -> Any:
    function = {"path": path, "name": "compute_score", "reward_kwargs": reward_kwargs}
    ours = {
        "source": "importlib",
        "name": "TokenLengthRewardManager",
        "module": {"path": "pkg://recipe.runner.reward_manager"},
    }
    config = {"reward": {"custom_reward_function": function, "reward_manager": ours}}
    return load_reward_manager(OmegaConf.create(config), Tokenizer())


def response(text: str, source: str = "aime24", info: dict[str, Any] | None = None, prompt: int = 0) -> DataProto:
    """The response of 6 positions at most, to row 7 if nothing else is given."""
    ids = [ord(c) for c in text]
    return DataProto.from_dict(
        tensors={
            "prompts": torch.full((1, 3), prompt),
            "responses": torch.tensor([ids + [0] * (6 - len(ids))]),
            "attention_mask": torch.tensor([[1] * (3 + len(ids)) + [0] * (6 - len(ids))]),
        },
        non_tensors={
            "data_source": np.array([source], dtype=object),
            "reward_model": np.array([{"ground_truth": "34"}], dtype=object),
            "extra_info": np.array([{"index": 7} if info is None else info], dtype=object),
        },
    )


def run(one: Any, data: DataProto) -> dict[str, Any]:
    return dict(asyncio.get_event_loop().run_until_complete(one.run_single(data)))


@pytest.fixture(autouse=True)
def _loop() -> Iterator[None]:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.close()


@pytest.fixture
def own(tmp_path: Path) -> Any:
    """A manager for a reward with this body."""

    def build(body: str, head: str = "def") -> Any:
        file = tmp_path / "reward.py"
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        file.write_text(f"{head} compute_score(data_source, solution_str, ground_truth, extra_info=None):\n{lines}")
        return manager(str(file))

    return build


@pytest.mark.parametrize(
    ("body", "score"),
    [
        ("return 0.5", 0.5),
        ("return solution_str == ground_truth", True),
        ("import numpy\nreturn numpy.float32(0.5)", 0.5),
        ("import torch\nreturn torch.tensor(0.5)", 0.5),
        ("return {'score': 2, 'acc': 1, 'why': 'text'}", 2),
        ("return extra_info['index'] + len(extra_info['problem_id'])", 32),
        ("return {'score': 1, 'parts': [1, 2.5], 'why': None}", 1),
    ],
)
@pytest.mark.parametrize("head", ["def", "async def"])
def test_what_is_a_reward_passes_unchanged(own: Any, head: str, body: str, score: float) -> None:
    one = own(body, head)
    result = run(one, response("34"))
    assert result["reward_score"] == score
    assert one.failure is None
    reported = {"response_length": 2, "data_source": "aime24"}
    assert reported.items() <= result["reward_extra_info"].items(), "what an evaluation reads"
    assert result["reward_extra_info"]["problem_id"].startswith("aime24/7/")


@pytest.mark.parametrize("path", ["own", "pkg://recipe.math.reward"])
def test_rows_without_a_problem_are_known_by_their_prompt(own: Any, path: str) -> None:
    def problem_id_of(prompt: int, **info: Any) -> str:
        one = own("return 1") if path == "own" else manager(path)
        return str(run(one, response("34", info=info, prompt=prompt))["reward_extra_info"]["problem_id"])

    assert problem_id_of(1) == problem_id_of(1, index=None, problem_id=None) != problem_id_of(2)
    assert problem_id_of(1, index=3) == problem_id_of(1, index=3, problem_id=None) != problem_id_of(1, index=4)
    assert problem_id_of(1, index=3) != problem_id_of(2, index=3), "two files of one source, each counted from 0"
    assert problem_id_of(1, index=3, problem_id="p") == problem_id_of(2, index=4, problem_id="p") == "p"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("number = int(solution_str)\nreturn 1 / (number - 34)", "ZeroDivisionError: division by zero"),
        ("return None", "NoneType"),
        ("return float('nan')", " nan"),
        ("return {'acc': 1}", "KeyError: 'score'"),
        ("return {'score': None}", "NoneType"),
        ("return '0.5'", " '0.5'"),
    ],
)
def test_a_failure_names_row_and_response_and_is_kept(own: Any, body: str, says: str) -> None:
    one = own(body)
    with pytest.raises(ExplainedError) as failed:
        run(one, response("34", source="own/task"))
    message = str(failed.value)
    for what in (says, "reward.py", "data_source='own/task'", "index=7", "ground truth: '34'", "response: '34'"):
        assert what in message
    assert one.failure == message
    with pytest.raises(ExplainedError):
        run(one, response("34", source="another"))
    assert one.failure == message  # the first one
