"""Entry point: ``python -m recipe.fspo.main [algo=...] [experiment=...] [any Hydra override]``."""

from __future__ import annotations

import os
import sys

import hydra
from omegaconf import DictConfig

from recipe.fspo.compose import CONF_DIR, ROOT_CONFIG, compose, first_of_each_sweep
from recipe.fspo.environment import WrongMachineError, export_platform
from recipe.fspo.preemption import PREEMPTED, Preempted, watch_for_warning

#: Exit status for bad input, as ``argparse`` uses it.
BAD_INPUT = 2
#: Exit status after Ctrl-C, as shells give it.
INTERRUPTED = 130


@hydra.main(config_path=str(CONF_DIR), config_name=ROOT_CONFIG, version_base=None)
def _train(config: DictConfig) -> None:
    # Imported here: both import verl, which must not happen before the platform is exported.
    from recipe.fspo.launch import TrainingFailed, launch
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
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"interrupted; {config.fspo.run_dir} keeps what was done", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _overrides(arguments: list[str]) -> list[str]:
    """The Hydra overrides among the command-line arguments (flags such as --multirun are Hydra's own)."""
    return [argument for argument in arguments if not argument.startswith("-")]


def main() -> None:
    """Decide the platform, then hand over to Hydra."""
    from hydra.errors import HydraException

    watch_for_warning()
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")  # this process only; workers log to their files as they do
    try:
        export_platform(compose(first_of_each_sweep(_overrides(sys.argv[1:]))))
    except (HydraException, ModuleNotFoundError, WrongMachineError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    _train()


if __name__ == "__main__":
    main()
