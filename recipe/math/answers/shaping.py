"""Optional additions to the 0/1 score. Both are off by default."""

from __future__ import annotations

from recipe.math.answers.extraction import closing_brace


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


def format_reward(response: str) -> float:
    r"""1.0 if the response has exactly one `\boxed{...}`, closed and not empty; else 0.0 (defined here)."""
    start = response.find("\\boxed{")
    if start < 0 or response.find("\\boxed", start + 1) >= 0:
        return 0.0
    opening = start + len("\\boxed")
    end = closing_brace(response, opening)
    return float(end is not None and bool(response[opening + 1 : end].strip()))
