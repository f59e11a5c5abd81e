"""The responses of a mini-batch in an order that does not depend on the ranks that have recorded them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def in_order(rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """Columns of the table of responses, [C, B]."""
    order = np.lexsort([rows[name] for name in ("S", "A", "L")])
    return np.stack([rows[name][order] for name in ("L", "A", "S", "Q", "inside", "kept", "weight")])
