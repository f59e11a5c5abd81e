"""The order in which prompts are handed out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from fspo.funnel import LengthFunnel


def test_single_prompts_keep_the_data_loader_s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.fspo.trainer import FSPOTrainer, PPOTrainerSync

    prompts = iter("cab")
    monkeypatch.setattr(PPOTrainerSync, "_fetch_one_gen_batch", lambda self: {"uid": [next(prompts)]})
    trainer = object.__new__(FSPOTrainer)
    trainer._position, trainer._fetched = {}, 0
    trainer._cycle = SimpleNamespace(funnel=LengthFunnel())
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": 8}}})
    monkeypatch.setattr(PPOTrainerSync, "prepare_step", lambda self: [self._fetch_one_gen_batch() for _ in range(3)])
    trainer.prepare_step()
    assert trainer._position == {"c": 0, "a": 1, "b": 2}
    assert trainer._cycle.funnel.state_dict()["started"] == 24
