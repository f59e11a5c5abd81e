#!/usr/bin/env bash
# Brings Ray up on the nodes of a SLURM job, runs one command on the first node, and takes Ray down again:
#   launch.sh COMMAND [ARGUMENT...]
# Exit status: the command's own; 1 if Ray did not come up. A job is requeued if its command ends with 75, and if Ray ends on
# a node, but not after scancel. docs/clusters.md explains every variable.
set -euo pipefail
readonly PREEMPTED=75 restart="${SLURM_RESTART_COUNT:-0}"
say() { echo "[$(date +%H:%M:%S)] $*"; }
fail() { say "error: $*" >&2; exit 1; }
is_running() { kill -0 "$@" 2>/dev/null; } # PROCESS-ID...: one of them
steps=() command='' lost='' cancelled=no # process ids of srun, Ray's first; which node was lost

job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}" job="${job:-$SLURM_JOB_ID}" # as scontrol takes it
export FSPO_ROOT="${FSPO_ROOT:-$SLURM_SUBMIT_DIR}"
FSPO_RUN_DIR="$(realpath -ms -- "${FSPO_RUN_DIR:-$FSPO_ROOT/runs/$SLURM_JOB_NAME/$SLURM_JOB_ID}")" # absolute: it is mounted
again="submit the job again with FSPO_RUN_DIR=$FSPO_RUN_DIR: it goes on from its last checkpoint"
export FSPO_RUN_DIR FSPO_LOG_DIR="$FSPO_RUN_DIR/slurm/$SLURM_JOB_ID-restart-$restart"
# The command saves and ends once the first file is there. When it has saved, it removes the second, a line for each start.
export FSPO_STOP="$FSPO_LOG_DIR/stop" FSPO_UNSAVED="$FSPO_RUN_DIR/slurm/$SLURM_JOB_ID-unsaved"
mkdir -p "$FSPO_LOG_DIR" || fail "the log folder cannot be made; set FSPO_RUN_DIR to a folder that every node can write"
ask_to_save() { # WHY
    say "$1: the run is asked to save after the step in progress ($FSPO_STOP)"
    touch "$FSPO_STOP" || true # it says why it cannot
}
trap 'ask_to_save "warning signal"' USR1 USR2 XCPU
# scancel, or a preemption: SLURM kills the job after a while, and requeues by itself what it preempts.
trap 'cancelled=yes; ask_to_save cancelled; [[ -n $command ]] || exit 143' TERM INT HUP
# The command saves before this time, too. SLURM sets it from 23.02 on.
end="$(timeout 20 squeue --noheader --jobs="$job" --format=%e 2>/dev/null)" || end=''
[[ $end != [0-9]* ]] || SLURM_JOB_END_TIME="$(date +%s --date="$end")" && export SLURM_JOB_END_TIME
# srun would confine a step to so many CPUs, and after sbatch --export=NONE or NAME=VALUE give it no variables.
unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_EXPORT_ENV
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
nodes=("${nodes[@]:0:${FSPO_NODES:-${#nodes[@]}}}")
say "job $SLURM_JOB_ID, restart $restart, ${#nodes[@]} node(s): ${nodes[*]}; logs: $FSPO_LOG_DIR"

container_srun=() container_command=()
export FSPO_RAY_TMP="${FSPO_RAY_TMP:-/tmp}"
mounts="$FSPO_ROOT:$FSPO_ROOT,$FSPO_RUN_DIR:$FSPO_RUN_DIR${FSPO_MOUNTS:+,$FSPO_MOUNTS}"
case "${FSPO_CONTAINER:+${FSPO_CONTAINER_RUNTIME:-apptainer}}" in
    '') ;;
    apptainer | singularity)
        container_command=("${FSPO_CONTAINER_RUNTIME:-apptainer}" exec --bind "$mounts" --pwd "$FSPO_ROOT" ${SLURM_GPUS_ON_NODE:+--nv} "$FSPO_CONTAINER") ;;
    pyxis) # All steps on a node use one container, a requeued job a new one. Its /tmp is private: all need Ray's sockets.
        container_srun=(--container-name="fspo-$SLURM_JOB_ID-$restart" --container-image="$FSPO_CONTAINER"
            --container-workdir="$FSPO_ROOT" --container-mounts="$mounts,$FSPO_RAY_TMP:$FSPO_RAY_TMP") ;;
    *) fail "FSPO_CONTAINER_RUNTIME=$FSPO_CONTAINER_RUNTIME: choose apptainer, singularity or pyxis" ;;
esac

