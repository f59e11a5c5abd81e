"""Command line of :mod:`fspo.check_loss`."""

from fspo.check_loss.command import main
from fspo.files import piped

if __name__ == "__main__":
    raise SystemExit(piped(main))
