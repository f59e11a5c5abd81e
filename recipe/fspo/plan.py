"""Entry point: ``python -m recipe.fspo.plan experiment=qwen3_8b nodes=2 [any Hydra override]``."""

from __future__ import annotations

import sys

from recipe.fspo.job import JOB
from recipe.runner.plan.command import main

if __name__ == "__main__":
    sys.exit(main(JOB, "recipe.fspo.plan", sys.argv[1:]))
