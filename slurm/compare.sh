#!/usr/bin/env bash
# One job per algorithm and seed: FSPO_ALGOS="fspo gspo" FSPO_SEEDS="1 2" sbatch --array=0-3 slurm/compare.sh [override]
#SBATCH --job-name=compare
#SBATCH --array=0-8
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.out
set -euo pipefail
export FSPO_WARNING_LEAD_S="${FSPO_WARNING_LEAD_S:-900}" # as in --signal
read -ra algos <<<"${FSPO_ALGOS:-fspo rloo gspo}"
read -ra seeds <<<"${FSPO_SEEDS:-1 2 3}"
runs=$((${#algos[@]} * ${#seeds[@]}))
: "${SLURM_ARRAY_TASK_ID:?compare.sh is a job array: submit it with sbatch --array=0-$((runs - 1))}"
if ((SLURM_ARRAY_TASK_ID >= runs)); then
    echo "error: ${#algos[@]} algorithms x ${#seeds[@]} seeds are $runs runs: submit with --array=0-$((runs - 1))" >&2
    exit 2
fi
((SLURM_ARRAY_TASK_COUNT == runs)) || echo "note: $SLURM_ARRAY_TASK_COUNT of the $runs runs were submitted"
algo="${algos[SLURM_ARRAY_TASK_ID % ${#algos[@]}]}"
seed="${seeds[SLURM_ARRAY_TASK_ID / ${#algos[@]}]}"
export FSPO_ROOT="${FSPO_ROOT:-$SLURM_SUBMIT_DIR}"
folder="${FSPO_COMPARE_DIR:-$FSPO_ROOT/runs/compare/$SLURM_ARRAY_JOB_ID}"
export FSPO_RUN_DIR="$folder/default/$algo/seed$seed"

# What was planned, so that the report can name what was not run. Every job of the array writes the same file.
write_grid() {
    local separator="" a s
    printf '{"runs": ['
    for s in "${seeds[@]}"; do
        for a in "${algos[@]}"; do
            printf '%s\n  {"path": "default/%s/seed%s", "algo": "%s", "seed": %s, "comparison": "default"}' \
                "$separator" "$a" "$s" "$a" "$s"
            separator=","
        done
    done
    printf '\n]}\n'
}
mkdir -p "$folder"
write_grid >"$folder/.grid.$SLURM_ARRAY_TASK_ID"
mv "$folder/.grid.$SLURM_ARRAY_TASK_ID" "$folder/grid.json"

exec bash "$FSPO_ROOT/slurm/train.sh" "experiment=${FSPO_EXPERIMENT:-qwen3_1_7b}" "algo=$algo" "seed=$seed" "$@"
