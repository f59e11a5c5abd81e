"""The figures of the documentation, from benchmarks/study into docs/images (``python -m benchmarks.studies figures``).

Those of README and the site are written light, and dark with ``-dark`` in the name and a transparent ground.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib import rcParams, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from PIL import Image

from benchmarks.pages import STUDY, read_table
from fspo.audit import read_audit
from fspo.audit.expected import truncated_weight
from fspo.clip import ACCEPT, needed_scale, scale_for, scaled
from fspo.conclusion import even_band, exponent_of, within_mini_batches
from fspo.diagnostics import band_edges, removed
from fspo.fairness.lre import Array, merge_bins
from fspo.losses import ALGORITHMS
from fspo.report.figures import STYLE, algo_looks, draw_clip_by_length
from fspo.report.groups import LengthProfile, length_profile
from fspo.report.runs import load_run
from fspo.report.summary import draw_run
from fspo.responses import Responses

IMAGES: Final = Path(__file__).resolve().parents[2] / "docs/images"
BANDS: Final = {"fspo": "FSPO, c sqrt(L)", "rloo": "RLOO, constant", "gspo": "GSPO, linear in L"}
ALGORITHM_OF: Final = {"fspo": "fspo", "rloo": "seq_rloo", "gspo": "seq_gspo"}
LOOKS: Final = {BANDS[name]: look for name, look in algo_looks([*BANDS]).items()}
#: What becomes of one batch of a step.
WAY: Final = (
    *("prompts", "responses\nby vLLM", "rewards,\nadvantages A", "old\nlog-probs"),
    *("S = sum of\nlog-ratios", "band by L:\nclip or keep", "gradient,\nupdate"),
)
#: Recorded responses in each of the four settings: file of benchmarks/study.
SPREADS: Final = {
    "demo": "demo",
    "demo, 7 times the learning rate": "fast",
    "sorted words": "words",
    "SmolLM2-135M": "two_words",
}
#: S of the same responses by how it was computed: file of benchmarks/study, and column.
PRECISIONS: Final = {
    "fp32": ("long_in_bf16", "S_fp32"),
    "bf16": ("long_in_bf16", "S"),
    "bf16, logits in fp32": ("long_in_logits32", "S"),
}
#: At which a weight exp(S) is truncated.
CAP: Final = 2
_DARK: Final = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), "#e8eaf0"),
    "grid.color": "0.3",
}


def clip_by_length(axes: Axes, responses: Responses) -> None:
    """Share of the responses outside each band, by length, at the clip values with which 85% lie inside."""
    starts, band = responses.starts(), even_band(responses)
    assert band is not None, "85% of S are 0"
    length_J = responses.by_bin(responses.length_B, starts) / responses.by_bin(np.ones_like(responses.s_B), starts)
    profiles = {
        BANDS[name]: LengthProfile(length_J, band.errors[ALGORITHMS[loss].exponent])
        for name, loss in ALGORITHM_OF.items()
    }
    draw_clip_by_length(axes, profiles, LOOKS)
    axes.set_ylabel("share of responses outside the band")
    axes.set_title("How often each band clips, by response length")


def s_by_length(axes: Axes, responses: Responses) -> None:
    """S of the recorded responses, and each band at the clip value with which 85% lie inside."""
    s_B, length_B = responses.s_B, responses.length_B
    axes.scatter(length_B, s_B, s=4, alpha=0.25, color="0.55", lw=0, rasterized=True)
    length_N = np.arange(1, length_B.max() + 1)
    for name, edges in bands_of(responses, length_N).items():
        for index, edge_N in enumerate(edges):
            axes.plot(length_N, edge_N, label=name if index else None, **LOOKS[name] | {"marker": ""})
    axes.set(xlabel="response length L (tokens)", ylabel="S (nats)", ylim=np.percentile(s_B, [0.5, 99.5]) * 1.3)
    axes.set_title("Each response's S, and the bands at one clip rate")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3)


def bands_of(responses: Responses, length_N: Array) -> dict[str, tuple[Array, Array]]:
    """Lower and upper edge of each band by length, at the clip value with which 85% of the responses lie inside."""
    edges = {}
    for name, loss in ALGORITHM_OF.items():
        needed_B = needed_scale(responses.s_B, responses.length_B, ALGORITHMS[loss])
        edges[BANDS[name]] = band_edges(length_N, scaled(ALGORITHMS[loss], scale_for(needed_B)))
    return edges


def spread_of(responses: Responses) -> tuple[Array, Array]:
    """Mean length and std(S) of each length bin, within mini-batches."""
    columns = within_mini_batches(responses, responses.s_B)
    count_J, tokens_J, squares_J = (column.sum(0) for column in columns)
    return tokens_J / count_J, np.sqrt(squares_J / count_J)


def spread_by_length(axes: Axes, responses: Responses) -> None:
    """std(S) by length, and each band at the clip value that accepts 85%, as the std(S) of which it accepts 85%.

    That is its half-width over the 85% quantile of |S| / std(S).
    """
    length_J, std_J = spread_of(responses)
    std_B = np.interp(np.log(responses.length_B), np.log(length_J), std_J)
    factor = np.quantile(np.abs(responses.s_B) / std_B, ACCEPT)
    length_N = np.unique(np.geomspace(length_J[0], length_J[-1]).round())
    for name, (lower_N, upper_N) in bands_of(responses, length_N).items():
        axes.plot(length_N, (upper_N - lower_N) / 2 / factor, label=name, **LOOKS[name] | {"marker": ""})
    axes.plot(length_J, std_J, "ko", ms=5, label="std(S)")
    _both_log(axes)


def _both_log(axes: Axes) -> None:
    axes.set(xscale="log", yscale="log", xlabel="response length (tokens)", ylabel="std(S) (nats)")
    for axis, form in ((axes.xaxis, "{x:,.0f}"), (axes.yaxis, "{x:g}")):
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(form)


def spreads(figure: Figure, recorded: Mapping[str, Responses]) -> None:
    """:func:`spread_by_length` of the four settings."""
    for axes, (setting, responses) in zip(figure.subplots(2, 2).flat, recorded.items(), strict=True):
        spread_by_length(axes, responses)
        axes.set_title(setting)
    # The dots are drawn in the text's colour, so that they show on a dark ground.
    for axes in figure.axes:
        axes.lines[-1].set_color(rcParams["text.color"])
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def forest(axes: Axes) -> None:
    """LRE with its interval by setting and band, from docs/tables/settings.csv."""
    heads, *cells = read_table("settings")
    rows = [dict(zip(heads, row, strict=True)) for row in cells]
    for index, (band, name) in enumerate(BANDS.items()):
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
        responses = Responses.of_rows({**rows.drop(columns="S"), "S": rows[column]})
        exponent = exponent_of(responses)
        shown = f"{name}: L^{exponent.value:.2f} [{exponent.low:.2f}, {exponent.high:.2f}]"
        axes.plot(*spread_of(responses), label=shown, **looks[name])
    _both_log(axes)
    axes.set_title("One small update of SmolLM2-135M: S by precision")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16))


def removed_by_sign(figure: Figure, responses: Responses) -> None:
    """Share of the gradients that a band removes, by length and sign of A, at the clip values of :func:`bands_of`."""
    starts = responses.starts()
    length_J = responses.by_bin(responses.length_B, starts) / merge_bins(responses.count_K, starts)
    for above, axes in zip((False, True), figure.subplots(1, 2, sharey=True), strict=True):
        for name, loss in ALGORITHM_OF.items():
            needed_B = needed_scale(responses.s_B, responses.length_B, ALGORITHMS[loss])
            under_band = responses.judged_by(scaled(ALGORITHMS[loss], scale_for(needed_B)))
            sign_B = (responses.advantage_B > 0 if above else responses.advantage_B < 0).astype(float)
            removed_J = responses.by_bin(removed(under_band)[0 if above else 1], starts)
            axes.plot(length_J, removed_J / responses.by_bin(sign_B, starts), label=BANDS[name], **LOOKS[BANDS[name]])
        axes.set(xscale="log", xlabel="response length L (tokens)", ylim=(0, None))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_title("A > 0: right responses" if above else "A < 0: wrong responses")
    figure.axes[0].set_ylabel("share whose gradient is removed")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def truncated_weights(axes: Axes, responses: Responses) -> None:
    """Mean of min(exp S, 2) by length: of recorded responses, and in the model of ``expected``."""
    length_N = np.geomspace(10, 10_000, 60)
    for sigma, line in zip((0.02, 0.03, 0.05), (":", "--", "-"), strict=True):
        means = [truncated_weight(-(sigma**2) * length / 2, sigma * length**0.5, CAP)[0] for length in length_N]
        axes.plot(length_N, means, line, color="0.5", label=f"model, sigma = {sigma}")
    starts = responses.starts()
    count_J = merge_bins(responses.count_K, starts)
    length_J = responses.by_bin(responses.length_B, starts) / count_J
    weight_J = responses.by_bin(np.minimum(np.exp(responses.s_B), CAP), starts) / count_J
    axes.plot(length_J, weight_J, "o-", color="#d55e00", label="recorded: rounding in bf16")
    axes.set(xscale="log", ylim=(0, None), xlabel="response length L (tokens)", ylabel=f"mean of min(exp S, {CAP})")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("What a truncated sequence weight leaves")
    axes.legend(loc="lower left")


def one_batch(axes: Axes) -> None:
    """The stations of a batch, left to right."""
    axes.set_axis_off()
    axes.set(xlim=(-0.5, len(WAY) - 0.5), ylim=(-1, 1))
    for x, text in enumerate(WAY):
        own = {"fc": "#0072b2", "ec": "none", "alpha": 0.9} if x in (4, 5) else {"fc": "none", "ec": "0.5"}
        axes.text(x, 0, text, ha="center", va="center", color="w" if x in (4, 5) else None, bbox=own | {"pad": 7})
        if x:
            axes.annotate("", (x - 0.43, 0), (x - 0.57, 0), arrowprops={"arrowstyle": "->", "color": "0.5"})


def save(figure: Figure, path: Path) -> None:
    """As a PNG of 256 colours, a third of the size of one of all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).quantize(method=Image.Quantize.FASTOCTREE).save(path, optimize=True)


