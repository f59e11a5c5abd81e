#!/usr/bin/env bash
# FSPO on Qwen3-1.7B-Base: sbatch [--nodes=N] slurm/fspo_1_7b.sh [algo=gspo] [any Hydra override]
#SBATCH --job-name=fspo_1_7b
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
#SBATCH --output=%x-%j.out
exec bash "${FSPO_ROOT:-$SLURM_SUBMIT_DIR}/slurm/train.sh" experiment=qwen3_1_7b "$@"
