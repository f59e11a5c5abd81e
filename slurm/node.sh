#!/usr/bin/env bash
# One node's part in a job. launch.sh starts it through srun, inside the container if there is one:
#   node.sh ray             Ray: the head on the first node, whose address goes to FSPO_LOG_DIR/ray_address; the others join;
#                           it ends once FSPO_LOG_DIR/end has a word in it
#   node.sh run COMMAND...  a command beside Ray
set -euo pipefail
fail() { echo "error: $* on $(hostname)" >&2; exit 1; }

# ------------------------------------------------------------------- software
# Profiles, module files and conda's hooks use variables that nobody has set, and commands that fail.
set +euo pipefail
conda_before="${CONDA_PREFIX:-}"
if [[ -n ${FSPO_MODULES:-} ]]; then
    command -v module >/dev/null || source /etc/profile
    # shellcheck disable=SC2086  # a list of names
    module load $FSPO_MODULES || fail "FSPO_MODULES=$FSPO_MODULES: not loaded"
fi
# shellcheck source=/dev/null
[[ -z ${FSPO_SETUP:-} ]] || source "$FSPO_SETUP" || fail "FSPO_SETUP=$FSPO_SETUP ended with status $?"
set -euo pipefail
if [[ -z ${FSPO_VENV+set} && -z ${FSPO_CONTAINER:-} ]]; then
    # Before .venv comes what is active where sbatch was called (conda's base is nearly always), or what a module or
    # FSPO_SETUP brings.
    [[ ${CONDA_PREFIX:-} == "$conda_before" ]] || unset VIRTUAL_ENV
    FSPO_VENV="${VIRTUAL_ENV:-}"
    if [[ -z $FSPO_VENV && -d $FSPO_ROOT/.venv && (-z ${CONDA_PREFIX:-} || ${CONDA_DEFAULT_ENV:-} == base) ]]; then
        [[ -n ${FSPO_MODULES:-}${FSPO_SETUP:-} ]] && command -v ray >/dev/null || FSPO_VENV="$FSPO_ROOT/.venv"
    fi
fi
[[ -z ${FSPO_VENV:-} ]] || export PATH="$FSPO_VENV/bin:$PATH" VIRTUAL_ENV="$FSPO_VENV"
# SLURM sets both where it is not told the GPUs' make, and verl refuses to run with both.
[[ -z ${CUDA_VISIBLE_DEVICES:-} ]] || unset ROCR_VISIBLE_DEVICES
# A caller's PYTHONPATH does not reach Ray's workers, so the command must not depend on it either.
unset PYTHONPATH
export PYTHONUNBUFFERED=1
if [[ -n ${FSPO_INTERFACE:-} ]]; then
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$FSPO_INTERFACE}" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$FSPO_INTERFACE}"
    address="$(ip -4 -o addr show dev "$FSPO_INTERFACE" | awk '{sub("/.*", "", $4); print $4; exit}')"
    [[ -n $address ]] || fail "FSPO_INTERFACE=$FSPO_INTERFACE has no IPv4 address"
    [[ ${RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER:-} != 0 ]] || address=127.0.0.1
fi

# Ray asks for 65,536 open files; many clusters begin with 1,024.
(($(ulimit -Sn | sed s/unlimited/65536/) >= 65536)) || ulimit -Sn 65536 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"
[[ $1 != run ]] || exec "${@:2}"

# ------------------------------------------------------------------- Ray
# SLURM sends its signals to every process of a step, and Ray must go on until the run has saved.
trap '' TERM INT HUP USR1 USR2 XCPU
ray='' status=0 ended=no
is_running() { kill -0 "$ray" 2>/dev/null; }
is_over() { # Ray has ended by itself, or is to end
    [[ -z $(cat "$FSPO_LOG_DIR/end" 2>/dev/null) ]] || ended=yes
    [[ $ended == yes ]] || { [[ -n $ray ]] && ! is_running; }
}
node="${SLURMD_NODENAME:-$(hostname)}" SLURM_NODEID="${SLURM_NODEID:-0}"
exec >"$FSPO_LOG_DIR/ray-$node.log" 2>&1
# Before it stops, Ray would wait up to 30 s for work to move to other nodes: there is none to move.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
# In a folder that only this user may enter: Ray lets everybody write to its own. A problem found here ends the step.
temp="$(python -m recipe.runner.faults.node "${FSPO_RAY_TMP:-/tmp}" "$SLURM_JOB_ID-$SLURM_NODEID")"
rm -rf "$temp" # a requeued job that was killed before may have left it, with the old address in it
# A step may use less than the job has, and on a node that is not confined more. nproc obeys the two variables.
cpus="$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)"
((cpus <= ${SLURM_CPUS_ON_NODE:?})) || cpus="$SLURM_CPUS_ON_NODE"
options=(
    --block --disable-usage-stats --log-color=false --node-name="$node" --temp-dir="$temp"
    --num-cpus="${FSPO_RAY_CPUS:-$cpus}" --num-gpus="${FSPO_RAY_GPUS:-${SLURM_GPUS_ON_NODE:-0}}"
    ${FSPO_INTERFACE:+--node-ip-address="$address"}
    # Free ports: another job on the node may have Ray's defaults. (Ray's client, which nothing uses here, takes no 0.)
    --dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0
)
file="$FSPO_LOG_DIR/ray_address"
if ((SLURM_NODEID == 0)); then
    options+=(--head --port=0 --ray-client-server-port=$((10001 + SLURM_JOB_ID % 10000)) --include-dashboard=false)
else
    until [[ -s $file ]]; do # launch.sh ends the step after FSPO_READY_TIMEOUT
        ! is_over || exit 0
        sleep 0.5
    done
    options+=(--address="$(<"$file")")
fi

# shellcheck disable=SC2086  # a list of options
python -m recipe.runner.faults.preemption ray start "${options[@]}" ${FSPO_RAY_OPTIONS:-} &
ray=$!
if ((SLURM_NODEID == 0)); then
    until [[ -s $temp/ray_current_cluster ]] || is_over; do sleep 0.5; done
    cp "$temp/ray_current_cluster" "$file.tmp" 2>/dev/null && mv "$file.tmp" "$file"
fi
until is_over; do sleep 1; done
# It ends all that is left of Ray here once a process that it has started ends.
while is_running; do
    python -c 'import psutil, sys; [child.kill() for child in psutil.Process(int(sys.argv[1])).children()]' "$ray" 2>/dev/null || true
    sleep 1
done
wait "$ray" || status=$?
# Ray's logs outlive the node's temporary folder.
cp -rT "$temp/session_latest/logs" "$FSPO_LOG_DIR/ray-$node" 2>/dev/null || true
rm -rf "$temp"
[[ $ended == yes ]] || exit "$((status == 0 ? 1 : status))"
