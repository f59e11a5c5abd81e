#!/usr/bin/env bash
# Brings Ray up on the nodes of a SLURM job, runs one command on the first node, and takes Ray down again:
#   launch.sh COMMAND [ARGUMENT...]
# Exit status: the command's own; 1 if Ray did not come up or a node was lost. A command that ends with status 75 has
# saved its state after the warning signal: the job is requeued. After the loss of a node the command is started again,
# FSPO_RESTARTS times: at once where enough nodes answer, else (or after the warning) in a requeued job. Every variable is explained in
# docs/clusters.md.
set -euo pipefail

readonly PREEMPTED=75
say() { echo "[$(date +%H:%M:%S)] $*"; }
fail() {
    say "error: $*" >&2
    exit 1
}

(($# > 0)) || fail "usage: launch.sh COMMAND [ARGUMENT...]"
[[ -n ${SLURM_JOB_ID:-} ]] || fail "this is not a SLURM job: submit one of slurm/*.sh with sbatch"
# sbatch runs a copy of the job script, so nothing can be found from its own path.
export FSPO_ROOT="${FSPO_ROOT:-$SLURM_SUBMIT_DIR}"
[[ -f $FSPO_ROOT/slurm/node.sh ]] ||
    fail "$FSPO_ROOT/slurm/node.sh does not exist: run sbatch in the repository's root, or export FSPO_ROOT=/path/to/it"
# Model and data that were carried here are whole: lists of checksums, each for the folder in which it lies.
for manifest in ${FSPO_MANIFEST:-}; do
    (cd "$(dirname "$manifest")" && sha256sum --check --quiet "$(basename "$manifest")") ||
        fail "FSPO_MANIFEST: the files named above are not those of $manifest; carry them over again"
done
# Absolute: a container takes no other path as a mount.
FSPO_RUN_DIR="$(realpath -ms -- "${FSPO_RUN_DIR:-$FSPO_ROOT/runs/$SLURM_JOB_NAME/$SLURM_JOB_ID}")"
export FSPO_RUN_DIR
logs="$FSPO_RUN_DIR/slurm/$SLURM_JOB_ID-restart-${SLURM_RESTART_COUNT:-0}"
mkdir -p "$logs" || fail "the log folder cannot be made; set FSPO_RUN_DIR to a folder that every node can write"
# With them srun would confine a step to so many CPUs, while the job may have the whole node.
unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK
# sbatch --export=NONE or --export=NAME=VALUE sets it, and srun would keep what is exported here from the steps.
unset SLURM_EXPORT_ENV
mapfile -t allocated < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
wanted="${FSPO_NODES:-${#allocated[@]}}"
[[ $wanted =~ ^[1-9][0-9]*$ ]] && ((wanted <= ${#allocated[@]})) ||
    fail "FSPO_NODES=$wanted: the job has ${#allocated[@]} node(s), of which that many are to be used"
restarts="${FSPO_RESTARTS:-3}"
[[ $restarts =~ ^[0-9]+$ ]] || fail "FSPO_RESTARTS=$restarts is not a number of restarts"

# ------------------------------------------------------------------- containers
container_srun=() container_command=() ready_within="${FSPO_READY_TIMEOUT:-300}"
mounts="$FSPO_ROOT:$FSPO_ROOT,$FSPO_RUN_DIR:$FSPO_RUN_DIR${FSPO_MOUNTS:+,$FSPO_MOUNTS}"
if [[ -n ${FSPO_CONTAINER:-} ]]; then
    case "${FSPO_CONTAINER_RUNTIME:-apptainer}" in
        apptainer)
            container_command=(apptainer exec --bind "$mounts" --pwd "$FSPO_ROOT")
            [[ -z ${SLURM_GPUS_ON_NODE:-} ]] || container_command+=(--nv)
            container_command+=("$FSPO_CONTAINER")
            ;;
        pyxis)
            # By its name (see run) all steps on a node use one container, so that the image is unpacked once. Its /tmp is
            # private, and every step needs Ray's sockets.
            ray_tmp="${FSPO_RAY_TMP:-/tmp}" ready_within="${FSPO_READY_TIMEOUT:-900}"
            container_srun=(--container-name= --container-image="$FSPO_CONTAINER" --container-workdir="$FSPO_ROOT"
                --container-mounts="$mounts,$ray_tmp:$ray_tmp")
            ;;
        *) fail "FSPO_CONTAINER_RUNTIME=$FSPO_CONTAINER_RUNTIME: choose apptainer or pyxis" ;;
    esac
fi

# ------------------------------------------------------------------- job steps
declare -A step_pid=() # by name; only of steps that have been started

# Starts a job step in the background. --overlap: the steps share the job's cores, memory and GPUs.
start_step() { # NAME NODE[,NODE...] COUNT OUTPUT ARGUMENT-OF-node.sh...
    local name="$1" list="$2" count="$3" output="$4"
    shift 4
    srun --overlap --job-name="$name" --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --nodelist="$list" \
        --kill-on-bad-exit=1 --output="$output" "${container_srun[@]}" \
        "${container_command[@]}" bash "$FSPO_ROOT/slurm/node.sh" "$@" \
        </dev/null 2> >(tee -a "$FSPO_LOG_DIR/srun.log" >&2) &
    step_pid[$name]=$!
}

is_running() { [[ -n ${step_pid[$1]:-} ]] && kill -0 "${step_pid[$1]}" 2>/dev/null; }

# TERM to the processes of a step, KILL after a while. (TERM to srun itself would be a KILL for its processes.)
stop_step() { # NAME SECONDS
    is_running "$1" || return 0
    local id waited
    id="$(timeout 20 squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j' | awk -v n="$1" '$2 == n {print $1}')" ||
        id="" # SLURM is busy: the step ends below
    # The signal goes out; some versions then report an unknown job all the same.
    [[ -z $id ]] || timeout 20 scancel --signal=TERM "$id" 2>/dev/null || true
    for ((waited = 0; waited < $2; waited++)); do
        is_running "$1" || return 0
        sleep 1
    done
    kill -TERM "${step_pid[$1]}" 2>/dev/null || true
    wait "${step_pid[$1]}" 2>/dev/null || true
}

stop_steps() {
    stop_step fspo_command 20
    stop_step fspo_ready 1
    stop_step fspo_ray_workers 20
    stop_step fspo_ray_head 20
    step_pid=()
    rm -f "${RAY_AUTH_TOKEN_PATH:-}"
}

stop_everything() {
    trap '' TERM INT USR1
    rm -f "${RAY_AUTH_TOKEN_PATH:-}" # before the steps end: SLURM kills a cancelled job soon
    stop_steps
}

# Like `sleep 1`, but a signal's trap runs at once.
pause() {
    sleep 1 &
    wait $! || true
}

# The log that says why Ray did not start or ended on a node: its own, or of what came before it.
log_of() { # NODE
    local log
    for log in "ray-$1" ray srun "ray-$1"; do [[ ! -s $FSPO_LOG_DIR/$log.log ]] || break; done
    echo "$FSPO_LOG_DIR/$log.log"
}

# Whether Ray runs on all nodes; if not, $lost says where it has ended, and $status is 1.
ray_is_whole() {
    local ray which
    for ray in fspo_ray_head fspo_ray_workers; do
        [[ -n ${step_pid[$ray]:-} ]] && ! is_running "$ray" || continue
        which="$head"
        [[ $ray == fspo_ray_head ]] || which="$(sed -n 's/^srun: error: \([^:]*\): task.*/\1/p' "$FSPO_LOG_DIR/srun.log" | head -1)"
        lost="Ray ended on node ${which:-(one of ${nodes[*]:1})}; see $(log_of "${which:-*}")"
        status=1
        return 1
    done
}

# Waits for a step to end by itself; its exit status is in $status. If a Ray node ends first, $lost says which.
watch_step() { # NAME
    local seconds=0
    status=0
    while is_running "$1"; do
        ray_is_whole || return 0
        # srun hands USR1 to the processes of its step. Again and again: until the command has a handler, it ignores it.
        if [[ $warned == yes && $1 == fspo_command ]] && ((seconds++ % 5 == 0)); then
            kill -USR1 "${step_pid[$1]}" 2>/dev/null || true
        fi
        pause
    done
    wait "${step_pid[$1]}" || status=$?
}

# Sets $answering to those of some nodes on which a step can be started. (SLURM itself notices a dead node late.)
ask() { # NODE...
    local node
    local -A asked=()
    answering=()
    for node in "$@"; do
        timeout --kill-after=5 30 srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" true </dev/null >/dev/null 2>&1 &
        asked[$node]=$!
    done
    for node in "$@"; do
        if wait "${asked[$node]}"; then answering+=("$node"); else say "node $node does not answer"; fi
    done
}

# ------------------------------------------------------------------- signals
warned=no
# shellcheck disable=SC2317  # called by a trap
on_warning() {
    warned=yes
    say "warning signal: the command is told to save after the step in progress"
}
# shellcheck disable=SC2317  # called by a trap
on_cancel() {
    say "cancelled"
    exit 143
}

# ------------------------------------------------------------------- Ray and the command
# Brings Ray up on $nodes, runs the command and sets $status; $lost says so if a node was lost on the way.
run() { # COMMAND [ARGUMENT...]
    local waited workers tail_pid
    lost="" head="${nodes[0]}"
    export FSPO_LOG_DIR="$logs${attempt:+.$attempt}"
    mkdir -p "$FSPO_LOG_DIR"
    # A new container at each restart: a half-made one may be left.
    [[ ${container_srun[*]} == '' ]] ||
        container_srun[0]="--container-name=fspo-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}${attempt:+-$attempt}"
    # A token of this job's own: only who can read the file can use this Ray. Never on a command line, never printed.
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$FSPO_LOG_DIR/.ray_token"
    unset RAY_AUTH_TOKEN RAY_ADDRESS
    (
        umask 077
        od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH"
    )
    start_step fspo_ray_head "$head" 1 "$FSPO_LOG_DIR/ray.log" head "$FSPO_LOG_DIR/ray_address"
    for ((waited = 0; waited < ready_within; waited++)); do
        [[ ! -s $FSPO_LOG_DIR/ray_address ]] || break
        is_running fspo_ray_head || fail "Ray's head did not start on node $head; see $(log_of "$head")"
        pause
    done
    [[ -s $FSPO_LOG_DIR/ray_address ]] ||
        fail "Ray's head on node $head was not up after $ready_within s (FSPO_READY_TIMEOUT); see $(log_of "$head")"
    RAY_ADDRESS="$(<"$FSPO_LOG_DIR/ray_address")"
    export RAY_ADDRESS
    if ((${#nodes[@]} > 1)); then
        workers="$(
            IFS=,
            echo "${nodes[*]:1}"
        )"
        start_step fspo_ray_workers "$workers" "$((${#nodes[@]} - 1))" "$FSPO_LOG_DIR/ray.log" worker "$RAY_ADDRESS"
    fi
    start_step fspo_ready "$head" 1 "$FSPO_LOG_DIR/ready.log" run python -m recipe.runner.faults.resources \
        --timeout "$ready_within" "${nodes[@]}"
    watch_step fspo_ready
    [[ -z $lost ]] || return 0
    ((status == 0)) || fail "$(tail -n 1 "$FSPO_LOG_DIR/ready.log"); see $FSPO_LOG_DIR/ray-*.log"
    say "Ray is up on ${#nodes[@]} node(s) at $RAY_ADDRESS"

    if [[ $warned == yes ]]; then
        say "the warning came before the command was started: nothing to save"
        status=$PREEMPTED
        return 0
    fi
    start_step fspo_command "$head" 1 "$FSPO_LOG_DIR/command.log" run "$@"
    # Shown here as well, but not through a pipe: the exit status must be the command's own.
    tail --pid="${step_pid[fspo_command]}" --follow=name --retry --lines=+1 "$FSPO_LOG_DIR/command.log" 2>/dev/null &
    tail_pid=$!
    watch_step fspo_command
    if [[ -n $lost ]]; then
        stop_steps # the command may wait for the node; its last words are shown before the error
    elif ((status == 1)); then
        # The command itself may have been the first to notice that a node is gone.
        pause
        ray_is_whole || true
        ask "${nodes[@]}"
        ((${#answering[@]} == ${#nodes[@]})) || lost="${lost:-a node of ${nodes[*]} was lost}"
    fi
    wait "$tail_pid" || true
    say "the command ended with status $status; log: $FSPO_LOG_DIR/command.log"
}

# The same job once more, with the same run folder.
requeue() {
    stop_everything
    trap - EXIT
    # Not SLURM_JOB_ID alone: one task of an array has the id of the whole array.
    local job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
    job="${job:-$SLURM_JOB_ID}"
    say "requeueing job $job: it continues from its last checkpoint"
    timeout 60 scontrol requeue "$job" || say "error: SLURM refused the requeue; submit the job again by hand" >&2
}

trap stop_everything EXIT
trap on_cancel TERM INT
trap on_warning USR1

say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, ${#allocated[@]} node(s): ${allocated[*]}; logs: $logs"
# A line for each restart after a loss, over all requeues of the job.
history="$FSPO_RUN_DIR/slurm/$SLURM_JOB_ID-restarts" attempt=""
nodes=("${allocated[@]:0:wanted}")
run "$@"
while [[ -n $lost ]]; do
    used=0
    [[ ! -f $history ]] || used="$(wc -l <"$history")"
    ((used < restarts)) || fail "$lost. The job has been restarted $used times (FSPO_RESTARTS)"
    say "error: $lost" >&2
    stop_steps
    answering=()
    [[ $warned == yes ]] || ask "${allocated[@]}" # else the job's time is nearly over
    if ((${#answering[@]} >= wanted)); then
        nodes=("${answering[@]:0:wanted}")
        attempt=$((${attempt:-1} + 1))
        say "restart $((used + 1)) of at most $restarts, on ${nodes[*]}" | tee -a "$history"
        run "$@"
    else
        why="$wanted node(s) are needed (FSPO_NODES)"
        [[ $warned == no ]] || why="the job's time is nearly over"
        say "restart $((used + 1)) of at most $restarts, in the queue: $why" | tee -a "$history"
        requeue
        exit 1
    fi
done
((status != PREEMPTED)) || requeue
exit "$status"
