"""The reward manager as a reward worker of verl runs it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager

from recipe.runner.faults.errors import ExplainedError

MANAGER = "reward: {reward_manager: {source: importlib, name: TokenLengthRewardManager, module: {path: %s}}}"
TOKENIZER = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(chr, ids.tolist())))


def manager(path: str) -> Any:
    config = OmegaConf.create(MANAGER % "pkg://recipe.runner.reward_manager")
    config.reward.custom_reward_function = {"path": path, "name": "compute_score", "reward_kwargs": {}}
    return load_reward_manager(config, TOKENIZER)


def scored(one: Any, source: str = "aime24", info: dict[str, Any] | None = None, prompt: int = 0) -> dict[str, Any]:
    """What a manager makes of the response "34" with room for six, to row 7 if nothing else is given."""
    tensors = {
        "prompts": torch.full((1, 3), prompt),
        "responses": torch.tensor([[ord("3"), ord("4"), 0, 0, 0, 0]]),
        "attention_mask": torch.tensor([[1] * 5 + [0] * 4]),
    }
    info = {"index": 7} if info is None else info
    others = {"data_source": source, "reward_model": {"ground_truth": "34"}, "extra_info": info}
    data = DataProto.from_dict(tensors, {name: np.array([value], dtype=object) for name, value in others.items()})
    return dict(one.loop.run_until_complete(one.run_single(data)))


def own(folder: Path, body: str, head: str = "def") -> Any:
    """A manager for a reward with this body."""
    lines = "\n    ".join(body.splitlines())
    text = f"{head} compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {lines}\n"
    (folder / "reward.py").write_text(text)
    return manager(str(folder / "reward.py"))


@pytest.mark.parametrize(
    ("body", "score"),
    [
        ("return 0.5", 0.5),
        ("return solution_str == ground_truth", True),
        ("import numpy\nreturn numpy.float32(0.5)", 0.5),
        ("import torch\nreturn torch.tensor(0.5)", 0.5),
        ("return extra_info['index'] + len(extra_info['problem_id'])", 32),
        ("return {'score': 1, 'parts': [1, 2.5], 'why': None}", 1),
    ],
)
@pytest.mark.parametrize("head", ["def", "async def"])
def test_what_is_a_reward_passes_unchanged(tmp_path: Path, head: str, body: str, score: float) -> None:
    one = own(tmp_path, body, head)
    result = scored(one)
    assert result["reward_score"] == score
    assert one.failure is None
    reported = {"response_length": 2, "data_source": "aime24"}
    assert reported.items() <= result["reward_extra_info"].items(), "what an evaluation reads"
    assert result["reward_extra_info"]["problem_id"].startswith("aime24/7/")


@pytest.mark.parametrize("path", ["own", "pkg://recipe.math.reward"])
def test_rows_without_a_problem_are_known_by_their_prompt(tmp_path: Path, path: str) -> None:
    def problem_id_of(prompt: int, **info: Any) -> str:
        one = own(tmp_path, "return 1") if path == "own" else manager(path)
        return str(scored(one, info=info, prompt=prompt)["reward_extra_info"]["problem_id"])

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
        ("return {'score': 1, 'acc': float('inf')}", " inf"),
    ],
)
def test_a_failure_names_row_and_response_and_is_kept(tmp_path: Path, body: str, says: str) -> None:
    one = own(tmp_path, body)
    with pytest.raises(ExplainedError) as failed:
        scored(one, "own/task")
    message = str(failed.value)
    for what in (says, "reward.py", "data_source='own/task'", "index=7", "ground truth: '34'", "response: '34'"):
        assert what in message
    assert one.failure == message
    with pytest.raises(ExplainedError):
        scored(one, "another")
    assert one.failure == message  # the first one
