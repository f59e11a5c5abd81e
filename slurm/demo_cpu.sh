#!/usr/bin/env bash
# The embedded demo on two nodes without GPUs, one FSDP rank on each: sbatch slurm/demo_cpu.sh [any Hydra override]
#SBATCH --job-name=demo_cpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
# Logical, as Ray counts them: a GPU is an FSDP rank, and verl asks for about a dozen CPUs.
export FSPO_RAY_GPUS=1 FSPO_RAY_CPUS="${FSPO_RAY_CPUS:-16}"
export FSPO_RAY_OPTIONS="${FSPO_RAY_OPTIONS:---object-store-memory=200000000}"
exec bash "${FSPO_ROOT:-$SLURM_SUBMIT_DIR}/slurm/train.sh" experiment=demo "$@"
