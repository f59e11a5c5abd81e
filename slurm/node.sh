#!/usr/bin/env bash
# One node's part in a job. launch.sh starts it through srun, inside the container if there is one:
#   node.sh head FILE       Ray's head; its address goes to FILE
#   node.sh worker ADDRESS  a Ray node that joins
#   node.sh run COMMAND...  a command beside Ray
set -euo pipefail

# ------------------------------------------------------------------- software
# Profiles, module files and conda's hooks use variables that nobody has set, and commands that fail.
set +euo pipefail
conda_before="${CONDA_PREFIX:-}"
if [[ -n ${FSPO_MODULES:-} ]]; then
    command -v module >/dev/null || source /etc/profile
    # shellcheck disable=SC2086  # a list of names
    module load $FSPO_MODULES || { echo "error: FSPO_MODULES=$FSPO_MODULES: not loaded on $(hostname)" >&2; exit 1; }
fi
if [[ -n ${FSPO_SETUP:-} ]]; then
    # shellcheck source=/dev/null
    source "$FSPO_SETUP" || { echo "error: FSPO_SETUP=$FSPO_SETUP ended with status $? on $(hostname)" >&2; exit 1; }
fi
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
fi

# Compiled kernels of vLLM, Triton and FlashInfer: on the node, because by default every process of every node writes
# them to one folder at home. Nobody else may write there: they are executed.
cache="${FSPO_RAY_TMP:-/tmp}/fspo-cache-$UID"
(umask 077 && mkdir -p "$cache")
[[ -O $cache ]] || { echo "error: $cache on $(hostname) is somebody else's: set FSPO_RAY_TMP to another folder" >&2; exit 1; }
export VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-$cache/vllm}" TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$cache/triton}" \
    FLASHINFER_WORKSPACE_BASE="${FLASHINFER_WORKSPACE_BASE:-$cache}"
# Ray asks for 65,536 open files; many clusters begin with 1,024.
(($(ulimit -Sn | sed s/unlimited/65536/) >= 65536)) || ulimit -Sn 65536 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"

role="$1"
shift
if [[ $role == run ]]; then
    trap '' USR1 # until the command has a handler of its own
    exec "$@"
fi

# ------------------------------------------------------------------- ports
# All below 32768, where Linux begins to hand out ports by itself, and above Ray's own defaults. A job takes one block of
# ports on each node; jobs that share a node take different ones: a lock shows blocks taken by this user's other jobs
# (it is held as long as any process of that Ray lives), a connection shows those of anybody else.
readonly FIRST_PORT=20000 BLOCK=400 BLOCKS=31 SERVICES=8

is_free() { # PORT
    ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null && ! (exec 3<>"/dev/tcp/$(hostname)/$1") 2>/dev/null
}

block_is_free() { # FIRST PORT
    local port
    for ((port = $1; port < $1 + SERVICES; port++)); do
        is_free "$port" || return 1
    done
}

take_ports() { # sets $port, the first of a block
    local locks="/tmp/fspo-ports-$UID" try lock
    (umask 077 && mkdir -p "$locks")
    for ((try = 0; try < BLOCKS; try++)); do
        port=$((FIRST_PORT + (SLURM_JOB_ID + try) % BLOCKS * BLOCK))
        exec {lock}>"$locks/$port"
        if flock --nonblock "$lock" && block_is_free "$port"; then
            return 0
        fi
        exec {lock}>&-
    done
    echo "error: all $BLOCKS blocks of ports from $FIRST_PORT on are in use on $(hostname): other Ray clusters are running" >&2
    exit 1
}

# ------------------------------------------------------------------- Ray
node="${SLURMD_NODENAME:-$(hostname)}"
exec >"$FSPO_LOG_DIR/ray-$node.log" 2>&1
# Before it stops, Ray would wait up to 30 s for work to move to other nodes: there is none to move.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
# Short: Ray puts sockets there, whose paths may have 107 characters.
temp="${FSPO_RAY_TMP:-/tmp}/fspo-$SLURM_JOB_ID-${SLURM_NODEID:-0}-$role"
rm -rf "$temp" # a requeued job that was killed before may have left it, with the old address in it
take_ports
# What this step may use: less than the job has where SLURM confines it, more on a node that is not confined at all. The
# variables are those that change nproc's answer.
cpus="$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)"
((cpus <= ${SLURM_CPUS_ON_NODE:?})) || cpus="$SLURM_CPUS_ON_NODE"
options=(
    --block --disable-usage-stats --log-color=false --node-name="$node" --temp-dir="$temp"
    --num-cpus="${FSPO_RAY_CPUS:-$cpus}"
    --num-gpus="${FSPO_RAY_GPUS:-${SLURM_GPUS_ON_NODE:-0}}"
    --node-manager-port="$((port + 1))"
    --object-manager-port="$((port + 2))"
    --runtime-env-agent-port="$((port + 3))"
    --dashboard-agent-grpc-port="$((port + 4))"
    --dashboard-agent-listen-port="$((port + 5))"
    --metrics-export-port="$((port + 6))"
    --min-worker-port="$((port + SERVICES))" --max-worker-port="$((port + BLOCK - 1))"
)
if [[ -n ${FSPO_INTERFACE:-} ]]; then
    address="$(ip -4 -o addr show dev "$FSPO_INTERFACE" | awk '{sub("/.*", "", $4); print $4; exit}')"
    [[ -n $address ]] || { echo "error: FSPO_INTERFACE=$FSPO_INTERFACE has no IPv4 address on $node" >&2; exit 1; }
    options+=(--node-ip-address="$address")
fi
# shellcheck disable=SC2206  # a list of options
options+=(${FSPO_RAY_OPTIONS:-})
case "$role" in
    head) options+=(--head --port="$port" --ray-client-server-port="$((port + 7))" --include-dashboard=false) ;;
    worker) options+=(--address="$1") ;;
    *) echo "error: node.sh $role: head, worker or run" >&2; exit 1 ;;
esac

ray_pid=''
stopping=no
stop() {
    stopping=yes
    [[ -z $ray_pid ]] || kill -TERM "$ray_pid" 2>/dev/null || true
}
trap stop TERM INT
ray start "${options[@]}" &
ray_pid=$!
if [[ $role == head ]]; then
    until [[ -s $temp/ray_current_cluster ]] || ! kill -0 "$ray_pid" 2>/dev/null; do sleep 0.5; done
    if [[ -s $temp/ray_current_cluster ]]; then
        cp "$temp/ray_current_cluster" "$1.tmp" && mv "$1.tmp" "$1"
    fi
fi
status=0
while kill -0 "$ray_pid" 2>/dev/null; do
    wait "$ray_pid" || status=$? # a trap ends a wait early, hence the loop
done
# Ray's logs outlive the node's temporary folder.
mkdir -p "$FSPO_LOG_DIR/ray-$node"
cp -r "$temp"/session_2*/logs/. "$FSPO_LOG_DIR/ray-$node" 2>/dev/null || true
rm -rf "$temp"
[[ $stopping == yes ]] || exit "$((status == 0 ? 1 : status))"
