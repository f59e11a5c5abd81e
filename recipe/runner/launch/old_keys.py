"""Keys that verl had in its releases 0.3 to 0.8 and that 0.9.1 does not have, with what to give instead.

From the composed ``ppo_trainer`` of each tag. A key stands for all that lies below it. :data:`OTHER_NAMES` are those
that settings of verl have elsewhere.
"""

from __future__ import annotations

from typing import Final

_PROFILER: Final = "use global_profiler, and profiler.tool_config beside it"
_OUT: Final = "leave it out"
_WITH_PARAMETERS: Final = "gradients are offloaded with the parameters (param_offload); leave it out"

OLD_KEYS: Final = {
    "actor_rollout_ref.actor.checkpoint.contents": "use save_contents and load_contents beside it",
    "actor_rollout_ref.actor.fsdp_config.grad_offload": _WITH_PARAMETERS,
    "actor_rollout_ref.actor.profiler.discrete": _PROFILER,
    "actor_rollout_ref.actor.use_token_level_loss": "use actor_rollout_ref.actor.loss_agg_mode=token-mean for true",
    "actor_rollout_ref.ref.fsdp_config.grad_offload": _WITH_PARAMETERS,
    "actor_rollout_ref.ref.profiler.discrete": _PROFILER,
    "actor_rollout_ref.rollout.profiler.discrete": _PROFILER,
    "actor_rollout_ref.profiler": _PROFILER,
    "actor_rollout_ref.actor.router_replay": "it needs Megatron, which is not served; " + _OUT,
    "actor_rollout_ref.ref.router_replay": "it needs Megatron, which is not served; " + _OUT,
    "actor_rollout_ref.actor.megatron": "Megatron is not served; leave its keys out, and shard with fsdp_size",
    "actor_rollout_ref.ref.megatron": "Megatron is not served; leave its keys out",
    "actor_rollout_ref.ref.model": "the reference has the actor's model; " + _OUT,
    "actor_rollout_ref.rollout.chat_scheduler": "use actor_rollout_ref.rollout.agent.default_agent_loop",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space": "vLLM has none; " + _OUT,
    "actor_rollout_ref.rollout.multi_turn.completion_callback": "use actor_rollout_ref.rollout.agent",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path": "verl has no interactions any more; " + _OUT,
    "actor_rollout_ref.rollout.multi_turn.max_turns": "use max_assistant_turns and max_user_turns beside it",
    "actor_rollout_ref.rollout.custom.stop_token_ids": (
        "use ++actor_rollout_ref.rollout.engine_kwargs.vllm.generation_config=FOLDER (docs/data-and-rewards.md)"
    ),
    "actor_rollout_ref.rollout.skip": _OUT,
    "actor_rollout_ref.rollout.skip_dump_dir": _OUT,
    "actor_rollout_ref.rollout.skip_rollout": _OUT,
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": (
        "use actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    ),
    "actor_rollout_ref.rollout.use_fire_sampling": _OUT,
    "actor_rollout_ref.rollout.n_val": "use actor_rollout_ref.rollout.val_kwargs.n",
    "actor_rollout_ref.rollout.val_temperature": "use actor_rollout_ref.rollout.val_kwargs.temperature",
    "algorithm.rollout_correction.rollout_rs_threshold_lower": (
        "write both thresholds as algorithm.rollout_correction.rollout_rs_threshold=LOWER_UPPER"
    ),
    "algorithm.rollout_correction.rollout_token_veto_threshold": (
        "use a rule of algorithm.rollout_correction.rollout_rs, such as token_k1"
    ),
    "algorithm.rollout_correction.use_policy_gradient": "use algorithm.rollout_correction.bypass_mode and loss_type",
    "critic.checkpoint.contents": "use save_contents and load_contents beside it",
    "critic.megatron": "Megatron is not served; leave its keys out",
    "critic.model.fsdp_config": "use critic.fsdp; without a critic (no adv_estimator=gae) leave critic.* out",
    "critic.profiler.discrete": _PROFILER,
    "ray_init": "use ray_kwargs.ray_init",
    "reward_manager": "use reward.reward_manager",
    "reward_model.launch_reward_fn_async": "rewards are always computed beside the generation; " + _OUT,
    "reward_model.sandbox_fusion": "use reward.sandbox_fusion",
    "reward_model.use_reward_loop": _OUT,
    "trainer.controller_nsight_options": "use global_profiler.global_tool_config.nsys",
    "trainer.npu_profile": "NPUs are not served; " + _OUT,
    "trainer.profile_steps": "use global_profiler.steps",
    "trainer.use_legacy_worker_impl": "there is one implementation; " + _OUT,
    "trainer.val_generations_to_log_to_wandb": "use trainer.log_val_generations",
    "trainer.worker_nsight_options": "use global_profiler.global_tool_config.nsys",
}

#: The last part of keys of verl, by the name that TRL, OpenRLHF, SkyRL, transformers and forks of verl have for it.
OTHER_NAMES: Final = {
    "actor_learning_rate": "actor.optim.lr",
    "advantage_estimator": "algorithm.adv_estimator",
    "batch_size": "data.train_batch_size",
    "beta": "actor.kl_loss_coef",
    "epochs": "trainer.total_epochs",
    "eps_clip": "actor.clip_ratio",
    "epsilon": "actor.clip_ratio",
    "epsilon_high": "actor.clip_ratio_high",
    "eval_steps": "trainer.test_freq",
    "generate_max_len": "data.max_response_length",
    "gradient_checkpointing": "model.enable_gradient_checkpointing",
    "init_kl_coef": "algorithm.kl_ctrl.kl_coef",
    "kl_coef": "actor.kl_loss_coef",
    "learning_rate": "optim.lr",
    "logging_dir": "run.dir",
    "lr_scheduler": "optim.lr_scheduler_type",
    "max_completion_length": "data.max_response_length",
    "max_grad_norm": "optim.clip_grad",
    "max_new_tokens": "data.max_response_length",
    "max_prompt_len": "data.max_prompt_length",
    "max_steps": "trainer.total_training_steps",
    "micro_train_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "mini_batch_size": "actor.ppo_mini_batch_size",
    "model_name_or_path": "model.path",
    "n_agent": "rollout.n",
    "n_gpus": "trainer.n_gpus_per_node",
    "n_samples_per_prompt": "rollout.n",
    "num_generations": "rollout.n",
    "num_gpus": "trainer.n_gpus_per_node",
    "num_iterations": "actor.ppo_epochs",
    "num_nodes": "trainer.nnodes",
    "num_train_epochs": "trainer.total_epochs",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "prompt_max_len": "data.max_prompt_length",
    "report_to": "trainer.logger",
    "rollout_batch_size": "data.train_batch_size",
    "rollout_save_path": "trainer.rollout_data_dir",
    "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.max_actor_ckpt_to_keep",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "total_steps": "trainer.total_training_steps",
    "train_data_num": "data.train_max_samples",
    "val_data_num": "data.val_max_samples",
    "warmup_ratio": "optim.lr_warmup_steps_ratio",
    "warmup_steps": "optim.lr_warmup_steps",
}
