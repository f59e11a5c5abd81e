#!/usr/bin/env bash
# The steps on a GPU that is lent for minutes, without a network, and takes little in one call. Each call has the same words:
#   bash benchmarks/gpu_check/loan.sh COMMIT KEEP [STEP...]
# KEEP is a folder that outlives a call: the parts of `bundle.sh slim` that came in runs/gpu_slim are kept there. While
# some are missing, the step `noise` uses the call: it needs torch and transformers alone. When all have come, they are
# unpacked, their bytecode is compiled once for all processes, and the steps run (smoke vllm preemption engine). What has
# passed is not repeated. LIMIT: seconds of a call (540). OUT: where results and logs go besides.
# DEVICE=cpu: a rehearsal in this environment; it needs no parts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
(($# >= 2)) || { sed -n '2,9s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
commit="$1" keep="$2" python="${PYTHON:-python3}" end=$((SECONDS + ${LIMIT:-540}))
shift 2
steps=("$@")
((${#steps[@]})) || steps=(smoke vllm preemption engine)
mkdir -p "$keep/slim" "$keep/check"
if [[ -d runs/gpu_slim ]]; then
    find runs/gpu_slim -maxdepth 1 -type f -exec cp {} "$keep/slim/" \;
fi

back() { # what has come of it, without weights
    [[ -z ${OUT:-} ]] ||
        tar -czf "$OUT/gpu_check.tgz" --exclude=model --exclude=saved --exclude=checkpoints -C "$keep" check
}

run() { # STEP...
    local status=0 left=$((end - SECONDS))
    ((left > 0)) || { echo "no time is left of LIMIT: call again"; return 124; }
    timeout -k 15 "$left" "$python" -m benchmarks.gpu_check --device "${DEVICE:-cuda}" --gpus 1 --commit "$commit" \
        --out "$keep/check" --steps "$@" || status=$?
    back
    return "$status"
}

missing() {
    [[ -f $keep/slim/parts.sha256 ]] || { echo parts.sha256; return; }
    cut -d' ' -f3 "$keep/slim/parts.sha256" | while read -r part; do [[ -f $keep/slim/$part ]] || echo "$part"; done
}

export HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD"
if [[ ${DEVICE:-cuda} == cuda && -n $(missing) ]]; then
    echo "not here yet: $(missing | xargs)"
    run noise
    exit
fi
if [[ -z $(missing) ]]; then
    bash requirements/bundle.sh unpack "$keep/slim" "$keep/site" # checks what is there
    # Without bytecode each of a run's fifteen processes compiles what it imports, which took 10 to 25 s each: the parts
    # have none, and an image may have none and forbid to write it.
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPATH="$PWD:$keep/site"
    packages="$("$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')"
    "$python" -m compileall -q -j 0 "$keep/site" \
        "$packages"/{torch,triton,numpy,pandas,pyarrow,scipy,sympy,networkx,numba,aiohttp} >"$keep/compileall.log" || true
    echo "unpacked and compiled after $SECONDS s"
fi
run "${steps[@]}"
