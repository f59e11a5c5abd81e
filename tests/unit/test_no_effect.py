"""A key that was given and that nothing reads is refused or noted, by its value."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from composing import composed
from omegaconf import OmegaConf

from recipe.fspo.job import JOB
from recipe.runner.launch.compose import has_key, parsed
from recipe.runner.launch.no_effect import TABLE, judged, rows_of, values_of

ROOT = Path(__file__).resolve().parents[2]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BUFFER = "+reward.reward_kwargs.overlong_buffer_cfg"


def test_a_run_that_has_trained_without_a_key_goes_on() -> None:
    kept = (f"{ACTOR}.kl_loss_coef=0.01",)
    refused, (note,) = judged(composed(*kept), JOB, parsed(kept), composed(), parsed(kept))
    assert refused == [] and f"{ACTOR}.kl_loss_coef" in note


@pytest.mark.parametrize(
    "words",
    [
        "trainer.resume_mode=resume_path trainer.resume_from_path=/x/global_step_1",
        "algorithm.adv_estimator=gae critic.optim.lr=1e-5",
        "+transfer_queue.backend.SimpleStorage.ssd_offload.enabled=true +transfer_queue.controller.polling_mode=true",
        f"critic.enable=true {ROLLOUT}.prometheus.enable=false distillation.enabled=false",
    ],
)
def test_a_key_that_is_read_gets_no_word(words: str) -> None:
    """Of commands that need a checkpoint or a critic's model; the others are in refusals.py."""
    assert judged(composed(*words.split()), JOB, parsed(words.split()), composed()) == ([], [])


def test_every_row_names_keys_and_settings_that_there_are() -> None:
    """A typing error in a table would let a key through without a word."""
    added = (f"{BUFFER}.enable=true", "+reward.reward_kwargs.max_resp_len=9")
    added += tuple(f"+{ROLLOUT}.engine_kwargs.{engine}.x=1" for engine in ("sglang", "trtllm"))
    config = composed(*added)
    groups = [f"{group}.{name}=0" for group in config if OmegaConf.is_dict(config[group]) for name in config[group]]
    keys = list(values_of(config, parsed(groups)))
    assert JOB.no_effect is not None
    unknown = []
    for row in (*rows_of(JOB.no_effect), *rows_of(TABLE)):
        for pattern in row.keys:
            matching = [key for key in keys if fnmatchcase(key, pattern)]
            unknown += [] if matching else [pattern]
            switches = {switch for key in matching for switch in row.switches(key, config)}
            unknown += [f"{pattern}: {switch}" for switch in switches if not has_key(config, switch)]
    assert unknown == []
