"""How a step's time grows with sequences, response length, parameters and ranks, on CPUs.

``python -m benchmarks.scaling`` starts the demo's stack once per point, lets every response reach its full length
(``ignore_eos``), and adds a line per finished start to ``benchmarks/scaling.jsonl``; interrupted, it continues where it
was. With ``--plain`` plain verl runs the largest points, too. Table and plot of docs/performance.md are made from the
lines; ``--minutes 0`` only renders.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.pages import markdown, write_section
from benchmarks.versus_verl.run import StartFailed, measure
from benchmarks.versus_verl.tables import NOT_RUN
from benchmarks.versus_verl.variants import VARIANTS, Variant
from fspo.files import complete_lines
from fspo.report.style import LIGHT, new_figure, save_png, themed

ROWS = Path(__file__).with_name("scaling.jsonl")
PAGE, PLOT = Path("docs/performance.md"), Path("docs/images/performance-scaling.png")
STEPS = 4
RESPONSES = 8
_PLAIN, _RECIPE = VARIANTS[0], VARIANTS[1]
_GUESS_S = 100.0


@dataclass(frozen=True)
class Point:
    """One start: prompts a step, tokens a response, the model's width and layers, ranks."""

    prompts: int = 8
    tokens: int = 64
    hidden: int = 128
    layers: int = 3
    ranks: int = 1

    @property
    def sequences(self) -> int:
        return self.prompts * RESPONSES

    @property
    def parameters(self) -> int:
        """Of the layers: queries and output, keys and values of half the heads, an MLP three times as wide."""
        return self.layers * (2 + 1 + 9) * self.hidden**2

    @property
    def name(self) -> str:
        return f"{self.sequences} x {self.tokens}, {self.hidden} x {self.layers}, {self.ranks} ranks"


BASE = Point()
AXES = {
    "sequences": (BASE, Point(prompts=16), Point(prompts=32)),
    "tokens": (BASE, Point(tokens=128), Point(tokens=256)),
    "parameters": (BASE, Point(hidden=256, layers=6), Point(hidden=384, layers=6)),
    "ranks": (BASE, Point(ranks=2)),
}
TITLES = {
    "sequences": "sequences a step",
    "tokens": "tokens a response",
    "parameters": "parameters",
    "ranks": "ranks, on the same two cores",
}
LARGEST = tuple(points[-1] for axis, points in AXES.items() if axis != "ranks")


