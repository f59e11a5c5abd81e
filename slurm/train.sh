#!/usr/bin/env bash
# train.sh OVERRIDE...: `python -m recipe.fspo.main` on all nodes of the job. Overrides given to sbatch come last, and win.
set -euo pipefail
export FSPO_ROOT="${FSPO_ROOT:-$SLURM_SUBMIT_DIR}"
[[ -z ${SLURM_ARRAY_TASK_ID:-} || -n ${FSPO_RUN_DIR:-} ]] || {
    echo "error: each task of an array would train the same run: to continue one in a chain of tasks, export" \
        "FSPO_RUN_DIR=/path/to/it; to compare algorithms and seeds, submit slurm/compare.sh" >&2
    exit 2
}
export FSPO_RUN_DIR="${FSPO_RUN_DIR:-$FSPO_ROOT/runs/$SLURM_JOB_NAME/$SLURM_JOB_ID}" # the same after a requeue
[[ " $*" == *" resume="* ]] || set -- "trainer.default_local_dir='$FSPO_RUN_DIR'" "$@"
exec bash "$FSPO_ROOT/slurm/launch.sh" python -m recipe.fspo.main "++ray_kwargs.ray_init.address=auto" \
    "trainer.nnodes=${FSPO_NODES:-$SLURM_JOB_NUM_NODES}" "$@"
