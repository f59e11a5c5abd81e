"""Commands of the program as a shell gives them: words in; status, output and files out.

A command runs in a process of its own, forked from one that has imported verl: a start costs its own work, and not six
seconds of imports.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: What makes a start slow. A name that is no longer there is left out.
_IMPORTED: Final = [
    "verl.trainer.main_ppo",
    "verl.experimental.agent_loop",
    "verl.experimental.reward_loop",
    "recipe.fspo.main",
    "recipe.fspo.checks",
    "fspo.audit",
    "matplotlib.pyplot",
    "pandas",
    "jinja2",
]
_FORKS: Final = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Ended:
    """A command that has ended; one that was still running after its time has the status None."""

    status: int | None
    out: str
    error: str

    @property
    def said(self) -> str:
        """All that it has printed."""
        return self.out + self.error


def _become(module: str, words: list[str], folder: str, environment: dict[str, str], out: str, error: str) -> None:
    gc.freeze()  # what is imported already is not looked through again and again
    for number, path in ((1, out), (2, error)):
        os.dup2(os.open(path, os.O_WRONLY), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[:0] = [module, *words], [folder]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run(
    module: str, *words: object, folder: Path, environment: Mapping[str, str] | None = None, seconds: float = 1200
) -> Ended:
    """``python -m MODULE WORDS`` in a folder, with these variables beside those of the tests."""
    if not getattr(_FORKS, "told", False):
        # No GPU is looked for, and every command has a core of its own.
        os.environ |= {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "RAY_ENABLE_AUTO_CONNECT": "0"}
        _FORKS.set_forkserver_preload(_IMPORTED)
        _FORKS.told = True  # type: ignore[attr-defined]
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as error:
        given = (module, [str(word) for word in words], str(folder), {**os.environ, **(environment or {})})
        process = _FORKS.Process(target=_become, args=(*given, out.name, error.name))
        process.start()
        process.join(seconds)
        status = process.exitcode
        if status is None:
            process.kill()
            process.join()
        return Ended(status, out.read(), error.read())


def main(*words: object, folder: Path, environment: Mapping[str, str] | None = None) -> Ended:
    """``python -m recipe.fspo.main``."""
    return run("recipe.fspo.main", *words, folder=folder, environment=environment)


#: Hydra writes nothing by itself, and a command that gets as far as Ray finds none.
_ALONE: Final = (
    *("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled", "hydra/hydra_logging=disabled"),
    "+ray_kwargs.ray_init.address=nowhere://x",
)


def verl(*words: object, folder: Path, environment: Mapping[str, str] | None = None) -> Ended:
    """``python -m verl.trainer.main_ppo``, verl's own command, up to the start of Ray."""
    return run("verl.trainer.main_ppo", *_ALONE, *words, folder=folder, environment=environment)


def files_of(folder: Path) -> dict[str, bytes]:
    """The content of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
