"""The report as one static HTML page: pictures inside, no script, no network; light and dark, phone and projector."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from fspo.report.tables import NOT_RUN, Table

_STYLE = """
:root{--page:#fff;--text:#1c2230;--muted:#5b6475;--line:#e3e6ec;--panel:#f6f7f9}
@media(prefers-color-scheme:dark){:root{--page:#14171d;--text:#e8eaf0;--muted:#a2a9b8;--line:#2c323d;--panel:#1c2028}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
font:clamp(15px,.55vw + 12px,20px)/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:min(1500px,100%);margin:0 auto;padding:1.2rem clamp(.8rem,3vw,3rem) 4rem}
h1{font-size:1.7em;line-height:1.2;margin:.6em 0 .2em}h2{font-size:1.3em;margin:2.2em 0 .3em}
h3{font-size:1.05em;margin:1.6em 0 .4em}
p{max-width:75ch;margin:.4em 0}.lead{color:var(--muted)}small,.why{color:var(--muted);font-size:.85em;font-weight:400}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr));gap:.6rem;margin:.8rem 0}
figure{margin:0}img{width:100%;height:auto;display:block}
.scroll{overflow-x:auto;margin:.8rem 0;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.92em}
th,td{padding:.42em .8em;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
td{white-space:nowrap}.prose td{white-space:normal;overflow-wrap:anywhere;min-width:8rem}
thead th{background:var(--panel);white-space:nowrap}tbody tr:last-child>*{border-bottom:0}
tbody th{font-weight:600;min-width:9rem}.why{display:block}td.missing{color:var(--muted);font-style:italic}
ul.problems{padding-left:1.2em;font-size:.9em;overflow-wrap:anywhere}
code{font-size:.92em;overflow-wrap:anywhere}
"""


@dataclass(slots=True)
class Page:
    """Collects the parts of the page in order; :meth:`render` gives the whole text."""

    title: str
    parts: list[str] = field(default_factory=list)

    def heading(self, text: str, level: int = 2) -> None:
        """Add a heading."""
        self.parts.append(f"<h{level}>{html.escape(text)}</h{level}>")

    def paragraph(self, text: str, lead: bool = False) -> None:
        """Add a paragraph of plain text."""
        opening = '<p class="lead">' if lead else "<p>"
        self.parts.append(f"{opening}{html.escape(text)}</p>")

    def problems(self, problems: Sequence[str]) -> None:
        """Add a list of what could not be read."""
        items = "".join(f"<li><code>{html.escape(problem)}</code></li>" for problem in problems)
        self.parts.append(f'<ul class="problems">{items}</ul>')

    def table(self, table: Table, corner: str = "", prose: bool = False) -> None:
        """Add a table that scrolls by itself where the screen is narrow; the cells of ``prose`` break their lines."""
        heads = "".join(f'<th scope="col">{html.escape(head)}</th>' for head in [corner, *table.heads])
        rows = "".join(_row(*row) for row in table.rows)
        opening = '<table class="prose">' if prose else "<table>"
        self.parts.append(
            '<div class="scroll" tabindex="0" role="region" aria-label="table">'
            f"{opening}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        )

    def figures(self, pictures: Sequence[tuple[str, bytes, bytes]]) -> None:
        """Add pictures side by side: for each the alternative text and the PNGs for light and dark backgrounds."""
        items = "".join(
            f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{_data(dark)}">'
            f'<img alt="{html.escape(text)}" src="{_data(light)}"></picture></figure>'
            for text, light, dark in pictures
        )
        self.parts.append(f'<div class="figures">{items}</div>')

    def render(self) -> str:
        """The page."""
        title = html.escape(self.title)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            f"<title>{title}</title><style>{_STYLE}</style></head>\n<body><main><h1>{title}</h1>\n"
            + "\n".join(self.parts)
            + "\n</main></body></html>\n"
        )


def png_bytes(figure: Figure, dpi: int = 120) -> bytes:
    """A figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _row(head: str, why: str, cells: Sequence[str]) -> str:
    explained = f'<span class="why">{html.escape(why)}</span>' if why else ""
    return f'<tr><th scope="row">{html.escape(head)}{explained}</th>{"".join(map(_cell, cells))}</tr>'


def _cell(text: str) -> str:
    if text.startswith("*"):
        return f"<td><strong>{html.escape(text[1:])}</strong></td>"
    missing = ' class="missing"' if text == NOT_RUN else ""
    return f"<td{missing}>{html.escape(text)}</td>"


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
