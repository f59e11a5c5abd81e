"""The reward hook as verl calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fspo.data.offline_task import DATA_SOURCE, generate
from recipe.fspo.reward import compute_score

ROOT = Path(__file__).resolve().parents[2]


def call(source: str, text: str, truth: str, **kwargs: Any) -> dict[str, Any]:
    return compute_score(data_source=source, solution_str=text, ground_truth=truth, **kwargs)


def test_right_and_wrong_answers() -> None:
    right = call("math500", r"so \boxed{34}", "34", extra_info={"problem_id": "math500/7", "response_length": 12})
    assert right == {
        "score": 1.0,
        "acc": 1.0,
        "timeout": 0.0,
        "parse_failed": 0.0,
        "crashed": 0.0,
        "response_length": 12,
        "status": "correct",
        "data_source": "math500",
        "problem_id": "math500/7",
    }
    assert call("math500", r"so \boxed{35}", "34")["acc"] == 0.0


def test_offline_task_has_its_own_verifier() -> None:
    (problem,), _ = generate(1, 0, seed=0)
    found = call(DATA_SOURCE, problem.working, str(problem.answer), extra_info={"index": 3})
    assert (found["score"], found["status"], found["problem_id"]) == (1.0, "correct", f"{DATA_SOURCE}/3")
    assert call(DATA_SOURCE, "", str(problem.answer))["score"] == 0.0


def test_all_sources_have_the_same_keys_because_verl_reads_those_of_the_first_row() -> None:
    assert list(call(DATA_SOURCE, "1", "1")) == list(call("aime24", r"\boxed{1}", "1"))


def test_verl_may_pass_more_than_we_use() -> None:
    assert (
        call("aime24", r"\boxed{1}", "1", reward_router_address="host:1", reward_model_tokenizer=None)["score"] == 1.0
    )


def test_shaping_changes_the_score_but_not_the_accuracy() -> None:
    info = {"response_length": 95}
    shaped = call(
        "aime24", r"\boxed{1}", "1", extra_info=info, format_weight=0.1, overlong_buffer=20, max_response_length=100
    )
    assert shaped["acc"] == 1.0
    assert shaped["score"] == pytest.approx(1.0 + 0.1 - 0.75)


def test_overlong_penalty_without_lengths_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"reward_manager"):
        call("aime24", r"\boxed{1}", "1", overlong_buffer=20, max_response_length=100)


def test_reward_manager_reports_the_length_in_tokens() -> None:
    import asyncio

    import numpy as np
    import torch
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager

    config = OmegaConf.create(
        {
            "reward": {
                "custom_reward_function": {
                    "path": "pkg://recipe.fspo.reward",
                    "name": "compute_score",
                    "reward_kwargs": {"overlong_buffer": 4, "max_response_length": 6},
                },
                "reward_manager": {
                    "source": "importlib",
                    "name": "TokenLengthRewardManager",
                    "module": {"path": "pkg://recipe.fspo.reward_manager"},
                },
            }
        }
    )

    class Tokenizer:
        def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
            return "".join(chr(i) for i in ids.tolist())

    response = [ord(c) for c in "34"] + [0, 0, 0, 0]
    data = DataProto.from_dict(
        tensors={
            "prompts": torch.zeros(1, 3, dtype=torch.int64),
            "responses": torch.tensor([response]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0, 0]]),
        },
        non_tensors={
            "data_source": np.array(["aime24"], dtype=object),
            "reward_model": np.array([{"ground_truth": "34"}], dtype=object),
            "extra_info": np.array([{"index": 0, "problem_id": "aime24/0"}], dtype=object),
        },
    )

    async def run() -> dict[str, Any]:
        return await load_reward_manager(config, Tokenizer()).run_single(data)

    result = asyncio.run(run())
    assert result["reward_extra_info"]["response_length"] == 2
    assert result["reward_extra_info"]["acc"] == 1.0
    assert result["reward_score"] == 1.0
