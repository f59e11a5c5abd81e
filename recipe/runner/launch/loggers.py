"""Where verl's loggers (``trainer.logger``) write: into the run folder, under the run's own name.

The variables are those that ``verl.utils.tracking`` and
the loggers themselves read; one that the user has set is left alone.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from omegaconf import DictConfig

from recipe.runner.launch.problems import MachineProblem

#: The package that a logger needs, where it has another name.
_PACKAGES: Final = {"console": "verl", "file": "verl", "vemlp_wandb": "volcengine_ml_platform"}


def point_into(run_dir: str) -> None:
    """Let the loggers of this process write into the run folder."""
    places = {
        # upstream: verl.utils.tracking "os.environ.get("TENSORBOARD_DIR""
        # upstream: verl.utils.tracking "os.environ.get("MLFLOW_TRACKING_URI""
        # upstream: verl.utils.tracking "os.environ.get("SWANLAB_LOG_DIR""
        "TENSORBOARD_DIR": f"{run_dir}/tensorboard",
        "WANDB_DIR": run_dir,  # W&B makes a folder wandb in it
        "MLFLOW_TRACKING_URI": f"sqlite:///{run_dir}/mlflow.db",
        "SWANLAB_LOG_DIR": f"{run_dir}/swanlog",
    }
    for name, place in places.items():
        os.environ.setdefault(name, place)


def run_name(config: DictConfig) -> str:
    """The name of the run's curves: its experiment, and what tells its folder from those of other runs."""
    experiment, parts = str(config.trainer.experiment_name), Path(config.trainer.default_local_dir).parts[1:]
    after = parts[len(parts) - parts[::-1].index(experiment) :] if experiment in parts else ()
    return "/".join([experiment, *(after or parts[-3:])])


def problems(config: DictConfig) -> Iterator[str]:
    """Loggers that verl does not have, or that are not installed."""
    from verl.utils.tracking import Tracking

    loggers = Tracking.supported_backend
    names = [config.trainer.logger] if isinstance(config.trainer.logger, str) else list(config.trainer.logger)
    for name in names:
        package = _PACKAGES.get(name, name)
        if name not in loggers:
            yield f"trainer.logger: {name} is none of verl's loggers; choose from {', '.join(loggers)}"
        elif importlib.util.find_spec(package) is None:
            yield MachineProblem(
                f"trainer.logger: {name} needs the package {package}, which is not installed: pip install {package}"
            )
