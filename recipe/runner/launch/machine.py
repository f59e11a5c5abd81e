"""Decides once, from the experiment and the machine, whether a run uses CPUs, and sets all processes' environment.

The decision is the experiment's ``trainer.device``: a GPU-less login or head node never turns a GPU run into a CPU run,
and a GPU in the machine never changes a CPU experiment.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.runner.faults import node
from recipe.runner.faults.preemption import ENDING, Preempted
from recipe.runner.faults.processes import RUN_ID_VARIABLE, own_run_id
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
_ray_folder: Path | None = None
_ray_parent: tuple[Path, str] | None = None


def verl_config() -> Path:
    """The folder of verl's own configuration files. It is found without an import: verl fixes its platform in one.

    Raises:
        Refused: if verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise Refused("verl is not installed: run `make setup`, or pip install -r requirements/gpu.txt")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def _torch_is_cpu_build() -> bool:
    return importlib.metadata.version("torch").endswith("+cpu")


def platform_environment(device: str, ranks: int = 1) -> dict[str, str]:
    """Environment variables for a run on ``device`` (``trainer.device``: "cpu", "cuda" or "npu").

    On CPUs each of the ``ranks`` on this machine gets its share of the cores as threads; Ray would give every process
    one. FSDP ranks and vLLM take turns, so they may use the same cores.

    Raises:
        Refused: if VERL_PLATFORM contradicts the experiment, or the installed torch cannot serve it.
    """
    wanted = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if wanted and (wanted == "cpu") != (device == "cpu"):
        raise Refused(
            f"VERL_PLATFORM={wanted} contradicts trainer.device={device} of this experiment: unset the variable, or "
            "choose another experiment (demo runs on CPUs, qwen3_8b on GPUs)"
        )
    if device == "cpu":
        defaults = CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
        return {name: os.environ.get(name, value) for name, value in defaults.items()}
    if _torch_is_cpu_build():
        raise Refused(
            f"trainer.device={device}, but the installed torch {importlib.metadata.version('torch')} is a CPU build; "
            "install requirements/gpu.txt, or choose a CPU experiment such as experiment=demo"
        )
    return {}


def export_platform(config: DictConfig, elsewhere: bool = False) -> None:
    """Set the variables of :func:`platform_environment` in this process. Call before verl is imported.

    With ``elsewhere`` the run will be on another machine: where torch is a CPU build, verl takes its CPU platform here.
    """
    if not elsewhere:
        os.environ.update(platform_environment(config.trainer.device, config.trainer.n_gpus_per_node))
    elif _torch_is_cpu_build():
        os.environ["VERL_PLATFORM"] = "cpu"


def pass_to_ray_workers(config: DictConfig) -> None:
    """Write the same variables into Ray's runtime environment, since workers on other nodes inherit nothing.

    Ray puts that environment on its workers' command lines, where every user of the machine reads it. The variables
    that the user gives there go into this process's environment, which a Ray of the run's own inherits.
    """
    runtime_env = config.ray_kwargs.ray_init.runtime_env
    variables = platform_environment(config.trainer.device, config.trainer.n_gpus_per_node)
    given = OmegaConf.select(runtime_env, "env_vars") or {}
    if starts_ray(config):
        os.environ.update({name: str(value) for name, value in given.items() if value is not None})
        variables = {name: os.environ.get(name, value) for name, value in variables.items()}
        given = {} if config.trainer.nnodes == 1 else given  # other machines inherit nothing
    elif RUN_ID_VARIABLE in os.environ:
        variables[RUN_ID_VARIABLE] = os.environ[RUN_ID_VARIABLE]
    with open_dict(runtime_env):
        runtime_env.env_vars = {**variables, **given}
        if _can_fork(config):
            from recipe.runner.cpu import fork_server  # here: a GPU run imports nothing of it

            # Also where the configuration is that of an earlier run, whose server is gone.
            runtime_env.py_executable = fork_server.py_executable()


def ray_parent(config: DictConfig) -> tuple[Path, str]:
    """The folder in which the run's private one is, and the setting that gives it, with its value."""
    if _ray_parent is not None:  # within private_run, which sets TMPDIR, one of the settings
        return _ray_parent
    if own := config.ray_kwargs.ray_init.get("_temp_dir"):
        return Path(own), f"ray_kwargs.ray_init._temp_dir={own}"
    return node.parent_folder()


