"""Suggestions for unknown names in error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` with the known name that is nearly the same, or an empty text if there is none."""
    near = difflib.get_close_matches(str(name), list(known), 1, 0.84)
    return f" (did you mean {near[0]}?)" if near else ""
