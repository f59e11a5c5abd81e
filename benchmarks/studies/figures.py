"""The figures of the documentation, from benchmarks/study into docs/images (``python -m benchmarks.studies figures``).

Those of README and the site are written light, and dark with ``-dark`` in the name and a transparent ground.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib import rcParams, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.pages import TABLES, opened
from fspo.clip_values import needed_scale, scaled
from fspo.conclusion import ACCEPT, Responses, exponent_of, within_mini_batches
from fspo.diagnostics import band_edges
from fspo.fairness.lre import Array
from fspo.losses import ALGORITHMS, BANDS, LOSSES
from fspo.records import read_sequences
from fspo.report.figures import STYLE, algo_looks, comparison_figures, draw_clip_by_length
from fspo.report.groups import LengthProfile, RunGroup, clip_profiles, group_runs, length_profile
from fspo.report.runs import load_run

STUDY: Final = Path(__file__).resolve().parents[1] / "study"
IMAGES: Final = Path(__file__).resolve().parents[2] / "docs/images"
TITLES: Final = {algo: LOSSES[loss].title for algo, loss in BANDS.items()}
LOOKS: Final = algo_looks([*TITLES.values()])
#: What becomes of one batch of a step.
WAY: Final = (
    *("prompts", "responses\nby vLLM", "rewards,\nadvantages A", "old\nlog-probs"),
    *("S = sum of\nlog-ratios", "band by L:\nclip or keep", "gradient,\nupdate"),
)
#: FSPO's runs in each of the four settings: archive, and the folder in it.
SPREADS: Final = {
    "demo": ("records", "default/fspo"),
    "demo, 7 times the learning rate": ("clipping", "comparison-4/matched_active/fspo"),
    "sorted words": ("words", "default/fspo"),
    "SmolLM2-135M": ("pretrained", "default/fspo"),
}
#: S of the same responses by how it was computed: file of benchmarks/study, and column.
PRECISIONS: Final = {
    "fp32": ("long_in_bf16", "S_fp32"),
    "bf16": ("long_in_bf16", "S"),
    "bf16, logits in fp32": ("long_in_logits32", "S"),
}
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
            name = TITLES[group.algo]
            for index, edge_N in enumerate(band_edges(length_N, settings)):
                axes.plot(length_N, edge_N, label=name if index else None, **LOOKS[name] | {"marker": ""})
    axes.set(xlabel="response length L (tokens)", ylabel="S (nats)", ylim=np.percentile(s, [0.5, 99.5]) * 1.3)
    axes.set_title("Each response's S, and the bands at matched clip rate")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3)


def responses_of(archive: str, folder: str) -> Responses:
    """The recorded sequences of the runs in a folder of an archive."""
    with opened(STUDY / f"{archive}.tar.xz") as place:
        records = [
            read for path in sorted((place / folder).glob("seed*")) if (read := read_sequences(path)) is not None
        ]
    s, length = ([column for run in records for column in getattr(run, name)] for name in ("s", "length"))
    batch = np.repeat(np.arange(len(s)), list(map(len, s)))
    return Responses.of_rows(np.concatenate(s), np.concatenate(length), batch)


def spread_of(responses: Responses) -> tuple[Array, Array]:
    """Mean length and std(S) of each length bin, within mini-batches."""
    columns = within_mini_batches(responses, responses.log_ratio_B)
    count_J, tokens_J, squares_J = (column.sum(0) for column in columns)
    return tokens_J / count_J, np.sqrt(squares_J / count_J)


def spread_by_length(axes: Axes, responses: Responses) -> None:
    """std(S) by length, and each band at the clip value that accepts 85%, as the std(S) of which it accepts 85%.

    That is its half-width over the 85% quantile of |S| / std(S).
    """
    length_J, std_J = spread_of(responses)
    std_B = np.interp(np.log(responses.length_B), np.log(length_J), std_J)
    factor = np.quantile(np.abs(responses.log_ratio_B) / std_B, ACCEPT)
    length_N = np.unique(np.geomspace(length_J[0], length_J[-1]).round())
    for algo, loss in BANDS.items():
        name = TITLES[algo]
        needed_B = needed_scale(responses.log_ratio_B, responses.length_B, ALGORITHMS[loss])
        settings = scaled(ALGORITHMS[loss], float(np.quantile(needed_B, ACCEPT)))
        lower_N, upper_N = band_edges(length_N, settings)
        axes.plot(length_N, (upper_N - lower_N) / 2 / factor, label=name, **LOOKS[name] | {"marker": ""})
    axes.plot(length_J, std_J, "ko", ms=5, label="std(S)")
    _both_log(axes)


def _both_log(axes: Axes) -> None:
    axes.set(xscale="log", yscale="log", xlabel="response length (tokens)", ylabel="std(S) (nats)")
    for axis, form in ((axes.xaxis, "{x:,.0f}"), (axes.yaxis, "{x:g}")):
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(form)


def spreads(figure: Figure) -> None:
    """:func:`spread_by_length` of the four settings."""
    for axes, (setting, place) in zip(figure.subplots(2, 2).flat, SPREADS.items(), strict=True):
        spread_by_length(axes, responses_of(*place))
        axes.set_title(setting)
    # The dots are drawn in the text's colour, so that they show on a dark ground.
    for axes in figure.axes:
        axes.lines[-1].set_color(rcParams["text.color"])
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def forest(axes: Axes) -> None:
    """LRE with its interval by setting and band, from docs/tables/settings.csv."""
    with (TABLES / "settings.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for index, (band, name) in enumerate(TITLES.items()):
        value_S, low_S, high_S = np.array([re.findall(r"[\d.]+", row[band]) for row in rows], float).T
        y = np.arange(len(rows)) + 0.22 * (index - 1)
        axes.errorbar(
            value_S, y, xerr=(value_S - low_S, high_S - value_S), label=name, **LOOKS[name] | {"linestyle": "none"}
        )
    axes.set_yticks(
        range(len(rows)), [f"{row['setting']}\nstd(S) ~ L^{row['a in std(S) ~ L^a'].split()[0]}" for row in rows]
    )
    axes.invert_yaxis()
    axes.set(xlabel="LRE (0: all lengths are accepted alike)", xlim=(0, None))
    axes.grid(visible=True, axis="x")
    axes.set_title("Unevenness by length, at equal clip rates")
    assert axes.figure is not None
    axes.figure.legend(loc="outside lower center", ncols=3)


def precisions(axes: Axes) -> None:
    """std(S) by length of the same responses in fp32 and in bf16."""
    import pandas as pd

    looks = algo_looks([*PRECISIONS])
    for name, (file, column) in PRECISIONS.items():
        rows = pd.read_parquet(STUDY / f"{file}.parquet")
        batch_B = rows.groupby(["seed", "step", "minibatch"]).ngroup()
        responses = Responses.of_rows(rows[column], rows["L"], batch_B, rows["prompt"])
        exponent = exponent_of(responses)
        shown = f"{name}: L^{exponent.value:.2f} [{exponent.low:.2f}, {exponent.high:.2f}]"
        axes.plot(*spread_of(responses), label=shown, **looks[name])
    _both_log(axes)
    axes.set_title("One small update of SmolLM2-135M: S by precision")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16))


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
        profiles = {TITLES[group.algo]: length_profile(group.runs) for group in groups}
        drawn: dict[str, tuple[Callable[[Axes], None], tuple[float, float]]] = {
            "acceptance-by-length": (lambda axes: clip_by_length(axes, profiles), (6, 4.2)),
            "s-by-length": (lambda axes: s_by_length(axes, groups), (6, 4)),
            "one-batch": (one_batch, (9.5, 1.2)),
            "lre-by-setting": (forest, (6.5, 4.4)),
            "s-by-precision": (precisions, (6, 4.4)),
        }
        for suffix, colours in (("", {}), ("-dark", _DARK)):
            with style.context([*STYLE, colours]):
                for name, (draw_on, size) in drawn.items():
                    figure = Figure(figsize=size, layout="constrained")
                    draw_on(figure.subplots())
                    figure.savefig(IMAGES / f"{name}{suffix}.png")
                figure = Figure(figsize=(8, 6), layout="constrained")
                spreads(figure)
                figure.savefig(IMAGES / f"spread-by-length{suffix}.png")
        with style.context(STYLE):
            of_demo(records)
