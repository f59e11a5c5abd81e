"""``python -m benchmarks.studies figures``: the figures of the documentation, from benchmarks/study."""

from __future__ import annotations

import argparse
import sys

from benchmarks.studies import figures


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("figures", help="the figures")
    parser.parse_args()
    figures.draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