def draw_demo(folder: Path) -> None:
    """Write the figure of a run of the demo, which docs/index.md shows, as ``run.png`` and dark."""
    run = load_run(folder)
    for suffix, colours in (("", {}), ("-dark", _DARK)):
        with style.context([*STYLE, {"savefig.dpi": 100}, colours]):
            save(draw_run(run, length_profile([run])), IMAGES / f"demo{suffix}.png")


def draw() -> None:
    """Write every figure."""
    recorded = {setting: read_audit(STUDY / f"{file}.parquet").responses.moved() for setting, file in SPREADS.items()}
    demo = recorded["demo"]
    in_bf16 = read_audit(STUDY / "long_in_bf16.parquet").responses.moved()
    drawn: dict[str, tuple[Callable[[Figure], None], tuple[float, float]]] = {
        "acceptance-by-length": (lambda figure: clip_by_length(figure.subplots(), demo), (6, 4.2)),
        "s-by-length": (lambda figure: s_by_length(figure.subplots(), demo), (6, 4)),
        "one-batch": (lambda figure: one_batch(figure.subplots()), (9.5, 1.2)),
        "lre-by-setting": (lambda figure: forest(figure.subplots()), (6.5, 4.4)),
        "s-by-precision": (lambda figure: precisions(figure.subplots()), (6, 4.4)),
        "removed-by-sign": (lambda figure: removed_by_sign(figure, demo), (8, 3.6)),
        "truncated-weights": (lambda figure: truncated_weights(figure.subplots(), in_bf16), (6, 4)),
        "spread-by-length": (lambda figure: spreads(figure, recorded), (8, 6)),
    }
    for suffix, colours in (("", {}), ("-dark", _DARK)):
        with style.context([*STYLE, colours]):
            for name, (draw_on, size) in drawn.items():
                figure = Figure(figsize=size, layout="constrained")
                draw_on(figure)
                save(figure, IMAGES / f"{name}{suffix}.png")
