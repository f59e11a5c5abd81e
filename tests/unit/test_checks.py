"""Bad input is named, with key, value and remedy, before anything expensive starts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from composing import composed
from hydra.utils import instantiate

from benchmarks.studies import asynchronous, clipping
from fspo.files import local_path
from fspo.losses import ALGORITHMS
from recipe.fspo.compare.__main__ import FAIR
from recipe.fspo.config import complete_loss
from recipe.fspo.config import problems as problems_of_settings
from recipe.fspo.main import JOB
from recipe.runner.launch import checks
from recipe.runner.launch.start import check, prepare
from recipe.runner.launch.values import PreflightError

Problems = Callable[..., list[str]]
#: As many problems as one step needs, so that they are written quickly.
SMALL_TASK = ["fspo.offline_task.n_train=32", "fspo.offline_task.n_test=8"]
#: Micro-batches by number of sequences, as on machines without remove-padding; the demo packs them by tokens.
BY_SEQUENCES = ["actor_rollout_ref.actor.use_dynamic_bsz=false"]


@pytest.fixture
def problems(tmp_path: Path) -> Problems:
    """Runs every check on the demo with some overrides, and returns what they said."""

    def find(*overrides: str) -> list[str]:
        config = composed(f"fspo.run_dir={tmp_path}", *SMALL_TASK, *overrides)
        try:
            prepare(config)
            checks.check(config, problems_of_settings)
        except PreflightError as error:
            return list(error.problems)
        return []

    return find


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / group).glob("*.yaml"))


@pytest.mark.parametrize("algo", options("algo"))
def test_every_algorithm_passes_on_the_demo(problems: Problems, algo: str) -> None:
    assert problems(f"algo={algo}") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        *((*asynchronous.DESIGN, *condition) for condition in asynchronous.CONDITIONS.values()),
        *((*clipping.DESIGN, *candidate) for candidate in clipping.CANDIDATES.values()),
    ],
)
def test_every_condition_of_the_studies_passes(problems: Problems, overrides: tuple[str, ...]) -> None:
    assert problems(*FAIR, *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["actor_rollout_ref.model.path=/no/such/model"], r"model\.path='/no/such/model'"),
        (["fspo.offline_task=null", "data.train_files=/no/such.parquet"], r"/no/such\.parquet"),
        (["data.val_files=file:///no/such.parquet"], r"data\.val_files: /no/such\.parquet does not exist"),
        (["data.val_files=null"], r"data\.val_files names no file"),
        (["data.train_max_samples=8"], r"32 rows, of which 8 are taken \(data\.train_max_samples\), but at least 32 "),
        (["+actor_rollout_ref.model.tokenizer_path=./none"], r"model\.tokenizer_path='\./none' is not a folder"),
        (["data.train_batch_size=30"], r"train_batch_size=30 is not a multiple of .*ppo_mini_batch_size=8"),
        (
            ["trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.fsdp_config.fsdp_size=3"],
            r"n_gpus_per_node=4 is not a multiple of actor\.fsdp_config\.fsdp_size=3",
        ),
        (["algorithm.adv_estimator=foo"], r"adv_estimator=foo is not known; choose one of .*grpo, "),
        (["trainer.critic_warmup=5"], r"critic_warmup=5 .*adv_estimator=grpo there is none: set it to 0"),
        (["trainer.n_gpus_per_node=3"], r"rollout\.n=64 is not a multiple of .*n_gpus_per_node=3"),
        ([*BY_SEQUENCES, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=48"], r"=64 is not a multiple of .*=48"),
        ([*BY_SEQUENCES], r"ppo_micro_batch_size_per_gpu"),
        (["data.max_response_length=600"], r"616 .*max_position_embeddings = 512"),
        (["actor_rollout_ref.rollout.max_model_len=128"], r"max_model_len = 128"),
        (["fspo.offline_task.n_train=16"], r"16 rows.* 32 "),
        (["actor_rollout_ref.actor.checkpoint.async_save=true"], r"async_save=true"),
        (["fspo.drop=fairly"], r"fspo\.drop=fairly must be stale or evenly"),
        (["fspo.hang_after_s=soon"], r"fspo\.hang_after_s=soon must be a number of seconds from 10 on"),
        (["fspo.drop=evenly"], r"fspo\.drop=evenly has no effect with mode=sync"),
        (
            ["mode=colocate_async", "fspo.drop=evenly", "trainer.v1.sampler.max_off_policy_strategy=wait"],
            r"fspo\.drop=evenly has no effect with max_off_policy_strategy=wait",
        ),
        (["trainer.max_actor_ckpt_to_keep=1"], r"max_actor_ckpt_to_keep=1"),
        (["algo=rloo", "actor_rollout_ref.rollout.n=1"], r"rollout\.n=1: set it to 2 or more"),
        (["actor_rollout_ref.rollout.top_p=0.9"], r"top_p=0\.9 .*set it to 1"),
        (["actor_rollout_ref.rollout.top_k=50"], r"top_k=50 .*set it to -1"),
        (["actor_rollout_ref.rollout.temperature=0"], r"temperature=0 "),
        (["actor_rollout_ref.actor.clip_ratio_high=0.28"], r"clip_ratio_high=0\.28 is ignored by loss_mode=fspo"),
        (["actor_rollout_ref.actor.clip_ratio_c=5"], r"clip_ratio_c=5 is ignored by loss_mode=fspo"),
        (["algo=gspo_verl", "actor_rollout_ref.actor.clip_ratio_c=5"], r"clip_ratio_c=5 is ignored by verl's gspo"),
        (["algo=gspo_verl", "actor_rollout_ref.actor.clip_ratio_low=0.2"], r"clip_ratio_low=0\.2 .*3e-4"),
        (
            ["algo=sapo", "actor_rollout_ref.actor.clip_ratio_low=0.1"],
            r"low=0\.1 is ignored by loss_mode=sapo, .* tau_pos",
        ),
        (["algo=cispo", "actor_rollout_ref.actor.clip_ratio=0.1"], r"clip_ratio=0\.1 is ignored by loss_mode=cispo"),
        (["algo=cispo", "actor_rollout_ref.actor.tau_neg=2"], r"tau_neg=2 is ignored by loss_mode=cispo, which reads"),
        (
            ["algo=vespo", "actor_rollout_ref.actor.clip_ratio_high=0.3"],
            r"clip_ratio_high=0\.3 is ignored by .*vespo: ",
        ),
        (["algo=vespo", "actor_rollout_ref.actor.policy_loss.k_pos=0"], r"VespoLossConfig: k_pos=0 must be a finite"),
        (["algo=ctpo_la", "+actor_rollout_ref.actor.policy_loss.clip_hihg=1"], r"no field clip_hihg \(did you mean"),
        (["algo=ctpo_la", "algorithm.rollout_correction.rollout_is=token"], r"rollout_is='token' .*'sequence'"),
        (
            ["algo=vespo", "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=1024"],
            r"=2048 differs from .*=1024",
        ),
        (["actor_rollout_ref.actor.policy_loss.clip_low=3e-4"], r"clip_low=0\.0003 .*band=linear"),
        (["algo=gspo", "actor_rollout_ref.actor.policy_loss.clip_high=0.03"], r"clip_high=0\.03 .*band=sqrt"),
        (["actor_rollout_ref.actor.policy_loss.clip_low=-1"], r"policy_loss\.clip_low=-1"),
        (["+actor_rollout_ref.actor.policy_loss.clip=1"], r"has no key clip; the keys are"),
        (["actor_rollout_ref.actor.policy_loss.drift=ema"], r"policy_loss\.drift='ema'"),
        (
            [
                *BY_SEQUENCES,
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
            ],
            r"=64 differs from .*=32",
        ),
        (["actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=1024"], r"=2048 differs from .*=1024"),
        (["algorithm.rollout_correction.bypass_mode=true"], r"bypass_mode=true"),
        (["algorithm.rollout_correction.rollout_is=token"], r"rollout_is='token' .*'sequence'"),
        (["algorithm.rollout_correction.rollout_rs='seq_sum_k1,token_k1'"], r"rollout_rs=.*token_k1 removes single"),
        (["algorithm.rollout_correction.rollout_rs=seq_mean_k3"], r"rollout_rs_threshold must be provided"),
        (["algorithm.rollout_correction.rollout_rs=seq_mean"], r"rollout_rs"),
        (
            ["algorithm.rollout_correction.rollout_is=sequence", "algorithm.rollout_correction.rollout_is_threshold=0"],
            r"algorithm\.rollout_correction: rollout_is_threshold upper bound must be positive",
        ),
        (["algorithm.rollout_correction.rollout_is=sequence", "fspo.pi_old=rollout"], r"no effect with fspo\.pi_old="),
        (
            [
                "algorithm.rollout_correction.rollout_is=sequence",
                "actor_rollout_ref.rollout.calculate_log_probs=false",
            ],
            r"no effect with .*calculate_log_probs=false",
        ),
        (["match_scale=matched", "fspo.reference_length=null"], r"reference_length=None: match_scale=matched"),
    ],
)
def test_bad_input_is_named_with_its_remedy(problems: Problems, overrides: list[str], says: str) -> None:
    found = problems(*overrides)
    assert any(re.search(says, problem) for problem in found), found


@pytest.mark.parametrize(
    ("key", "values"),
    {
        "data.train_batch_size": "0 -8 abc null",
        "data.max_response_length": "0 null",
        "actor_rollout_ref.rollout.n": "2.5 true",
        "actor_rollout_ref.rollout.val_kwargs.n": "0 abc",
        "actor_rollout_ref.rollout.temperature": "0 hot",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "7 0 abc",
        "actor_rollout_ref.actor.ppo_epochs": "0",
        "actor_rollout_ref.actor.grad_clip": "-1 null",
        "actor_rollout_ref.actor.policy_loss.clip_low": "abc",
        "actor_rollout_ref.model.path": "null",
        "reward.num_workers": "0",
        "seed": "-1 abc null",
        "trainer.nnodes": "abc",
        "trainer.total_training_steps": "0 -3 abc",
        "trainer.save_freq": "null -2",
        "trainer.logger": "null",
        "trainer.resume_mode": "foo",
        "fspo.wait_for_resources_s": "abc",
        "fspo.window_steps": "0",
        "fspo.lre_bins": "0",
        "fspo.calibration_rounds": "abc",
        "fspo.restarts": "abc -1",
        "trainer.v1.colocate_async.num_warmup_batches": "abc -1 null",
    }.items(),
)
def test_a_value_of_another_kind_or_out_of_range_is_named(problems: Problems, key: str, values: str) -> None:
    for value in values.split():
        (found,) = problems(f"{key}={value}")
        assert found.lower().startswith(f"{key}={value} must be "), found


def test_all_problems_are_told_at_once(problems: Problems) -> None:
    found = problems("data.train_batch_size=30", "actor_rollout_ref.rollout.top_p=0.9")
    assert len(found) == 2
    assert len(problems("data.train_batch_size=0", "seed=abc")) == 2


def test_empty_and_broken_data_files(problems: Problems, tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet")
    assert any("not a readable parquet" in p for p in problems("fspo.offline_task=null", f"data.train_files={broken}"))
    import pyarrow as pa
    import pyarrow.parquet as pq

    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"question": ["1+1"]}), foreign)
    found = problems("fspo.offline_task=null", f"data.train_files={foreign}", f"data.val_files={foreign}")
    assert any("has no column data_source, prompt, reward_model" in problem for problem in found)


def test_the_files_of_a_list_are_checked_one_by_one_and_together(problems: Problems, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = {}
    for name, truth in (("text", "1"), ("number", 1)):
        prompt, answer = [{"role": "user", "content": "1"}], {"ground_truth": truth}
        rows = [{"data_source": "own", "prompt": prompt, "reward_model": answer}] * 16
        files[name] = tmp_path / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), files[name])
    assert problems(f"data.train_files=[{files['text']},{files['text']}]", f"data.val_files={files['text']}") == []
    (found,) = problems(f"data.val_files={files['number']}")
    assert f"{files['number']} has reward_model.ground_truth of type int64, and the recipe's own reward" in found
    (tmp_path / "reward.py").write_text("def compute_score(**row):\n    return 1.0\n")
    own = f"reward.custom_reward_function.path={tmp_path}/reward.py"
    assert problems(f"data.val_files={files['number']}", own) == [], "another reward may read numbers"
    (tmp_path / "cut.jsonl").write_text('{"data_source": "own", "pro')
    (found,) = problems(f"data.val_files={tmp_path}/cut.jsonl")
    assert found.startswith(f"data.val_files: {tmp_path}/cut.jsonl is not a readable JSON file")
    (found,) = problems(f"data.train_files=[{files['text']},{files['number']}]", own)
    assert found.startswith(f"data.train_files: reward_model.ground_truth is string in {files['text']} and int64 in ")
    (found,) = problems(f"data.train_files=[{files['text']},{tmp_path}/no.parquet]")
    assert "no.parquet does not exist" in found


def test_model_folder_without_weights(problems: Problems, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert any("no config.json" in p for p in problems(f"actor_rollout_ref.model.path={tmp_path}/model"))
    (tmp_path / "model" / "config.json").write_text("{}")
    assert any("no weights" in p for p in problems(f"actor_rollout_ref.model.path={tmp_path}/model"))


def test_what_only_verl_refuses_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    refused = [*BY_SEQUENCES, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"]
    refused.append("actor_rollout_ref.rollout.log_prob_micro_batch_size=4")
    config = composed(f"fspo.run_dir={tmp_path}", *SMALL_TASK, *refused)
    prepare(config)
    says = r"error: verl refuses the configuration: .*log_prob_micro_batch_size"
    with pytest.raises(PreflightError, match=says):
        check(config, JOB)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("actor_rollout_ref.actor.loss_agg_mode=foo", "loss_agg_mode: foo"),
        ("+actor_rollout_ref.actor.nonsense=1", "'nonsense'"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=foo", "FSDPOptimizerConfig"),
        ("actor_rollout_ref.actor.fsdp_config.strategy=foo", "foo"),
    ],
)
def test_what_a_dataclass_of_verls_refuses_is_said_in_its_words(tmp_path: Path, override: str, says: str) -> None:
    config = composed(f"fspo.run_dir={tmp_path}", *SMALL_TASK, override)
    prepare(config)
    with pytest.raises(PreflightError) as refused:
        check(config, JOB)
    assert str(refused.value).startswith("error: verl refuses the configuration: ") and says in str(refused.value)


@pytest.mark.parametrize(
    ("address", "variable", "prepared"),
    [
        (None, None, "local"),  # by itself Ray would join what the temp folder names
        (None, "", "local"),
        ("local", "10.0.0.1:6379", "local"),
        (None, "10.0.0.1:6379", None),
        ("auto", None, "auto"),
        ("10.0.0.1:6379", None, "10.0.0.1:6379"),
    ],
)
def test_a_run_starts_a_ray_of_its_own_unless_it_is_told_a_cluster(
    address: str | None, variable: str | None, prepared: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setenv("FSPO_RUN_ID", "a-run")
    key = "ray_kwargs.ray_init.address"
    override = f"~{key}" if address is None else f"{key}={address}"  # no experiment but the demo has it
    config = composed(f"fspo.run_dir={tmp_path}", *SMALL_TASK, override)
    prepare(config)
    ray_init = config.ray_kwargs.ray_init
    assert ray_init.get("address") == prepared
    starts = prepared == "local"
    assert ("num_cpus" in ray_init) == ("num_gpus" in ray_init) == starts, "ray.init refuses both where it joins"
    assert ("FSPO_RUN_ID" in ray_init.runtime_env.env_vars) != starts


def test_package_paths_become_folders() -> None:
    assert Path(local_path("pkg://fspo.data/assets")).is_dir()
    assert local_path("/a/b") == "/a/b"


@pytest.mark.parametrize(("algo", "multiplier"), [("fspo", 1 / 60), ("rloo", 1 / 60), ("gspo", 1), ("grpo", None)])
def test_matched_gradient_scale_divides_the_token_sums(algo: str, multiplier: float | None) -> None:
    config = composed(f"algo={algo}", "match_scale=matched", "fspo.run_dir=/nowhere")
    complete_loss(config)
    found = config.actor_rollout_ref.actor.policy_loss.get("grad_multiplier")
    assert found == (None if multiplier is None else pytest.approx(multiplier))


def test_one_key_turns_a_loss_of_verls_into_one_of_the_librarys() -> None:
    config = composed("algo=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=fspo", "fspo.run_dir=/nowhere")
    assert list(problems_of_settings(config)) == []
    complete_loss(config)
    assert instantiate(config.actor_rollout_ref.actor.policy_loss).settings() == ALGORITHMS["fspo"]


def test_the_active_band_has_a_window_of_its_own_unless_another_is_given() -> None:
    given = ["algo=fspo_active", "fspo.run_dir=/nowhere"]
    assert composed(*given).fspo.calibration_rounds == 3 < composed("fspo.run_dir=/nowhere").fspo.calibration_rounds
    assert composed(*given, "fspo.calibration_rounds=5").fspo.calibration_rounds == 5


def test_a_run_names_every_setting_of_its_loss() -> None:
    config = composed("algo=rloo", "fspo.run_dir=/nowhere", "actor_rollout_ref.actor.policy_loss.clip_high=0.3")
    complete_loss(config)
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    named = {field.name: policy_loss[field.name] for field in dataclasses.fields(ALGORITHMS["seq_rloo"])}
    assert named == dataclasses.asdict(ALGORITHMS["seq_rloo"]) | {"clip_high": 0.3}


def test_the_packages_that_only_a_gpu_has_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [composed("experiment=qwen3_8b", *more) for more in ([], ["mode=separate_async"])]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    flash, *more = [problem for job in jobs for problem in checks.gpu_package_problems(job)]
    assert flash.startswith("flash-attn is not installed") and "requirements/gpu-flash-attn.txt" in flash
    assert more[0] == flash and "needs the package cupy" in more[1] and len(more) == 2
