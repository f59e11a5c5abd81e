#!/usr/bin/env bash
# Carries large folders to a machine without a network, in parts of at most 60 MB with checksums:
#   bundle.sh wheels OUT        everything in gpu.txt for Python PYTHON (3.12), then as pack; goes on where it stopped
#   bundle.sh slim OUT          for half an hour on one GPU that has torch 2.11 already (slim.txt): OUT/{base,ray,vllm},
#                               packed and compressed in parts of at most 42 MB; unpacked, each goes on PYTHONPATH
#   bundle.sh pack FOLDER OUT   any folder, a model or data say: OUT/part-*, parts.sha256, files.sha256
#   bundle.sh unpack OUT NEW    checks every part, joins them, checks every file; NEW appears only when it is complete
#   bundle.sh cross-entropy FOLDER SITE    flash-attn's cross-entropy alone, from its source archive in FOLDER
# NEW/SHA256SUMS lists the files: FSPO_MANIFEST=NEW/SHA256SUMS lets a job check them before it starts.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
fail() { echo "error: $*" >&2; exit 1; }
pip=("${BIN:-$here/../.venv/bin}/python" -m pip)

pack() { # FOLDER OUT
    [[ -d $1 && -n $(ls -A "$1") ]] || fail "$1 is not a folder with files"
    [[ ! -e $2 || -f $2/files.sha256 || -z $(find "$2" -maxdepth 1 -type f) ]] ||
        fail "$2 holds files that are not of a bundle: give another folder"
    mkdir -p "$2"
    rm -f "$2"/part-* "$2/parts.sha256"
    # -h: the hub's cache holds links to the files. Sorted and without times: the same files make the same parts.
    (cd "$1" && find -L . -type f ! -path ./SHA256SUMS -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum) >"$2/files.sha256"
    tar -C "$1" -ch --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --exclude=./SHA256SUMS . |
        ${COMPRESS:-cat} | split --bytes="${PART_BYTES:-60000000}" --numeric-suffixes --suffix-length=4 - "$2/part-"
    (cd "$2" && sha256sum part-* >parts.tmp && mv parts.tmp parts.sha256) # last: without it, this is no bundle
    echo "$2: $(wc -l <"$2/parts.sha256") parts, $(wc -l <"$2/files.sha256") files, $(du -shL "$1" | cut -f1)"
}

decompressed() { # the first part, which says whether the bundle is compressed
    if [[ $(head -c 6 "$1" | tr -d '\0') != $'\xfd7zXZ' ]]; then
        cat
    elif command -v xz >/dev/null; then
        xz -dc -T0
    else # an image may lack it
        python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer)'
    fi
}

unpack() { # OUT NEW
    local list
    set -- "$1" "${2%/}"
    for list in parts.sha256 files.sha256; do
        [[ -f $1/$list ]] || fail "$1 has no $list: carry it there, too"
    done
    if [[ -d $2 ]]; then
        (cd "$2" && sha256sum --check --quiet SHA256SUMS) || fail "$2 exists and is not what was packed: remove it"
        return
    fi
    (cd "$1" && sha256sum --check --quiet parts.sha256) || fail "carry the parts named above to $1 again"
    incomplete="$2.incomplete"
    trap 'rm -rf "$incomplete"' EXIT
    rm -rf "$incomplete"
    mkdir -p "$incomplete"
    (cd "$1" && cut -d' ' -f3 parts.sha256 | xargs cat) | decompressed "$1/part-0000" | tar -C "$incomplete" -x
    cp "$1/files.sha256" "$incomplete/SHA256SUMS"
    (cd "$incomplete" && sha256sum --check --quiet SHA256SUMS) || fail "$2 would not be what was packed: is the disk full?"
    mv "$incomplete" "$2"
}

# pip takes each platform literally. glibc 2.31 is that of Ubuntu 20.04; RHEL 9 has 2.34.
platforms() { # NEWEST
    local n
    for n in $(seq 5 "$1"); do echo --platform "manylinux_2_${n}_x86_64"; done
    for n in 2014 2010 1; do echo --platform "manylinux${n}_x86_64"; done
}

# A list with one requirement and its sums a line.
lines() { # LIST
    sed -e '/^#/d' -e ':a' -e '/\\$/{N;s/ *\\\n */ /;ta' -e '}' "$1"
}

