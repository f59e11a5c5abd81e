"""Commands that the program refuses, notes or takes, and what its sentence must hold, whatever its words.

A row is a command as in a shell and the parts of one sentence: key, value, remedy. Each refusal has one row. Of rows
that share a command, each has a sentence that begins with a key of its own. The commands run in a folder with
:data:`FILES`.
"""

from __future__ import annotations

from typing import Final

from fspo.losses import ALGORITHMS
from recipe.fspo.job import choices

Row = tuple[str, ...]
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
LOSS, OPTIM = f"{ACTOR}.policy_loss", f"{ACTOR}.optim"
CORRECTION, FILTER = "algorithm.rollout_correction", "algorithm.filter_groups"
REWARD, MANAGER = "reward.custom_reward_function", "reward.reward_manager"
BUFFER = "+reward.reward_kwargs.overlong_buffer_cfg"
OURS = f"{REWARD}.reward_kwargs.overlong_buffer="
Q8B = "experiment=qwen3_8b"
#: Micro-batches by number of sequences, as on machines without remove-padding; the demo packs them by tokens.
BY_SEQUENCES = f"{ACTOR}.use_dynamic_bsz=false"
ONE_UPDATE = f"{ACTOR}.ppo_mini_batch_size=32"
PROFILED = "global_profiler.steps=[1] global_profiler.tool=torch"

FILES: Final = {
    "broken.parquet": "not parquet",
    "foreign.jsonl": '{"question": "1 + 1"}',
    "four.jsonl": '{"prompt": []}\n' * 4,
    "data.csv": "prompt",
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
    ("--multirun", "--multirun", "recipe.fspo.compare"),
    ("algo=fspo,gspo", "algo=fspo,gspo", "recipe.fspo.compare"),
    ("seed=1,2 dry_run=maybe", "seed=1,2", "recipe.fspo.compare"),
    ("--config-dir=mine", "--config-dir=mine", "hydra.searchpath", "--help"),
    ("trainer.logger=console,wandb", "trainer.logger=console,wandb", "[A,B]"),
    # as other programs take them
    ("--algo=gspo", "--algo=gspo", "algo=VALUE", "--help"),
    ("--learning_rate 1e-6", "--learning_rate", "learning_rate=VALUE"),
    ("seed =1", "'=1'", "blank"),
    *((f"{key}=1e-5", f"the key {key} ", "GROUP.NAME") for key in (f"{OPTIM}..lr", f"actor_rollout_ref/{OPTIM}")),
    (f"{OPTIM}.lr=1e\u22126", f"{OPTIM}.lr=1e\u22126", "value", "a text is"),
    *((f"{plus}algo=gspo", f"{plus}algo=gspo", "leave the + out") for plus in ("+", "++")),
    ("--config-name=ppo_megatron_trainer", "--config-name=ppo_megatron_trainer", "hydra.searchpath"),
    ("--config-path config", "--config-path=config", "hydra.searchpath"),
    ("'data.train_batch_size=8\r'", "data.train_batch_size=8", "\\r", "take it out"),
    ("' '", "' '", "backslash"),
    ("b.parquet]", "'b.parquet]'", "quotes"),
    ("trainer.experiment_name=a:(b)", "trainer.experiment_name=a:(b)", """'trainer.experiment_name='"'"'a:(b)"""),
    ("--cfg=hydra", "--cfg", "hydra", "job"),
    ("dry_run=ture", "dry_run=ture", "true"),
    ("run=3", "run=3", "run.NAME=VALUE"),
    ("run=null", "run=None", "run.dir=FOLDER"),
    ("trainer=3", "trainer=3", "trainer.NAME=VALUE"),
    ("reward=3", "reward=3", "reward.NAME=VALUE"),
    (f"{LOSS}=vanilla {LOSS}.clip_cov_ratio=1", f"{LOSS}=vanilla", f"{LOSS}.NAME=VALUE"),
    ("run.dir=${nothing}", "nothing"),
    (f"{MODEL}.path=", f"{MODEL}.path=:", "a variable of the shell"),
    ("data.train_files=", "data.train_files=:", "a variable of the shell"),
    ("trainer.epochs=3", "trainer.epochs: ", "did you mean trainer.total_epochs?"),
    ("hydra.searchpath=[nowhere]", "nowhere", "folder"),
    *((f"~{key}", f"~{key}: ", key.rpartition(".")[2], "leave it out") for key in ("run", "trainer.nnodes", "seed")),
    *((f"{plus}algo=nosuch", "algo=nosuch", "fspo_quantile") for plus in ("+", "++")),
    ("+data.train_batch_size=abc", "data.train_batch_size=abc ", "integer"),
)

