"""Commands that the program refuses or takes, and what its sentence must hold, whatever its words.

A row is a command as in a shell and the parts of one sentence: key, value, remedy. Of rows that share a command, each
has a sentence that begins with a key of its own. The commands run in a folder with :data:`FILES`.
"""

from __future__ import annotations

from typing import Final

from recipe.fspo.job import choices

Row = tuple[str, ...]
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
LOSS, OPTIM = f"{ACTOR}.policy_loss", f"{ACTOR}.optim"
CORRECTION = "algorithm.rollout_correction"
REWARD, MANAGER = "reward.custom_reward_function", "reward.reward_manager"
BUFFER = "+reward.reward_kwargs.overlong_buffer_cfg"
Q8B = "experiment=qwen3_8b"
#: Micro-batches by number of sequences, as on machines without remove-padding; the demo packs them by tokens.
BY_SEQUENCES = f"{ACTOR}.use_dynamic_bsz=false"
ONE_UPDATE = f"{ACTOR}.ppo_mini_batch_size=32"

FILES: Final = {
    "broken.parquet": "not parquet",
    "foreign.jsonl": '{"question": "1 + 1"}',
    "data.csv": "prompt",
    "tools.yaml": "tools: []",
    "reward.py": (
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):\n"
        "    return float(solution_str != '')\n"
    ),
    "narrow.py": "def compute_score(solution_str):\n    return 0.0\n",
    "ends.py": "import os\nos._exit(7)\n",
    "managers.py": (
        "from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager\n"
        "class Mine(NaiveRewardManager): ...\n"
        "class Older:\n    def __call__(self, data): ...\n"
    ),
}

# ---------------------------------------------------------------- refused

#: Words of a command that are no overrides, or of no configuration.
ARGUMENTS: tuple[Row, ...] = (
    ("resume=.", "resume=/", "run.json"),
    ("algo=fspo,gspo", "algo=fspo,gspo", "recipe.fspo.compare"),
    ("--config-dir=mine", "--config-dir=mine", "hydra.searchpath"),
    ("--algo=gspo", "--algo=gspo", "algo=VALUE"),
    ("seed =1", "'=1'", "blank"),
    ("'data.train_batch_size=8\r'", "data.train_batch_size=8", "\\r"),
    ("dry_run=full", "dry_run=full", "true"),
    ("run=3", "run=3", "run.NAME=VALUE"),
    (f"{MODEL}.path=", f"{MODEL}.path=:", "a variable of the shell"),
    ("data.train_files=", "data.train_files=:", "a variable of the shell"),
    ("hydra.searchpath=[nowhere]", "nowhere", "folder"),
    ("~trainer.nnodes", "~trainer.nnodes: ", "leave it out"),
)

#: Keys and options that there are not.
KEYS: tuple[Row, ...] = (
    ("trainer.nothing_like_it=8", "trainer.nothing_like_it=8", "no such key"),
    (f"{OPTIM}.lrr=1", f"{OPTIM}.lrr=1", "no such key"),
    ("~trainer.nothing_like_it", "~trainer.nothing_like_it", "leave it out"),
    ("+data.train_batch_size=8", "+data.train_batch_size=8", "leave the + out"),
    ("trainer.logger.name=wandb", "trainer.logger.name", "trainer.logger=["),
    ("experiment=null", "experiment=null", "~experiment"),
    ("algo=fsop", "algo=fsop", *choices("algo")),
    ("~algo", "fspo.algo", "algo=NAME", "+fspo.algo=NAME"),
)

#: Values of another kind, by what they must be.
_KINDS: Final[dict[str, str]] = {
    "integer": f"{ROLLOUT}.n=2.5 {ACTOR}.ppo_epochs=1.5 critic.ppo_epochs=two trainer.save_freq=null seed=abc",
    "true or false": f"{ACTOR}.use_kl_loss=Flase evaluate=ture {ROLLOUT}.enforce_eager=1 fspo.kl_to_start=2",
    "number": f"{ROLLOUT}.temperature=hot {OPTIM}.lr=abc {LOSS}.c_low=a",
    "list of float, float": f"{OPTIM}.betas=0.9",
    "string": "trainer.logger=[1] data.prompt_key=[a]",
    "dictionary": f"+{REWARD}.reward_kwargs=2",
}
VALUES: tuple[Row, ...] = (
    *(
        (override, f"{override.partition('=')[0].lstrip('+')}=", kind)
        for kind, overrides in _KINDS.items()
        for override in overrides.split()
    ),
    (f"{OPTIM}.lr=0.1", f"{OPTIM}.lr=0.1 ", "less than 0.01"),
    ("trainer.default_local_dir=/elsewhere", "default_local_dir=/elsewhere", "run.dir=FOLDER"),
)