def ray_folder() -> Path | None:
    """The folder of the Ray that this process starts, within :func:`private_run`; None if it starts none."""
    return _ray_folder


@dataclass
class PrivateRun:
    """A run within :func:`private_run`; ``failed`` keeps the logs of its Ray."""

    failed: bool = False


@contextlib.contextmanager
def private_run(config: DictConfig) -> Iterator[PrivateRun]:
    """Within it, what the run starts shares nothing with other users of the machine. Enter it before Ray is imported.

    Compiled kernels are in the user's private folder. A Ray that the run starts has its files there, and a token of its
    own in the environment of its processes and on no disk; on one machine it listens on 127.0.0.1. The files go with
    the run, but for Ray's logs of a run that failed.

    Raises:
        Refused: if the folder cannot be made, or is not private.
    """
    global _ray_folder, _ray_parent
    parent, setting = ray_parent(config)
    try:
        private = node.private_folder(parent, setting)
    except node.NotPrivateError as error:
        raise Refused(str(error)) from error
    variables = {**node.cache_environment(private), node.PRIVATE_VARIABLE: str(private)}
    if not starts_ray(config):
        with _environment(variables):
            yield PrivateRun()
        return
    variables["RAY_AUTH_MODE"] = mode = os.environ.get("RAY_AUTH_MODE") or "token"
    if mode.lower() == "token" and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        variables["RAY_AUTH_TOKEN"] = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
    if config.trainer.nnodes == 1:
        variables |= {name: os.environ.get(name) or value for name, value in LOOPBACK_ENVIRONMENT.items()}
    folder = ENDING.folder = Path(tempfile.mkdtemp(prefix="", dir=private))
    variables["TMPDIR"] = os.environ.get("TMPDIR") or str(folder)  # sockets of vLLM, locks of verl
    run = PrivateRun()
    try:
        with _environment(variables):
            _ray_folder, _ray_parent = folder, (parent, setting)
            yield run
    except Preempted:
        raise
    except BaseException:
        run.failed = True
        raise
    finally:
        _ray_folder = _ray_parent = ENDING.folder = None
        if (ray := sys.modules.get("ray")) is not None:
            ray.shutdown()
        _remove(folder, keep_logs=run.failed)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables of this process for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    tempfile.tempdir = None  # it is read again, from TMPDIR
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        tempfile.tempdir = None


def _remove(folder: Path, keep_logs: bool) -> None:
    """Remove the folder of a Ray that has been stopped; with ``keep_logs`` its logs stay, if it has any."""
    logs = set(folder.glob("session_[0-9]*/logs")) if keep_logs else set()
    if logs:
        sessions = {path.parent for path in logs}
        for path in {*folder.iterdir(), *itertools.chain(*(session.iterdir() for session in sessions))}:
            if path.is_dir() and not path.is_symlink() and path not in sessions | logs:
                shutil.rmtree(path, ignore_errors=True)
            elif not path.is_dir() or path.is_symlink():
                path.unlink(missing_ok=True)
        return
    limit = time.monotonic() + _REMOVAL_S
    while folder.exists() and time.monotonic() < limit:  # until the last process of Ray has written its last line
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


def starts_ray(config: DictConfig) -> bool:
    """Whether the run starts a Ray of its own: neither its configuration nor RAY_ADDRESS names a cluster."""
    address = config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS") or "local"
    return address == "local"


def _can_fork(config: DictConfig) -> bool:
    """Whether all workers of the run are Ray's on this machine, without an accelerator."""
    return config.trainer.device == "cpu" and starts_ray(config)


@contextlib.contextmanager
def forked_workers(config: DictConfig, modules: Sequence[str]) -> Iterator[None]:
    """Start the fork server of one CPU run; it begins to import ``modules`` at once.

    It serves one run only, because Ray reads its cluster's variables while it is imported.
    """
    if not _can_fork(config):
        yield
        return
    from recipe.runner.cpu import fork_server

    own_run_id()  # the workers inherit it from the process that they are forked from
    stop = fork_server.start(modules)
    try:
        yield
    finally:
        stop()
