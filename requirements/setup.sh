#!/usr/bin/env bash
# Makes the virtual environment for the CPU stack: `setup.sh VENV`. Does nothing if it is already up to date.
#
# The packages come from wherever this machine's own pip configuration says (index, find-links): pip's
# settings are read and handed to uv, which installs the pinned list in seconds but does not read pip's configuration.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${1:?usage: setup.sh VENV}"
lock=requirements/cpu.txt

find_python() {
    local candidate
    # Another one in place of a given one that does not run would be tested, or used, in silence.
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: Python 3.11 or 3.12 was not found; install one, or give its path: make PYTHON=/path/to/python3.11" >&2
    exit 1
}

stamp="$venv/.installed"
wanted="$(cat "$lock" requirements/uv.txt pyproject.toml requirements/setup.sh | sha256sum | cut -d' ' -f1)  $PWD"
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
fi

python="$(find_python)"
echo "setting up $venv with $("$python" --version) (once; a minute or two and what the network takes; 3.5 GB of disk)"
# By its pip: an interrupted venv has a Python without one.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/uv.txt ||
    { echo "error: pip could not install requirements/uv.txt (see above)" >&2; exit 1; }

options=(--python "$venv/bin/python" --no-deps --compile-bytecode)
# shellcheck source=requirements/pip-addresses.sh
source requirements/pip-addresses.sh "$venv/bin/python"

install() { # its progress and the sizes of large packages, not the list of two hundred names
    "$venv/bin/uv" pip install "${options[@]}" "$@" 2> >(sed -u '/^ [-+~] /d' >&2)
}

# --compile-bytecode: a run starts about ten Python processes, each of which would otherwise compile the same modules.
export UV_COMPILE_BYTECODE_TIMEOUT=600
if ! install --require-hashes -r "$lock"; then
    echo "no torch +cpu wheel where pip's configuration points: trying PyTorch's own CPU index"
    install --torch-backend cpu --require-hashes -r "$lock" || {
        echo "error: the pinned packages of $lock could not be installed (both attempts are shown above)" >&2
        exit 1
    }
fi
install --quiet --editable .
echo "$wanted" >"$stamp"
