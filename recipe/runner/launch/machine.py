"""Decides once, from the experiment and the machine, whether a run uses CPUs, and sets all processes' environment.

The decision is the experiment's ``trainer.device``: a GPU-less login or head node never turns a GPU run into a CPU run,
and a GPU in the machine never changes a CPU experiment.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.runner.faults.processes import RUN_ID_VARIABLE, own_run_id

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


class WrongMachineError(RuntimeError):
    """The experiment's device and the installed packages or the environment contradict each other."""


def _torch_is_cpu_build() -> bool:
    return importlib.metadata.version("torch").endswith("+cpu")


def platform_environment(device: str, ranks: int = 1) -> dict[str, str]:
    """Environment variables for a run on ``device`` (``trainer.device``: "cpu", "cuda" or "npu").

    On CPUs each of the ``ranks`` on this machine gets its share of the cores as threads; Ray would give every process
    one. FSDP ranks and vLLM take turns, so they may use the same cores.

    Raises:
        WrongMachineError: if VERL_PLATFORM contradicts the experiment, or the installed torch cannot serve it.
    """
    wanted = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if wanted and (wanted == "cpu") != (device == "cpu"):
        raise WrongMachineError(
            f"VERL_PLATFORM={wanted} contradicts trainer.device={device} of this experiment: unset the variable, or "
            "choose another experiment (demo runs on CPUs, qwen3_8b on GPUs)"
        )
    if device == "cpu":
        defaults = CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
        return {name: os.environ.get(name, value) for name, value in defaults.items()}
    if _torch_is_cpu_build():
        raise WrongMachineError(
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
        given = {}
    elif RUN_ID_VARIABLE in os.environ:
        variables[RUN_ID_VARIABLE] = os.environ[RUN_ID_VARIABLE]
    with open_dict(runtime_env):
        runtime_env.env_vars = {**variables, **given}
        if _can_fork(config):
            from recipe.runner.cpu import fork_server  # here: a GPU run imports nothing of it

            # Also where the configuration is that of an earlier run, whose server is gone.
            runtime_env.py_executable = fork_server.py_executable()


def starts_ray(config: DictConfig) -> bool:
    """Whether the run starts a Ray of its own: neither its configuration nor RAY_ADDRESS names a cluster."""
    address = config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS") or "local"
    return address == "local"


def _can_fork(config: DictConfig) -> bool:
    """Whether all workers of the run are Ray's on this machine, without an accelerator."""
    return config.trainer.device == "cpu" and starts_ray(config)


@contextlib.contextmanager
def forked_workers(config: DictConfig, modules: Sequence[str]) -> Iterator[None]:
    """Within it, the processes of one CPU run are forked from one that begins its imports, ``modules`` too, now.

    Not for two runs: while Ray is imported, it reads what belongs to one start of it.
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
