"""Decides from the experiment whether a run uses CPUs, sets all processes' environment, and keeps other users out.

The decision is the experiment's ``trainer.device``: a GPU-less login or head node never turns a GPU run into a CPU run,
and a GPU in the machine never changes a CPU experiment.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.resources
import importlib.util
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from omegaconf import DictConfig, OmegaConf, open_dict

from fspo.files import INFO_FILE, read_object
from recipe.runner import ranks
from recipe.runner.faults import node
from recipe.runner.faults.preemption import ENDING
from recipe.runner.launch.settings import DATA, PATHS, Refused, absolute, files_of

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
#: Arguments of ``ray.init`` that describe a cluster to start; it refuses them when it joins one.
_ONLY_TO_START_RAY: Final = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")
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


def platform_environment(device: str, of_machine: int = 1) -> dict[str, str]:
    """Environment variables for a run on ``device`` (``trainer.device``: "cpu", "cuda" or "npu").

    On CPUs each of the ranks ``of_machine`` gets its share of the cores as threads; Ray would give every process
    one. FSDP ranks and vLLM take turns, so they may use the same cores. Raises Refused if VERL_PLATFORM contradicts the
    experiment, or the installed torch cannot serve it.
    """
    wanted = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if wanted and (wanted == "cpu") != (device == "cpu"):
        raise Refused(f"VERL_PLATFORM={wanted} contradicts trainer.device={device}: unset the variable")
    if device == "cpu":
        shares = of_machine if isinstance(of_machine, int) and of_machine > 0 else 1  # the checks come later
        defaults = CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // shares))}
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


def on_this_machine(config: DictConfig, elsewhere: bool = False) -> None:
    """Write absolute paths, Ray's arguments and its workers' environment into a composed configuration, in place.

    Ray puts that environment on its workers' command lines, where every user of the machine reads it. The variables
    that the user gives there go into this process's environment, which a Ray of the run's own inherits. With
    ``elsewhere`` the run will be on another machine, and what this one's platform would need is left out.
    """
    trainer, ray_init = config.trainer, config.ray_kwargs.ray_init
    starts, on_cpus = starts_ray(ray_init), trainer.device == "cpu"
    with open_dict(config):
        trainer.default_local_dir = absolute(str(trainer.default_local_dir))
        for key in PATHS:
            place = str(OmegaConf.select(config, key) or "")
            if place.startswith("pkg://") and key in PATHS[:2]:  # a model of an installed package
                package, _, inside = place.removeprefix("pkg://").partition("/")
                place = str(importlib.resources.files(package) / inside)
            if place and "://" not in place and Path(place).expanduser().exists():
                OmegaConf.update(config, key, absolute(place))
        for name in DATA:
            config.data[name] = [absolute(file) for file in files_of(config.data, name)]
        if starts:
            # Without an address Ray joins the cluster that the temp folder names, be it one that was killed.
            ray_init.address = "local"
            if on_cpus and ray_init.get("num_gpus", 0) is None:
                generating = ranks.only_generating(trainer, config.actor_rollout_ref.rollout)
                ray_init.num_gpus = ranks.training(trainer) + generating  # logical: one for each rank
        else:
            for key in _ONLY_TO_START_RAY:
                ray_init.pop(key, None)
        if elsewhere:
            return
        variables = platform_environment(trainer.device, trainer.n_gpus_per_node)
        given = OmegaConf.select(ray_init, "runtime_env.env_vars") or {}
        if starts:
            os.environ.update({name: str(value) for name, value in given.items() if value is not None})
            variables = {name: os.environ.get(name, value) for name, value in variables.items()}
            given = {} if trainer.nnodes == 1 else given  # other machines inherit nothing
        ray_init.runtime_env.env_vars = {**variables, **given}
        if on_cpus and starts:
            from recipe.runner.cpu import fork_server  # here: a GPU run imports nothing of it

            # Also where the configuration is that of an earlier run, whose server is gone.
            ray_init.runtime_env.py_executable = fork_server.py_executable


@contextlib.contextmanager
def private_run(trainer: DictConfig, ray_init: DictConfig) -> Iterator[None]:
    """Within it, what the run starts shares nothing with other users of the machine. Enter it before Ray is imported.

    Compiled kernels are in the user's private folder. A Ray that the run starts has its files there, in
    ``ENDING.folder``, and a token of its own in the environment of its processes and on no disk; on one machine it
    listens on 127.0.0.1. The folder goes, but for Ray's logs of a run that failed. Raises Refused if the folder cannot
    be made, is not private, or has no room for paths of sockets; if a GPU is for one process only.
    """
    own = ray_init.get("_temp_dir")
    parent, setting = (Path(own), f"ray_kwargs.ray_init._temp_dir={own}") if own else node.parent_folder()
    try:
        private = node.private_folder(parent, setting)
    except node.NotPrivateError as error:
        raise Refused(str(error)) from error
    os.environ |= {**node.cache_environment(private), node.PRIVATE_VARIABLE: str(private)}
    if not starts_ray(ray_init):
        yield
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
        if wrong := list(node.problems(folder, setting, trainer.device != "cpu")):
            raise Refused(*wrong)
        yield
    finally:
        ENDING.folder = None
        if (ray := sys.modules.get("ray")) is not None:
            ray.shutdown()
        is_kept = False
        if any(folder.glob("session_*/logs")):  # else nothing has begun, and the run's folder may be a wrong value
            status = read_object(Path(trainer.default_local_dir) / INFO_FILE).get("status")
            is_kept = status not in ("finished", "preempted", "interrupted")
        limit = time.monotonic() + _REMOVAL_S
        while not is_kept and folder.exists() and time.monotonic() < limit:
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

    with fork_server.running(modules):
        yield
