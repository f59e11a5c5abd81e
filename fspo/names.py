"""What an error adds to a name that nothing has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` with the nearest of the known names; an empty text if none is near.

    Of dotted names, one with the same last part is near wherever it is; so is the only one that begins with the name.
    """
    name, known = str(name), list(known)
    last = name.rpartition(".")[2]
    elsewhere = [key for key in known if "." in key and key.rpartition(".")[2] == last]
    near = difflib.get_close_matches(name, elsewhere or known, 1, 0.0 if elsewhere else 0.6)
    longer = [key for key in known if key.startswith(f"{name}_")]
    near = near or (longer if len(longer) == 1 else [])
    return f" (did you mean {near[0]}?)" if near else ""
