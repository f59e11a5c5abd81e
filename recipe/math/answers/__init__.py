"""Math answers scored by math-verify, within limits of time and memory. Only worker processes load math-verify."""

from __future__ import annotations

from recipe.math.answers.scorer import MathScorer
from recipe.math.answers.verdict import Status

__all__ = ["MathScorer", "Status"]
