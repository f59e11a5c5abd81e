#!/usr/bin/env bash
# A task of an array for each cell of the grid below: sbatch slurm/compare.sh [override]. For another grid copy this file.
#SBATCH --job-name=compare --array=0-8 --output=%x-%A_%a.out --open-mode=append
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --mem=0 --exclusive
#SBATCH --time=24:00:00 --signal=B:USR1@900 --requeue --no-kill
seeds=(1 2 3) # first, so that a part of the grid is paired
algos=(fspo rloo gspo)
shared=(experiment=qwen3_1_7b algorithm.adv_estimator=grpo)
set -euo pipefail
task="${SLURM_ARRAY_TASK_ID:?compare.sh is a job array, one task for each cell: sbatch --array=0-8 slurm/compare.sh}"
((task < ${#seeds[@]} * ${#algos[@]})) || { echo "task $task: the grid has fewer cells"; exit 0; }
seed="${seeds[task / ${#algos[@]}]}" algo="${algos[task % ${#algos[@]}]}"
export FSPO_ROOT="${FSPO_ROOT:-$SLURM_SUBMIT_DIR}"
export FSPO_RUN_DIR="${FSPO_RUN_DIR:-$FSPO_ROOT/runs/compare/$SLURM_ARRAY_JOB_ID}/$algo/seed$seed"
exec bash "$FSPO_ROOT/slurm/train.sh" "seed=$seed" "algo=$algo" "${shared[@]}" "$@"