#: Keys and options that there are not, with what is meant.
KEYS: tuple[Row, ...] = (
    ("clip_values=published", "clip_values: ", "fspo.clip_values="),
    ("match_scale=native", "match_scale: ", "fspo.match_scale="),
    ("advantage=shared", "advantage: ", "algorithm.adv_estimator=grpo"),
    ("+data.train_batch_size=8", "+data.train_batch_size=8", "leave the + out"),
    ("data.apply_chat_template_kwargs.effort=high", "+data.apply_chat_template_kwargs.effort=high adds it"),
    ("trainer.nothing_like_it=8", "trainer.nothing_like_it", "leave it out"),
    ("~algo", "fspo.algo", "algo=NAME", "+fspo.algo=NAME"),
    ("~trainer.nothing_like_it", "~trainer.nothing_like_it", "leave it out"),
    ("trainer.logger.name=wandb", "trainer.logger.name", "trainer.logger=["),
    *((f"{plus}trainer.logger.a.b=1", f"{plus}trainer.logger.a.b=1", "trainer.logger=[") for plus in ("", "+", "++")),
    ("~trainer.logger.0", "~trainer.logger.0", "trainer.logger=["),
    ("++data.x=[1] ++data.x.a=2", "++data.x.a=2", "data.x=["),
    ("+data.x=[1] data.x.a.b=2", "data.x.a.b=2", "data.x=["),
    *((f"{group}=null", f"{group}=null", f"~{group}") for group in ("experiment", "algo", "mode")),
    *((f"algo={value}", f"algo={value}", "gspo") for value in ("3", "true", "[fspo,3]", "[[fspo]]")),
    ("algo=fsop", "algo=fsop", "did you mean fspo?", *choices("algo")),
    ("~experiment=3", "~experiment=3", "demo"),
    ("hydra/launcher=3", "hydra/launcher=3"),
    (f"actor@{ACTOR}=3", f"actor@{ACTOR}=3"),
    ("expriment=demo", "expriment", "did you mean experiment?"),
    ("resum=1", "resum", "did you mean resume?"),
    # mistyped, or without the groups above them
    *((f"{key}=1", key, f"{OPTIM}.lr?") for key in (f"{OPTIM}.lrr", f"{ACTOR}.optm.lr", "lr", "actor.optim.lr")),
    *((f"{ACTOR}{key}=1", f"{ACTOR}{key}", f"{OPTIM}.lr?") for key in (".optim_lr", "_optim.lr")),
    ("fspo.c_low=1", "fspo.c_low", f"{LOSS}.c_low?"),
    (f"{ACTOR}.kl_loss_coeff=1", f"{ACTOR}.kl_loss_coeff", f"{ACTOR}.kl_loss_coef?"),
    (f"{ACTOR}.ppo_kl_coef=1", f"{ACTOR}.ppo_kl_coef", f"{LOSS}.ppo_kl_coef?"),
    (f"{ROLLOUT}.val_kwarg.temperature=1", "val_kwarg.", f"{ROLLOUT}.val_kwargs.temperature?"),
    ("data.train_file=x", "data.train_file", "data.train_files?"),
    ("trainer.n_gpus=1", "trainer.n_gpus", "trainer.n_gpus_per_node?"),
    ("rollout.nnodes=2", "rollout.nnodes", f"{ROLLOUT}.nnodes?"),
    # as TRL calls them
    *((f"{key}=1e-5", key, f"{OPTIM}.lr?") for key in (f"{OPTIM}.learning_rate", "learning_rate")),
    ("critic.optim.learning_rate=1e-5", "critic.optim.learning_rate", "critic.optim.lr?"),
    ("trainer.max_steps=100", "trainer.max_steps", "trainer.total_training_steps?"),
    (f"{ROLLOUT}.num_generations=8", f"{ROLLOUT}.num_generations", f"{ROLLOUT}.n?"),
    ("data.max_completion_length=8", "data.max_completion_length", "data.max_response_length?"),
    # as OpenRLHF calls them
    ("actor_learning_rate=1e-6", "actor_learning_rate", f"{OPTIM}.lr?"),
    ("rollout_batch_size=128", "rollout_batch_size", "data.train_batch_size?"),
    ("n_samples_per_prompt=8", "n_samples_per_prompt", f"{ROLLOUT}.n?"),
    # of an earlier verl
    ("critic.model.fsdp_config.param_offload=true", "critic.model.fsdp_config", "critic.fsdp"),
    (f"{ACTOR}.megatron.tensor_model_parallel_size=2", f"{ACTOR}.megatron", "Megatron is not served"),
    (f"+{ROLLOUT}.update_weights_bucket_megabytes=512", f"{ROLLOUT}.checkpoint_engine.update_weights"),
    (f"{ACTOR}.checkpoint.contents=[model]", f"{ACTOR}.checkpoint.contents", "save_contents"),
    ("trainer.val_generations_to_log_to_wandb=3", "val_generations_to_log_to_wandb", "trainer.log_val_generations"),
    (f"{ROLLOUT}.val_temperature=0.6", f"{ROLLOUT}.val_temperature", f"{ROLLOUT}.val_kwargs.temperature"),
    (f"+{ROLLOUT}.n_val=4", f"{ROLLOUT}.n_val", f"{ROLLOUT}.val_kwargs.n"),
    (f"{ACTOR}.use_token_level_loss=True", f"{ACTOR}.use_token_level_loss", "loss_agg_mode=token-mean"),
    *(
        (f"{ACTOR[:-5]}{of}.fsdp_config.grad_offload=True", f"{of}.fsdp_config", "leave it out")
        for of in ("actor", "ref")
    ),
    ("ray_init.num_cpus=8", "ray_init.num_cpus", "ray_kwargs.ray_init"),
    *((f"{plus}reward_model.overlong_buffer.enable=true", "reward_model.", f"+{OURS}") for plus in ("", "+")),
    ("reward_model.reward_kwargs.overlong_buffer_cfg.enable=true", "reward_model.", f"+{OURS}"),
    ("reward.reward_kwargs.overlong_buffer_cfg.enable=True", "overlong_buffer_cfg.enable", f"+{OURS}"),
    ("reward_model.model.trust_remote_code=true", "reward_model.model.trust_remote_code", "leave it out"),
)

