"""What an error adds to a name that nothing has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_ALIKE: Final = 0.6


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` with the nearest of the known names; an empty text if none is near.

    A name without a dot is near to a dotted one whose last part it is, and to the only one that begins with it. Of two
    dotted names the last parts must be alike, too: keys of one group are, by the group's name, whatever they are.
    """
    name, known = str(name), list(known)
    last = _last(name)
    elsewhere = [key for key in known if "." in key and _last(key) == last]
    alike = [key for key in known if difflib.SequenceMatcher(None, last, _last(key)).ratio() >= _ALIKE]
    near = difflib.get_close_matches(name, elsewhere, 1, _ALIKE if "." in name else 0.0)
    near = near or difflib.get_close_matches(name, alike, 1, _ALIKE)
    longer = [key for key in known if key.startswith(f"{name}_")]
    near = near or (longer if len(longer) == 1 else [])
    return f" (did you mean {near[0]}?)" if near else ""


def _last(name: str) -> str:
    return name.rpartition(".")[2]
