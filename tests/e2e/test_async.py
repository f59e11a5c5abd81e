"""verl's asynchronous modes with our hooks: training, a kill and a resume, and the length funnel that adds up."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from real_stack import SMALL, Start, Starter

from fspo.funnel import STAGES
from fspo.records import from_record

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS, RESPONSES = 8, 64


def lines(run: Start, name: str) -> list[dict[str, Any]]:
    """The run folder's records, of a step that was done twice only the later ones."""
    records = [json.loads(line) for line in (run.run_dir / name).read_text().splitlines()]
    last = {(record["step"], record.get("minibatch")): record for record in records}
    return [last[key] for key in sorted(last, key=str)]


def ended(record: dict[str, Any], stage: str) -> int:
    return sum(row[1 + STAGES.index(stage)] for row in record["rows"])


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_a_mode_trains_is_killed_resumes_and_counts_every_response(start: Starter, tmp_path: Path, mode: str) -> None:
    command = (
        *SMALL,
        f"mode={mode}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        "trainer.v1.sampler.max_off_policy_threshold=2",  # so that something is dropped
    )
    killed = start(tmp_path, *command)
    killed.wait_for(f"step 5/{STEPS}", 500)
    killed.process.send_signal(signal.SIGKILL)
    killed.wait(10)
    assert killed.left_behind() == []
    run = start(tmp_path, *command)
    assert run.wait(500) == 0, run.output()[-4000:]
    assert run.left_behind() == []
    assert "resumed from" in run.output() and "prompts were under way when the checkpoint was saved" in run.output()

    funnel = {record["step"]: record for record in lines(run, "funnel.jsonl")}
    assert sorted(funnel) == list(range(1, STEPS + 1))
    under_way = 0
    for record in funnel.values():
        assert ended(record, "trained") == RESPONSES
        under_way += record["started"] - sum(ended(record, stage) for stage in STAGES)
        assert record["under_way"] == under_way >= 0

    sums = {(r["step"], r["minibatch"]): from_record(r) for r in lines(run, "length_stats.jsonl")}
    assert sorted(sums) == [(step, index) for step in range(1, STEPS + 1) for index in (0, 1)]
    assert all(part.total("count") == RESPONSES / 2 for part in sums.values())
    # pi_old is that of the cycle's beginning: in its first mini-batch S is 0, in the second it is not.
    assert all(sums[step, 0].total("S_squared") == pytest.approx(0, abs=1e-6) for step in funnel)
    assert sum(sums[step, 1].total("S_squared") for step in funnel) > 1e-3


def split_recording(folder: Path, parts: int) -> None:
    """Store what ``sync`` recorded (``GBS8.../STEP/0``) where ``separate_async`` looks (``GBS1.../STEP/PART``).

    verl names the folder after the prompts that it draws at a time, and stores each mini-batch of a cycle by itself.
    """
    from verl.utils.tensordict_utils import index_select_tensor_dict

    for path in folder.glob("*/GBS8_*/*/0/tq_batch.pt"):
        whole = torch.load(path, weights_only=False)
        groups: dict[str, list[int]] = {}
        for index, key in enumerate(whole["keys"]):
            groups.setdefault(key.split("_")[0], []).append(index)
        share = len(groups) // parts
        step = Path(str(path.parents[1]).replace("GBS8_", "GBS1_"))
        for part in range(parts):
            rows = [row for group in list(groups.values())[part * share : (part + 1) * share] for row in group]
            (step / str(part)).mkdir(parents=True, exist_ok=True)
            shutil.copy(path.with_name("meta.json"), step / str(part) / "meta.json")
            chosen = {name: [whole[name][row] for row in rows] for name in ("keys", "tags")}
            tensors = {"tensordict": index_select_tensor_dict(whole["tensordict"], rows)}
            torch.save(whole | chosen | tensors, step / str(part) / "tq_batch.pt")


def test_replayed_rollouts_give_the_losses_of_synchronous_training(start: Starter, tmp_path: Path) -> None:
    recording = tmp_path / "recording"

    def run(name: str, *overrides: str) -> Start:
        replay = (
            "skip.rollout_tq.enable=true",
            f"skip.rollout_tq.dump_dir={recording}",
            "skip.rollout_tq.steps=[1,2,3]",
        )
        warm_up = "trainer.v1.separate_async.num_warmup_batches=0"
        steps = "trainer.total_training_steps=3"
        each = start(tmp_path / name, *SMALL, steps, *replay, warm_up, "trainer.experiment_name=replay", *overrides)
        assert each.wait(400) == 0, each.output()[-4000:]
        return each

    run("recorded")
    pairs = []
    for mini, parts in ((8, 1), (2, 4)):
        size = f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}"
        pairs.append([run(f"sync{mini}", size)])
        split_recording(recording, parts)
        pairs[-1].append(run(f"separate{mini}", size, "mode=separate_async"))
    for synchronous, asynchronous in pairs:
        one, other = synchronous.steps(), asynchronous.steps()
        for step in (1, 2, 3):
            for name in ("actor/pg_loss", "actor/grad_norm"):
                assert other[step][name] == pytest.approx(one[step][name], rel=1e-5, abs=1e-5), (step, name)
        moved = [from_record(record).total("S_squared") for record in lines(synchronous, "length_stats.jsonl")]
        again = [from_record(record).total("S_squared") for record in lines(asynchronous, "length_stats.jsonl")]
        assert again == pytest.approx(moved, rel=1e-4, abs=1e-6)
    assert max(moved) > 1e-3  # there is a mini-batch in which S is not 0