load() { # FOLDER VERSION GLIBC, lines of a list on standard input
    local folder="$1" target=(--python-version "$2" --implementation cp)
    mapfile -t platforms < <(platforms "$3" | xargs -n 1)
    mkdir -p "$folder"
    # pip keeps nothing of a call that fails, so there are eight packages to a call; what the folder holds is not loaded
    # again.
    while mapfile -t -n 8 eight && ((${#eight[@]})); do
        "${pip[@]}" download --quiet --no-deps --dest "$folder" "${target[@]}" "${platforms[@]}" --require-hashes \
            -r <(printf '%s\n' "${eight[@]}") </dev/null ||
            fail "not all packages could be loaded: run this again, it goes on where it stopped"
    done
    # To build a source archive, the cluster would need what its build requires. Plain Python is built here instead.
    find "$folder" -name '*.tar.gz' ! -name 'flash_attn-*' | while read -r archive; do
        "${pip[@]}" wheel --quiet --no-deps --wheel-dir "$folder" "$archive"
        rm "$archive"
    done
    [[ -z $(find "$folder" -name '*-linux_*.whl') ]] || fail "built for this machine: $(find "$folder" -name '*-linux_*.whl')"
}

# flash-attn has no wheel. Its metadata come from its setup.py, which imports torch: the environment's own will do.
flash_attention() { # FOLDER
    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE "${pip[@]}" download --quiet --no-deps --no-binary :all: --no-build-isolation \
        --dest "$1" --require-hashes --requirement "$here/gpu-flash-attn.txt"
}

# verl's log-probabilities without a loop over the rows: flash-attn's cross-entropy, which is Triton and needs no
# compiler. It is a package of its own, because transformers takes flash_attn without metadata for an error, and that of
# the name flash-attn for its attention.
cross_entropy() { # FOLDER SITE
    local archive version info file=flash_attn/ops/triton/cross_entropy.py
    archive="$(find "$1/" -maxdepth 1 -name 'flash_attn-*.tar.gz' -print -quit)"
    [[ -n $archive ]] || fail "$1 holds no flash_attn-*.tar.gz: bundle.sh slim and wheels load it"
    version="${archive##*/flash_attn-}" version="${version%.tar.gz}" info="$2/flash_attn_cross_entropy-$version.dist-info"
    mkdir -p "$2/${file%/*}" "$info"
    touch "$2"/flash_attn/{,ops/,ops/triton/}__init__.py
    tar -xzf "$archive" -O "flash_attn-$version/$file" >"$2/$file"
    printf 'Metadata-Version: 2.1\nName: flash-attn-cross-entropy\nVersion: %s\n' "$version" >"$info/METADATA"
    echo flash_attn >"$info/top_level.txt"
    echo bundle.sh >"$info/INSTALLER"
    printf '%s,,\n' flash_attn/{,ops/,ops/triton/}__init__.py "$file" \
        "${info##*/}"/{INSTALLER,METADATA,RECORD,top_level.txt} >"$info/RECORD"
}

# pip writes where a wheel lay, and the programs that it made: paths of this machine. A RECORD also lists files that the
# parts leave out.
forget_machine() { # SITE
    local record line
    find "$1" -name direct_url.json -delete
    for record in "$1"/*.dist-info/RECORD; do
        while IFS= read -r line; do
            [[ $line == ../* || ! -e $1/${line%,*,*} ]] || echo "$line"
        done <"$record" >"$record.new"
        mv "$record.new" "$record"
    done
}

wheels() { # OUT
    local version="${PYTHON:-}" folder="$1/downloads"
    version="${version##*python}" version="${version:-3.12}"
    [[ $version == 3.11 || $version == 3.12 ]] || fail "PYTHON=$version: give 3.11 or 3.12, the cluster's"
    lines "$here/gpu.txt" | load "$folder" "$version" 31
    flash_attention "$folder"
    pack "$folder" "$1"
}

slim() { # OUT
    local name site part
    umask 022 # modes of files are part of the parts
    load "$1/downloads/base" 3.12 35 < <(grep -v '^#' "$here/slim.txt" | while read -r name; do
        lines "$here/gpu-slim.txt" | grep "^$name==" || lines "$here/gpu.txt" | grep "^$name==" || echo "$name==is-not-in-gpu.txt"
    done)
    for part in ray vllm; do lines "$here/gpu.txt" | grep "^$part==" | load "$1/downloads/$part" 3.12 35; done
    flash_attention "$1/downloads"
    # The name, version and entry points of this repository; its code is the checkout's.
    "${pip[@]}" wheel --quiet --no-deps --wheel-dir "$1/downloads/base" "$here/.."
    mapfile -t platforms < <(platforms 35 | xargs -n 1)
    for part in base ray vllm; do
        site="$1/$part.site"
        rm -rf "$site"
        "${pip[@]}" install --quiet --no-compile --no-deps --no-index --target "$site" --python-version 3.12 \
            --implementation cp --only-binary :all: "${platforms[@]}" "$1/downloads/$part"/*.whl
        rm -rf "$site/bin"
    done
    rm -rf "$1"/base.site/{fspo,recipe,conf,benchmarks}
    cross_entropy "$1/downloads" "$1/base.site"
    # What no step imports: Java, the dashboard's pages, other libraries; kernels of older GPUs, of mixtures of experts,
    # for other Pythons and other models, and vLLM's front end in Rust.
    (cd "$1/ray.site/ray" && rm -rf jars cpp rllib serve llm tune train dashboard/client)
    (cd "$1/vllm.site/vllm" && rm -rf vllm_flash_attn/_vllm_fa2_C.* _moe_C_* vllm-rs third_party/deep_gemm/include \
        third_party/fmha_sm100/cutlass && find third_party -name '*cpython-3*' ! -name '*cpython-312-*' -delete)
    for part in base ray vllm; do
        forget_machine "$1/$part.site"
        # With one thread xz writes other bytes than with several.
        COMPRESS="xz -6 -T4" PART_BYTES=42000000 pack "$1/$part.site" "$1/$part"
        rm -rf "$1/$part.site"
    done
    du -sh "$1"/{base,ray,vllm}
}

case "${1:-}-$#" in
    wheels-2) wheels "$2" ;;
    slim-2) slim "$2" ;;
    pack-3) pack "$2" "$3" ;;
    cross-entropy-3) cross_entropy "$2" "$3" && forget_machine "$3" ;;
    unpack-3) unpack "$2" "$3" ;;
    *) fail "usage: bundle.sh wheels OUT | slim OUT | pack FOLDER OUT | unpack OUT NEW | cross-entropy FOLDER SITE" ;;
esac
