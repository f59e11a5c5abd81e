"""An optional addition to the 0/1 score, off by default."""

from __future__ import annotations


def soft_overlong_penalty(response_length: int, max_response_length: int, buffer_length: int) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, equation 13), in [-1, 0].

    With `L_max = max_response_length`, `L_cache = buffer_length` and L the response length, all in tokens: 0 up to
    `L_max - L_cache`, then `((L_max - L_cache) - L) / L_cache`, and -1 beyond `L_max`.

    Raises:
        ValueError: a buffer outside (0, max_response_length].
    """
    if not 0 < buffer_length <= max_response_length:
        raise ValueError(
            f"buffer_length={buffer_length}: it must be positive and at most max_response_length={max_response_length}"
        )
    free = max_response_length - buffer_length
    return min(0.0, max(-1.0, (free - response_length) / buffer_length))
