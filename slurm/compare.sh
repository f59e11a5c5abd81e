#!/usr/bin/env bash
# One task per run of a grid, with the fairness settings of `python -m recipe.fspo.compare`:
#   FSPO_ALGOS="fspo gspo" FSPO_SEEDS="1 2" sbatch --array=0-3 slurm/compare.sh [override]
#SBATCH --job-name=compare
#SBATCH --array=0-8
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.out
set -euo pipefail
: "${SLURM_ARRAY_TASK_ID:?compare.sh is a job array, one task per algorithm and seed: sbatch --array=0-8 slurm/compare.sh}"
export FSPO_ROOT="${FSPO_ROOT:-$SLURM_SUBMIT_DIR}"
export FSPO_RUN_DIR="${FSPO_COMPARE_DIR:-$FSPO_ROOT/runs/compare/$SLURM_ARRAY_JOB_ID}"
algos="${FSPO_ALGOS:-fspo rloo gspo}" seeds="${FSPO_SEEDS:-1 2 3}"
exec bash "$FSPO_ROOT/slurm/launch.sh" python -m recipe.fspo.compare "run=$SLURM_ARRAY_TASK_ID" "out=$FSPO_RUN_DIR" \
    "algos=[${algos// /,}]" "seeds=[${seeds// /,}]" "experiment=${FSPO_EXPERIMENT:-qwen3_1_7b}" \
    "++ray_kwargs.ray_init.address=auto" "trainer.nnodes=${FSPO_NODES:-$SLURM_JOB_NUM_NODES}" "$@"
