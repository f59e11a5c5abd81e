"""A run's private folder on one machine, and what keeps a run from starting there, asked before Ray.

``python -m recipe.runner.faults.node PARENT NAME`` does so on a node of a SLURM job. Needs Python alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
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
#: Name a folder for sockets and kernels, the first that is set; Ray obeys the last two.
_PARENTS: Final = ("FSPO_RAY_TMP", "RAY_TMPDIR", "TMPDIR")
#: Names the private folder to every process that is started with it.
PRIVATE_VARIABLE: Final = "FSPO_PRIVATE"
#: Where compiled kernels are kept: by variable, a folder in the private one. The defaults lie in the home folder, where
#: all nodes would write the same files, and Inductor's in a folder in /tmp that it also takes from somebody else.
_KERNELS: Final = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
#: Inductor keeps precompiled headers in TMPDIR, whatever its cache is. A run that starts a Ray has a TMPDIR of its own
#: and would compile them anew (7 s of processor time).
_NO_HEADERS: Final = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}


class NotPrivateError(RuntimeError):
    """A folder that has to be the user's alone is not."""


def parent_folder() -> tuple[Path, str]:
    """The folder in which the private one is, and the setting that gives it."""
    variable = next((name for name in _PARENTS if os.environ.get(name)), "RAY_TMPDIR")
    parent = os.environ.get(variable) or "/tmp"
    return Path(parent), f"{variable}={parent}"


def private_folder(parent: Path, setting: str) -> Path:
    """Make ``parent/fspo-UID`` if need be, short because of the sockets in it: only its owner may look into it.

    ``setting`` gives the parent.

    Raises NotPrivateError if it cannot be made, or is a link, another user's, or open to others.
    """
    folder = parent / f"fspo-{os.getuid()}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError as error:
        raise NotPrivateError(f"{setting}: give a folder that can be written to ({error})") from error
    mode, owner = status.st_mode, status.st_uid
    if stat.S_ISDIR(mode) and mode & 0o777 == 0o700 and owner == os.getuid():
        return folder
    raise NotPrivateError(
        f"{setting}: {folder} ({stat.filemode(mode)}, of user {owner}) is not a folder that only you may enter, and "
        "a run executes what lies there: give another one"
    )


def cache_environment(private: Path) -> dict[str, str]:
    """Variables for compiled kernels in the private folder; a value that the user has set wins."""
    variables = {name: str(private / folder) for name, folder in _KERNELS.items()} | _NO_HEADERS
    return {name: os.environ.get(name) or value for name, value in variables.items()}


def problems(ray_folder: Path, setting: str, has_gpus: bool = True) -> Iterator[str]:
    """What keeps a run from starting here: paths of sockets, in ``ray_folder`` and the temporary one, and GPUs.

    A GPU is shared by the trainer's processes and vLLM's: its mode must not be for one process, or none.
    """
    temporary = Path(tempfile.gettempdir())
    for folder, socket, given_by in ((ray_folder, RAY, setting), (temporary, VLLM, f"TMPDIR={temporary}")):
        if (length := len(os.fsencode(folder / socket))) > _SOCKET_BYTES:
            yield f"{given_by}: give a shorter path. A socket in it has {length} bytes, Linux allows {_SOCKET_BYTES}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=index,compute_mode", "--format=csv,noheader"]
    query += [f"--id={visible}"] if visible else []
    if not has_gpus or visible == "":
        return
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return  # no NVIDIA GPU, or one that cannot be asked
    for gpu, mode in (line.split(", ", 1) for line in answer.splitlines() if ", " in line):
        if mode.startswith(("Exclusive", "Prohibited")):
            yield (
                f"GPU {gpu} has the compute mode {mode}, and the processes of the trainer and vLLM share it: have it "
                "set to Default (nvidia-smi --compute-mode=DEFAULT)"
            )


def main() -> int:
    """Print Ray's folder, ``PARENT/fspo-UID/NAME``. Exit status: 0, or 1 after one line ``error: ...`` a problem."""
    setting = f"FSPO_RAY_TMP={sys.argv[1]}"
    try:
        folder = private_folder(Path(sys.argv[1]), setting) / sys.argv[2]
        wrong = list(problems(folder, setting))
        print(folder)
    except NotPrivateError as error:
        wrong = [str(error)]
    for problem in wrong:
        print(f"error: {os.uname().nodename}: {problem}", file=sys.stderr, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
