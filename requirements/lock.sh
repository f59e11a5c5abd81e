#!/usr/bin/env bash
# Resolves requirements/*.in into the pinned lists *.txt with the SHA-256 sum of every file that may be installed. Run by
# `make lock` after changing an .in file. Pins that still fit stay as they are, and so do the sums of their files; delete
# a .txt file to take the newest of everything.
set -euo pipefail
bin="$(realpath "${1:?usage: lock.sh BIN, the folder of a virtual environment with python and uv}")"
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=requirements/pip-addresses.sh
source ./pip-addresses.sh "$bin/python"

lock() { # NAME [options]
    local name="$1"
    shift
    local new="$name.new.txt"
    cp "$name.txt" "$new" 2>/dev/null || true
    "$bin/uv" pip compile --quiet --no-header --no-annotate --generate-hashes --python-version 3.11 --output-file "$new" \
        --python-platform x86_64-unknown-linux-gnu "$@" "$name.in" >/dev/null
    {
        echo "# Made by \`make lock\` from $name.in. Install with --no-deps: the list is complete."
        cat "$new"
    } >"$name.txt"
    rm "$new"
}

# Left out: their registry wheels are CUDA builds, and with them on a CPU `import transformers` models fails with
# "operator torchvision::nms does not exist". Everything text-only works without.
lock cpu --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec --no-emit-package triton
lock gpu
# Complete as they are written.
for name in uv smollm2 gpu-flash-attn; do lock "$name" --no-deps; done