#: What contradicts itself, or is not served.
CHECKS: tuple[Row, ...] = (
    # arithmetic
    ("data.train_batch_size=30", "train_batch_size=30 ", "ppo_mini_batch_size=8"),
    (f"trainer.n_gpus_per_node=4 {ACTOR}.fsdp_config.fsdp_size=3", "n_gpus_per_node=4 ", "fsdp_size=3"),
    ("trainer.n_gpus_per_node=3", "rollout.n=64 ", "n_gpus_per_node=3"),
    (f"{BY_SEQUENCES} {ACTOR}.ppo_micro_batch_size_per_gpu=48", "=64 ", "batch_size_per_gpu=48"),
    ("data.max_response_length=600", "= 616 ", "max_position_embeddings = 512", "shorten data.max_response_length"),
    (f"{ROLLOUT}.max_model_len=128", "= 272 ", "rollout.max_model_len = 128", "max_model_len=272"),
    (
        f"{ACTOR}.ulysses_sequence_parallel_size=2 {ACTOR}.ppo_max_token_len_per_gpu=100",
        *("= 272 ", "actor.ppo_max_token_len_per_gpu = 100", "2 Ulysses", "ppo_max_token_len_per_gpu=136"),
    ),
    (f"{ROLLOUT}.tensor_model_parallel_size=3", "parallel_size=3 ", "heads", "set it to 2"),
    (f"{ROLLOUT}.n=abc {ROLLOUT}.name=sglang", f"{ROLLOUT}.name=sglang ", "set it to vllm"),
    # lost work, wrong numbers
    (f"{ROLLOUT}.val_kwargs.n=2 {ROLLOUT}.val_kwargs.temperature=0", "val_kwargs.n=2 ", "temperature=0", "1.0"),
    (f"{ACTOR}.checkpoint.async_save=true", "async_save=true", "set it to false"),
    ("trainer.max_actor_ckpt_to_keep=1", "max_actor_ckpt_to_keep=1 ", "2 or more"),
    ("trainer.resume_from_path=/x/global_step_100", "global_step_100", "resume_mode=auto", "resume_mode=resume_path"),
    (f"{Q8B} {OPTIM}.lr_warmup_steps_ratio=0.05", "steps_ratio=0.05", "warmup_steps=10", "lr_warmup_steps=-1"),
    (f"{Q8B} {OPTIM}.min_lr_ratio=0.1", "min_lr_ratio=0.1", "constant", "scheduler_type=cosine"),
    (f"{ACTOR}.grad_clip=0.5", "grad_clip=0.5", f"{OPTIM}.clip_grad"),
    (f"{ACTOR}.kl_loss_coef=0.01", "kl_loss_coef=0.01", "use_kl_loss=false", "use_kl_loss=true"),
    ("algorithm.kl_ctrl.kl_coef=0.05", "kl_coef=0.05", "use_kl_in_reward=false", "use_kl_in_reward=true"),
    (
        "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.0",
        *("kl_ctrl.kl_coef=0.0 ", "use_kl_in_reward=true", "0.001"),
    ),
    # agents
    (f"{ROLLOUT}.agent.default_agent_loop=tool_agnet", "=tool_agnet ", "tool_agent", "agent_loop_config_path"),
    (f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml", "/tools.yaml: ", "one turn", "default_agent_loop=tool_agent"),
    # the method
    (f"algo=fspo {ONE_UPDATE}", f"{ONE_UPDATE} ", "data.train_batch_size=32", "algo=unclipped"),
    (f"algo=rloo {ROLLOUT}.n=1", "adv_estimator=rloo ", "rollout.n=1", "2 or more"),
    (f"{ROLLOUT}.top_p=0.9", "rollout.top_p=0.9 ", "top_p=1 "),
    (f"algo=gspo_verl {ACTOR}.clip_ratio_low=0.2", "clip_ratio_low=0.2 ", "3e-4"),
    (f"{LOSS}.c_low=3e-4", f"{LOSS}.c_low=0.0003 ", "nearly every", "0.03"),
    (f"algo=gspo {LOSS}.c_high=0.03", f"{LOSS}.c_high=0.03 ", "4e-4"),
    (f"{LOSS}.exponent=2", f"{LOSS}.c_low=0.03 ", "never clip", "256 tokens"),
    (f"{LOSS}.exponent=-1", f"{LOSS}.exponent=-1", "0.5"),
    (f"+{LOSS}.clip=1", f"{LOSS}: ", "'clip'", "docs/algorithms.md"),
    *(
        (f"{LOSS}.loss_mode={loss} {ACTOR}.{key}=0.28", f"{key}=0.28 ", f"loss_mode={loss}", "policy_loss.c_low")
        for loss, key in (("fspo", "clip_ratio_high"), ("seq_gspo", "clip_ratio_low"), ("luspo", "clip_ratio"))
    ),
    (
        f"{BY_SEQUENCES} {ACTOR}.ppo_micro_batch_size_per_gpu=64 {ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
        *("ppo_micro_batch_size_per_gpu=64 ", "log_prob_micro_batch_size_per_gpu=32"),
    ),
    (f"{CORRECTION}.rollout_rs=\\'seq_sum_k1,token_k1\\'", "rollout_rs=seq_sum_k1,token_k1 ", "seq_..."),
    (
        "trainer.v1.trainer_mode=fspo_separate_async fspo.allow_uncorrected=true",
        *(f"{ROLLOUT}.nnodes=0", "trainer_mode=fspo_separate_async", "mode=separate_async"),
    ),
    # weights or probabilities that are not the trainer's (verl#7495, vime#64)
    (
        f"mode=separate_async {MODEL}.lora_rank=8",
        *(f"{MODEL}.lora_rank=8 ", f"{MODEL}.lora.merge=true", "mode=colocate_async"),
    ),
    *(
        (f"{mode} trainer.v1.sampler.max_off_policy_threshold={age}", f"max_off_policy_threshold={age} ", "1", "null")
        for mode, age in (("mode=colocate_async", 0), ("mode=sync", -1))
    ),
    (f"{ROLLOUT}.temperature=1e-6", f"{ROLLOUT}.temperature=1e-06 ", "0.01"),
    (
        f"mode=colocate_async {ROLLOUT}.temperature=0.6 {ROLLOUT}.logprobs_mode=raw_logprobs",
        *(f"{ROLLOUT}.logprobs_mode=raw_logprobs ", "temperature=0.6", "processed_logprobs"),
    ),
    (f"mode=separate_async {CORRECTION}.rollout_rs=null", "rollout_rs=null ", "seq_sqrt_k1", "allow_uncorrected=true"),
    (f"{CORRECTION}.rollout_is=sequence {ROLLOUT}.calculate_log_probs=false", "log_probs=false", CORRECTION, "true"),
    ("fspo.accept=1.2", "fspo.accept=1.2 ", "less than 1"),
    (f"fspo.clip_values=measured algo=gspo {LOSS}.c_low=0.001", "fspo.clip_values=measured", "c_low=0.001", "leave"),
    # an update
    ("algorithm.adv_estimator=foo", "adv_estimator=foo ", "grpo, "),
    (f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_type=full", f"{ACTOR}.kl_loss_type=full ", "low_var_kl, k3"),
    ("algorithm.use_kl_in_reward=true algorithm.kl_penalty=k9", "algorithm.kl_penalty=k9 ", "low_var_kl, k3"),
    (f"algo=grpo {LOSS}.loss_mode=dro", "policy_loss.loss_mode=dro ", "policy_loss.dro_beta"),
    (f"{LOSS}.loss_mode=nobody", "policy_loss.loss_mode=nobody ", "external_lib", "seq_gspo"),
    (
        f"{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_threshold=0",
        *(f"{CORRECTION}.rollout_is=sequence ", "rollout_is_threshold=0", "positive"),
    ),
    (f"{ACTOR}.loss_agg_mode=foo", "loss_agg_mode: foo"),  # verl's words
    (f"{ROLLOUT}.mode=sync", "verl refuses", "mode=async"),
    (f"{LOSS}._target_=nowhere.Mine", f"{LOSS}._target_=nowhere.Mine ", "loss_mode=fspo", "leave _target_ out"),
    (f"{MODEL}.external_lib=nowhere", "external_lib=nowhere ", "install"),
)

#: Data files and rewards.
INPUTS: tuple[Row, ...] = (
    ("data.val_files=null", "data.val_files", "0 rows", "give more data"),
    ("data.train_max_samples=8", "data.train_files: ", "8 are taken", "data.train_batch_size"),
    ("data.val_files=broken.parquet", "data.val_files: ", "/broken.parquet", "not a Parquet file"),
    ("data.val_files=foreign.jsonl", "data.val_files: ", "/foreign.jsonl", "no column prompt", "data.md"),
    ("data.val_files=data.csv", "data.val_files: ", "/data.csv", ".parquet"),
    ("data.val_files=zero.parquet", "data.val_files", "/zero.parquet", "no rows"),
    (f"+{REWARD}.reward_kwargs.overlong_bufer=64", "overlong_bufer", "overlong_buffer"),
    (f"{REWARD}.path=reward.py {REWARD}.name=score", f"{REWARD}.path='", "/reward.py', name='score'"),
    (f"{REWARD}.path=ends.py", "/ends.py'", " 7"),
    (f"+{REWARD}.reward_kwargs.place=1 {REWARD}.path=narrow.py", "/narrow.py'", "place"),
    (f"{BUFFER}.enable=true {BUFFER}.len=512", "overlong_buffer_cfg", f"{REWARD}.reward_kwargs.overlong_buffer=TOKENS"),
    ("reward.reward_model.enable=true", "enable=true", "model_path"),
    (
        "reward.reward_model.enable=true reward.reward_model.model_path=/rm",
        *("enable=true", f"{REWARD}.path=null"),
    ),
    (f"{MANAGER}.name=gdpo", f"{MANAGER}.name=gdpo ", "source=register"),
    (f"{MANAGER}.source=register {MANAGER}.name=niave", "name=niave ", "naive", "dapo"),
    (f"{MANAGER}.module.path=managers.py {MANAGER}.name=Older", f"{MANAGER}.name=Older ", "/managers.py", "run_single"),
)

#: What docs/settings.md lists as refused: a command, and a part of the sentence.
NOT_SERVED: Final[dict[str, str]] = {
    "trainer.v1.trainer_mode=sync": "trainer_mode=sync",
    "model_engine=megatron": "model_engine=megatron",
    f"{ACTOR}.strategy=veomni": "strategy=veomni",
    f"{ROLLOUT}.name=sglang": "rollout.name=sglang",
    f"trainer.n_gpus_per_node=2 {ACTOR}.ulysses_sequence_parallel_size=2": "ulysses_sequence_parallel_size=2",
    f"{ROLLOUT}.full_determinism=true": "full_determinism",
    f"{ACTOR}.ppo_mini_batch_size=32": "algo=unclipped",
    f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_coef=0": "kl_loss_coef=0",
    "algorithm.adv_estimator=gae": "adv_estimator=gae",
    "algorithm.rollout_correction.rollout_is=token": "rollout_is=token",
}

#: Rows that need a command of their own, and tables of rows that do not concern each other.
ALONE: Final = (*ARGUMENTS, *CHECKS, *INPUTS)
TOGETHER: Final = (KEYS, VALUES)

#: What only the run's machine can settle; a dry run for another machine lists it.
UNSETTLED: tuple[Row, ...] = (
    *(
        (f"{ROLLOUT}.agent.default_agent_loop=tool_agent {ROLLOUT}.{key}=/no/such", f"{key}=/no/such", "correct")
        for key in ("multi_turn.tool_config_path", "multi_turn.function_tool_path", "agent.agent_loop_config_path")
    ),
    (f"{MODEL}.lora_rank=8 {MODEL}.lora_adapter_path=./none", f"{MODEL}.lora_adapter_path=./none", "correct"),
    (f"{MODEL}.path=/no/such/model", "model.path='/no/such/model'", "hub"),
    ("data.val_files=file:///no/such.parquet", "data.val_files", "/no/such.parquet"),
    ("trainer.max_actor_ckpt_to_keep=9999999", "9999999 checkpoint(s)", "make room"),
)

# ---------------------------------------------------------------- taken without a word

TAKEN: tuple[str, ...] = (
    *(f"algo={algo}" for algo in choices("algo")),
    f"{ONE_UPDATE} {ROLLOUT}.calculate_log_probs=true fspo.pi_old=rollout",
    f"{ONE_UPDATE} mode=separate_async",
    f"{ACTOR}.use_kl_loss=true algorithm.use_kl_in_reward=true",  # with verl's coefficients
    f"{ACTOR}.kl_loss_coef=0 {ACTOR}.grad_clip=1.0 {Q8B} {OPTIM}.lr_scheduler_type=cosine {OPTIM}.min_lr_ratio=0.1",
    f"{OPTIM}.clip_grad=0.5 {ACTOR}.grad_clip=0.5",
    f"algo=grpo {ACTOR}.clip_ratio_high=0.28 {ACTOR}.loss_agg_mode=token-mean",
    f"{CORRECTION}.rollout_rs=seq_sqrt_k1 {CORRECTION}.rollout_rs_threshold=3",
    f"{BUFFER}.enable=true {MANAGER}.source=register {MANAGER}.name=dapo",
    f"{BUFFER}.enable=false {BUFFER}.len=512",
    f"reward.reward_model.enable=true {REWARD}.path=null reward.reward_model.model_path=/rm",
    f"{ROLLOUT}.agent.default_agent_loop=tool_agent {ROLLOUT}.multi_turn.tool_config_path=tools.yaml",
    f"{REWARD}.path=reward.py data.val_files=number.parquet",  # a reward of one's own may read numbers
    f"{MANAGER}.module.path=managers.py {MANAGER}.name=Mine",
    f"trainer.total_training_steps=null {ROLLOUT}.max_model_len=null +data.of_mine=true",
)
