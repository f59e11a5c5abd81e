"""Entry point: ``python -m recipe.fspo.rehearse experiment=qwen3_8b [any Hydra override]``."""

from __future__ import annotations

import sys

from recipe.fspo.job import JOB
from recipe.runner.rehearse.command import main

if __name__ == "__main__":
    sys.exit(main(JOB, "recipe.fspo.rehearse", sys.argv[1:]))
