"""`python -m recipe.math.data`: see `recipe.math.data.prepare`."""

import sys

from recipe.math.data.prepare import main

sys.exit(main())
