"""The length funnel: every response ends once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.fspo.accounting.funnel import STAGES, LengthFunnel

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