start_step() { # NAME COUNT ARGUMENT-OF-node.sh..., in the background; --overlap: steps share cores, memory and GPUs
    srun --overlap --job-name="fspo_$1" --nodes="$2" --ntasks="$2" --ntasks-per-node=1 --kill-on-bad-exit=1 \
        --nodelist="$(IFS=, && echo "${nodes[*]:0:$2}")" --output="$FSPO_LOG_DIR/$1.log" "${container_srun[@]}" \
        "${container_command[@]}" bash "$FSPO_ROOT/slurm/node.sh" "${@:3}" \
        </dev/null 2> >(tee -a "$FSPO_LOG_DIR/srun-$1.log" >&2) &
    steps+=($!)
}
# Ends Ray, without which a command ends, too; what is left after a while is killed, by TERM to its srun.
stop_steps() {
    trap cancelled=yes TERM INT HUP && trap '' USR1 USR2 XCPU
    rm -f "${RAY_AUTH_TOKEN_PATH:-}" # before the steps end: SLURM kills a cancelled job soon
    is_running "${steps[@]}" || return 0
    echo now >"$FSPO_LOG_DIR/end" || true
    for step in "${steps[@]}"; do
        timeout 30 tail --pid="$step" --follow /dev/null || kill -TERM "$step" 2>/dev/null || true
    done
    wait "${steps[@]}" 2>/dev/null || true
}

pause() { sleep 1 & wait $! || true; } # a signal's trap runs at once
# The node on which Ray's step has ended first. Its step itself ends later: the others do not take the TERM that they get.
lost_node() { sed -n '/^srun: error: [^:]*: task/{s/srun: error: //;s/:.*//p;q}' "$FSPO_LOG_DIR/srun-ray.log" 2>/dev/null || true; }
has_ray() { is_running "${steps[0]}" && [[ -z $(lost_node) ]]; }
# Waits for a step. Its exit status is in $status; if Ray ends before it, $lost names the node, and the log that says why.
watch_step() { # PROCESS-ID
    local node log
    while is_running "$1" && has_ray; do pause; done
    status=1
    is_running "$1" || { wait "$1" && status=0 || status=$?; }
    ((status > 0)) || return 0
    pause # Ray's step may end for the same reason, which it says better
    ! has_ray || return 0
    node="$(lost_node)"
    for log in "$FSPO_LOG_DIR"/{"ray-$node",ray,srun-ray}.log; do [[ ! -s $log ]] || break; done
    lost="Ray ended on node ${node:-(one of ${nodes[*]})}; see $log$(sed -n '/^error: /{s/error//p;q}' "$log" || true)"
}

requeue() { # WHY
    say "this start ends: $1"
    [[ ! -e $FSPO_UNSAVED ]] || printf ' to %(%T)T: %s' -1 "$1" >>"$FSPO_UNSAVED" || true
    stop_steps
    trap - EXIT
    [[ $cancelled == no ]] || exit 143
    say "requeueing job $job: it continues from its last checkpoint"
    timeout 60 scontrol requeue "$job" || fail "SLURM refused the requeue: $again"
    exit "$PREEMPTED"
}

starts="$(wc -l 2>/dev/null <"$FSPO_UNSAVED")" || starts=0
((starts < 3)) || fail "$starts starts in a row have saved no checkpoint, so job $job ends:$(<"$FSPO_UNSAVED")
Raise --time, or save sooner (trainer.save_freq, --signal=B:USR1@SECONDS for one step and one save), and $again"
printf '\n  restart %s: %(%F %T)T' "$restart" -1 >>"$FSPO_UNSAVED"
trap stop_steps EXIT
# A token of this job's own: only who can read the file can use this Ray. Never on a command line, never printed.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$FSPO_LOG_DIR/.ray_token"
unset RAY_AUTH_TOKEN RAY_ADDRESS
# With one node Ray (its switch for laptops), TransferQueue, vLLM and torch listen on 127.0.0.1.
((${#nodes[@]} > 1)) || export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" \
    VLLM_HOST_IP="${VLLM_HOST_IP:-127.0.0.1}"
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")
# Ray ends once there is a word in this file. It is there from the beginning, because a node may not see a new file at once.
: >"$FSPO_LOG_DIR/end"
start_step ray "${#nodes[@]}" ray
# SLURM's signals to all steps, that of the command among them, must not look like a Ray that is not ready.
start_step ready 1 run python -m recipe.runner.faults.preemption \
    python -m recipe.runner.faults.resources "${FSPO_READY_TIMEOUT:-600}" "${nodes[@]}"
watch_step "${steps[1]}"
[[ -z $lost ]] || { ((restart > 0)) && requeue "$lost"; } || fail "$lost" # what has run once may run again
((status == 0)) || fail "$(tail -n 1 "$FSPO_LOG_DIR/ready.log"); see ready.log and ray-*.log in $FSPO_LOG_DIR"
RAY_ADDRESS="$(<"$FSPO_LOG_DIR/ray_address")" && export RAY_ADDRESS
say "Ray is up on ${#nodes[@]} node(s) at $RAY_ADDRESS"
start_step command 1 run "$@"
command="${steps[2]}"
tail --pid="$command" --follow=name --retry --lines=+1 "$FSPO_LOG_DIR/command.log" 2>/dev/null &
shown=$!
watch_step "$command"
[[ -z $lost ]] || stop_steps # the command may wait for the node; its last words are shown before the error
# SLURM kills a cancelled job soon, and nobody waits for its last lines.
if [[ $cancelled == yes ]]; then kill "$shown" 2>/dev/null || true; else wait "$shown" || true; fi
[[ -z $lost ]] || requeue "$lost"
say "the command ended with status $status; log: $FSPO_LOG_DIR/command.log"
((status != PREEMPTED)) || [[ $cancelled == yes ]] || requeue "its command is worth another start"
exit "$status"
