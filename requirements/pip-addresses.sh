# Sourced with a Python as its argument: hands the addresses of this machine's pip configuration to uv, which does not
# read it, by the environment. An address may have a password in it, and every user can read a command line.
# shellcheck shell=bash
pip_setting() { # PYTHON NAME VARIABLE SEPARATOR: the words of a setting, from the environment or from pip's files
    local value="${!3:-}" words
    [[ -n $value ]] || value="$("$1" -m pip config get "global.$2" 2>/dev/null || true)"
    read -r -d '' -a words <<<"$value" || true
    (IFS="$4" && echo "${words[*]:-}")
}

pip_links="$(pip_setting "$1" find-links PIP_FIND_LINKS ,)" pip_index="$(pip_setting "$1" index-url PIP_INDEX_URL ' ')"
[[ -z $pip_links ]] || export UV_FIND_LINKS="$pip_links"
[[ -z $pip_index ]] || export UV_DEFAULT_INDEX="$pip_index"
