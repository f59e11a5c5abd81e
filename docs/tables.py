"""Hooks of mkdocs (mkdocs.yml): the site shows each table of docs/tables as a page, and links to it lead there. The
references of docstrings lose their Sphinx roles. Pictures follow the site's switch between light and dark."""

from __future__ import annotations

import csv
import html
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from fspo.markdown import markdown_table

_PAGE = """---
hide: [navigation, toc]
search: {{exclude: true}}
---
# {name}

A table of {pages}. The file: [{name}.csv]({name}.csv)

<input type="search" class="fspo-rows" placeholder="rows that hold ..." aria-label="rows that hold" oninput="{filter}">

{table}
"""
#: Hides the rows that do not hold what was typed.
_FILTER = (
    "for (const row of document.querySelectorAll('tbody tr'))"
    " row.hidden = !row.textContent.toLowerCase().includes(this.value.toLowerCase())"
)


def _pages_of(table: str, docs: Path) -> str:
    """Links to the pages that name a table."""
    pages = [page for page in sorted(docs.rglob("*.md")) if f"tables/{table}.csv" in page.read_text(encoding="utf-8")]
    titles = {page: page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for page in pages}
    return ", ".join(f"[{title}](../{page.relative_to(docs).as_posix()})" for page, title in titles.items())


def on_files(files: Files, config: Any) -> None:
    for path in sorted(Path(config.docs_dir).glob("tables/*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            heads, *rows = [[re.sub(r"([*_])", r"\\\1", html.escape(cell)) for cell in row] for row in csv.reader(file)]
        pages = _pages_of(path.stem, Path(config.docs_dir))
        page = _PAGE.format(name=path.stem, pages=pages, filter=_FILTER, table=markdown_table(heads, rows))
        files.append(File.generated(config, f"tables/{path.stem}.md", content=page))


def on_page_content(content: str, **_: Any) -> str:
    """Code in a cell of a table may break between its words; a browser would break it at any letter, or nowhere."""

    def breaking(part: re.Match[str]) -> str:
        if part[0].startswith("<td"):
            return re.sub(r"<code.*?</code>", breaking, part[0], flags=re.S)
        return re.sub(r"(?<=[a-z_])[.=/](?=[a-z_*])(?![^<>]*>)", r"\g<0><wbr>", part[0])  # not in a tag

    # GitHub knows <picture> only, which asks the system; the theme hides one of two images by the end of its address.
    content = re.sub(
        r'<picture>\s*<source[^>]* srcset="([^"]+)">\s*<img src="([^"]+)" alt="([^"]*)">\s*</picture>',
        r'<img src="\1#only-dark" alt="\3"><img src="\2#only-light" alt="\3">',
        content,
    )
    content = re.sub(r":(?:mod|func|class|meth|data|attr):(?=<code>)|(?<=<code>)~(?=fspo)", "", content)
    return re.sub(r"<td.*?</td>", breaking, content, flags=re.S)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown if page.file.generated_by else re.sub(r"\(((?:\.\./)?tables/[\w-]+)\.csv\)", r"(\1.md)", markdown)
