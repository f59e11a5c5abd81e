"""The former name of :mod:`recipe.fspo.alignment`."""

import sys

sys.exit("error: recipe.fspo.audit is now called recipe.fspo.alignment: python -m recipe.fspo.alignment RUN")
