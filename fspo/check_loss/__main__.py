"""Command line of :mod:`fspo.check_loss`."""

import sys

from fspo.check_loss.command import main

if __name__ == "__main__":
    sys.exit(main())
