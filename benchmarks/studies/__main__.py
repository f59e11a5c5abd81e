"""``python -m benchmarks.studies figures``: the figures of the documentation, from benchmarks/study and docs/tables.

``python -m benchmarks.studies demo RUN``: that of the demo, from a run of it.
``python -m benchmarks.studies clip_values FOLDER``: the tables of the open study, from its runs and benchmarks/study.
The code of a closed study is at the commit that its page names.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.pages import write_tables
from benchmarks.studies import clip_values, figures


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("figures", help="the figures")
    commands.add_parser("demo", help="the demo's figure").add_argument("folder", type=Path, help="a run of the demo")
    commands.add_parser("clip_values", help="the tables").add_argument("folder", type=Path, help="its runs")
    asked = parser.parse_args()
    if asked.command == "figures":
        figures.draw()
    elif asked.command == "demo":
        figures.draw_demo(asked.folder)
    else:
        write_tables({f"clip-values-{kind}": table for kind, table in clip_values.tables(asked.folder).items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
