"""What a stage of the length funnel removes by length is measured."""

from __future__ import annotations

import numpy as np
import pytest

from fspo.report.funnel_steps import STAGES, stage_fairness


def test_lre_of_a_stage_that_removes_long_responses_only() -> None:
    ended = np.zeros((10, len(STAGES), 40))
    ended[:, STAGES.index("trained"), 5] = 50  # short: all of them pass
    ended[:, STAGES.index("trained"), 30] = 25
    ended[:, STAGES.index("stale"), 30] = 25  # long: half are too old
    errors = stage_fairness(ended, np.array([0, 20]))
    # rates 1 and 1/2, overall 3/4, half of the responses each: |1/(3/4) - 1| / 2 + |(1/2)/(3/4) - 1| / 2 = 1/3
    assert errors["stale"].debiased.value == pytest.approx(1 / 3, abs=0.01)
    assert errors["kept"].debiased.value == errors["stale"].debiased.value
    assert errors.keys() == {"stale", "kept"}
    assert stage_fairness(ended * 0, np.array([0, 20])) == {}
