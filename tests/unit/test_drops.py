"""Dropping evenly: as many groups as are stale, and of every length the same share."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from fspo.drops import HARD_LIMIT, EvenDrops
from recipe.fspo.accounting import replay_buffer
from recipe.fspo.accounting.funnel import LengthFunnel
from recipe.fspo.accounting.replay_buffer import counting
from recipe.runner.hooks import RunnerHooks

THRESHOLD = 2
group = st.tuples(st.sampled_from([10.0, 100.0, 1000.0]), st.integers(1, HARD_LIMIT * THRESHOLD + 1))


@settings(max_examples=100)
@given(st.lists(st.lists(group, max_size=6), min_size=1, max_size=12), st.integers(0, 11), st.sampled_from([1, 3]))
def test_as_many_are_dropped_as_are_stale(polls: list[list[tuple[float, int]]], saved: int, bins: int) -> None:
    drops, groups, stale, lost, beyond = EvenDrops(bins, 1000), 0, 0, 0, 0
    there: dict[str, tuple[float, int]] = {}
    for number, poll in enumerate(polls):
        there |= {f"{groups + i}": group for i, group in enumerate(poll)}
        groups += len(poll)
        stale += sum(age > THRESHOLD for _, age in poll)
        length, age = ({uid: group[i] for uid, group in there.items()} for i in (0, 1))
        chosen = drops.choose(length, age, THRESHOLD)
        assert drops.choose(length, age, THRESHOLD) == chosen
        assert {uid for uid in there if age[uid] > HARD_LIMIT * THRESHOLD} <= chosen
        lost += len(chosen)
        beyond += len({uid for uid in chosen if age[uid] > HARD_LIMIT * THRESHOLD})
        # In one bin exactly as many; in several each quota is rounded down, and may wait for a group.
        assert lost == stale if bins == 1 else lost <= stale + beyond
        for uid in chosen:
            del there[uid]
        if number == saved:
            state = drops.state_dict()
            drops = EvenDrops(bins, 1000)
            drops.load_state_dict(state)


def test_long_groups_that_are_stale_and_short_ones_that_are_not_lose_the_same_share() -> None:
    drops, lost = EvenDrops(2, 200), Counter[str]()
    for step in range(50):
        groups = {f"{step}-{i}": (20.0, 1) if i < 4 else (200.0, 3) for i in range(8)}  # half, and only the long, stale
        length, age = ({uid: group[i] for uid, group in groups.items()} for i in (0, 1))
        lost.update("short" if length[uid] < 100 else "long" for uid in drops.choose(length, age, THRESHOLD))
    assert lost["short"] == pytest.approx(100, abs=3) and lost["long"] == pytest.approx(100, abs=3)


def test_the_oldest_of_a_bin_go_first() -> None:
    drops = EvenDrops(1, 10)
    assert drops.choose({}, {}, THRESHOLD) == set()
    assert drops.choose(dict.fromkeys("abcd", 50.0), {"a": 1, "b": 4, "c": 3, "d": 2}, THRESHOLD) == {"b", "c"}


@pytest.mark.parametrize("evenly", [False, True])
def test_verls_buffer_drops_what_the_rule_says(evenly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def masks(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, torch.Tensor]:
        assert (partition_id, select_fields) == ("train", ["response_mask"])
        asked.extend(keys)
        rows = [torch.ones(20 + int(key[3]) if key[0] == "s" else 200 + int(key[3])) for key in keys]
        # A tool has written much into the short ones: 300 tokens, which are no part of L.
        rows = [torch.cat([torch.zeros(300 if len(row) < 200 else 0), row]).long() for row in rows]
        return {"response_mask": torch.nested.nested_tensor(rows, layout=torch.jagged)}

    monkeypatch.setattr(replay_buffer.tq, "kv_batch_get", masks)
    sampler = {"max_off_policy_threshold": 2, "max_off_policy_strategy": "drop", "sampler_kwargs": {}}
    built = ReplayBufferAsync("separate_async", {}, **sampler)
    buffer = counting(built, LengthFunnel(), 2, {}, EvenDrops(2, 100) if evenly else None)
    assert isinstance(buffer, ReplayBufferAsync) and buffer.trainer_mode == "separate_async"
    ages = {"s1": 1, "s2": 2, "s3": 2, "s4": 1, "l1": 3, "l2": 3, "l3": 4, "l4": 3}
    for uid, age in ages.items():
        buffer.finished_keys["train"].add(uid)
        buffer.prompt_global_steps["train"][uid] = 10 - age + 1
        for i in range(2):
            buffer.partitions["train"][f"{uid}_{i}_0"] = {"response_len": 320 + i if uid[0] == "s" else 200 + i}
    for _ in range(2):  # polls
        stale = buffer._terminal_eviction_reasons(10, "train")[0]
    assert sorted(asked) == (sorted(buffer.partitions["train"]) if evenly else []), "each mask is read once"
    assert stale == ({"s2", "s3", "l1", "l3"} if evenly else {"l1", "l2", "l3", "l4"})
    assert buffer._terminal_eviction_reasons(10, "val")[0] == set()
    # What is left may be sampled, stale or not: verl would fail for a stale one under its own name of the strategy.
    left = buffer._sampleable_terminal_keys("train", (stale, set(), set(), Counter()))
    assert buffer._has_enough_samples(10, "train", 4, left) and left == set(ages) - stale


def test_a_buffer_of_ones_own_only_tells_its_progress() -> None:
    lines: list[str] = []

    class Mine(ReplayBufferAsync):  # type: ignore[misc]
        """As ``trainer.v1.sampler.custom_sampler`` names one: verl asks for a subclass of its own."""

        def _select_prompt_uids(self, *_: object) -> str:
            return "mine"

    mine = Mine("separate_async", {}, max_off_policy_threshold=2, max_off_policy_strategy="drop", sampler_kwargs={})
    assert counting(mine, LengthFunnel(), 2, {}) is mine
    RunnerHooks._watch(SimpleNamespace(_moved=lines.append), mine)
    mine.poll_interval = 0.0
    assert mine._select_prompt_uids("train", set(), 2) == "mine"
    mine._wait_for_next_poll("train", 0.0)
    assert lines == ["0 responses finished; prompts: 0 pending, 0 running, 0 finished, 0 failed"]
