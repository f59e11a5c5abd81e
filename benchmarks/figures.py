"""The figures of the documentation, from benchmarks/study into docs/images (``python -m benchmarks.figures``).

Those of README and the site are written light, and dark with ``-dark`` in the name and a transparent ground.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib import rcParams, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from PIL import Image

from benchmarks.pages import STUDY
from fspo.audit import read_audit
from fspo.clip_value import ACCEPT, needed_scale, scale_for, scaled
from fspo.conclusion import even_band, exponent_of, within_mini_batches
from fspo.fairness.lre import Array
from fspo.losses import ALGORITHMS, BANDS
from fspo.metrics import band_edges, removed
from fspo.report.figures import STYLE, algo_looks, draw_clip_by_length
from fspo.responses import Responses

IMAGES: Final = Path(__file__).resolve().parents[1] / "docs/images"
TITLES: Final = {"fspo": "FSPO, c sqrt(L)", "rloo": "RLOO, constant", "gspo": "GSPO, linear in L"}
LOOKS: Final = {TITLES[name]: look for name, look in algo_looks([*TITLES]).items()}
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
_DARK: Final = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), "#e8eaf0"),
    "grid.color": "0.3",
}


def clip_by_length(axes: Axes, responses: Responses) -> None:
    """Share of the responses outside each band, by length, at the clip values with which 85% lie inside."""
    band = even_band(responses)
    assert band is not None, "85% of S are 0"
    (length_J,) = responses.means(responses.length_B)
    profiles = {TITLES[name]: (length_J, band.errors[ALGORITHMS[loss].exponent]) for name, loss in BANDS.items()}
    draw_clip_by_length(axes, profiles, LOOKS)
    even = {"color": rcParams["text.color"]}
    axes.axhline(1 - ACCEPT, linewidth=1.2, linestyle=":", **even)
    axes.annotate("even", (1, 1 - ACCEPT), (-2, 3), axes.get_yaxis_transform(), "offset points", ha="right", **even)
    axes.legend(axes.containers, [*TITLES.values()], loc="upper left", bbox_to_anchor=(0, -0.16))
    axes.set_ylabel("share of responses clipped")
    axes.set_title(f"Responses clipped, by length: {1 - ACCEPT:.0%} of all by each band")


def bands_of(responses: Responses, length_N: Array) -> dict[str, tuple[Array, Array]]:
    """Lower and upper edge of each band by length, at the clip value with which 85% of the responses lie inside."""
    edges = {}
    for name, loss in BANDS.items():
        needed_B = needed_scale(responses.s_B, responses.length_B, ALGORITHMS[loss])
        edges[TITLES[name]] = band_edges(length_N, scaled(ALGORITHMS[loss], scale_for(needed_B)))
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
    (length_J,) = responses.means(responses.length_B)
    for above, axes in zip((False, True), figure.subplots(1, 2, sharey=True), strict=True):
        for name, loss in BANDS.items():
            needed_B = needed_scale(responses.s_B, responses.length_B, ALGORITHMS[loss])
            under_band = responses.judged_by(scaled(ALGORITHMS[loss], scale_for(needed_B)))
            sign_B = (responses.advantage_B > 0 if above else responses.advantage_B < 0).astype(float)
            removed_J = responses.by_bin(removed(under_band)[0 if above else 1])
            axes.plot(length_J, removed_J / responses.by_bin(sign_B), label=TITLES[name], **LOOKS[TITLES[name]])
        axes.set(xscale="log", xlabel="response length L (tokens)", ylim=(0, None))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_title("A > 0: right responses" if above else "A < 0: wrong responses")
    figure.axes[0].set_ylabel("share whose gradient is removed")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def save(figure: Figure, path: Path) -> None:
    """As a PNG of 256 colours, a third of the size of one of all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).quantize(method=Image.Quantize.FASTOCTREE).save(path, optimize=True)


def draw() -> None:
    """Write every figure."""
    recorded = {setting: read_audit(STUDY / f"{file}.parquet").responses.moved() for setting, file in SPREADS.items()}
    demo = recorded["demo"]
    drawn: dict[str, tuple[Callable[[Figure], None], tuple[float, float]]] = {
        "acceptance-by-length": (lambda figure: clip_by_length(figure.subplots(), demo), (6, 4.2)),
        "s-by-precision": (lambda figure: precisions(figure.subplots()), (6, 4.4)),
        "removed-by-sign": (lambda figure: removed_by_sign(figure, demo), (8, 3.6)),
        "spread-by-length": (lambda figure: spreads(figure, recorded), (8, 6)),
    }
    for suffix, colours in (("", {}), ("-dark", _DARK)):
        with style.context([*STYLE, colours]):
            for name, (draw_on, size) in drawn.items():
                figure = Figure(figsize=size, layout="constrained")
                draw_on(figure)
                save(figure, IMAGES / f"{name}{suffix}.png")


if __name__ == "__main__":
    draw()
