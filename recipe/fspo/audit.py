"""The former name of :mod:`recipe.fspo.alignment`."""

import sys

print("error: this command is now called python -m recipe.fspo.alignment", file=sys.stderr)
sys.exit(2)
