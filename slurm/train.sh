#!/usr/bin/env bash
# What the job scripts share: train.sh OVERRIDE... runs `python -m recipe.fspo.main` on all nodes of the job. Later
# overrides win, so those given to sbatch can replace any of these.
set -euo pipefail
export FSPO_ROOT="${FSPO_ROOT:-$SLURM_SUBMIT_DIR}"
[[ -z ${SLURM_ARRAY_TASK_ID:-} || -n ${FSPO_RUN_DIR:-} ]] || {
    echo "error: each task of an array would train the same run in a folder of its own: to continue one run in a chain of" \
        "tasks, export FSPO_RUN_DIR=/path/to/it; to compare algorithms and seeds, submit slurm/compare.sh" >&2
    exit 2
}
# The same folder after a requeue: that is how a run finds its checkpoint.
export FSPO_RUN_DIR="${FSPO_RUN_DIR:-$FSPO_ROOT/runs/$SLURM_JOB_NAME/$SLURM_JOB_ID}"
run_dir=("trainer.default_local_dir='$FSPO_RUN_DIR'")
for word in "$@"; do [[ $word != resume=* ]] || run_dir=(); done
exec bash "$FSPO_ROOT/slurm/launch.sh" python -m recipe.fspo.main \
    "++ray_kwargs.ray_init.address=auto" \
    "trainer.nnodes=${FSPO_NODES:-$SLURM_JOB_NUM_NODES}" \
    "${run_dir[@]}" \
    "$@"
