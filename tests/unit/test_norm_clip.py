"""The warning about a norm clip that always binds."""

from __future__ import annotations

import pytest

from recipe.fspo.accounting.norm_clip import NormClipWatch


@pytest.mark.parametrize(("norms", "warnings"), [([2.0] * 11, 1), ([2.0] * 9 + [0.5] + [2.0] * 9, 0)])
def test_a_norm_clip_that_always_binds_is_reported_once(norms: list[float], warnings: int) -> None:
    watch = NormClipWatch(1.0)
    sentences = [sentence for norm in norms if (sentence := watch.warning(norm)) is not None]
    assert len(sentences) == warnings and all("clip_grad=1" in sentence for sentence in sentences)
