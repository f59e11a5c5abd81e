"""The lines that people read while a run goes on."""

from __future__ import annotations

from recipe.runner.launch.progress import step_line, validation_line


def test_lines_leave_out_what_was_not_measured() -> None:
    assert step_line(3, 20, {"critic/rewards/mean": 0.5, "fspo/lre_debiased": None}) == "step 3/20  reward 0.500"
    assert validation_line(3, {"critic/rewards/mean": 0.5}) == ""
    assert validation_line(3, {"val-core/a/b/acc/mean@1": 0.25}) == "held-out after step 3:  a/b/acc/mean@1 0.250"
