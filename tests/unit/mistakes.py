"""Mistakes in commands that train: the words, and what the sentence that refuses them must hold.

A row of :data:`BOTH` is refused by one function in this recipe's command and in verl's own, of :data:`MAIN` by this
recipe's alone. The words come beside ``experiment=demo``, or in verl's own command beside :data:`PLAIN`.
"""

from __future__ import annotations

from typing import Final

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
LOSS, OPTIM = f"{ACTOR}.policy_loss", f"{ACTOR}.optim"
CORRECTION, REWARD = "algorithm.rollout_correction", "reward.custom_reward_function"
OURS = f"{LOSS}._target_=fspo.verl.SequencePolicyLossConfig"
VERLS = f"{LOSS}._target_=verl.workers.config.PolicyLossConfig"
DATA = "data.train_files=foreign.jsonl data.val_files=foreign.jsonl"
ROWS = "data.train_files=rows.jsonl data.val_files=rows.jsonl"
STALENESS = "trainer.v1.sampler.max_off_policy_threshold"
#: A right command of verl's own with a trainer and a loss of this recipe.
PLAIN: Final = (
    *("trainer.v1.trainer_mode=fspo", "algorithm.adv_estimator=grpo", f"{LOSS}.loss_mode=fspo", f"{ROLLOUT}.n=4"),
    *(OURS, f"{ROLLOUT}.name=vllm", f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_mini_batch_size=256"),
)

Row = tuple[str, ...]
#: What tests/promises/test_commands.py has not.
BOTH: Final[dict[str, tuple[Row, ...]]] = {
    "the loss": (
        (f"{MODEL}.external_lib=nowhere", "external_lib=nowhere ", "nowhere"),
        (f"++{LOSS}.exponent=3", f"{LOSS}.exponent=3"),
        (f"++{LOSS}.clip=1", f"{LOSS}: ", "'clip'"),
        ("+fspo.acept=0.5", "fspo.acept: ", "accept"),
        ("++fspo.accept=85", "accept=85 ", "0.85"),
        (f"++{LOSS}.c_low=0", "c_low=0 ", "clip nearly every"),
        (f"{VERLS} {LOSS}.loss_mode=gspo {ACTOR}.clip_ratio_low=null {ACTOR}.clip_ratio_high=null", "clip_ratio=0.2 "),
        ("++fspo=true", "fspo=True ", "dictionary"),
        (f"++{LOSS}.grad_scale=1", f"""'{LOSS}.grad_scale="1"'"""),
        (f"{OPTIM}.lr_scheduler_type=linear", f"{ACTOR}: ", OPTIM),
    ),
    "advantages, corrections, sampling": (
        ("algorithm.adv_estimator=gae", "adv_estimator=gae ", "grpo"),
        ("algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.9", "=reinforce_plus_plus ", "gamma=0.9"),
        (f"{CORRECTION}.rollout_rs=token_k1 {ROLLOUT}.calculate_log_probs=true", "rollout_rs=token_k1 ", "seq_"),
        (f"{ACTOR}.ppo_max_token_len_per_gpu=1000 {ROLLOUT}.log_prob_max_token_len_per_gpu=9000", "=1000 ", "=9000"),
        (f"{STALENESS}=0", f"{STALENESS}=0 ", "null"),
        (f"{ROLLOUT}.temperature=0.009", "temperature=0.009 ", "0.01"),
        (f"{ROLLOUT}.temperature=0.6 ++{ROLLOUT}.logprobs_mode=raw_logprobs", "raw_logprobs ", "processed_logprobs"),
        (f"{ROLLOUT}.logprobs_mode=processed_logits", "processed_logits ", "processed_logprobs"),
    ),
    "weights, rewards, tools, types": (
        (f"trainer.v1.trainer_mode=fspo_separate_async {MODEL}.lora_rank=8", "lora_rank=8 ", "lora.merge=true"),
        ("trainer.use_v1=false", "use_v1=false ", "leave it out"),
        ("reward.reward_model.enable=true", "enable=true without a model"),
        ("custom_reward_function.path=mine.py", "custom_reward_function.path=mine.py: ", "reward."),
        (f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml {DATA}", "tools.yaml: ", "default_agent_loop=tool_agent"),
        (f"{ACTOR}.use_kl_loss=Flase", "use_kl_loss=Flase ", "boolean"),
        ("++fspo.accept=much", "fspo.accept=much ", "number"),
        ("++fspo.accept=null", "fspo.accept=null ", "number"),
        (f"{ROLLOUT}.n=null", "rollout.n=null ", "integer"),
        (f"{ROLLOUT}.temperature=null", "temperature=null ", "number"),
        (f"{MODEL}.path=null", "model.path=null ", "string"),
        ("trainer.default_local_dir=null", "default_local_dir=null ", "string"),
        ("trainer.save_freq=null", "save_freq=null ", "integer"),
        (f"{MODEL}.path=${{oc.env:NOPE}}", "model.path=", "NOPE"),
        ("data.train_batch_size=0", "train_batch_size=0 ", "greater than 0"),
        (f"data.max_response_length=0 ++{LOSS}.exponent=0.3", "max_response_length=0 ", "greater than 0"),
        (f"{ACTOR}.ppo_epochs=0", "ppo_epochs=0 ", "greater than 0"),
        ("++fspo.clip_values=mine", "fspo.clip_values=mine ", "measured"),
    ),
}
MAIN: Final[dict[str, tuple[Row, ...]]] = {
    "sizes, names, lost work, wrong numbers": (
        (f"trainer.n_gpus_per_node=4 {ACTOR}.fsdp_config.fsdp_size=3", "n_gpus_per_node=4:", "fsdp_size=3 "),
        (f"{ROLLOUT}.max_model_len=128", "= 272 ", "max_model_len = 128"),
        ("reward.reward_manager.source=register reward.reward_manager.name=niave", "name=niave ", "naive"),
        (f"{ROLLOUT}.response_length=32", "rollout.response_length=32 ", "data.max_response_length=256"),
        (f"{ROLLOUT}.prompt_length=4", "rollout.prompt_length=4 ", "data.max_prompt_length=16"),
        (f"{ACTOR}.checkpoint.save_contents=[modle]", "save_contents=['modle'] ", "[model,optimizer,extra]"),
        (f"{ACTOR}.checkpoint.load_contents=[extra]", "load_contents=['extra'] ", "[model,optimizer,extra]"),
        ("algorithm.adv_estimator=foo", "adv_estimator=foo ", "grpo"),
        (f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_type=full", "kl_loss_type=full"),
        (f"{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_threshold=0", "rollout_is=sequence", "positive"),
        (f"{ROLLOUT}.agent.agent_loop_config_path=/no/such", "agent_loop_config_path=/no/such ", "correct"),
        ("+ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=my.hook", "setup_hook=my.hook ", "leave it out"),
        (f"{ROLLOUT}.full_determinism=true", "full_determinism=true ", "advantages 0"),
        ("algorithm.kl_ctrl.kl_coef=0.05", "kl_coef=0.05 ", "use_kl_in_reward=true"),
        (f"{OPTIM}.lr_warmup_steps=10 {OPTIM}.lr_warmup_steps_ratio=0.05", "steps_ratio=0.05 ", "-1"),
        (f"{OPTIM}.min_lr_ratio=0.1", "min_lr_ratio=0.1 ", "cosine"),
    ),
    "model, data, reward": (
        (f"{MODEL}.path=/no/such/model", "model.path='/no/such/model' ", "config.json"),
        ("data.val_files=foreign.jsonl", "data.val_files: ", "foreign.jsonl", "no column prompt"),
        ("data.val_files=text.jsonl", "data.val_files: ", "text.jsonl", "row 1: reward_model"),
        ("data.val_files=untrue.jsonl", "data.val_files: ", "untrue.jsonl", "row 1: reward_model", "ground_truth"),
        ("data.val_files=none.parquet", "data.val_files: ", "none.parquet", "exist"),
        ("data.train_max_samples=8", "data.train_files: ", "8 rows", "32"),
        (f"{REWARD}.path=ends.py", "ends.py", " 7"),
        (f"{REWARD}.path=acc.py {ROWS} data.train_batch_size=1", "acc.py", "'yes'"),
        ("+reward.reward_kwargs.overlong_buffer_cfg.enable=true", "overlong_buffer_cfg", "overlong_buffer=TOKENS"),
    ),
}
_ROW: Final = '{"prompt": [{"content": "?"}], "data_source": "x", "reward_model": {"ground_truth": "1"}}\n'
FILES: Final = {
    "foreign.jsonl": '{"question": "1 + 1"}',
    "rows.jsonl": _ROW,
    "text.jsonl": _ROW + _ROW.replace('{"ground_truth": "1"}', '"1"'),
    "untrue.jsonl": _ROW + _ROW.replace("ground_truth", "truth"),
    "reward.py": "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.0\n",
    "narrow.py": "def compute_score(solution_str):\n    return 0.0\n",
    "acc.py": "def compute_score(**_): return {'score': 1.0, 'acc': 'yes'}\n",
    "ends.py": "import os\nos._exit(7)\n",
}
#: Taken without a word.
RIGHT: Final = (
    f"{ROLLOUT}.n=2 {ROLLOUT}.temperature=0.01 {STALENESS}=1",
    f"{CORRECTION}.rollout_rs=seq_sqrt_k1 {CORRECTION}.rollout_rs_threshold=3 {ROLLOUT}.calculate_log_probs=true",
    f"{CORRECTION}.bypass_mode=true {ROLLOUT}.calculate_log_probs=true",
    f"++{LOSS}.c_low=0.05 ++{LOSS}.exponent=0.43",
    f"{LOSS}.loss_mode=luspo",
    f"trainer.v1.trainer_mode=fspo_separate_async {MODEL}.lora_rank=8 {MODEL}.lora.merge=true {ROLLOUT}.nnodes=1",
    f"{ACTOR}.use_kl_loss=true algorithm.use_kl_in_reward=true",
    f"+data.of_mine=true trainer.total_training_steps=null {ACTOR}.clip_ratio_low=null {STALENESS}=null",
)
