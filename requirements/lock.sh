#!/usr/bin/env bash
# Resolves requirements/{cpu,gpu}.in into the pinned {cpu,gpu}.txt. Run by `make lock` after changing an .in file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
uv="${1:?usage: lock.sh UV [find-links ...]}"
shift
links=()
for link in "$@"; do links+=(--find-links "$link"); done

lock() { # NAME [options]
    local name="$1"
    shift
    {
        echo "# Made by \`make lock\` from $name.in. Install with --no-deps: the list is complete."
        "$uv" pip compile --quiet --no-header --no-annotate --python-version 3.11 \
            --python-platform x86_64-unknown-linux-gnu "${links[@]}" "$@" "$name.in"
    } >"$name.txt.tmp"
    mv "$name.txt.tmp" "$name.txt"
}

# Left out: their registry wheels are CUDA builds, and with them on a CPU `import transformers` models fails with
# "operator torchvision::nms does not exist". Everything text-only works without.
lock cpu --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec --no-emit-package triton
lock gpu
