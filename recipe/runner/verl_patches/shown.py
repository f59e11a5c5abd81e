"""The configuration that verl prints and hands to its loggers: without secrets."""

from __future__ import annotations

import pprint
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fspo.files import CONFIG_FILE


def written(config: Mapping[str, Any]) -> Any:
    """``config.yaml`` of the run whose resolved configuration this is: with its references to the environment."""
    file = Path(config["trainer"]["default_local_dir"]) / CONFIG_FILE
    return OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else config


def print_as_written(main_ppo: Any) -> None:
    """Let verl's task runner print what :func:`written` gives in place of the resolved configuration.

    verl 0.9.1 prints it into Ray's log of the process that trains; each logger of ``trainer.logger`` keeps a copy
    (:func:`log_as_written`). Passwords and tokens are among the values, and neither has a setting or a hook.
    """
    # upstream: verl.trainer.main_ppo "pprint(OmegaConf.to_container(config, resolve=True))"
    # upstream: verl.trainer.main_ppo:pprint
    main_ppo.pprint = lambda config: pprint.pprint(written(config))


def log_as_written(trainer_base: Any) -> None:
    """The same for verl's loggers."""
    # upstream: verl.trainer.ppo.v1.trainer_base "config=OmegaConf.to_container(self.config, resolve=True),"
    # upstream: verl.trainer.ppo.v1.trainer_base:Tracking
    tracking = trainer_base.Tracking
    trainer_base.Tracking = lambda **arguments: tracking(**{**arguments, "config": written(arguments["config"])})
