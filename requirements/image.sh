#!/usr/bin/env bash
# What Dockerfile and apptainer.def run in nvidia/cuda:13.0.2-devel-ubuntu24.04, in a copy of this repository: system
# packages, the environment /opt/fspo, the GPU stack, this package. FLASH_ATTN and the like: see install-gpu.sh.
set -euo pipefail
apt-get update
# ip is for FSPO_INTERFACE, git for the commit in run.json.
apt-get install --yes --no-install-recommends git iproute2 python3.12-dev python3.12-venv
rm -rf /var/lib/apt/lists/*
python3.12 -m venv /opt/fspo
export PYTHON=/opt/fspo/bin/python PIP_NO_CACHE_DIR=1 CUDA_HOME=/usr/local/cuda
bash "$(dirname "${BASH_SOURCE[0]}")/install-gpu.sh"
cd / && "$PYTHON" -m recipe.fspo.main experiment=qwen3_8b --cfg job >/dev/null
