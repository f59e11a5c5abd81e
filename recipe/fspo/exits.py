"""How the commands that start the stack end: one sentence on standard error, and the exit status that goes with it."""

from __future__ import annotations

import sys
from typing import Final

from omegaconf import DictConfig

from recipe.fspo.environment import forked_workers
from recipe.fspo.preemption import PREEMPTED, Preempted

#: Exit status of a run that failed.
FAILED: Final = 1
#: Exit status for bad input, as ``argparse`` uses it.
BAD_INPUT: Final = 2
#: Exit status after Ctrl-C, as shells give it.
INTERRUPTED: Final = 130


def launch_or_exit(config: DictConfig, kept: str) -> None:
    """Run the stack with ``config``; unless it finishes, say why and leave the process.

    Args:
        config: Composed, with its platform exported.
        kept: What an interrupted run leaves, for the sentence that says so.
    """
    with forked_workers(config):
        _launch_or_exit(config, kept)


def _launch_or_exit(config: DictConfig, kept: str) -> None:
    # Imported here: both import verl, which must not happen before the platform is exported.
    from recipe.fspo.failure import TrainingFailed
    from recipe.fspo.launch import launch
    from recipe.fspo.preflight import PreflightError

    try:
        launch(config)
    except PreflightError as error:
        print(error, file=sys.stderr)
        sys.exit(BAD_INPUT)
    except Preempted as ended:
        print(ended, file=sys.stderr)
        sys.exit(PREEMPTED)
    except TrainingFailed as failed:
        print(f"error: {failed}", file=sys.stderr)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        print(f"interrupted; {kept}", file=sys.stderr)
        sys.exit(INTERRUPTED)
