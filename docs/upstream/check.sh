#!/usr/bin/env bash
# Apply each patch by itself to its base commit of a verl checkout, in a temporary worktree, and run its tests on CPUs.
# Usage: docs/upstream/check.sh CHECKOUT   (PYTHON: an interpreter with torch and what verl imports; python by default)
set -euo pipefail
[ $# -eq 1 ] || { sed -n 's/^# Usage: /usage: /p' "$0" >&2; exit 2; }
checkout=$1 here=$(cd "$(dirname "$0")" && pwd) folder=$(mktemp -d)
trap 'rm -rf "$folder"; git -C "$checkout" worktree prune' EXIT
for patch in "$here"/*.patch; do
    name=$(basename "$patch" .patch)
    base=$(sed -n 's/^base-commit: //p' "$patch") tests=$(sed -n 's/^tests: //p' "$patch")
    git -C "$checkout" cat-file -e "$base^{commit}" 2>/dev/null ||
        { echo "error: $checkout has no commit $base, the base of $name; run git fetch there" >&2; exit 1; }
    git -C "$checkout" worktree add --quiet --detach "$folder/$name" "$base"
    (
        cd "$folder/$name"
        git apply --index "$patch"
        echo "== $name on $base"
        VERL_PLATFORM=cpu VERL_USE_EXTERNAL_PLUGINS=none PYTHONPATH=$PWD "${PYTHON:-python}" -m pytest -q "$tests"
    )
done
