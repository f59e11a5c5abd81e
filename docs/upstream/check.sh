#!/usr/bin/env bash
# Apply each patch of a checkout's repository by itself to its base commit, in a temporary worktree, and run its tests on
# CPUs. Usage: docs/upstream/check.sh CHECKOUT   (PYTHON: an interpreter with torch and what the repository imports;
# python by default)
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: docs/upstream/check.sh CHECKOUT, of verl or prime-rl" >&2; exit 2; }
checkout=$1 here=$(cd "$(dirname "$0")" && pwd) folder=$(mktemp -d) checked=0
trap 'rm -rf "$folder"; git -C "$checkout" worktree prune' EXIT
for patch in "$here"/*.patch; do
    name=$(basename "$patch" .patch)
    base=$(sed -n 's/^base-commit: //p' "$patch") tests=$(sed -n 's/^tests: //p' "$patch")
    git -C "$checkout" cat-file -e "$base^{commit}" 2>/dev/null ||
        { echo "== $name left out: $checkout has no commit $base of $(sed -n 's/^repository: //p' "$patch")"; continue; }
    git -C "$checkout" worktree add --quiet --detach "$folder/$name" "$base"
    (
        cd "$folder/$name"
        git apply --index "$patch"
        echo "== $name on $base"
        VERL_PLATFORM=cpu VERL_USE_EXTERNAL_PLUGINS=none \
            PYTHONPATH=$PWD:$PWD/src:$PWD/packages/prime-rl-configs/src${PYTHONPATH:+:$PYTHONPATH} \
            "${PYTHON:-python}" -m pytest -q "$tests"
    )
    checked=$((checked + 1))
done
[ "$checked" -gt 0 ] || { echo "error: $checkout has the base of no patch; run git fetch there" >&2; exit 1; }
