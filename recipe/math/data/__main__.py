"""`python -m recipe.math.data`: see `recipe.math.data.cli`."""

import sys

from recipe.math.data.cli import main

sys.exit(main())