def write_model(point: Point, folder: Path) -> None:
    """The demo's architecture and tokenizer at another size, with random weights."""
    from fspo.data.char_tokenizer import build_tokenizer
    from fspo.data.demo_model import CONTEXT, Recipe, build_model, shipped_model
    from fspo.data.remainder import VOCABULARY

    heads = point.hidden // 32
    recipe = Recipe(hidden_size=point.hidden, layers=point.layers, heads=heads, kv_heads=heads // 2)
    build_model(recipe, build_tokenizer(VOCABULARY, CONTEXT)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((shipped_model() / name).read_bytes())


def overrides(point: Point, model: Path) -> list[str]:
    """Settings of a start at ``point``; four updates a step at every size."""
    return [
        f"trainer.total_training_steps={STEPS}",
        f"data.train_batch_size={point.prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={point.prompts // 4}",
        f"actor_rollout_ref.rollout.n={RESPONSES}",
        f"data.max_response_length={point.tokens}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.n_gpus_per_node={point.ranks}",
        "fspo.offline_task.n_train=256",
        "fspo.offline_task.n_test=8",
    ]


def start(variant: Variant, point: Point) -> dict[str, Any]:
    """Measure one point; the row to keep."""
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        write_model(point, Path(folder))
        row = measure(variant, overrides(point, Path(folder)), STEPS)
    keep = ("variant", "date", "cores", "steps_s", "timings_s", "peak_pss_mib", "response_tokens", "others_share")
    return {"point": point.name, **{name: row[name] for name in (*keep, "first_step_begins_s")}}


def todo(rows: Sequence[dict[str, Any]], plain: bool) -> list[tuple[Variant, Point]]:
    """What has not been measured yet, the recipe's points first."""
    done = {(row["variant"], row["point"]) for row in rows}
    wanted = [(_RECIPE, point) for point in dict.fromkeys(p for points in AXES.values() for p in points)]
    if plain:
        wanted += [(_PLAIN, point) for point in (*LARGEST, BASE)]
    return [(variant, point) for variant, point in wanted if (variant.name, point.name) not in done]


def step_s(rows: Sequence[dict[str, Any]], variant: Variant, point: Point) -> float | None:
    """Median of the later steps; None if it was not measured."""
    found = [row["steps_s"] for row in rows if row["variant"] == variant.name and row["point"] == point.name]
    return median(found[-1]) if found else None


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """b of the least-squares fit y = a x^b."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def _number(axis: str, x: int) -> str:
    return f"{x / 1e6:.1f}e6" if axis == "parameters" else str(x)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """What grows, the step time at each point, the exponent; plain verl where it was measured."""
    lines = []
    for axis, points in AXES.items():
        cells, found = [], []
        for point in points:
            ours, plain = step_s(rows, _RECIPE, point), step_s(rows, _PLAIN, point)
            x = getattr(point, axis)
            cells.append(f"{_number(axis, x)}: {NOT_RUN if ours is None else f'{ours:.1f} s'}")
            if plain is not None:
                cells[-1] += f" (plain verl {plain:.1f} s)"
            if ours is not None:
                found.append((x, ours))
        fitted = f"{exponent(*zip(*found, strict=True)):.2f}" if len(found) > 1 else NOT_RUN
        lines.append([TITLES[axis], ", ".join(cells), fitted])
    return markdown(["what grows", "step time", "exponent"], lines)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Step time against each axis with more than two points, both logarithmic."""
    axes = [axis for axis, points in AXES.items() if len(points) > 2]
    with themed(LIGHT):
        figure = new_figure(9, 2.9)
        panels = figure.subplots(1, len(axes), sharey=True)
        for panel, axis in zip(panels, axes, strict=True):
            for variant, marker, colour in ((_RECIPE, "o-", LIGHT.arms["fspo"]), (_PLAIN, "s", LIGHT.others[0])):
                found = [(getattr(p, axis), s) for p in AXES[axis] if (s := step_s(rows, variant, p)) is not None]
                if found:
                    panel.loglog(*zip(*found, strict=True), marker, color=colour, label=variant.title, markersize=5)
            ticks = [getattr(point, axis) for point in AXES[axis]]
            panel.set_xticks(ticks, [_number(axis, x) for x in ticks])
            panel.minorticks_off()
            panel.set_xlabel(TITLES[axis])
        seconds = [2, 5, 10, 20, 50]
        panels[0].set_yticks(seconds, [str(s) for s in seconds])
        panels[0].set_ylabel("step, s")
        panels[0].legend()
        save_png(figure, path, dpi=100)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no start that would end later")
    parser.add_argument("--plain", action="store_true", help="plain verl at the largest points, too")
    arguments = parser.parse_args()
    began, status = time.monotonic(), 0
    for variant, point in todo(complete_lines(ROWS), arguments.plain):
        if time.monotonic() - began + _GUESS_S > 60 * arguments.minutes:
            break
        try:
            row = start(variant, point)
        except StartFailed as error:
            print(f"error: {point.name}: {error}", file=sys.stderr)
            status = 1
            continue
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{variant.name}, {point.name}: {row['steps_s']} s, others {row['others_share']:.0%}", flush=True)
    rows = complete_lines(ROWS)
    section = table(rows)
    if rows:
        plot(rows, PLOT)
        others = [f"{100 * share(row['others_share'] for row in rows):.0f}" for share in (min, max)]
        section += f"\n\nProcesses of others took {' to '.join(others)}% of the cores meanwhile."
        section += (
            f"\n\n![step time against sequences, tokens and parameters, both axes logarithmic](images/{PLOT.name})"
        )
    write_section(PAGE, "scaling", section)
    return status


if __name__ == "__main__":
    sys.exit(main())
