"""The fine length bins that all statistics by length are formed from. Defined here.

The bins are fixed and much finer than those shown to a person. Coarser bins of equal mass are formed from them
(:func:`fspo.fairness.lre.bin_starts`), so that equal lengths stay together.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

_BINS_PER_OCTAVE: Final = 8
_LARGEST_EDGE: Final = 2**17
_OPEN_END: Final = 2**62


def _edges() -> npt.NDArray[np.int64]:
    own = list(range(1, 18))
    octaves = int(math.log2(_LARGEST_EDGE / 16))
    geometric = [round(16 * 2 ** (j / _BINS_PER_OCTAVE)) for j in range(1, octaves * _BINS_PER_OCTAVE + 1)]
    return np.array(sorted({*own, *geometric, _OPEN_END}), dtype=np.int64)


FINE_LENGTH_EDGES: Final = _edges()
"""K + 1 integer edges e: bin k holds the lengths e[k] <= L < e[k + 1]. Lengths 1 to 16 have a bin each, then the edges
grow by 2**(1/8) up to 2**17; the last bin is open-ended (its upper edge is a sentinel, 2**62)."""

FINE_BINS: Final = len(FINE_LENGTH_EDGES) - 1
"""K."""


def length_bin(length_B: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Index k of the fine length bin of each length of at least 1, 0 <= k < K."""
    return np.searchsorted(FINE_LENGTH_EDGES, length_B, side="right") - 1
