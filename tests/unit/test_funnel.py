"""The length funnel: every response ends once, and what a stage removes by length is measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fspo.funnel import STAGES, LengthFunnel, stage_fairness

lengths = st.lists(st.integers(0, 300), max_size=20)
events = st.lists(st.tuples(st.sampled_from(STAGES), lengths, st.integers(0, 3)), max_size=12)


@settings(max_examples=30)
@given(st.lists(events, min_size=1, max_size=4), st.integers(0, 50))
def test_every_response_started_ends_once_or_is_under_way(steps: list, extra: int) -> None:
    funnel = LengthFunnel()
    started = extra + sum(len(lengths) + unknown for step in steps for _, lengths, unknown in step)
    funnel.start(started)
    records = []
    for number, step in enumerate(steps):
        for stage, lengths, unknown in step:
            if stage == "trained":
                funnel.train(lengths, [0] * len(lengths), [1] * len(lengths))
                funnel.end("failed", [], unknown)
            else:
                funnel.end(stage, lengths, unknown)
        if number == 0:  # through a checkpoint, in the middle of a step
            restored = LengthFunnel()
            restored.load_state_dict(funnel.state_dict())
            funnel = restored
        records.append(funnel.end_step(number)[1])
    ended = sum(sum(row[1 : 1 + len(STAGES)]) for record in records for row in record["rows"])
    assert sum(record["started"] for record in records) == started
    assert records[-1]["under_way"] == started - ended == extra


def test_metrics_of_a_step() -> None:
    funnel = LengthFunnel()
    funnel.start(10)
    funnel.train([10, 20], staleness=[0, 2], versions=[1, 2])
    funnel.end("stale", [50, 70])
    funnel.end("failed", [], unknown=1)
    metrics, record = funnel.end_step(3)
    assert metrics["fspo/funnel/trained"] == 2 and metrics["fspo/funnel/under_way"] == 5
    assert metrics["fspo/funnel/tokens_lost"] == 120 / 150
    assert (metrics["fspo/funnel/length_trained"], metrics["fspo/funnel/length_lost"]) == (15, 60)
    assert (metrics["fspo/funnel/staleness"], metrics["fspo/funnel/versions"]) == (1, 1.5)
    assert record["tokens"]["stale"] == 120 and [row[0] for row in record["rows"]][-1] == -1


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
