"""Plain verl and this recipe side by side: start-up, step time and memory of the demo.

``python -m benchmarks.versus_verl`` starts the variants alternately and watches all their processes from outside. It
adds a line to ``benchmarks/versus_verl/runs.jsonl`` for each finished start, and renders docs/performance.md's tables
from the lines whose settings are today's. Interrupted, it continues where it was; ``--runs 0`` only renders;
``--floor`` adds the processor seconds of the imports that remain.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.pages import write_section
from benchmarks.versus_verl import floor, tables
from benchmarks.versus_verl.run import StartFailed, measure
from benchmarks.versus_verl.variants import VARIANTS, Variant, fingerprint
from fspo.files import complete_lines

ROWS = Path(__file__).with_name("runs.jsonl")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
_FIRST_GUESS_S = 300.0


def current(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows whose settings are today's."""
    today = {variant.name: fingerprint(variant) for variant in VARIANTS}
    return [row for row in rows if not row["extra"] and row["fingerprint"] == today.get(row["variant"])]


def next_variant(rows: Sequence[dict[str, Any]], variants: Sequence[Variant], runs: int) -> Variant | None:
    """The variant with the fewest finished runs, in their order; None if all have ``runs``."""
    done = {variant: sum(row["variant"] == variant.name for row in rows) for variant in variants}
    variant = min(variants, key=lambda variant: done[variant])
    return variant if done[variant] < runs else None


def expected_s(rows: Sequence[dict[str, Any]], variant: Variant) -> float:
    """How long a start of ``variant`` will take, from those that were."""
    return median(
        [r["first_step_ends_s"] + sum(r["steps_s"]) for r in rows if r["variant"] == variant.name] or [_FIRST_GUESS_S]
    )


def render(rows: Sequence[dict[str, Any]]) -> None:
    """Write the sections of the page anew."""
    write_section(PAGE, "runs", tables.machine_line(rows))
    write_section(PAGE, "start-up", tables.startup_table(rows))
    write_section(PAGE, "processes", tables.process_table(rows))
    write_section(PAGE, "step time", tables.step_table(rows))
    write_section(PAGE, "memory", tables.memory_table(rows))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versus_verl", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="finished starts wanted of each variant (3)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no start that would end later")
    parser.add_argument(
        "--variants", default=",".join(variant.name for variant in VARIANTS), help="which of them (all)"
    )
    parser.add_argument("--floor", action="store_true", help="measure the imports that remain, too")
    arguments = parser.parse_args()
    variants = [variant for variant in VARIANTS if variant.name in arguments.variants.split(",")]
    began, status = time.monotonic(), 0
    while (variant := next_variant(current(complete_lines(ROWS)), variants, arguments.runs)) is not None:
        left_s = 60 * arguments.minutes - (time.monotonic() - began)
        if expected_s(current(complete_lines(ROWS)), variant) > left_s:
            break
        try:
            row = measure(variant)
        except StartFailed as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
            break
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{variant.name}: first step {row['first_step_begins_s']:.0f} to {row['first_step_ends_s']:.0f} s, ", end=""
        )
        print(f"then {row['steps_s']} s, {row['peak_pss_mib']} MiB, others {row['others_share']:.0%}", flush=True)
    render(current(complete_lines(ROWS)))
    if arguments.floor:
        write_section(PAGE, "floor", floor.table(floor.measure()))
    return status


if __name__ == "__main__":
    sys.exit(main())
