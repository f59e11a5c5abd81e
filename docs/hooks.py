"""Hooks of mkdocs (mkdocs.yml): code in tables breaks between its words, the references of docstrings lose their Sphinx
roles, and pictures follow the site's switch between light and dark.
"""

from __future__ import annotations

import re
from typing import Any


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
