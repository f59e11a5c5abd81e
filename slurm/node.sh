#!/usr/bin/env bash
# One node's part in a job. launch.sh starts it through srun, inside the container if there is one:
#   node.sh ray             Ray: the head on the first node, whose address goes to FSPO_LOG_DIR/ray_address; the others join;
#                           it ends once FSPO_LOG_DIR/end has a word in it
#   node.sh run COMMAND...  a command beside Ray
set +e # profiles, module files and conda's hooks have commands that fail
fail() { echo "error: $* on $(hostname)" >&2; exit 1; }
# shellcheck disable=SC2086  # a list of names
[[ -z ${FSPO_MODULES:-} ]] || { command -v module >/dev/null || source /etc/profile; module load $FSPO_MODULES; } ||
    fail "FSPO_MODULES=$FSPO_MODULES: not loaded"
# shellcheck source=/dev/null
[[ -z ${FSPO_SETUP:-} ]] || source "$FSPO_SETUP" || fail "FSPO_SETUP=$FSPO_SETUP ended with status $?"
set -euo pipefail
# What is active where sbatch was called, or a module or FSPO_SETUP brings, is in PATH.
[[ -n ${FSPO_VENV+set}${FSPO_CONTAINER:-} ]] || command -v ray >/dev/null || FSPO_VENV="$FSPO_ROOT/.venv"
[[ -z ${FSPO_VENV:-} ]] || export PATH="$FSPO_VENV/bin:$PATH" VIRTUAL_ENV="$FSPO_VENV"
# SLURM sets both where it is not told the GPUs' make, and verl refuses to run with both.
[[ -z ${CUDA_VISIBLE_DEVICES:-} ]] || unset ROCR_VISIBLE_DEVICES
unset PYTHONPATH # a caller's does not reach Ray's workers, so the command must not depend on it either
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

ray='' node="${SLURMD_NODENAME:-$(hostname)}" SLURM_NODEID="${SLURM_NODEID:-0}" file="$FSPO_LOG_DIR/ray_address"
is_running() { kill -0 "$ray" 2>/dev/null; }
is_to_end() { [[ -n $(cat "$FSPO_LOG_DIR/end" 2>/dev/null) ]]; }
is_over() { is_to_end || { [[ -n $ray ]] && ! is_running; }; }
trap '' TERM INT HUP USR1 USR2 XCPU # SLURM sends its signals to every process of a step: Ray goes on until the save is done
exec >"$FSPO_LOG_DIR/ray-$node.log" 2>&1
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
if ((SLURM_NODEID == 0)); then
    options+=(--head --port=0 --ray-client-server-port=$((10001 + SLURM_JOB_ID % 10000)) --include-dashboard=false)
else
    until [[ -s $file ]] || is_over; do sleep 0.5; done # launch.sh ends the step after FSPO_READY_TIMEOUT
    options+=(--address="$(<"$file")")
fi
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # else it waits up to 30 s for work to move to other nodes
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
wait "$ray" || true
cp -rT "$temp/session_latest/logs" "$FSPO_LOG_DIR/ray-$node" 2>/dev/null || true # they outlive the node's folder
rm -rf "$temp"
is_to_end # else Ray has ended by itself: status 1
