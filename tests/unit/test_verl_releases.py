"""The losses of ``fspo.verl`` in the releases of verl: each through its own calling code."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version

import pytest
from verl_release import LOSSES, PATHS, RELEASES, measured

#: CI has the pinned release and an older one, with both of verl's paths; every night has all.
IN_CI = ("0.7.1", version("verl"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "release",
    [pytest.param(release, marks=() if release in IN_CI else pytest.mark.nightly) for release in RELEASES],
)
def test_the_gradient_in_a_release_is_the_librarys(release: str) -> None:
    try:
        rows = measured(release)
    except subprocess.CalledProcessError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"verl {release} cannot be downloaded: {error.stderr[-300:]}")
    assert len(rows) == len(PATHS.get(release[:3], ("engine",))) * (len(LOSSES) + 1)
    assert [row for row in rows if row.get("difference", 0) > 1e-7] == []
    says = {row["says"].partition(" needs a band that is measured")[0] for row in rows if "says" in row}
    assert says == {"actor_rollout_ref.actor.policy_loss.loss_mode=fspo_v1"}
