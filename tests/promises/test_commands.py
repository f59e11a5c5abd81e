"""Promises 11, 12, 16, 17 and 26: what a command refuses, composes and hands on, before Ray."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from commands import Ended, files_of, main, verl

pytestmark = pytest.mark.promise(11, 12, 13, 16, 17, 26)
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
LOSS, CORRECTION = f"{ACTOR}.policy_loss", "algorithm.rollout_correction"
REWARD, PENALTY = "reward.custom_reward_function.path", "+reward.reward_kwargs.overlong_buffer_cfg"
TYPED = f"{LOSS}._target_=fspo.verl.SequencePolicyLossConfig"

ROW = {
    "data_source": "own/task",
    "prompt": [{"role": "user", "content": "150%44"}],
    "reward_model": {"style": "rule", "ground_truth": "18"},
    "extra_info": {"index": 0},
}
GIVEN = {
    "raises.py": "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):\n"
    "    raise RuntimeError('of mine')\n",
    "broken.parquet": "no parquet",
    "my_loss.py": "from verl.trainer.ppo.core_algos import register_policy_loss\n"
    "@register_policy_loss('mine')\n"
    "def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode='', config=None,\n"
    "         rollout_is_weights=None):\n"
    "    loss = -(advantages * (log_prob - old_log_prob).exp() * response_mask).sum() / response_mask.sum()\n"
    "    return loss, {}\n",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with data, rewards and a loss of the user's own."""
    for name, text in GIVEN.items():
        (tmp_path / name).write_text(text)
    for name, rows in {"rows": [ROW] * 32, "four": [ROW] * 4, "train": [ROW], "foreign": [{"question": "?"}]}.items():
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    return tmp_path


def tried(place: Path, words: str, *more: str) -> Ended:
    """A command that checks and writes nothing."""
    before = files_of(place)
    ended = main(*words.split(), *more, "dry_run=true", folder=place)
    assert files_of(place) == before
    return ended


def refused(ended: Ended, keys: str) -> bool:
    """Whether a command was refused with every key named."""
    missing = [key for key in keys.split() if key not in ended.error]
    assert not missing, (missing, ended.error)
    return ended.status == 2


