"""The figures of the documentation, from benchmarks/study into docs/images (``python -m benchmarks.studies``).

Those of README and the site are written light, and dark with ``-dark`` in the name and a transparent ground.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.pages import opened
from fspo.diagnostics import band_edges
from fspo.records import read_sequences
from fspo.report.figures import STYLE, algo_looks, comparison_figures, draw_clip_by_length
from fspo.report.groups import LengthProfile, RunGroup, clip_profiles, group_runs, length_profile
from fspo.report.runs import load_run

STUDY: Final = Path(__file__).resolve().parents[1] / "study"
IMAGES: Final = Path(__file__).resolve().parents[2] / "docs/images"
BANDS: Final = {"fspo": "FSPO, c sqrt(L)", "rloo": "RLOO, constant", "gspo": "GSPO, linear in L"}
LOOKS: Final = algo_looks([*BANDS.values()])
#: What becomes of one batch of a step.
WAY: Final = (
    *("prompts", "responses\nby vLLM", "rewards,\nadvantages A", "old\nlog-probs"),
    *("S = sum of\nlog-ratios", "band by L:\nclip or keep", "gradient,\nupdate"),
)
#: Figures of a report on the demo's runs, which the page of results shows.
_OF_DEMO: Final = (
    *("default_clip_by_length", "default_distribution_fspo"),
    *("matched_clip_by_length", "matched_removed_by_length"),
)
_DARK: Final = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), "#e8eaf0"),
    "grid.color": "0.3",
}


def clip_by_length(axes: Axes, profiles: Mapping[str, LengthProfile | None]) -> None:
    """Share of the responses outside each band, by length."""
    draw_clip_by_length(axes, profiles, LOOKS)
    axes.set_ylabel("share of responses outside the band")
    axes.set_title("How often each band clips, by response length")


def s_by_length(axes: Axes, groups: Sequence[RunGroup]) -> None:
    """S of the recorded sequences of the first group, and the bands at matched clip rate."""
    records = [read_sequences(run.path) for run in groups[0].runs]
    pairs = [pair for run in records if run for pair in zip(run.s, run.length, strict=True)]
    s, length = (np.concatenate(column) for column in zip(*pairs, strict=True))
    axes.scatter(length, s, s=4, alpha=0.25, color="0.55", lw=0, rasterized=True)
    length_N = np.arange(1, length.max() + 1)
    for group in groups:
        if (settings := group.runs[0].loss_settings) is not None:
            name = BANDS[group.algo]
            for index, edge_N in enumerate(band_edges(length_N, settings)):
                axes.plot(length_N, edge_N, label=name if index else None, **LOOKS[name] | {"marker": ""})
    axes.set(xlabel="response length L (tokens)", ylabel="S (nats)", ylim=np.percentile(s, [0.5, 99.5]) * 1.3)
    axes.set_title("Each response's S, and the bands at matched clip rate")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3)


def one_batch(axes: Axes) -> None:
    """The stations of a batch, left to right."""
    axes.set_axis_off()
    axes.set(xlim=(-0.5, len(WAY) - 0.5), ylim=(-1, 1))
    for x, text in enumerate(WAY):
        own = {"fc": "#0072b2", "ec": "none", "alpha": 0.9} if x in (4, 5) else {"fc": "none", "ec": "0.5"}
        axes.text(x, 0, text, ha="center", va="center", color="w" if x in (4, 5) else None, bbox=own | {"pad": 7})
        if x:
            axes.annotate("", (x - 0.43, 0), (x - 0.57, 0), arrowprops={"arrowstyle": "->", "color": "0.5"})


def of_demo(records: Path) -> None:
    """Draw the demo's runs as a report does, at the published and at the matched clip values."""
    for origin in ("default", "matched"):
        groups = group_runs([load_run(path) for path in sorted(records.glob(f"{origin}/*/seed*"))])
        looks = algo_looks([group.algo for group in groups])
        for name, _, figure in comparison_figures(groups, clip_profiles(groups), looks):
            if (file := f"{origin}_{name}") in _OF_DEMO:
                figure.savefig(IMAGES / "study" / f"{file}.png")


def draw() -> None:
    """Write every figure."""
    with opened(STUDY / "records.tar.xz") as records:
        groups = group_runs([load_run(path) for algo in BANDS for path in sorted(records.glob(f"matched/{algo}/*"))])
        profiles = {BANDS[group.algo]: length_profile(group.runs) for group in groups}
        drawn: dict[str, tuple[Callable[[Axes], None], tuple[float, float]]] = {
            "acceptance-by-length": (lambda axes: clip_by_length(axes, profiles), (6, 4.2)),
            "s-by-length": (lambda axes: s_by_length(axes, groups), (6, 4)),
            "one-batch": (one_batch, (9.5, 1.2)),
        }
        for suffix, colours in (("", {}), ("-dark", _DARK)):
            with style.context([*STYLE, colours]):
                for name, (draw_on, size) in drawn.items():
                    figure = Figure(figsize=size, layout="constrained")
                    draw_on(figure.subplots())
                    figure.savefig(IMAGES / f"{name}{suffix}.png")
        with style.context(STYLE):
            of_demo(records)
