"""Whether two texts are one problem: what is left of a text without what only changes how it looks."""

from __future__ import annotations

import re
import unicodedata

# LaTeX that only changes how a formula looks.
_FORMATTING = re.compile(r"\\(?:left|right|displaystyle|text|mathrm|quad|qquad|[dt]frac|[,;:! ])|[${}~]")
_TOKEN = re.compile(r"\\?[^\W_]+|[^\w\s,.;:?!'\"]")


def tokens(text: str) -> list[str]:
    r"""Words, numbers, commands and operators of a problem, without case, punctuation and LaTeX formatting.

    >>> tokens(r"Find $\left(x-1\right)^2$.") == tokens("find (x - 1)^{2}")
    True
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    text = _FORMATTING.sub(lambda match: "\\frac" if match.group().endswith("frac") else " ", text)
    return _TOKEN.findall(text)