#: Commands with several wrong settings each, and the words by which every one of them is named.
WRONG = {
    "sampling, sizes, lost work, clip values just too narrow and too wide, one token too many": (
        f"{ROLLOUT}.n=1 {ROLLOUT}.top_p=0.9 {ROLLOUT}.top_k=50 {ROLLOUT}.log_prob_max_token_len_per_gpu=1024 "
        f"{ACTOR}.clip_ratio_high=0.28 {CORRECTION}.rollout_is=token data.train_batch_size=30 "
        f"{ACTOR}.checkpoint.async_save=true trainer.max_actor_ckpt_to_keep=1 {ACTOR}.kl_loss_coef=0.01 "
        f"{ACTOR}.grad_clip=0.5 trainer.resume_from_path=/x/global_step_1 {ROLLOUT}.tensor_model_parallel_size=3 "
        f"data.max_response_length=497 {ROLLOUT}.val_kwargs.n=2 {ROLLOUT}.val_kwargs.temperature=0 "
        f"{LOSS}.c_low=1.51 {LOSS}.c_high=5.9e-4 {ROLLOUT}.agent.default_agent_loop=tool_agnet trainer.logger=[nosuch]",
        "rollout.n=1 top_p=0.9 top_k=50 log_prob_max_token_len_per_gpu=1024 clip_ratio_high=0.28 rollout_is=token "
        "train_batch_size=30 async_save=true max_actor_ckpt_to_keep=1 kl_loss_coef=0.01 grad_clip=0.5 resume_from_path "
        "tensor_model_parallel_size=3 max_response_length 513 512 val_kwargs.n=2 c_low=1.51 c_high=0.00059 tool_agnet "
        "nosuch",
    ),
    "advantage and correction by token, no log-probabilities, an engine that is not served": (
        f"algorithm.adv_estimator=gae {CORRECTION}.rollout_rs=token_k1 {CORRECTION}.rollout_rs_threshold=2 "
        f"{ROLLOUT}.calculate_log_probs=false {ROLLOUT}.name=sglang",
        "adv_estimator=gae rollout_rs=token_k1 calculate_log_probs=false rollout.name=sglang",
    ),
    "a drift that verl's trainer does not measure": ("algo=fspo_v1 trainer.v1.trainer_mode=sync", "trainer_mode"),
    "an exponent out of range, a size, and a file of the user's that the demo's task would replace": (
        f"{LOSS}.exponent=3 data.train_batch_size=30 data.offline_task.folder=.",
        f"{LOSS}.exponent=3 train_batch_size=30 offline_task train.parquet",
    ),
    "types and an empty variable": (
        f"{ACTOR}.use_kl_loss=Flase {ROLLOUT}.n=2.5 {MODEL}.path= seed=abc",
        f"use_kl_loss=Flase rollout.n=2.5 {MODEL}.path seed=abc",
    ),
    "nobody's loss, data, LoRA, staleness, temperature, a reward model without a model, DAPO's penalty": (
        f"algo=gspo_verl {LOSS}.loss_mode=gsop data.train_files=broken.parquet data.val_files=foreign.parquet "
        f"mode=separate_async {MODEL}.lora_rank=8 trainer.v1.sampler.max_off_policy_threshold=0 "
        f"{ROLLOUT}.temperature=0.009 reward.reward_model.enable=true {PENALTY}.enable=true {PENALTY}.len=512",
        "loss_mode=gsop broken.parquet foreign.parquet lora_rank=8 max_off_policy_threshold=0 temperature=0.009 "
        "reward_model.enable=true overlong_buffer_cfg",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_command_is_refused_and_writes_nothing(name: str, place: Path) -> None:
    words, keys = WRONG[name]
    assert refused(tried(place, words), keys)


#: At the other side of each bound.
RIGHT = (
    f"{ROLLOUT}.n=2 trainer.max_actor_ckpt_to_keep=2 data.max_response_length=496 {ROLLOUT}.val_kwargs.n=2 "
    f"{ROLLOUT}.val_kwargs.temperature=0.6 {LOSS}.c_low=1.49 {LOSS}.c_high=6.1e-4 data.train_batch_size=48 "
    f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_coef=0.01 {CORRECTION}.rollout_is=sequence "
    f"{ROLLOUT}.calculate_log_probs=true"
)


def test_a_right_command_is_taken_and_writes_nothing(place: Path) -> None:
    ended = tried(place, RIGHT)
    assert ended.status == 0, ended.error


def test_what_is_one_s_own_is_taken_and_a_reward_that_raises_told(place: Path) -> None:
    """Data, a loss by verl's two keys, a reward by its own words; a dry run may be on another machine than the run."""
    data = "data.train_files=rows.parquet data.val_files=[rows.parquet,four.parquet] trainer.total_training_steps=3"
    loss = f"{MODEL}.external_lib=my_loss {LOSS}.loss_mode=mine {LOSS}._target_=verl.workers.config.PolicyLossConfig"
    words = f"{data} {REWARD}=raises.py algo=grpo {loss} dry_run=true"
    argument = "reward.custom_reward_function.reward_kwargs.no_argument"
    for given, says in ((words, "of mine"), (f"+{argument}=64 dry_run=true", "no_argument")):
        ended = main(*given.split(), folder=place)
        assert ended.status == 0 and says in ended.said, ended.error


def test_what_is_no_setting_is_hydra_s_to_name(place: Path) -> None:
    named = {
        "trainer.nothing_like_it=8": "nothing_like_it",
        "algo=nosuch": "nosuch",
        "critic.enable=true": "critic.model",
    }
    for word, name in named.items():
        ended = tried(place, word)
        assert ended.status == 1 and name in ended.error


# ---------------------------------------------------------------- 11 and 13: verl's own command

PLAIN = (
    f"{LOSS}.loss_mode=fspo trainer.v1.trainer_mode=fspo algorithm.adv_estimator=grpo {ROLLOUT}.n=4 "
    f"{ROLLOUT}.name=vllm {ACTOR}.use_dynamic_bsz=true"
)
AT_RAY = "nowhere"


def plain(place: Path, words: str) -> Ended:
    """What it says, without Hydra's line of the words that were given."""
    before = files_of(place)
    ended = verl(*PLAIN.split(), *words.split(), folder=place)
    assert ended.status == 1 and files_of(place) == before
    return Ended(2, ended.out, re.sub(r"^Error executing.*", "", ended.error, flags=re.M))


WRONG_IN_VERL = {
    "sampling, sizes, a correction without log-probabilities, a list with a rule that stands alone": (
        f"{ROLLOUT}.n=1 {ROLLOUT}.top_p=0.9 {ROLLOUT}.top_k=50 {CORRECTION}.rollout_is=token {TYPED} "
        f"+{LOSS}.c_low=30.0 {ROLLOUT}.calculate_log_probs=false {CORRECTION}.rollout_rs='seq_sqrt_k1,seq_mean_k1'",
        "rollout.n=1 top_p=0.9 top_k=50 rollout_is=token c_low=30.0 calculate_log_probs=false "
        "rollout_rs=seq_sqrt_k1,seq_mean_k1",
    ),
    "a loss that nobody registers": (f"{LOSS}.loss_mode=gsop", "loss_mode=gsop"),
    "where only the loss is ours: a drift that nobody measures, verl's clip range": (
        f"{LOSS}.loss_mode=fspo_v1 trainer.v1.trainer_mode=sync {ACTOR}.clip_ratio_high=0.28",
        "loss_mode=fspo_v1 clip_ratio_high=0.28",
    ),
}


@pytest.mark.parametrize("name", WRONG_IN_VERL)
def test_verl_s_own_command_is_refused_before_ray(name: str, place: Path) -> None:
    words, keys = WRONG_IN_VERL[name]
    ended = plain(place, words)
    assert refused(ended, keys) and AT_RAY not in ended.error


@pytest.mark.parametrize("words", ["", f"trainer.v1.trainer_mode=sync {LOSS}.loss_mode=vanilla {ROLLOUT}.top_p=0.9"])
def test_verl_s_own_command_gets_as_far_as_ray(words: str, place: Path) -> None:
    """With our trainer, and with nothing of ours."""
    ended = plain(place, words)
    assert AT_RAY in ended.error, ended.error


# ---------------------------------------------------------------- 12, 16, 17: configurations

CONF = Path(__file__).parents[2] / "conf"
ALGOS = sorted(path.stem for path in (CONF / "algo").glob("*.yaml"))


@functools.cache
def composed(*words: str) -> dict[str, object]:
    """Leaves of the configuration as it is printed."""
    ended = main("--cfg", "job", *words, folder=Path.cwd())
    assert ended.status == 0, ended.error
    return pd.json_normalize(yaml.safe_load(ended.out)).iloc[0].to_dict()


#: What an algorithm may set: its loss, its advantage, and verl's own clip range and average.
OF_AN_ALGO = re.compile(
    rf"{re.escape(LOSS)}\..*|{re.escape(ACTOR)}\.(clip_ratio.*|loss_agg_mode)|algorithm\.(adv_estimator|filter_groups\..*|"
    r"norm_adv_by_std_in_grpo)|fspo\.(algo|clip_values)"
)


@pytest.mark.parametrize("algo", ALGOS)
def test_swapping_algo_changes_nothing_but_the_loss(algo: str) -> None:
    first, second = composed("algo=fspo"), composed(f"algo={algo}")
    changed = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
    assert {key for key in changed if not OF_AN_ALGO.fullmatch(key)} == set()
    assert (f"{LOSS}.loss_mode" in changed) == (algo not in ("fspo", "unclipped"))
    assert bool(changed) == (algo != "fspo")
    assert second["algorithm.adv_estimator"] == ("rloo" if algo == "rloo" else "grpo")


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_composes(path: Path) -> None:
    leaves = composed(f"experiment={path.stem}")
    assert leaves[f"{LOSS}.loss_mode"] == "fspo" and leaves["trainer.experiment_name"]


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_every_mode_composes(mode: str) -> None:
    first, second = composed("algo=fspo"), composed(f"mode={mode}")
    assert (first["trainer.v1.trainer_mode"], second["trainer.v1.trainer_mode"]) == ("fspo", f"fspo_{mode}")
    assert second[f"{CORRECTION}.rollout_rs"], "stale responses are corrected"


@pytest.mark.slow  # each arm is a fresh process, which imports verl
def test_a_sweep_checks_every_arm_first(place: Path) -> None:
    arms = ("-m", "algo=fspo,rloo", "algorithm.adv_estimator=grpo", "dry_run=true")
    before = files_of(place)
    assert main(*arms, folder=place).status == 0 and files_of(place) == before


# ---------------------------------------------------------------- 26: secrets

SECRET = "hf_Q7xZ0vB3nM9kL2pT"


@pytest.mark.parametrize("last", ["dry_run=true", "dry_run=maybe"])
def test_a_secret_in_a_command_is_printed_nowhere(last: str, place: Path) -> None:
    keys = ("trainer.hub_token", "reward.custom_reward_function.reward_kwargs.api_key", "data.password")
    words = [f"+{key}={SECRET}" for key in (*keys, "ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY")]
    ended = main(*words, last, folder=place)
    assert SECRET not in ended.said and all(SECRET.encode() not in content for content in files_of(place).values())


def test_a_reference_to_a_secret_stays_a_reference(place: Path) -> None:
    word = "+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY=${oc.env:MY_SECRET}"
    for last in (["--cfg", "job"], ["dry_run=true"]):
        ended = main(word, *last, folder=place, environment={"MY_SECRET": SECRET})
        assert ended.status == 0 and SECRET not in ended.said
