"""Dropping the same share of every length where old groups of responses are dropped. Defined here.

A group that took long is stale when it is done, and long responses take long: a rule that drops what is stale drops by
length. :class:`EvenDrops` drops as many groups, but takes them from every length bin in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from fspo.fairness.lre import equal_mass_starts
from fspo.length_bins import FINE_BINS, length_bin

HARD_LIMIT: Final = 2
"""A group whose age is above this many times the threshold is dropped, whatever its length."""


class EvenDrops:
    """Chooses the groups to drop.

    Over a window of groups that finished, with n_b of them in length bin b, n in all, and s that became stale: a group
    of bin b is dropped, the oldest first, while the bin has lost fewer than s n_b / n, rounded down. If a bin has no
    finished group to drop, its quota carries over to the next poll. So the total is at most s, except for groups beyond
    the hard limit. Stale groups that are not chosen stay and are trained on; others, which are not stale,
    go in their place.

    Args:
        bins: Length bins of equal mass, by the mean length of a group.
        window: Groups remembered.
    """

    def __init__(self, bins: int, window: int) -> None:
        self._bins, self._size = bins, window
        #: By group, in the order in which they finished: fine length bin, whether it became stale, whether it is lost.
        self._window: dict[str, tuple[int, bool, bool]] = {}

    def choose(self, length: Mapping[str, float], age: Mapping[str, int], threshold: int) -> set[str]:
        """The groups to drop now. Asked again, with the same groups there, it gives the same answer.

        Args:
            length: Mean length in tokens, at least 1, of each finished group that is there.
            age: Policy versions that each has seen, from the issue of its prompt; 1 for one of this step.
            threshold: A group is stale if its age is above.
        """
        for uid, mean in length.items():
            fine, stale, lost = self._window.get(uid, (int(length_bin(max(1, round(mean)))), False, False))
            beyond = age[uid] > HARD_LIMIT * threshold
            self._window[uid] = fine, stale or age[uid] > threshold, lost or beyond
        for uid in [uid for uid in self._window if uid not in length][: max(0, len(self._window) - self._size)]:
            del self._window[uid]
        fine_N, stale_N, lost_N = np.array(list(self._window.values()), dtype=np.int64).reshape(-1, 3).T
        starts = equal_mass_starts(np.bincount(fine_N, minlength=FINE_BINS), self._bins)
        bin_N = np.searchsorted(starts, fine_N, side="right") - 1
        finished_J = np.bincount(bin_N, minlength=len(starts))
        due_J = stale_N.sum() * finished_J // max(1, len(fine_N)) - np.bincount(bin_N, lost_N, len(starts))
        bin_of = dict(zip(self._window, bin_N.tolist(), strict=True))
        for uid in sorted(length, key=lambda uid: (-age[uid], uid)):
            fine, stale, lost = self._window[uid]
            if not lost and due_J[bin_of[uid]] >= 1:
                due_J[bin_of[uid]] -= 1
                self._window[uid] = fine, stale, True
        return {uid for uid in length if self._window[uid][2]}

    def state_dict(self) -> dict[str, Any]:
        """The window, for a checkpoint."""
        return {"window": [[uid, *group] for uid, group in self._window.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, in place."""
        self._window = {uid: (fine, stale, lost) for uid, fine, stale, lost in state["window"]}
