#!/usr/bin/env bash
# FSPO on Qwen3-8B-Base with verifiable rewards, on one node of 8 GPUs with 80 GB each.
#
# The same run as `python3 -m recipe.fspo.main experiment=qwen3_8b`, but no experiment file is read ('~experiment'): what
# differs from verl's defaults is written below. Copy this file and change it. Reasons: conf/experiment/qwen3_8b.yaml.
# Further overrides may follow on the command line, and the last one wins:
#   bash recipe/fspo/run_fspo_qwen3_8b.sh algo=gspo trainer.nnodes=2
set -xeuo pipefail

MODEL=${FSPO_MODEL:-Qwen/Qwen3-8B-Base}
DATA=${FSPO_DATA:-data} # python3 -m fspo.data prepare all --out data

algorithm=(
    algo=fspo # policy_loss.loss_mode=fspo with clip_low=clip_high=0.03 (c, nats per sqrt(token)); adv_estimator=grpo
    actor_rollout_ref.actor.use_kl_loss=False # the distance to the start is measured at validations (fspo.kl_to_start)
    actor_rollout_ref.actor.kl_loss_coef=0.0
    actor_rollout_ref.actor.entropy_coeff=0.0
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean # for the KL metric; the loss is a mean over sequences
    fspo.reference_length=2000                                # only used by match_scale=matched
    seed=1
)

data=(
    data.train_files="$DATA/dapo_math_17k.parquet"
    data.val_files="[$DATA/math500.parquet,$DATA/amc23.parquet,$DATA/aime24.parquet,$DATA/aime25.parquet]"
    data.train_batch_size=512
    data.max_prompt_length=2048
    data.max_response_length=8192
    data.filter_overlong_prompts=True
    data.truncation=error
    reward.custom_reward_function.path=pkg://recipe.fspo.reward # math-verify in processes of its own
    reward.custom_reward_function.name=compute_score
)

model=(
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    +actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2
)

actor=(
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=128 # four optimizer steps per rollout batch
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480 # rollout.log_prob_max_token_len_per_gpu follows it
    actor_rollout_ref.actor.pad_to_length=True              # one shape for all packs: both passes round alike
    actor_rollout_ref.actor.fsdp_config.pad_to_length_bucket=20480
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.actor.entropy_from_logits_with_chunking=True
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    actor_rollout_ref.ref.entropy_from_logits_with_chunking=True
)

rollout=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.top_k=-1
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
    actor_rollout_ref.rollout.max_num_batched_tokens=10240
    actor_rollout_ref.rollout.max_num_seqs=304
    actor_rollout_ref.rollout.max_model_len=10240
    actor_rollout_ref.rollout.val_kwargs.n=8
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=1.0
)

trainer=(
    trainer.experiment_name=qwen3_8b
    trainer.device=cuda
    trainer.nnodes=1
    trainer.n_gpus_per_node=8
    trainer.total_training_steps=300
    trainer.test_freq=10
    trainer.save_freq=5
    trainer.max_actor_ckpt_to_keep=2
    'trainer.logger=[console]'
)

python3 -m recipe.fspo.main '~experiment' \
    "${algorithm[@]}" "${data[@]}" "${model[@]}" "${actor[@]}" "${rollout[@]}" "${trainer[@]}" "$@"
