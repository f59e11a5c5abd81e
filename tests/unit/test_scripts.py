"""The program that tries the launch scripts of a checkout: bash's own words, and what has no effect without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scripts import _without_its_file, algorithm, answer, arguments, edited, scripts, tried, unnamed
from recipe.runner.launch import left_to_verl, no_effect

OWN = [
    "data.train_files=/data/t.parquet",
    "actor_rollout_ref.model.path=/models/m",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "trainer.n_gpus_per_node=8",
]

QUOTING = r"""
set -euo pipefail
curl https://example.org > secret; rm -rf kept; which nvcc
N=$(python3 -c 'print(8)'); files="['a b.parquet', 'c.parquet']"
MORE=(+data.apply_chat_template_kwargs.effort="very high")
WORDS=(
    data.train_files="$files"   # a comment
    trainer.logger='["console","wandb"]'
    "${MORE[@]}"
)
exec python3 -u -m verl.trainer.main_ppo "${WORDS[@]}" trainer.nnodes=${NODES:-2} "$@"
"""


def test_the_arguments_are_those_that_bash_hands_over(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "quoting.sh").write_text(QUOTING)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/by_ray.sh").write_text('ray job submit -- python -m recipe.dapo.main_dapo a="x y"\n')
    (tmp_path / "sub/none.sh").write_text("# main_ppo is not started\nsleep 1000\n")
    (tmp_path / "other.sh").write_text("python -m something.else a=1\n")
    paths = scripts(tmp_path)
    words = {path.name: words for path, words in arguments(tmp_path, paths)}
    assert words == {
        "quoting.sh": [
            "data.train_files=['a b.parquet', 'c.parquet']",
            'trainer.logger=["console","wandb"]',
            "+data.apply_chat_template_kwargs.effort=very high",
            "trainer.nnodes=2",
        ],
        "by_ray.sh": ["a=x y"],
        "none.sh": [],
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "other.sh", "quoting.sh", "sub"]


def test_options_of_verls_file_are_left_out_with_their_values() -> None:
    words = ["--config-path=config", "a=1", "--config-name", "x", "-cn", "y", "b=2"]
    assert _without_its_file(words) == ["a=1", "b=2"]


def test_a_command_is_edited_as_the_errors_say() -> None:
    words = [
        "a.loss_mode=gspo",
        "+a.n=3",
        "b.x.y=1",
        "b.x.z=2",
        "~c.d",
        "--config-name=x",
        "c=1",
        "f.path=g.py",
        "f.name=h",
    ]
    errors = [
        "a.loss_mode=gspo with _target_=T, the class of other losses, has no settings: give algo=gspo_verl",
        "+a.n=3: there is a.n already; leave the + out",
        "b.x.y, b.x.z: there is no b.x; leave it out",
        "~c.d: there is no such key; leave it out",
        "--config-name=x: leave it out; give c=2",
        "reward.f.path='/g.py', name='h': /g.py does not exist: correct the path",
        "d.name=x with d.path=y: it has no class 'x'; d.source=register takes verl's x",
    ]
    assert edited(words, errors) == ["a.loss_mode=gspo", "a.n=3", "c=1", "algo=gspo_verl", "d.source=register"]


@pytest.mark.parametrize(
    ("error", "alternatives"),
    [
        ("a.n: there is no such key (did you mean a.m?)", [["a.m=1"]]),
        ("a.n: there is no a; use b.c", [["b.c.n=1"]]),
        ("a.n=1 is registered by nobody (did you mean x?): choose one of y, z", [["a.n=x"]]),
        ("a.n=1: no effect with a.on=false; leave it out, or give a.on=true", [[], ["a.n=1", "a.on=true"]]),
        ("a.n=1 with other=0 draws one: set other=1.0, or n=2", [["a.n=1", "a.other=1.0"], ["a.n=2"]]),
        ("a.n=1 does not divide the model's 4 heads: set it to 2", [["a.n=2"]]),
        ("a.n=1 is not known; choose one of 'x', 'y'", [["a.n=y"]]),
        ("a.n=1 is refused: give +data.b=TOKENS +data.c=TOKENS (docs)", [["a.n=1", "+data.b=16", "+data.c=16"]]),
        ("a.n=1: leave a.n (b.n) out for ours, or give algo=grpo", [[], ["a.n=1", "algo=grpo"]]),
        ("a.n=1 is another's: leave it out, and give mode=x, or train with it", [["mode=x"]]),
        ("a.n=1 must be 2 or more", [[]]),
    ],
)
def test_each_alternative_of_an_error_is_done_to_the_letter(error: str, alternatives: list[list[str]]) -> None:
    assert [edited(["a.n=1"], [error], which) for which in range(len(alternatives))] == alternatives


def test_a_key_without_effect_and_without_a_word_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["experiment=demo", f"run.dir={tmp_path}/run", "actor_rollout_ref.rollout.over_sample_rate=0.1"]
    assert answer(words).silent == []  # noted
    refused = answer([*words, "trainer.use_v1=false"])
    assert refused.status == 2 and edited([*words, "trainer.use_v1=false"], refused.errors) == words
    monkeypatch.setattr(no_effect, "rows_of", lambda table: ())
    (key,) = answer(words).silent
    assert key.startswith("actor_rollout_ref.rollout.over_sample_rate:")


@pytest.mark.parametrize(
    "words",
    [
        "reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=16",
        "reward_model.reward_manager=prime",
        "actor_rollout_ref.rollout.val_temperature=0.6 actor_rollout_ref.rollout.n_val=2 data.train_max_sample=64",
        "actor_rollout_ref.rollout.max_tokens=8 actor_rollout_ref.actor.fsdp_config.grad_offload=True",
        "+actor_rollout_ref.rollout.agent.max_turns=3 actor_rollout_ref.actor.policy_loss=vanilla",
        "+actor_rollout_ref.rollout.val_kwargs.response_length=8 trainer.v1.trainer_mode=colocate_async",
    ],
)
def test_remedies_done_to_the_letter_pass(tmp_path: Path, words: str) -> None:
    trial = tried(["experiment=demo", f"run.dir={tmp_path}/run", *words.split()])
    assert (trial.first.status, trial.last.errors) == (2, []) and 0 < trial.edits < 3


def test_a_leaf_other_than_verls_that_nothing_names_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["data.train_batch_size=64", "data.val_files=v.parquet", "actor_rollout_ref.rollout.val_temperature=0.6"]
    command = ["experiment=own", "algo=grpo", f"run.dir={tmp_path}/run", *words, *OWN]
    trial = tried(command)
    assert (trial.last.errors, trial.edits) == ([], 1) and trial.last.config.data.train_batch_size == 64
    differing, missing = unnamed([*words, *OWN], trial)
    assert differing > 9 and missing == []
    monkeypatch.setattr(left_to_verl, "lines", lambda *_: [])
    _, missing = unnamed([*words, *OWN], tried(command))
    assert {"algorithm.adv_estimator: gae -> grpo", "data.filter_overlong_prompts: False -> True"} <= {*missing}


@pytest.mark.parametrize(
    ("words", "algo"),
    [
        ([], "grpo"),
        (["actor_rollout_ref.actor.clip_ratio_high=0.28"], "dapo"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"], "gspo_verl"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=cispo"], "cispo"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov"], "grpo"),
    ],
)
def test_the_algorithm_of_a_script_is_that_of_the_pages_table(words: list[str], algo: str) -> None:
    assert algorithm(words) == algo
