"""`python -m fspo.data`: see `fspo.data.cli`."""

import sys

from fspo.data.cli import main

sys.exit(main())
