"""A key that was given and that nothing reads is refused or noted, by its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from composing import composed, defaults_of
from hydra.errors import ConfigCompositionException
from messages import holds
from omegaconf import OmegaConf

from fspo.losses import ALGORITHMS
from recipe.fspo.job import JOB, compose
from recipe.runner.launch.compose import has_key, parsed
from recipe.runner.launch.no_effect import TABLE, judged, rows_of, values_of
from recipe.runner.launch.prepare import on_this_machine

ROOT = Path(__file__).resolve().parents[2]
Judged = Callable[..., tuple[list[str], list[str]]]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION, FILTER, REWARD = "algorithm.rollout_correction", "algorithm.filter_groups", "reward.custom_reward_function"
BUFFER = "+reward.reward_kwargs.overlong_buffer_cfg"
Q8B = "experiment=qwen3_8b"
PROFILED = "global_profiler.steps=[1] global_profiler.tool=torch"


@pytest.fixture
def judge(tmp_path: Path) -> Judged:
    """What is refused and what is noted of a command."""

    def sentences(*overrides: str, begun_with: Sequence[str] = ()) -> tuple[list[str], list[str]]:
        config = on_this_machine(composed(f"run.dir={tmp_path}", *overrides), elsewhere=True)
        return judged(config, JOB, parsed(overrides), defaults_of(*overrides), parsed(begun_with))

    return sentences


#: What is given, and what the one sentence must hold: key and value, what disables it, the remedy.
REFUSED = (
    ("trainer.resume_from_path=/x/global_step_100", "global_step_100", "resume_mode=auto", "resume_mode=resume_path"),
    ("trainer.resume_from_path=/x/global_step_100 trainer.resume_mode=auto", "resume_mode=resume_path"),
    ("trainer.use_v1=false", "use_v1=false", "verl.trainer.main_ppo"),
    (f"{Q8B} {ACTOR}.optim.lr_warmup_steps_ratio=0.05", "steps_ratio=0.05", "warmup_steps=10", "lr_warmup_steps=-1"),
    (f"{ACTOR}.kl_loss_coef=0.01", "kl_loss_coef=0.01", "use_kl_loss=false", "use_kl_loss=true"),
    (f"{ACTOR}.kl_loss_type=k3+", "kl_loss_type=k3+", "use_kl_loss=false", "use_kl_loss=true"),
    ("algorithm.kl_ctrl.kl_coef=0.05", "kl_coef=0.05", "use_kl_in_reward=false", "use_kl_in_reward=true"),
    ("algorithm.use_kl_in_reward=true algorithm.kl_ctrl.target_kl=0.2", "target_kl=0.2", "type=fixed", "type=adaptive"),
    (f"{CORRECTION}.rollout_is_threshold=3", "rollout_is_threshold=3", "rollout_is=null", "rollout_is=sequence"),
    (f"{CORRECTION}.rollout_rs_threshold=3", "rollout_rs_threshold=3", "rollout_rs=null", "rollout_rs=seq_sqrt_k1"),
    (f"{CORRECTION}.loss_type=reinforce", "loss_type=reinforce", "bypass_mode=false", "policy_loss.loss_mode"),
    (f"{FILTER}.metric=acc", "metric=acc", f"{FILTER}.enable=false", f"{FILTER}.enable=true"),
    ("reward.reward_model.model_path=/rm", "model_path=/rm", "reward_model.enable=false", "reward_model.enable=true"),
    ("actor_rollout_ref.model.lora_alpha=32", "lora_alpha=32", "lora_rank=0", "lora_rank"),
    (
        "reward.reward_model.enable=true",
        "enable=true",
        f"{REWARD}.path=pkg://recipe.math.reward",
        f"{REWARD}.path=null",
    ),
    (f"{BUFFER}.enable=true {BUFFER}.len=512", "enable=true", "len=512", f"{REWARD}.reward_kwargs.overlong_buffer="),
    ("+reward.reward_kwargs.mine=1", "mine=1", f"{REWARD}.reward_kwargs.overlong_buffer="),
    (f"{Q8B} {ACTOR}.optim.min_lr_ratio=0.1", "min_lr_ratio=0.1", "scheduler_type=constant", "scheduler_type=cosine"),
    (f"{ACTOR}.grad_clip=0.5", "grad_clip=0.5", f"{ACTOR}.optim.clip_grad=1.0", "give it as"),
    ("algorithm.lam=0.95", "lam=0.95", "adv_estimator=grpo", "gae"),
    (
        f"algo=sapo {ACTOR}.clip_ratio_high=0.28",
        "clip_ratio_high=0.28",
        "loss_mode=sapo",
        "policy_loss.loss_mode that reads it",
    ),
    (f"algo=grpo {ACTOR}.clip_ratio=0.3", "clip_ratio=0.3", "clip_ratio_low=0.2", "clip_ratio_high"),
    (f"algo=grpo {ACTOR}.loss_scale_factor=10", "factor=10", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    (f"{ACTOR}.freeze_vision_tower=true", "freeze_vision_tower=true", "leave it out"),
    ("algorithm.use_pf_ppo=true", "use_pf_ppo=true", "leave it out"),
    ("actor_rollout_ref.model.lora.rank=8", "lora.rank=8", "model.lora_rank"),
    (f"{ACTOR}.clip_ratio_high=0.28", "clip_ratio_high=0.28", "loss_mode=fspo", "policy_loss.c_low"),
)


@pytest.mark.parametrize("key", ["overlong_buffer.enable", "reward_kwargs.overlong_buffer_cfg.enable"])
@pytest.mark.parametrize("plus", ["", "+"])
def test_yesterdays_keys_of_an_overlong_buffer_name_the_setting_of_this_recipe(key: str, plus: str) -> None:
    with pytest.raises(ConfigCompositionException, match=holds("reward_model.", f"+{REWARD}.reward_kwargs.overlong")):
        compose([f"{plus}reward_model.{key}=true"])


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_what_would_change_the_training_is_refused_with_its_remedy(judge: Judged, case: tuple[str, ...]) -> None:
    refused, notes = judge(*case[0].split())
    (sentence,), _ = refused, notes
    assert all(part in sentence for part in case[1:]), sentence
    assert notes == []


#: What the run does anyway, or what changes no gradient; and the keys that the one note names.
NOTED = (
    (f"{Q8B} {ACTOR}.ppo_micro_batch_size_per_gpu=2", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    (f"{ACTOR}.use_dynamic_bsz=false {ACTOR}.ppo_max_token_len_per_gpu=999", f"{ACTOR}.ppo_max_token_len_per_gpu"),
    (f"{ACTOR}.kl_loss_coef=0.01 {ACTOR}.use_kl_loss=false", f"{ACTOR}.kl_loss_coef"),  # both given
    (f"{ACTOR}.kl_loss_coef=0", f"{ACTOR}.kl_loss_coef"),  # asks for nothing
    (f"{ACTOR}.kl_loss_type=low_var_kl", f"{ACTOR}.kl_loss_type"),  # as it is
    ("trainer.resume_from_path=/x trainer.resume_mode=disable", "trainer.resume_from_path"),
    (f"{Q8B} {ACTOR}.optim.lr_warmup_steps_ratio=0", f"{ACTOR}.optim.lr_warmup_steps_ratio"),
    (
        f"{ACTOR}.optim.lr_warmup_steps=5 {ACTOR}.optim.lr_warmup_steps_ratio=0.1",
        f"{ACTOR}.optim.lr_warmup_steps_ratio",
    ),
    (f"{BUFFER}.enable=false {BUFFER}.len=512", f"{BUFFER[1:]}.enable {BUFFER[1:]}.len"),
    (f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_low"),
    (f"{ACTOR}.clip_ratio_c=10 {ACTOR}.loss_agg_mode=token-mean", f"{ACTOR}.clip_ratio_c {ACTOR}.loss_agg_mode"),
    ("critic.optim.lr=1e-5 trainer.max_critic_ckpt_to_keep=3", "critic.optim.lr trainer.max_critic_ckpt_to_keep"),
    ("critic.enable=false critic.optim.min_lr_ratio=0.1", "critic.optim.min_lr_ratio"),
    (f"{ACTOR}.grad_clip=1.0", f"{ACTOR}.grad_clip"),
    (f"{ACTOR}.optim.clip_grad=0.5 {ACTOR}.grad_clip=0.5", f"{ACTOR}.grad_clip"),
    (
        f"{ACTOR}.fsdp_config.param_offload=true {ACTOR}.fsdp_config.offload_policy=true",
        f"{ACTOR}.fsdp_config.param_offload",
    ),
    ("actor_rollout_ref.ref.fsdp_config.param_offload=true", "actor_rollout_ref.ref.fsdp_config.param_offload"),
    (f"{ACTOR}.use_torch_compile=false", f"{ACTOR}.use_torch_compile"),
    (f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.val_kwargs.do_sample"),
    (f"{ROLLOUT}.val_kwargs.n=2 trainer.test_freq=-1 trainer.val_before_train=false", f"{ROLLOUT}.val_kwargs.n"),
    ("trainer.log_val_generations=10", "trainer.log_val_generations"),
    (f"{ROLLOUT}.multi_turn.max_user_turns=4", f"{ROLLOUT}.multi_turn.max_user_turns"),
    (f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.nnodes"),
    (f"{ROLLOUT}.layered_summon=true", f"{ROLLOUT}.layered_summon"),
    ("trainer.balance_batch=false", "trainer.balance_batch"),
    ("algo=rloo algorithm.norm_adv_by_std_in_grpo=false", "algorithm.norm_adv_by_std_in_grpo"),
    ("transfer_queue.enable=true", "transfer_queue.enable"),
    ("reward.sandbox_fusion.url=http://x", "reward.sandbox_fusion.url"),
    (
        "fspo.kl_to_start=false actor_rollout_ref.ref.fsdp_config.model_dtype=bf16",
        "actor_rollout_ref.ref.fsdp_config.model_dtype",
    ),
    (f"{FILTER}.enable=true {FILTER}.max_num_gen_batches=10", f"{FILTER}.max_num_gen_batches"),
    # What is below a switch that is off.
    ("reward.reward_model.rollout.n=2", "reward.reward_model.rollout.n"),
    ("transfer_queue.metrics.port=1", "transfer_queue.metrics.port"),
    ("actor_rollout_ref.ref.fsdp_config.qat.mode=x", "actor_rollout_ref.ref.fsdp_config.qat.mode"),
    # A profile needs the steps, a tool, and a role that is profiled.
    (f"{ACTOR}.profiler.enable=true {ACTOR}.profiler.ranks=[0]", f"{ACTOR}.profiler.enable {ACTOR}.profiler.ranks"),
    (PROFILED, "global_profiler.steps global_profiler.tool"),
    (
        f"{PROFILED} {ACTOR}.profiler.ranks=[0]",
        f"global_profiler.steps global_profiler.tool {ACTOR}.profiler.ranks",
    ),
)


@pytest.mark.parametrize("case", NOTED, ids=lambda case: case[0])
def test_one_note_names_what_changes_nothing(judge: Judged, case: tuple[str, str]) -> None:
    overrides, keys = case
    refused, (note,) = judge(*overrides.split())
    assert refused == [] and named(note) == keys.split()


def named(note: str) -> list[str]:
    """The keys of the note of keys that change nothing."""
    return note.partition(" here: ")[2].partition(" (docs/keys-without-effect.md)")[0].split(", ")


@pytest.mark.parametrize("loss", ALGORITHMS)
def test_no_loss_of_this_repository_reads_the_clip_range_of_verls(judge: Judged, loss: str) -> None:
    (sentence,), _ = judge(f"{ACTOR}.policy_loss.loss_mode={loss}", f"{ACTOR}.clip_ratio_high=0.28")
    assert f"loss_mode={loss}" in sentence and "policy_loss.c_low" in sentence


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        Q8B,
        "experiment=gpu_smoke",
        "trainer.use_v1=true",
        f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_coef=0.01 {ACTOR}.kl_loss_type=k1",
        "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.01",
        "trainer.resume_mode=resume_path trainer.resume_from_path=/x/global_step_1",
        f"{Q8B} {ACTOR}.optim.lr_warmup_steps=-1 {ACTOR}.optim.lr_warmup_steps_ratio=0.1",
        f"{ACTOR}.use_dynamic_bsz=false {ACTOR}.ppo_micro_batch_size_per_gpu=2",
        f"algo=grpo {ACTOR}.clip_ratio_high=0.28 {ACTOR}.loss_agg_mode=token-mean {ACTOR}.clip_ratio_c=10",
        f"{ACTOR}.entropy_coeff=0.01 {ACTOR}.loss_agg_mode=token-mean",
        f"{CORRECTION}.rollout_rs=seq_sqrt_k1 {CORRECTION}.rollout_rs_threshold=3",
        f"{BUFFER}.enable=true reward.reward_manager.source=register reward.reward_manager.name=dapo",
        f"reward.reward_model.enable=true {REWARD}.path=null reward.reward_model.model_path=/rm",
        "algorithm.adv_estimator=gae critic.optim.lr=1e-5",
        "data.train_batch_size=64",
        f"{Q8B} {ACTOR}.optim.lr_scheduler_type=cosine {ACTOR}.optim.min_lr_ratio=0.1",
        f"{ACTOR}.optim.clip_grad=0.5 {ACTOR}.fsdp_config.use_torch_compile=false",
        "algorithm.norm_adv_by_std_in_grpo=false",
        f"algo=grpo {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm {ACTOR}.loss_scale_factor=10",
        f"algo=cispo {ACTOR}.clip_ratio_low=5 {ACTOR}.clip_ratio_high=0.3",
        f"algo=sapo {ACTOR}.tau_pos=2",
        f"{ROLLOUT}.val_kwargs.temperature=0.6 {ROLLOUT}.val_kwargs.top_p=0.9",
        "trainer.log_val_generations=10 trainer.logger=[console,wandb]",
        "trainer.log_val_generations=10 trainer.logger=wandb",
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent {ROLLOUT}.multi_turn.max_user_turns=4",
        f"mode=separate_async {ROLLOUT}.nnodes=2 trainer.v1.separate_async.num_warmup_batches=2",
        "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_alpha=16",
        f"{PROFILED} {ACTOR}.profiler.enable=true {ACTOR}.profiler.ranks=[0]",
        f"{PROFILED} {ACTOR}.profiler.enable=true global_profiler.global_tool_config.precision_debugger.strict=true",
        "actor_rollout_ref.ref.fsdp_config.model_dtype=bf16",
        f"critic.enable=true {ROLLOUT}.prometheus.enable=false distillation.enabled=false",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",  # its enable=false is no switch
    ],
)
def test_a_key_that_is_read_gets_no_word(judge: Judged, overrides: str) -> None:
    assert judge(*overrides.split()) == ([], [])


@pytest.mark.parametrize(
    ("override", "is_noted"),
    [
        ("+trainer.use_legacy_worker_impl=disable", True),
        ("+async_training.of_nobody=4", True),
        ("+data.need_tools_kwargs=true", False),  # verl's data set asks for it
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.of_the_server=1", False),
        (f"+{REWARD}.reward_kwargs.of_the_function=1", False),
        ("++data.seed=3", False),
    ],
)
def test_an_added_key_that_no_code_has_is_noted(judge: Judged, override: str, is_noted: bool) -> None:
    assert_holds(judge(override), None, override.lstrip("+") if is_noted else None)


EPOCHS = ("data.train_batch_size=32", "data.offline_task.n_train=320")  # ten steps


@pytest.mark.parametrize(
    ("overrides", "refused", "noted"),
    [
        (("trainer.total_epochs=2",), None, "trainer.total_epochs"),  # the demo's 20 steps, as 2 epochs
        (("trainer.total_epochs=3",), None, "trainer.total_epochs"),
        (("trainer.total_epochs=1",), None, None),  # which end the run: it has an effect
        (("trainer.total_epochs=1", "trainer.total_training_steps=null"), None, None),
        (("trainer.total_epochs=1", "trainer.total_training_steps=30"), None, "trainer.total_training_steps"),
        (("trainer.total_epochs=2", "data.train_files=/no/such.parquet"), None, "trainer.total_epochs"),
    ],
)
def test_epochs_are_judged_by_the_length_of_the_data(
    judge: Judged, overrides: tuple[str, ...], refused: str | None, noted: str | None
) -> None:
    assert_holds(judge(*EPOCHS, *overrides), refused, noted)


def test_more_steps_than_the_epochs_have_are_refused(judge: Judged, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": []}\n' * 4)  # two steps an epoch, and 30 epochs
    file = f"data.train_files={tmp_path}/train.jsonl"
    judgement = judge("experiment=own", file, "data.train_batch_size=2", "trainer.total_training_steps=61")
    assert_holds(judgement, "total_training_steps=61: no effect with trainer.total_epochs=30", None)
    assert "total_training_steps=null" in judgement[0][0]


def assert_holds(judgement: tuple[list[str], list[str]], refused: str | None, noted: str | None) -> None:
    for sentences, part in zip(judgement, (refused, noted), strict=True):
        assert len(sentences) == (part is not None), judgement
        assert part is None or part in sentences[0]


def test_a_run_that_has_trained_without_a_key_goes_on(judge: Judged) -> None:
    kept = (f"{ACTOR}.kl_loss_coef=0.01",)
    assert_holds(judge(*kept, begun_with=kept), None, f"{ACTOR}.kl_loss_coef")
    assert_holds(judge(*kept), "kl_loss_coef=0.01", None)


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


def test_the_page_has_both_tables() -> None:
    page = (ROOT / "docs/keys-without-effect.md").read_text(encoding="utf-8")
    assert JOB.no_effect is not None
    for table in (TABLE, JOB.no_effect):
        assert f"```yaml\n{table.read_text(encoding='utf-8')}```\n" in page, "python -m benchmarks.settings writes it"
