"""Decides from the experiment whether a run uses CPUs, sets all processes' environment, and keeps other users out.

The decision is the experiment's ``trainer.device``: a GPU-less login or head node never turns a GPU run into a CPU run,
and a GPU in the machine never changes a CPU experiment.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.runner.faults import node
from recipe.runner.faults.preemption import ENDING
from recipe.runner.launch.problems import Refused

#: Environment of a CPU run, in every process. A value that the user has set wins.
CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    # GiB reserved by each vLLM replica for keys and values; the demo's model needs megabytes.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Replicas share the cores with FSDP workers: pinning each to the same cores would serialise them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM's usage report would try to reach the internet.
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Its default, 8, is more than there are cores, which TransferQueue says at every read and write.
    "TQ_NUM_THREADS": "1",
    # Ray's idle workers in advance have another environment than the run's, which can use none of them.
    "RAY_prestart_worker_first_driver": "0",
}
#: Environment of a run whose Ray has no other machine: Ray, TransferQueue, vLLM and torch listen on 127.0.0.1.
LOOPBACK_ENVIRONMENT = {
    # Ray's switch for laptops, whatever its name says: Ray's address is 127.0.0.1.
    # upstream: ray._private.services "if not ray_constants.ENABLE_RAY_CLUSTER:"
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
#: How long the last files of a run may take to go: its processes end a moment after Ray has.
_REMOVAL_S = 10.0


def verl_config() -> Path:
    """verl's own configuration files, found without an import, in which it fixes its platform; Refused without verl."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise Refused("verl is not installed: run `make setup`, or pip install -r requirements/gpu.txt")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def _torch_is_cpu_build() -> bool:
    return importlib.metadata.version("torch").endswith("+cpu")


def platform_environment(device: str, ranks: int = 1) -> dict[str, str]:
    """Environment variables for a run on ``device`` (``trainer.device``: "cpu", "cuda" or "npu").

    On CPUs each of the ``ranks`` on this machine gets its share of the cores as threads; Ray would give every process
    one. FSDP ranks and vLLM take turns, so they may use the same cores. Raises Refused if VERL_PLATFORM contradicts the
    experiment, or the installed torch cannot serve it.
    """
    wanted = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if wanted and (wanted == "cpu") != (device == "cpu"):
        raise Refused(f"VERL_PLATFORM={wanted} contradicts trainer.device={device}: unset the variable")
    if device == "cpu":
        defaults = CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
        return {name: os.environ.get(name, value) for name, value in defaults.items()}
    if _torch_is_cpu_build():
        raise Refused(
            f"trainer.device={device}, but the installed torch {importlib.metadata.version('torch')} is a CPU build; "
            "install requirements/gpu.txt, or choose a CPU experiment such as experiment=demo"
        )
    return {}


def export_platform(trainer: DictConfig, elsewhere: bool = False) -> None:
    """Set the variables of :func:`platform_environment` in this process. Call before verl is imported.

    With ``elsewhere`` the run will be on another machine: where torch is a CPU build, verl takes its CPU platform here.
    """
    if not elsewhere:
        os.environ.update(platform_environment(trainer.device, trainer.n_gpus_per_node))
    elif _torch_is_cpu_build():
        os.environ["VERL_PLATFORM"] = "cpu"


def pass_to_ray_workers(trainer: DictConfig, ray_init: DictConfig) -> None:
    """Write the same variables into Ray's runtime environment, since workers on other nodes inherit nothing.

    Ray puts that environment on its workers' command lines, where every user of the machine reads it. The variables
    that the user gives there go into this process's environment, which a Ray of the run's own inherits.
    """
    runtime_env = ray_init.runtime_env
    variables = platform_environment(trainer.device, trainer.n_gpus_per_node)
    given = OmegaConf.select(runtime_env, "env_vars") or {}
    if starts_ray(ray_init):
        os.environ.update({name: str(value) for name, value in given.items() if value is not None})
        variables = {name: os.environ.get(name, value) for name, value in variables.items()}
        given = {} if trainer.nnodes == 1 else given  # other machines inherit nothing
    with open_dict(runtime_env):
        runtime_env.env_vars = {**variables, **given}
        if trainer.device == "cpu" and starts_ray(ray_init):
            from recipe.runner.cpu import fork_server  # here: a GPU run imports nothing of it

            # Also where the configuration is that of an earlier run, whose server is gone.
            runtime_env.py_executable = fork_server.py_executable


@dataclass
class PrivateRun:
    """A run within :func:`private_run`, whose Ray's logs stay unless it is told that it has not ``failed``."""

    failed: bool = True


@contextlib.contextmanager
def private_run(trainer: DictConfig, ray_init: DictConfig) -> Iterator[PrivateRun]:
    """Within it, what the run starts shares nothing with other users of the machine. Enter it before Ray is imported.

    Compiled kernels are in the user's private folder. A Ray that the run starts has its files there, in
    ``ENDING.folder``, and a token of its own in the environment of its processes and on no disk; on one machine it
    listens on 127.0.0.1. The folder goes with a run that has not failed. Raises Refused if the folder cannot be made,
    is not private, or has no room for paths of sockets; if a GPU is for one process only.
    """
    own = ray_init.get("_temp_dir")
    parent, setting = (Path(own), f"ray_kwargs.ray_init._temp_dir={own}") if own else node.parent_folder()
    try:
        private = node.private_folder(parent, setting)
    except node.NotPrivateError as error:
        raise Refused(str(error)) from error
    os.environ |= {**node.cache_environment(private), node.PRIVATE_VARIABLE: str(private)}
    run = PrivateRun()
    if not starts_ray(ray_init):
        yield run
        return
    os.environ["RAY_AUTH_MODE"] = mode = os.environ.get("RAY_AUTH_MODE") or "token"
    if mode.lower() == "token" and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ["RAY_AUTH_TOKEN"] = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
    if trainer.nnodes == 1:
        os.environ |= {name: os.environ.get(name) or value for name, value in LOOPBACK_ENVIRONMENT.items()}
    folder = ENDING.folder = Path(tempfile.mkdtemp(prefix="", dir=private))
    os.environ["TMPDIR"] = os.environ.get("TMPDIR") or str(folder)  # sockets of vLLM, locks of verl
    tempfile.tempdir = None  # it is read again, from TMPDIR
    try:
        if wrong := list(node.problems(folder, parent, setting, trainer.device != "cpu")):
            raise Refused(*wrong)
        yield run
    finally:
        ENDING.folder = None
        if (ray := sys.modules.get("ray")) is not None:
            ray.shutdown()
        if not (run.failed and any(folder.glob("session_*/logs"))):
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the folder of a Ray that has been stopped, once the last process of it has written its last line."""
    limit = time.monotonic() + _REMOVAL_S
    while folder.exists() and time.monotonic() < limit:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


def starts_ray(ray_init: DictConfig) -> bool:
    """Whether the run starts a Ray of its own: neither its configuration nor RAY_ADDRESS names a cluster."""
    return (ray_init.get("address") or os.environ.get("RAY_ADDRESS") or "local") == "local"


@contextlib.contextmanager
def forked_workers(trainer: DictConfig, ray_init: DictConfig, modules: Sequence[str]) -> Iterator[None]:
    """Start the fork server of a CPU run all of whose workers are here; it begins to import ``modules`` at once.

    It serves one run only, because Ray reads its cluster's variables while it is imported.
    """
    if trainer.device != "cpu" or not starts_ray(ray_init):
        yield
        return
    from recipe.runner.cpu import fork_server

    stop = fork_server.start(modules)
    try:
        yield
    finally:
        stop()
