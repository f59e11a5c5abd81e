"""``python -m benchmarks.studies figures``: the figures of the documentation, from benchmarks/study.

``python -m benchmarks.studies demo RUN``: that of the demo, from a run of it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.studies import figures


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("figures", help="the figures")
    commands.add_parser("demo", help="the demo's figure").add_argument("folder", type=Path, help="a run of the demo")
    asked = parser.parse_args()
    if asked.command == "figures":
        figures.draw()
    else:
        figures.draw_demo(asked.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
