#!/usr/bin/env bash
# FSPO on Qwen3-8B-Base: sbatch [--nodes=N] slurm/fspo_8b.sh [algo=gspo] [any Hydra override]
#SBATCH --job-name=fspo_8b --output=%x-%j.out --open-mode=append
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --mem=0 --exclusive
#SBATCH --time=24:00:00 --signal=B:USR1@1800 --requeue --no-kill
exec bash "${FSPO_ROOT:-$SLURM_SUBMIT_DIR}/slurm/train.sh" experiment=qwen3_8b "$@"
