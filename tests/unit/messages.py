"""What a message must hold, whatever its words: the key or file, the value, the remedy."""

from __future__ import annotations

import re


def unpadded(text: str) -> str:
    """The text with its tables' cells as short as they can be: ``| a | b |``, ``| --- |``."""
    return re.sub(r"-{3,}", "---", re.sub(r"(?<=[^|]) +\|", " |", re.sub(r"\| +\|", "|  |", text)))


def holds(*parts: str) -> str:
    """A pattern for messages that hold all of the parts, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)
