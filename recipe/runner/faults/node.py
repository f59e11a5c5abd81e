"""What in one machine keeps a run from starting, asked before Ray: folders for sockets and kernels, the GPUs' mode.

``python -m recipe.runner.faults.node RAY_FOLDER KERNEL_FOLDER`` asks it on a node of a SLURM job (``slurm/node.sh``); a
run that starts a Ray of its own asks it in its checks. Needs Python alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: Linux takes so many bytes for the path of a Unix socket.
_SOCKET_BYTES: Final = 107
#: The longest path of a socket in Ray's folder (process ids have up to seven digits), and of vLLM's in a temporary one.
RAY, VLLM = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store", "00000000-0000-0000-0000-000000000000"


def socket_problems(folder: Path, socket: str, setting: str) -> Iterator[str]:
    """A folder in which sockets would have paths that are too long.

    Args:
        folder: The folder.
        socket: ``RAY`` or ``VLLM``.
        setting: The setting that gives the folder, with its value.
    """
    room = _SOCKET_BYTES - len(f"/{socket}")
    if (length := len(os.fsencode(folder))) > room:
        yield (
            f"{setting}: give a shorter path. {folder} has {length} bytes, and a socket of "
            f"{'Ray' if socket == RAY else 'vLLM'} in it leaves {room} of the {_SOCKET_BYTES} that Linux allows"
        )


def kernel_problems(*folders: tuple[Path, str]) -> Iterator[str]:
    """Folders on file systems without execution: a compiled kernel cannot be loaded from there.

    Args:
        folders: Each with the variable that gives another one.
    """
    for folder, variable in dict.fromkeys(folders):
        place = next(path for path in (folder, *folder.parents) if path.exists())
        if os.statvfs(place).f_flag & os.ST_NOEXEC:
            yield (
                f"set {variable} to a folder on a local disk without noexec: {place} is mounted noexec, "
                f"and the kernels that Triton, Inductor and FlashInfer compile into {folder} could not be loaded"
            )


def gpu_problems() -> Iterator[str]:
    """GPUs that only one process may use, or none: the trainer's processes and vLLM's share each."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=index,compute_mode", "--format=csv,noheader"]
    if visible:
        query.append(f"--id={visible}")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return  # no NVIDIA GPU, or one that cannot be asked
    modes = dict(line.split(", ", 1) for line in answer.splitlines() if ", " in line)
    for gpu, mode in modes.items():
        if visible != "" and mode.startswith(("Exclusive", "Prohibited")):
            yield (
                f"GPU {gpu} has the compute mode {mode}, and the processes of the trainer and vLLM share it: have it "
                "set to Default (nvidia-smi --compute-mode=DEFAULT, by an administrator or an option of your cluster)"
            )


def main() -> int:
    """Exit status: 0, or 1 after one line ``error: ...`` a problem."""
    ray_folder, kernel_folder = map(Path, sys.argv[1:])
    temporary = Path(tempfile.gettempdir())
    problems = [
        *socket_problems(ray_folder, RAY, f"FSPO_RAY_TMP={ray_folder.parent}"),
        *socket_problems(temporary, VLLM, f"TMPDIR={temporary}"),
        *kernel_problems((kernel_folder, "FSPO_RAY_TMP"), (temporary, "TMPDIR")),
        *gpu_problems(),
    ]
    for problem in problems:
        print(f"error: {os.uname().nodename}: {problem}", file=sys.stderr, flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