#: Values of another kind, by what they must be.
_KINDS: Final[dict[str, str]] = {
    "integer": (
        f"{ROLLOUT}.n=2.5 {ACTOR}.ppo_epochs=1.5 {ACTOR}.ppo_mini_batch_size=64.0 {ROLLOUT}.max_model_len=None "
        "critic.ppo_epochs=two trainer.save_freq=null data.train_max_samples=1.5 seed=abc "
        f"trainer.v1.sampler.max_off_policy_threshold=eight {MODEL}.lora_alpha=1.5 "
        "ray_kwargs.ray_init.num_cpus=two"
    ),
    "true or false": (
        f"{ACTOR}.use_kl_loss=Flase {ROLLOUT}.enforce_eager=1 {ROLLOUT}.enable_chunked_prefill=yes evaluate=ture "
        f"{MODEL}.use_remove_padding=Ture trainer.val_before_train=no data.shuffle=null fspo.kl_to_start=2"
    ),
    "number": f"{ROLLOUT}.temperature=hot {OPTIM}.lr=abc {ACTOR}.entropy_coeff=none algorithm.gamma=one {LOSS}.c_low=a",
    "list of float, float": f"{OPTIM}.betas=0.9",
    "list": f"{ACTOR}.checkpoint.save_contents=model",
    "string": "trainer.logger=[1] data.prompt_key=[a] trainer.experiment_name=[a,b]",
    "dictionary": f"+{REWARD}.reward_kwargs=2",
    "'headline' or 'all'": "run.log=few",
    "equal to 0": (
        f"{MODEL}.lora_rank=-1 {ACTOR}.clip_ratio_low=-0.2 {ACTOR}.clip_ratio_high=-0.2 {ACTOR}.kl_loss_coef=-0.1 "
        f"{OPTIM}.weight_decay=-1"
    ),
    "than or equal to 1": f"{OPTIM}.lr_warmup_steps_ratio=5",
    "'constant' or 'cosine'": f"{OPTIM}.lr_scheduler_type=cosin",
    "'fixed' or 'adaptive'": "algorithm.kl_ctrl.type=adaptve",
    "'middle'": "data.truncation=lef",
    "'cpu', 'cuda'": "trainer.device=gpu",
    "equal to 1": f"{ROLLOUT}.max_num_seqs=0 data.val_max_samples=0 {ROLLOUT}.val_kwargs.top_p=2",
    "finite": f"{ACTOR}.tau_pos=nan fspo.reference_length=inf",
    "equal to -1": "trainer.test_freq=-2",
    "-1": f"{ACTOR}.fsdp_config.fsdp_size=0",
    "greater than 0": f"{OPTIM}.clip_grad=0",
}
VALUES: tuple[Row, ...] = (
    *(
        (override, f"{override.partition('=')[0].lstrip('+')}=", kind)
        for kind, overrides in _KINDS.items()
        for override in overrides.split()
    ),
    (f"{ROLLOUT}.n=\\'8\\'", f"{ROLLOUT}.n=8 ", "integer"),
    ("seed=-1", "seed=-1 ", "0"),
    ("data.shuffle=0", "data.shuffle=0 ", "true or false"),
    (f"{ACTOR}.entropy_coeff=null", f"{ACTOR}.entropy_coeff=null ", "number"),
    ("algorithm.lam=null", "algorithm.lam=null ", "number"),
    (f"{ROLLOUT}.temperature=[1.0]", f"{ROLLOUT}.temperature=[1.0] ", "number"),
    (f"{ROLLOUT}.temperature={{a:1}}", f"{ROLLOUT}.temperature={{'a': 1}} ", "number"),
    (f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.temperature=0 ", "greater than 0"),
    (f"{OPTIM}.betas=[0.9]", f"{OPTIM}.betas=[0.9] ", "list of float, float"),
    (f"{OPTIM}.lr=0.1", f"{OPTIM}.lr=0.1 ", "less than 0.01"),
    (f"{LOSS}.exponent=half", f"{LOSS}.exponent=half ", "number"),
    ("trainer.total_training_steps=null", "total_training_steps=null", "trainer.total_epochs"),
    ("trainer.default_local_dir=/elsewhere", "default_local_dir=/elsewhere", "run.dir=FOLDER"),
)

#: Values in place of groups of settings.
GROUPS: tuple[Row, ...] = (
    (f"{OPTIM}=3", f"{OPTIM}=3: ", f"{OPTIM}.NAME=VALUE"),
    (f"{ACTOR}=null", f"{ACTOR}=null ", f"{ACTOR}.NAME=VALUE"),
    ("data=3", "data=3: ", "group of settings"),
    ("trainer.v1=sync", "trainer.v1=sync: ", "trainer.v1.NAME=VALUE"),
    ("data.train_batch_size=0 seed=abc", "data.train_batch_size=0 ", "equal to 1"),
    (f"{ROLLOUT}.n=abc {ROLLOUT}.name=sglang", f"{ROLLOUT}.name=sglang ", "set it to vllm"),
    ("seed=abc data.train_batch_size=30", "train_batch_size=30 ", "ppo_mini_batch_size=8"),
    ("seed=4294967296", "seed=4294967296 ", "less than 4294967296"),
    ("run.dir=\\'~/run\\'", "run.dir=~/run: ", "$HOME"),
)

#: What contradicts itself, or is not served.
CHECKS: tuple[Row, ...] = (
    # arithmetic
    ("data.train_batch_size=30", "train_batch_size=30 ", "ppo_mini_batch_size=8"),
    (f"{Q8B} data.train_batch_size=500", "train_batch_size=500 ", "ppo_mini_batch_size="),
    (f"trainer.n_gpus_per_node=4 {ACTOR}.fsdp_config.fsdp_size=3", "n_gpus_per_node=4 ", "fsdp_size=3"),
    ("trainer.n_gpus_per_node=3", "rollout.n=64 ", "n_gpus_per_node=3"),
    (f"{BY_SEQUENCES} {ACTOR}.ppo_micro_batch_size_per_gpu=48", "=64 ", "batch_size_per_gpu=48"),
    (BY_SEQUENCES, "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),  # verl's words
    ("data.max_response_length=600", "= 616 ", "max_position_embeddings = 512", "shorten data.max_response_length"),
    (f"{ROLLOUT}.max_model_len=128", "= 272 ", "rollout.max_model_len = 128", "max_model_len=272"),
    (
        f"{ACTOR}.ulysses_sequence_parallel_size=2 {ACTOR}.ppo_max_token_len_per_gpu=100",
        *("= 272 ", "actor.ppo_max_token_len_per_gpu = 100", "2 Ulysses", "ppo_max_token_len_per_gpu=136"),
    ),
    (f"{ROLLOUT}.tensor_model_parallel_size=3", "parallel_size=3 ", "heads", "set it to 2"),
    (f"{ROLLOUT}.tensor_model_parallel_size=3", f"{ROLLOUT}.tensor_model_parallel_size * data_parallel_size", "=3:"),
    (
        f"data.max_response_length=600 +{MODEL}.override_config.max_position_embeddings=1024",
        *("= 616 ", "max_position_embeddings = 512", "override_config", "config.json"),
    ),
    # settings by themselves
    (f"{ROLLOUT}.val_kwargs.n=2 {ROLLOUT}.val_kwargs.temperature=0", "val_kwargs.n=2 ", "temperature=0", "1.0"),
    (f"{ACTOR}.checkpoint.async_save=true", "async_save=true", "set it to false"),
    ("trainer.max_actor_ckpt_to_keep=1", "max_actor_ckpt_to_keep=1 ", "2 or more"),
    (
        "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.0",
        *("kl_ctrl.kl_coef=0.0 ", "use_kl_in_reward=true", "0.001"),
    ),
    (f"{ROLLOUT}.agent.default_agent_loop=tool_agnet", "=tool_agnet ", "did you mean tool_agent?"),
    (f"{MODEL}.lora_rank=8 {MODEL}.target_modules=[q_projj]", "target_modules=['q_projj']", "did you mean q_proj?"),
    # the method
    *(
        (f"algo={algo} {ONE_UPDATE}", f"{ONE_UPDATE} ", "data.train_batch_size=32", "algo=unclipped")
        for algo in ("fspo", "fspo_quantile", "gspo", "rloo", "luspo")
    ),
    (f"algo=rloo {ROLLOUT}.n=1", "adv_estimator=rloo ", "rollout.n=1", "2 or more"),
    (f"{ROLLOUT}.top_p=0.9", "rollout.top_p=0.9 ", "top_p=1 "),
    (f"{ROLLOUT}.top_k=50", "rollout.top_k=50 ", "top_k=-1 "),
    (f"algo=gspo_verl {ACTOR}.clip_ratio_low=0.2", "clip_ratio_low=0.2 ", "3e-4"),
    (f"{LOSS}.c_low=3e-4", f"{LOSS}.c_low=0.0003 ", "nearly every", "0.03"),
    (f"{LOSS}.c_high=2", f"{LOSS}.c_high=2", "never clip", "0.03"),
    (f"algo=gspo {LOSS}.c_high=0.03", f"{LOSS}.c_high=0.03 ", "4e-4"),
    (f"{LOSS}.exponent=2", f"{LOSS}.c_low=0.03 ", "never clip", "256 tokens"),
    (f"algo=gspo +{LOSS}.clip_low=3e-4", f"{LOSS}.clip_low=0.0003 ", "c_low=0.000300045"),
    (f"algo=fspo_v1 ++{LOSS}.clip_high=0.05", f"{LOSS}.clip_high=0.05 ", "c_high=0.05"),
    (f"{LOSS}.exponent=-1", f"{LOSS}.exponent=-1", "0.5"),
    (f"{LOSS}.band=sqrt", f"{LOSS}.band='sqrt' ", "power", "exponent=0.5"),
    (f"{LOSS}.drift=ema", f"{LOSS}.drift='ema' "),
    (f"+{LOSS}.clip=1", f"{LOSS}: ", "'clip'", "docs/algorithms.md"),
    (
        f"{BY_SEQUENCES} {ACTOR}.ppo_micro_batch_size_per_gpu=64 {ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
        *("ppo_micro_batch_size_per_gpu=64 ", "log_prob_micro_batch_size_per_gpu=32"),
    ),
    (f"{ROLLOUT}.log_prob_max_token_len_per_gpu=1024", "ppo_max_token_len_per_gpu=2048 ", "per_gpu=1024"),
    (f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.bypass_mode=True ", "false"),
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
    ("mode=colocate_async fspo.pi_old=rollout", CORRECTION, "fspo.pi_old=rollout", "rollout_rs to null"),
    (f"{CORRECTION}.rollout_is=sequence fspo.pi_old=rollout", CORRECTION, "fspo.pi_old=rollout", "actor"),
    (f"{CORRECTION}.rollout_is=sequence {ROLLOUT}.calculate_log_probs=false", "log_probs=false", CORRECTION, "true"),
    ("fspo.accept=1.2", "fspo.accept=1.2 ", "less than 1"),
    (f"fspo.clip_values=measured algo=gspo {LOSS}.c_low=0.001", "fspo.clip_values=measured", "c_low=0.001", "leave"),
    *(  # the authors' values are given, too
        (f"fspo.clip_values=measured {values}", "fspo.clip_values=measured", "c_low=0.03", "leave")
        for values in (f"{LOSS}.c_low=0.03", f"{LOSS}.c_low=0.03 {LOSS}.c_high=0.03 {LOSS}.s_max=10")
    ),
    # keys that another setting of the command disables
    ("algorithm.use_kl_in_reward=true algorithm.kl_ctrl.target_kl=0.2", "target_kl=0.2", "type=fixed", "type=adaptive"),
    (
        "reward.reward_model.enable=true",
        *("enable=true", f"{REWARD}.path=pkg://recipe.math.reward", f"{REWARD}.path=null"),
    ),
    # an update
    ("algorithm.adv_estimator=foo", "adv_estimator=foo ", "grpo, "),
    (f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_type=full", f"{ACTOR}.kl_loss_type=full ", "low_var_kl, k3"),
    ("algorithm.use_kl_in_reward=true algorithm.kl_penalty=k9", "algorithm.kl_penalty=k9 ", "low_var_kl, k3"),
    (f"algo=grpo {LOSS}.loss_mode=dro", "policy_loss.loss_mode=dro ", "policy_loss.dro_beta"),
    (f"{LOSS}.loss_mode=nobody", "policy_loss.loss_mode=nobody ", "external_lib", "seq_gspo"),
    (f"algo=gspo_verl {LOSS}.loss_mode=gsop", "policy_loss.loss_mode=gsop ", "did you mean gspo"),
    (f"{CORRECTION}.rollout_rs=seq_mean_k3", f"{CORRECTION}.rollout_rs=seq_mean_k3 ", "rollout_rs_threshold"),
    (
        f"{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_threshold=0",
        *(f"{CORRECTION}.rollout_is=sequence ", "rollout_is_threshold=0", "positive"),
    ),
    (
        f"{CORRECTION}.rollout_rs=seq_mean_k1 {CORRECTION}.rollout_rs_threshold=abc",
        "rollout_rs_threshold=abc",
        "0.5_2.0",
    ),
    (f"{OPTIM}.optimizer=AdanW", f"{OPTIM}.", "optimizer=AdanW", "did you mean AdamW?"),
    (f"{OPTIM}.betas=[0.9,1.5]", f"{OPTIM}.", "1.5", "correct"),
    (f"+{OPTIM}.override_optimizer_config.esp=1e-8", f"{OPTIM}", "'esp'", "correct"),
    (
        *(f"+{OPTIM}.override_optimizer_config.fused=true +{OPTIM}.override_optimizer_config.foreach=true", OPTIM),
        *("fused", "foreach", "correct"),
    ),
    (f"{OPTIM}.lr_warmup_steps_ratio=null", f"{OPTIM}.lr_warmup_steps_ratio=null", "number"),
    (f"{ACTOR}.loss_agg_mode=foo", "loss_agg_mode: foo"),  # verl's words
    # a loss without its class of settings
    (f"{LOSS}.loss_mode=cispo", f"{LOSS}.loss_mode=cispo ", "algo=cispo"),
    (f"algo=gspo_verl {LOSS}.loss_mode=fsop", f"{LOSS}.loss_mode=fsop ", "fspo"),
    (f"{LOSS}.loss_mode=fsop", f"{LOSS}.loss_mode=fsop ", "fspo"),
    (f"{LOSS}._target_=nowhere.Mine", f"{LOSS}._target_=nowhere.Mine ", "loss_mode=fspo", "leave _target_ out"),
    (f"~{LOSS}._target_", "loss_mode=fspo ", f"~{LOSS}._target_"),
    (f"algo=sapo +{LOSS}.tau_pos=1.0 +{LOSS}.tau_neg=2", f"{LOSS}.tau_pos=1.0", f"use {ACTOR}.tau_pos"),
    (f"{MODEL}.external_lib=nowhere", "external_lib=nowhere ", "install"),
)

#: Data files and rewards.
INPUTS: tuple[Row, ...] = (
    ("data.val_files=null", "data.val_files", "0 rows", "give more data"),
    (
        "data.train_max_samples=8",
        "data.train_files: ",
        "8 are taken",
        "data.train_max_samples",
        "data.train_batch_size",
    ),
    (
        "data.val_files=broken.parquet",
        "data.val_files: ",
        "/broken.parquet",
        "not a Parquet file",
        "write it as Parquet",
    ),
    ("data.val_files=foreign.jsonl", "data.val_files: ", "/foreign.jsonl", "no column prompt", "data-and-rewards.md"),
    ("data.val_files=data.csv", "data.val_files: ", "/data.csv", ".parquet"),
    *(
        (f"data.{key}=[{files}]", f"data.{key}", "/zero.parquet", "no rows", "leave it out")
        for key in ("train_files", "val_files")
        for files in ("zero.parquet", "text.parquet,zero.parquet")
    ),
    (
        f"{REWARD}.path=reward.py data.train_files=[text.parquet,number.parquet]",
        *("data.train_files: ", "/number.parquet cannot be joined", "int64"),
    ),
    (f"+{REWARD}.reward_kwargs.overlong_bufer=64", "overlong_bufer ", "overlong_buffer"),
    (f"+{REWARD}.reward_kwargs.overlong_buffer=64", "max_response_length"),
    (
        f"'+{REWARD}.reward_kwargs={{overlong_buffer: 64, max_response_length: 32}}'",
        *("buffer_length=64", "max_response_length=32"),
    ),
    (f"+{REWARD}.reward_kwargs.format_weight=abc", "format_weight=abc", "number"),
    (f"+{REWARD}.reward_kwargs.time_limit_s=-1", "time_limit_s=-1"),
    ("custom_reward_function.path=x.py", f"{REWARD}.path='", "/x.py'", "correct the path"),
    (f"{REWARD}.path=reward.py {REWARD}.name=score", f"{REWARD}.path='", "/reward.py', name='score'"),
    (f"{REWARD}.path=ends.py", "/ends.py'", " 7"),
    (f"+{REWARD}.reward_kwargs.place=1 {REWARD}.path=narrow.py", "/narrow.py'", "place"),
    *(
        (f"reward_model.reward_manager={name}", f"{MANAGER}.name={name} ", "leave", "reward_model.reward_manager")
        for name in ("dapo", "wizard", "prime")
    ),
    (f"{MANAGER}.name=dapo", f"{MANAGER}.name=dapo ", f"leave {MANAGER}.name", "recipe.runner.reward_manager"),
    (f"{MANAGER}.name=gdpo", f"{MANAGER}.name=gdpo ", "source=register"),
    (f"{MANAGER}.name=TokenLenghtRewardManager", "=TokenLenghtRewardManager ", "did you mean TokenLength"),
    (f"{MANAGER}.name=raise_failure", "=raise_failure ", "run_single", "TokenLengthRewardManager"),
    (f"{MANAGER}.source=register", "name=TokenLengthRewardManager ", "source=register", "naive", "importlib"),
    (f"{MANAGER}.source=register {MANAGER}.name=niave", "name=niave ", "did you mean naive", "dapo"),
    (f"{MANAGER}.source=registry {MANAGER}.name=dapo", ".source=registry", "register", "importlib"),
    (f"{MANAGER}.module.path=null", f"{MANAGER}.module.path=None", "source=register", "naive"),
    (f"{MANAGER}.module.path=x.py", f"{MANAGER}.name=Token", "/x.py", "correct the path"),
    (f"{MANAGER}.module.path=pkg://recipe.fspo.rewrad_manager", "fspo.rewrad_manager", "No module"),
    *(
        (f"{MANAGER}.module.path=managers.py {MANAGER}.name={name}", f"{MANAGER}.name={name} ", "/managers.py", says)
        for name, says in (("Mien", "did you mean Mine"), ("Older", "run_single"))
    ),
)

#: Keys that another setting disables: key and value, what disables it, the remedy.
DISABLED: tuple[Row, ...] = (
    ("trainer.resume_from_path=/x/global_step_100", "global_step_100", "resume_mode=auto", "resume_mode=resume_path"),
    ("trainer.resume_from_path=/x/global_step_100 trainer.resume_mode=auto", "resume_mode=resume_path"),
    ("trainer.use_v1=false", "use_v1=false", "verl.trainer.main_ppo"),
    (f"{Q8B} {OPTIM}.lr_warmup_steps_ratio=0.05", "steps_ratio=0.05", "warmup_steps=10", "lr_warmup_steps=-1"),
    (f"{ACTOR}.kl_loss_coef=0.01", "kl_loss_coef=0.01", "use_kl_loss=false", "use_kl_loss=true"),
    (f"{ACTOR}.kl_loss_type=k3+", "kl_loss_type=k3+", "use_kl_loss=false", "use_kl_loss=true"),
    ("algorithm.kl_ctrl.kl_coef=0.05", "kl_coef=0.05", "use_kl_in_reward=false", "use_kl_in_reward=true"),
    (f"{CORRECTION}.rollout_is_threshold=3", "rollout_is_threshold=3", "rollout_is=null", "rollout_is=sequence"),
    (f"{CORRECTION}.rollout_rs_threshold=3", "rollout_rs_threshold=3", "rollout_rs=null", "rollout_rs=seq_sqrt_k1"),
    (f"{CORRECTION}.loss_type=reinforce", "loss_type=reinforce", "bypass_mode=false", "policy_loss.loss_mode"),
    (f"{FILTER}.metric=acc", "metric=acc", f"{FILTER}.enable=false", f"{FILTER}.enable=true"),
    ("reward.reward_model.model_path=/rm", "model_path=/rm", "reward_model.enable=false", "reward_model.enable=true"),
    (f"{MODEL}.lora_alpha=32", "lora_alpha=32", "lora_rank=0", "lora_rank"),
    *(
        (f"{ROLLOUT}.multi_turn.{key}", key, "default_agent_loop=single_turn_agent", "default_agent_loop=tool_agent")
        for key in ("max_user_turns=4", "max_assistant_turns=4", "function_tool_path=calculator.py")
    ),
    (f"{BUFFER}.enable=true {BUFFER}.len=512", "enable=true", "len=512", OURS),
    ("+reward.reward_kwargs.mine=1", "mine=1", OURS),
    (f"{Q8B} {OPTIM}.min_lr_ratio=0.1", "min_lr_ratio=0.1", "scheduler_type=constant", "scheduler_type=cosine"),
    (f"{ACTOR}.grad_clip=0.5", "grad_clip=0.5", f"{OPTIM}.clip_grad=1.0", "give it as"),
    ("algorithm.lam=0.95", "lam=0.95", "adv_estimator=grpo", "gae"),
    (f"algo=sapo {ACTOR}.clip_ratio_high=0.28", "high=0.28", "loss_mode=sapo", "policy_loss.loss_mode that reads it"),
    (f"algo=grpo {ACTOR}.clip_ratio=0.3", "clip_ratio=0.3", "clip_ratio_low=0.2", "clip_ratio_high"),
    (f"algo=grpo {ACTOR}.loss_scale_factor=10", "factor=10", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    (f"{ACTOR}.freeze_vision_tower=true", "freeze_vision_tower=true", "leave it out"),
    ("algorithm.use_pf_ppo=true", "use_pf_ppo=true", "leave it out"),
    (f"{MODEL}.lora.rank=8", "lora.rank=8", "model.lora_rank"),
    (f"{MODEL}.lora_adapter_path=/adapter", "lora_adapter_path=/adapter", "lora_rank"),
    *(  # no loss of this repository reads the clip range of verl's
        (f"{LOSS}.loss_mode={loss} {ACTOR}.clip_ratio_high=0.28", f"loss_mode={loss}", "policy_loss.c_low")
        for loss in ALGORITHMS
    ),
    (
        "experiment=own data.train_files=four.jsonl data.train_batch_size=2 trainer.total_training_steps=61",
        *("total_training_steps=61: no effect with trainer.total_epochs=30", "total_training_steps=null"),
    ),
)

#: The rows of docs/what-works.md that are refused, by their feature.
NOT_SERVED: Final[dict[str, str]] = {
    "verl's own asynchronous trainers": "trainer_mode=colocate_async",
    "verl's own synchronous trainer": "trainer_mode=sync",
    "Megatron": "model_engine=megatron",
    "VeOmni, TorchTitan": "strategy=veomni",
    "SGLang, TensorRT-LLM": "rollout.name=sglang",
    "Ulysses without flash-attn": "ulysses_sequence_parallel_size=2",
    "deterministic sampling": "full_determinism",
    "one update per rollout batch": "algo=unclipped",
    "a KL penalty without a coefficient": "kl_loss_coef=0",
    "critic and GAE with a sequence-level loss": "adv_estimator=gae",
    "ReMax, GDPO, optimal token baselines": "adv_estimator=remax",
    "REINFORCE++ with a KL penalty in the reward": "reinforce_plus_plus",
    "importance weights by token": "rollout_is=token",
    "rejection by token": "rollout_rs=token_k1 removes",
}

#: What only verl's own dataclasses refuse, which every worker makes.
DATACLASSES: tuple[Row, ...] = (
    (f"{ROLLOUT}.mode=sync", "verl refuses", "mode=async"),
    (f"+{ROLLOUT}.agent.max_turns=3", f"{ROLLOUT}.agent.max_turns", "leave it out"),
    (f"+{MODEL}.nothing_like_it=1", f"{MODEL}.nothing_like_it", "leave it out"),
)

#: Rows that need a command of their own, and tables of rows that do not concern each other.
ALONE: Final = (*ARGUMENTS, *GROUPS, *CHECKS, *INPUTS, *DATACLASSES)
TOGETHER: Final = (KEYS, VALUES, DISABLED)

#: What only the run's machine can settle; a dry run for another machine lists it.
UNSETTLED: tuple[Row, ...] = (
    *(
        (f"{ROLLOUT}.agent.default_agent_loop=tool_agent {ROLLOUT}.{key}=/no/such", f"{key}=/no/such", "correct")
        for key in ("multi_turn.tool_config_path", "multi_turn.function_tool_path", "agent.agent_loop_config_path")
    ),
    (f"{MODEL}.lora_rank=8 {MODEL}.lora_adapter_path=./none", f"{MODEL}.lora_adapter_path=./none", "adapter_config"),
    (f"{OPTIM}.optimizer_impl=of.nobody", "optimizer_impl=of.nobody", "install"),
    (f"{MODEL}.path=/no/such/model", "model.path='/no/such/model'", "hub"),
    (f"+{MODEL}.tokenizer_path=./none", "model.tokenizer_path='./none'", "copy its files"),
    ("data.val_files=file:///no/such.parquet", "data.val_files", "/no/such.parquet"),
    ("run.dir=/dev/null/run", "run.dir=/dev/null/run", "give another"),
    ("trainer.max_actor_ckpt_to_keep=9999999", "9999999 checkpoint(s)", "make room"),
)

# ---------------------------------------------------------------- noted

#: What the run does anyway, or what changes no gradient; and the keys that the one note names.
NOTED: tuple[tuple[str, str], ...] = (
    (f"{Q8B} {ACTOR}.ppo_micro_batch_size_per_gpu=2", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    (
        f"algo=gspo {BY_SEQUENCES} {ACTOR}.ppo_micro_batch_size_per_gpu=16 {ACTOR}.ppo_max_token_len_per_gpu=999",
        f"{ACTOR}.ppo_max_token_len_per_gpu",
    ),
    (f"{ACTOR}.kl_loss_coef=0.01 {ACTOR}.use_kl_loss=false", f"{ACTOR}.kl_loss_coef"),  # both given
    (f"{ACTOR}.kl_loss_coef=0", f"{ACTOR}.kl_loss_coef"),  # asks for nothing
    (f"{ACTOR}.kl_loss_type=low_var_kl", f"{ACTOR}.kl_loss_type"),  # as it is
    ("trainer.resume_from_path=/x trainer.resume_mode=disable", "trainer.resume_from_path"),
    (f"{Q8B} {OPTIM}.lr_warmup_steps_ratio=0", f"{OPTIM}.lr_warmup_steps_ratio"),
    (f"{OPTIM}.lr_warmup_steps=5 {OPTIM}.lr_warmup_steps_ratio=0.1", f"{OPTIM}.lr_warmup_steps_ratio"),
    (f"{BUFFER}.enable=false {BUFFER}.len=512", f"{BUFFER[1:]}.enable {BUFFER[1:]}.len"),
    (f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_low"),
    (f"{ACTOR}.clip_ratio_c=10 {ACTOR}.loss_agg_mode=token-mean", f"{ACTOR}.clip_ratio_c {ACTOR}.loss_agg_mode"),
    ("critic.optim.lr=1e-5 trainer.max_critic_ckpt_to_keep=3", "critic.optim.lr trainer.max_critic_ckpt_to_keep"),
    ("critic.enable=false critic.optim.min_lr_ratio=0.1", "critic.optim.min_lr_ratio"),
    (f"{ACTOR}.grad_clip=1.0", f"{ACTOR}.grad_clip"),
    (f"{OPTIM}.clip_grad=0.5 {ACTOR}.grad_clip=0.5", f"{ACTOR}.grad_clip"),
    (
        f"{ACTOR}.fsdp_config.param_offload=true {ACTOR}.fsdp_config.offload_policy=true",
        f"{ACTOR}.fsdp_config.param_offload",
    ),
    ("actor_rollout_ref.ref.fsdp_config.param_offload=true", "actor_rollout_ref.ref.fsdp_config.param_offload"),
    (f"{ACTOR}.use_torch_compile=false", f"{ACTOR}.use_torch_compile"),
    (f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.val_kwargs.do_sample"),
    (f"{ROLLOUT}.val_kwargs.n=2 trainer.test_freq=-1 trainer.val_before_train=false", f"{ROLLOUT}.val_kwargs.n"),
    ("trainer.log_val_generations=10", "trainer.log_val_generations"),
    (f"{ROLLOUT}.multi_turn.max_parallel_calls=4", f"{ROLLOUT}.multi_turn.max_parallel_calls"),
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
    (f"{FILTER}.enable=true {FILTER}.metric=acc {FILTER}.max_num_gen_batches=10", f"{FILTER}.max_num_gen_batches"),
    # What is below a switch that is off.
    ("reward.reward_model.rollout.n=2", "reward.reward_model.rollout.n"),
    ("transfer_queue.metrics.port=1", "transfer_queue.metrics.port"),
    ("actor_rollout_ref.ref.fsdp_config.qat.mode=x", "actor_rollout_ref.ref.fsdp_config.qat.mode"),
    # A profile needs the steps, a tool, and a role that is profiled.
    (
        f"algo=gspo {ACTOR}.profiler.enable=true {ACTOR}.profiler.ranks=[0]",
        f"{ACTOR}.profiler.enable {ACTOR}.profiler.ranks",
    ),
    (PROFILED, "global_profiler.steps global_profiler.tool"),
    (f"{PROFILED} {ACTOR}.profiler.ranks=[0]", f"global_profiler.steps global_profiler.tool {ACTOR}.profiler.ranks"),
    # The demo's 20 steps, of which an epoch has ten.
    ("data.offline_task.n_train=320 trainer.total_epochs=2", "trainer.total_epochs"),
    ("data.offline_task.n_train=320 trainer.total_epochs=3", "trainer.total_epochs"),
    (
        "data.offline_task.n_train=320 trainer.total_epochs=1 trainer.total_training_steps=30",
        "trainer.total_training_steps",
    ),
    ("trainer.total_epochs=2 data.train_files=/no/such.parquet", "trainer.total_epochs"),
)

#: Added keys that no code has, each in a note of its own.
UNKNOWN: Final = (
    "+trainer.of_nobody=disable",
    "+async_training.of_nobody=4",
    "+trainer.total_steps=10",  # verl's code has variables of this name
    "+reward.of_nobody.overlong_buffer=3",
)
#: Such a key that is a mistyped one, and the one that is meant.
MISTYPED: Final = ("+fspo.clip_value=published", "clip_values?")

# ---------------------------------------------------------------- taken without a word

TAKEN: tuple[str, ...] = (
    *(f"algo={algo}" for algo in choices("algo")),
    # one update a rollout batch
    f"{ONE_UPDATE} {ACTOR}.ppo_epochs=2",
    f"{ONE_UPDATE} evaluate=true",
    f"{ONE_UPDATE} {ROLLOUT}.calculate_log_probs=true fspo.pi_old=rollout",
    *(f"{ONE_UPDATE} mode={mode}" for mode in ("colocate_async", "separate_async")),
    *(f"{ONE_UPDATE} algo={algo}" for algo in ("unclipped", "grpo", "gspo_verl")),
    # a key that is read
    "trainer.use_v1=true",
    f"{ACTOR}.use_kl_loss=true algorithm.use_kl_in_reward=true",  # with verl's coefficients
    f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_coef=0.01 {ACTOR}.kl_loss_type=k1",
    "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.01",
    f"{Q8B} {OPTIM}.lr_warmup_steps=-1 {OPTIM}.lr_warmup_steps_ratio=0.1",
    f"{BY_SEQUENCES} {ACTOR}.ppo_micro_batch_size_per_gpu=2",
    f"algo=grpo {ACTOR}.clip_ratio_high=0.28 {ACTOR}.loss_agg_mode=token-mean {ACTOR}.clip_ratio_c=10",
    f"{ACTOR}.entropy_coeff=0.01 {ACTOR}.loss_agg_mode=token-mean",
    f"{CORRECTION}.rollout_rs=seq_sqrt_k1 {CORRECTION}.rollout_rs_threshold=3",
    f"{BUFFER}.enable=true {MANAGER}.source=register {MANAGER}.name=dapo",
    *(f"{MANAGER}.source=register {MANAGER}.name={name}" for name in ("naive", "gdpo", "rate_limited", "remote")),
    f"reward.reward_model.enable=true {REWARD}.path=null reward.reward_model.model_path=/rm",
    f"{Q8B} {OPTIM}.lr_scheduler_type=cosine {OPTIM}.min_lr_ratio=0.1",
    f"{OPTIM}.clip_grad=inf",
    f"{OPTIM}.clip_grad=0.5 {ACTOR}.fsdp_config.use_torch_compile=false",
    "algorithm.norm_adv_by_std_in_grpo=false",
    f"algo=grpo {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm {ACTOR}.loss_scale_factor=10",
    f"algo=cispo {ACTOR}.clip_ratio_low=5 {ACTOR}.clip_ratio_high=0.3",
    f"algo=sapo {ACTOR}.tau_pos=2",
    f"{ROLLOUT}.val_kwargs.temperature=0.6 {ROLLOUT}.val_kwargs.top_p=0.9",
    "trainer.log_val_generations=10 trainer.logger=wandb",
    f"{ROLLOUT}.agent.default_agent_loop=tool_agent {ROLLOUT}.multi_turn.max_user_turns=4",
    f"mode=separate_async {ROLLOUT}.nnodes=2 trainer.v1.separate_async.num_warmup_batches=2",
    f"{MODEL}.lora_rank=8 {MODEL}.lora_alpha=16",
    f"{PROFILED} {ACTOR}.profiler.enable=true {ACTOR}.profiler.ranks=[0]",
    f"{PROFILED} {ACTOR}.profiler.enable=true global_profiler.global_tool_config.precision_debugger.strict=true",
    "actor_rollout_ref.ref.fsdp_config.model_dtype=bf16",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",  # its enable=false is no switch
    "data.offline_task.n_train=320 trainer.total_epochs=1",  # ten steps, which end the run
    "data.offline_task.n_train=320 trainer.total_epochs=1 trainer.total_training_steps=null",
    # an added key
    "+data.need_tools_kwargs=true",  # verl's data set asks for it
    f"+{ROLLOUT}.engine_kwargs.vllm.of_the_server=1",
    f"{REWARD}.path=reward.py +{REWARD}.reward_kwargs.of_the_function=1",
    "++data.seed=3",
    # values of several kinds
    f"algo=gmpo {ACTOR}.clip_ratio_low=null",
    "data.train_files=[a.parquet,b.parquet]",
    "data.seed=null data.filter_overlong_prompts_workers=null trainer.logger=console trainer.experiment_name=2026",
    f"trainer.total_training_steps=10 {OPTIM}.clip_grad=1 {OPTIM}.betas=[0.9,0.95] {ROLLOUT}.max_model_len=null",
    f"{CORRECTION}=null",
    f"{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_threshold=\\'0.5_2.0\\'",
    f"algo=unclipped {ACTOR}.ppo_mini_batch_size=${{data.train_batch_size}}",
    # files and rewards
    f"{REWARD}.path=reward.py data.val_files=number.parquet",  # a reward of one's own may read numbers
    "data.train_files=[text.parquet,text.parquet] data.val_files=text.parquet",
    f"{MANAGER}.module.path=managers.py {MANAGER}.name=Mine",
    (
        f"'+{REWARD}.reward_kwargs={{overlong_buffer: 64, max_response_length: 256, n_workers: 2, normalise: false, "
        "time_limit_s: 2}'"
    ),
    f"'+{REWARD}.reward_kwargs={{overlong_buffer: null}}'",  # off
)
