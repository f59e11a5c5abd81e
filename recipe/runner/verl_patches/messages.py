"""Messages that verl cannot format."""

from __future__ import annotations

import logging


def drop_a_message_that_is_an_error() -> None:
    """Log nothing below a warning in verl's separate trainer.

    verl 0.9.1 hands its logger ``flush``, a keyword of ``print()``, there: a TypeError unless the level drops the
    message. The level is an environment variable's, which all of verl's loggers share.
    """
    from verl.trainer.ppo.v1 import trainer_separate_async

    logging.getLogger(trainer_separate_async.__name__).setLevel(logging.WARNING)
