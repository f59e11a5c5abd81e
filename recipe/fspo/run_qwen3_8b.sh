#!/usr/bin/env bash
# FSPO on Qwen3-8B-Base by verl's own command, on 8 GPUs with 80 GB; more nodes: trainer.nnodes=N, Ray started before.
# Data: python3 -m recipe.math.data prepare all --out data. The reasons for the values: conf/experiment/qwen3_8b.yaml.
# Measured clip values, the table of responses and metrics by length come with trainer_mode=fspo.
set -xeuo pipefail

MODEL=${MODEL:-Qwen/Qwen3-8B-Base}
DATA=${DATA:-$PWD/data}
val_files="['$DATA/math500.parquet','$DATA/amc23.parquet','$DATA/aime24.parquet','$DATA/aime25.parquet']"

python3 -m verl.trainer.main_ppo \
    trainer.v1.trainer_mode=fspo \
    actor_rollout_ref.actor.policy_loss.loss_mode=fspo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/dapo_math_17k.parquet" \
    data.val_files="$val_files" \
    data.train_batch_size=512 \
    data.max_prompt_length=2048 \
    data.max_response_length=8192 \
    data.filter_overlong_prompts=true \
    data.truncation=error \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.fsdp_config.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480 \
    actor_rollout_ref.actor.use_kl_loss=false \
    actor_rollout_ref.actor.entropy_from_logits_with_chunking=true \
    actor_rollout_ref.actor.fsdp_config.param_offload=true \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
    actor_rollout_ref.actor.fsdp_config.use_torch_compile=false \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.85 \
    actor_rollout_ref.rollout.max_num_batched_tokens=10240 \
    actor_rollout_ref.rollout.max_num_seqs=700 \
    actor_rollout_ref.rollout.max_model_len=10240 \
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=2560 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=20480 \
    actor_rollout_ref.rollout.val_kwargs.n=8 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.top_p=1.0 \
    reward.custom_reward_function.path=pkg://recipe.math.reward \
    reward.custom_reward_function.name=compute_score \
    trainer.project_name=fspo \
    trainer.experiment_name=qwen3_8b \
    trainer.logger='["console","tensorboard"]' \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.total_training_steps=300 \
    trainer.test_freq=10 \
    trainer.save_freq=5 \
    trainer.max_actor_ckpt_to_keep=2 \
    "$@"
