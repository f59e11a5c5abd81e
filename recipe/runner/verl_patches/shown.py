"""The configuration that verl prints and hands to its loggers: without secrets."""

from __future__ import annotations

import pprint
from collections.abc import Mapping
from typing import Any


def show_configuration(written: Mapping[str, Any]) -> None:
    """Let verl's trainer print ``written`` in place of its configuration, and hand it to W&B, MLflow and the others.

    verl 0.9.1 resolves the configuration and prints it into Ray's log of the process that trains; each logger of
    ``trainer.logger`` keeps a copy. Passwords and tokens are among the values, and neither has a setting or a hook.
    """
    from verl.trainer import main_ppo
    from verl.trainer.ppo.v1 import trainer_base

    # upstream: verl.trainer.main_ppo "pprint(OmegaConf.to_container(config, resolve=True))"
    # upstream: verl.trainer.ppo.v1.trainer_base "config=OmegaConf.to_container(self.config, resolve=True),"
    # upstream: verl.trainer.main_ppo:pprint
    # upstream: verl.trainer.ppo.v1.trainer_base:Tracking
    tracking = trainer_base.Tracking
    main_ppo.pprint = lambda _: pprint.pprint(written)
    trainer_base.Tracking = lambda **arguments: tracking(**{**arguments, "config": written})
