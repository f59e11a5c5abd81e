"""The length audit: in anyone's loop, its files, and what it hooks into verl."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from messages import holds
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from fspo import expected_clip
from fspo.acceptance import acceptance_counts
from fspo.audit import Audit, GrowingAudit, describe, from_packed, live_metrics, read_audit
from fspo.audit.__main__ import main
from fspo.diagnostics import NormClipWatch
from fspo.fairness.lre import equal_mass_starts, merge_bins, plain_lre
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.positions import PositionSums
from fspo.records import to_record
from fspo.report.runs import load_runs
from fspo.sums import FINE_LENGTH_EDGES, SequenceSums
from fspo.types import BandState
from recipe.fspo import audit, policy_loss
from recipe.fspo.import_hook import check_before_ray
from recipe.fspo.recorder import Recorder
from recipe.runner.when_imported import WhenImported

RANKS, STEPS, MINI_BATCHES = 2, 2, 3
GSPO = ALGORITHMS["seq_gspo"]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def micro_batch(seed: int, moved: bool = True) -> Tensors:
    """log_prob, old_log_prob, mask, one advantage per sequence."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(16, 64, generator=generator)
    mask = torch.arange(64) < torch.randint(0, 65, (16, 1), generator=generator)
    new = old + 3e-3 * moved * torch.randn(16, 64, generator=generator)
    return new, old, mask, torch.randn(16, generator=generator)


def train(folder: Path, run: str = "run", ranks: range = range(RANKS)) -> None:
    """A loop as anyone writes it."""
    for rank in ranks:
        audit = Audit(folder, GSPO, loss="seq_gspo", rank=rank, ranks=RANKS, run=run)
        for step in range(STEPS):
            for mini_batch in range(MINI_BATCHES):
                for micro in range(2):
                    audit.add(*micro_batch(1000 * rank + 100 * step + 10 * mini_batch + micro, mini_batch > 0))
                audit.end_mini_batch(step)


def test_an_audit_of_two_ranks_adds_up(tmp_path: Path) -> None:
    train(tmp_path)
    records = read_audit(tmp_path)
    assert records.problems == [] and (records.loss, records.acceptance) == ("seq_gspo", True)
    assert sorted(records.sums) == [(step, index) for step in range(STEPS) for index in range(MINI_BATCHES)]
    tensors = [micro_batch(1000 * rank + 100 + 20 + micro) for rank in range(RANKS) for micro in range(2)]
    sums = records.sums[1, 2]
    length = torch.cat([mask.sum(1) for _, _, mask, _ in tensors])
    s = torch.cat([((new - old) * mask).sum(1) for new, old, mask, _ in tensors])[length > 0]
    mean = s / length[length > 0]
    assert sums.total("count") == int((length > 0).sum())
    assert sums.total("S") == pytest.approx(float(s.sum()), rel=1e-6)
    inside = (mean.exp() >= math.exp(-GSPO.c_low)) & (mean.exp() <= math.exp(GSPO.c_high))
    assert sums.total("accepted") == int(inside.sum())
    assert records.sums[1, 0].total("S") == 0
    table = describe(records)
    assert f"{sum(part.total('count') for part in records.moved()):.0f} sequences" in table and "LRE" in table
    seeds = [sum(digits) for digits in itertools.product((0, 1000), (0, 100), (10, 20), (0, 1))]
    d_BT = torch.cat([(new.double() - old).where(mask, np.nan) for new, old, mask, _ in map(micro_batch, seeds)])
    s_B = d_BT[:, :16].sum(1)
    spread, reach = s_B[~s_B.isnan()].std(correction=0), (~s_B.isnan()).sum()
    rms = d_BT[:, 15:31].square().nanmean().sqrt()
    assert f"| 16 | {reach} | {spread:.4f} | {spread / 4:.4f} | {rms:.4f} |" in table
    assert main([str(tmp_path)]) == 0


def test_without_a_rule_nothing_is_claimed_of_acceptance(tmp_path: Path) -> None:
    audit = Audit(tmp_path, loss="mine")
    for index in range(2):
        audit.add(*micro_batch(index))
        audit.end_mini_batch(1)
    records = read_audit(tmp_path)
    assert not records.acceptance and "LRE" not in describe(records)
    assert set(live_metrics(records.sums[1, 1], records.acceptance)) == {
        "length_short", "length_long", "S_std_short", "S_std_long"
    }  # fmt: skip


def spoiled(value: float, where: str) -> Tensors:
    """A micro-batch with one log-probability that is not finite in a row of 5 tokens and more."""
    new, old, mask, advantage = micro_batch(3)
    row = int(mask.sum(1).argmax())
    (new if where == "new" else old)[row, 2] = value
    return new, old, mask, advantage


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rule", [None, GSPO])
@pytest.mark.parametrize("where", ["new", "old"])
def test_a_response_that_is_not_finite_is_left_out_counted_and_named_in_all_readers(
    value: float, rule: Any, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old, mask, advantage = spoiled(value, where)
    whole, without = Audit(tmp_path, rule, run="run"), Audit(None, rule)
    for index in range(2):
        whole.add(new, old, mask, advantage)
        sums = whole.end_mini_batch(1).sums
        kept = mask & (torch.arange(16) != mask.sum(1).argmax())[:, None]
        without.add(*(x.nan_to_num(0, 0, 0) for x in (new, old)), kept, advantage)
        expected = without.end_mini_batch(1).sums
        assert torch.equal(sums.sums_KF, expected.sums_KF) and torch.equal(sums.hist_KH, expected.hist_KH), index
    assert capsys.readouterr().err.count("1 response with a log-probability that is not finite left out") == 1
    assert "NaN" not in next(tmp_path.glob("*.jsonl")).read_text()
    records = read_audit(tmp_path)
    assert (records.left_out, records.problems) == (2, [])
    assert main([str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert "2 responses with a log-probability that is not finite left out" in output.out and "nan" not in output.out
    assert expected_clip.main([f"audit={tmp_path}"]) == 0
    assert "2 responses" in capsys.readouterr().err
    (run,) = load_runs(tmp_path)
    assert any("2 responses" in problem for problem in run.problems)


def test_an_older_file_with_nan_in_it_is_named(tmp_path: Path) -> None:
    train(tmp_path, ranks=range(1))
    path = tmp_path / "audit-run-00000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    row = json.loads(lines[-1])
    row["rows"][0][-1] = float("nan")
    path.write_text("".join([*lines[:-1], json.dumps(row) + "\n"]))
    assert any(
        f"{path}:{len(lines)}" in problem and "not finite" in problem for problem in read_audit(tmp_path).problems
    )


@pytest.mark.parametrize(
    ("change", "key", "remedy"),
    [
        (lambda new, old, mask, a: (new, old[:1], mask, a), "old_log_prob_BT", "(16, 64)"),
        (lambda new, old, mask, a: (new, old[:, :1], mask, a), "old_log_prob_BT", "(16, 64)"),
        (lambda new, old, mask, a: (new, old, mask[:1], a), "(16, 64)", "response positions"),
        (lambda new, old, mask, a: (new, old, mask, a[:5]), "advantages_BT", "(16, 64)"),
        (lambda new, old, mask, a: (new[mask], old[mask], mask[mask], a), "(", "from_packed"),
    ],
)
@pytest.mark.parametrize("rule", [None, GSPO])
def test_shapes_are_checked(rule: Any, change: Any, key: str, remedy: str) -> None:
    audit = Audit(None, rule)
    with pytest.raises(ValueError) as error:
        audit.add(*change(*micro_batch(1)))
    assert key in str(error.value) and remedy in str(error.value)
    assert audit.sums.total("count") == 0


@pytest.mark.parametrize("rule", [None, GSPO])
def test_no_width_adds_nothing_and_one_advantage_a_response_may_be_a_column(rule: Any) -> None:
    audit, new, old, mask, a = Audit(None, rule), *micro_batch(1)
    audit.add(new[:, :0], old[:, :0], mask[:, :0], a)
    assert audit.sums.total("count") == 0 and not audit.positions.prefix_LPF.any()
    audit.add(new, old, mask, a[:, None])
    column = audit.end_mini_batch(1).sums
    audit.add(new, old, mask, a[:, None].expand(mask.shape))
    assert torch.equal(column.sums_KF, audit.sums.sums_KF)


def test_packed_sequences_are_those_of_rows() -> None:
    new, old, mask, a = micro_batch(2)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), mask.sum(1).cumsum(0).int()])
    packed = [from_packed(x[mask], cu_seqlens) for x in (new, old, torch.ones_like(new))]
    rows, packs = Audit(None, GSPO), Audit(None, GSPO)
    rows.add(new, old, mask, a)
    packs.add(*packed, a)
    assert torch.allclose(rows.sums.sums_KF, packs.sums.sums_KF) and rows.sums.total("count") > 10
    assert torch.allclose(rows.positions.token_LPF, packs.positions.token_LPF)
    assert torch.equal(from_packed(new[mask][None], cu_seqlens), packed[0])
    for wrong in (cu_seqlens[:-1], cu_seqlens + 1, cu_seqlens.flip(0), cu_seqlens[None]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            from_packed(new[mask], wrong)


def first_mini_batch(tmp_path: Path, off: Any, on_policy: bool = True) -> list[str]:
    audit = Audit(tmp_path, loss="mine", on_policy=on_policy)
    generator = torch.Generator().manual_seed(0)
    for index in range(6):
        _, old, mask, a = micro_batch(index)
        audit.add(off(old, generator), old, mask, a)
        if index % 3 == 2:
            audit.end_mini_batch(1)
    return read_audit(tmp_path).notes()


def test_advantages_by_token_count_as_their_mean_with_a_rule_as_without_one() -> None:
    """S = 0.3 above every band at L = 4; A is positive in the mean of the first row, and negative in the second's."""
    old, mask = -torch.ones(3, 5), torch.tensor([[1, 1, 1, 1, 0]] * 3)
    advantages = torch.tensor(
        [[-1.0, 3.0, 1.0, 1.0, -90.0], [1.0, -3.0, -1.0, -1.0, 90.0], [1.0, -1.0, 0.5, -0.5, 9.0]]
    )
    sums = []
    for rule in (ALGORITHMS["fspo"], None):
        audit = Audit(rule=rule)
        audit.add(old + 0.075 * mask, old, mask, advantages)
        sums.append(audit.end_mini_batch(1).sums)
    with_rule, without = sums
    for name in ("count", "length", "S", "S_squared", "advantage_zero"):
        assert with_rule.total(name) == pytest.approx(without.total(name), rel=1e-6)
    assert with_rule.total("advantage_zero") == 1
    assert [with_rule.total(name) for name in ("accepted", "clipped_high", "clipped_low")] == [0, 1, 0]


@pytest.mark.parametrize(
    ("off", "says"),
    [
        (lambda old, g: old, ""),
        (lambda old, g: old + 1e-6 * torch.randn(old.shape, generator=g), ""),
        (lambda old, g: old + 0.03 * torch.randn(old.shape, generator=g), "bf16"),
        (lambda old, g: old / 0.7, "temperature"),
        (lambda old, g: old - 0.1, "top_p"),
        (lambda old, g: old - 0.001, "top_p"),  # below what rounds in bf16, but all one way
        (lambda old, g: old.roll(1, 1), "shifted mask"),
    ],
)
def test_the_first_mini_batch_is_judged(off: Any, says: str, tmp_path: Path) -> None:
    notes = first_mini_batch(tmp_path / "on", off)
    assert [says in note and "first mini-batch" in note for note in notes] == [True] * bool(says)
    assert ("note: first mini-batch" in describe(read_audit(tmp_path / "on"))) == bool(says)
    assert first_mini_batch(tmp_path / "off", off, on_policy=False) == [], "pi_old is the rollout engine's by setting"


def test_what_is_not_there_is_said_in_words(tmp_path: Path) -> None:
    new, old, mask, a = micro_batch(1)
    cases = {
        "empty": ((new, old, mask & False, a), "no response with a token", False),
        "lost": ((old - 9, old, mask, a), "nothing was accepted", True),
        "kept": ((old + 1e-7, old, mask, a), "nothing was clipped", True),
        "still": ((old, old, mask, a), "nothing was clipped", False),
    }
    for name, (tensors, says, could_clip) in cases.items():
        audit = Audit(tmp_path / name, GSPO)
        for _ in range(2):
            audit.add(*tensors)
            live = live_metrics(audit.end_mini_batch(1).sums)
        assert "lre" not in live and not any(map(np.isnan, live.values()))
        assert ("accept_rate" in live) == could_clip
        text = describe(read_audit(tmp_path / name))
        assert "nan" not in text and says in text
    with pytest.raises(ValueError, match="no response"):
        expected_clip.Measured.audit(tmp_path / "empty")
    (tmp_path / "begun").mkdir()
    header = '{"audit":1,"loss":"x","acceptance":true,"run":"r","rank":0,"ranks":1}\n'
    (tmp_path / "begun" / "audit-r-00000.jsonl").write_text(header)
    assert any("no mini-batch" in problem for problem in read_audit(tmp_path / "begun").problems)


@pytest.mark.parametrize("name", ["fspo_v1", "fspo_quantile"])
def test_a_rule_that_is_measured_is_refused_where_nothing_measures_it(name: str) -> None:
    with pytest.raises(ValueError, match="output="):
        Audit(None, ALGORITHMS[name])
    new, old, mask, a = micro_batch(1)
    wide = a[:, None].expand(mask.shape)
    state = BandState(half_width_K=(1.0,) * (len(FINE_LENGTH_EDGES) - 1))
    output = sequence_policy_loss(new, old, wide, mask, ALGORITHMS[name], state)
    audit = Audit()
    audit.add(new, old, mask, a, output)
    assert audit.sums.total("accepted") == float(output.accepted_B.sum())


def test_a_reader_that_goes_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    train(tmp_path, ranks=range(1))
    command = f"{sys.executable} -m fspo.audit {tmp_path} | head -c 10"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert ended.returncode in (1, 141) and "Traceback" not in ended.stderr and "Broken" not in ended.stderr


def broken(folder: Path, how: str) -> str:
    train(folder, ranks=range(1) if how == "a rank is missing" else range(RANKS))
    path = folder / "audit-run-00000.jsonl"
    if how == "a rank is missing":
        return "of 2 ranks, 1"
    lines = path.read_text().splitlines(keepends=True)
    if how == "a line is cut":
        path.write_text("".join([*lines[:-1], lines[-1][:50]]))
        return f"{path}:{len(lines)}"
    if how == "a rank stopped early":
        path.write_text("".join(lines[:-2]))
        return "step 1, mini-batch 1"
    if how == "a header is cut":
        path.write_text("".join(['{"audit":1}\n', *lines[1:]]))
        return f"{path}:1"
    path.write_text("".join([*lines[:-1], json.dumps({"step": 1, "minibatch": 2, "layout": 0})]))
    return "layout is 0"


@pytest.mark.parametrize(
    "how", ["a rank is missing", "a line is cut", "a rank stopped early", "a header is cut", "another layout", "empty"]
)
def test_what_is_wrong_with_a_folder_is_named(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = broken(tmp_path, how) if how != "empty" else str(tmp_path)
    assert any(expected in problem for problem in read_audit(tmp_path).problems)
    assert main([str(tmp_path)]) == (2 if how == "empty" else 1) and expected in capsys.readouterr().err


def test_the_folder_of_a_run_is_read_as_an_audit_of_its_last_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that went back to step 2 and did step 3 again: the first step 3 does not count."""
    generator, audit, lines = torch.Generator().manual_seed(3), Audit(tmp_path / "audit", ALGORITHMS["fspo"]), []
    audit.loss = "fspo"
    for step, counts in ((1, True), (2, True), (3, False), (3, True)):
        for index in range(12):
            old, length = -torch.rand(64, 40, generator=generator), torch.randint(1, 41, (64, 1), generator=generator)
            new, mask = old + 0.02 * index * torch.randn(64, 40, generator=generator), torch.arange(40) < length
            audit.add(new, old, mask, torch.ones(64))
            sums, positions = audit.sums, audit.positions
            lines.append(json.dumps(to_record(sums, positions, step=step, minibatch=index)))
            audit.end_mini_batch(step) if counts else audit.clear()
    run = tmp_path / "run"
    run.mkdir()
    (run / "length_stats.jsonl").write_text("\n".join([*lines[:36], *lines[12:24], *lines[36:]]))
    (run / "run.json").write_text(json.dumps({"algo": "mine", "loss": {"loss_mode": "fspo"}}))
    assert main([str(tmp_path / "audit")]) == 0
    audited = capsys.readouterr().out
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == audited and "S spreads like L^" in audited
    assert read_audit(run).truncation and not read_audit(tmp_path / "audit").truncation
    with (run / "length_stats.jsonl").open("a") as file:
        file.write('\n{"step": 4, "min')
    assert main([str(run)]) == 1 and "length_stats.jsonl:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        ("nowhere", ("nowhere", "does not exist", "FSPO_AUDIT")),
        ("run/run.json", ("run.json", "is a file", "FSPO_AUDIT")),
        ("run", ("run", "length_stats.jsonl")),
        ("grid", ("grid", "grid/fspo/seed1")),
        ("above", ("above", "above/audit")),
    ],
)
def test_a_folder_of_another_kind_is_named_with_what_reads_it(
    tmp_path: Path, folder: str, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run/run.json", "grid/grid.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    train(tmp_path / "above/audit")
    (tmp_path / "grid/fspo/seed1").mkdir(parents=True)
    (tmp_path / "grid/fspo/seed1/length_stats.jsonl").touch()
    assert main([str(tmp_path / folder)]) == 2
    assert re.search(holds("error: ", *names), capsys.readouterr().err)


def test_of_several_runs_in_a_folder_the_newest_is_read_and_the_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path)
    once = read_audit(tmp_path)
    train(tmp_path, run="run2")
    again, first = read_audit(tmp_path), read_audit(tmp_path, "run")
    assert (again.run, again.others, first.others) == ("run2", ["run"], ["run2"])
    for records in (again, first):
        assert records.problems == []
        assert records.sums[1, 2].total("count") == once.sums[1, 2].total("count")
    assert main([str(tmp_path), "--run", "run"]) == 0 and "run2" in capsys.readouterr().err
    assert "run3" in read_audit(tmp_path, "run3").problems[0]


def test_what_a_running_training_is_writing_is_no_problem(tmp_path: Path) -> None:
    train(tmp_path)
    path = tmp_path / "audit-run-00001.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    records = read_audit(tmp_path)
    assert records.problems == [] and max(records.sums) == (STEPS - 1, MINI_BATCHES - 2)


def test_sums_by_position_against_the_formula() -> None:
    new, old, mask, _ = micro_batch(5)
    mask = mask & (torch.arange(64) % 7 != 3)  # tokens of a tool have no position
    d = torch.where(mask, new - old, torch.nan).double()
    whole = PositionSums.zeros().add_(d, mask)
    parts = PositionSums.zeros().add_(d[:7], mask[:7]) + PositionSums.zeros().add_(d[7:], mask[7:])
    torch.testing.assert_close(parts.prefix_LPF, whole.prefix_LPF)
    torch.testing.assert_close(parts.token_LPF, whole.token_LPF)
    prefix, token = np.zeros((18, 18, 3)), np.zeros((18, 18, 3))
    for row, kept in zip(d, mask, strict=True):
        tokens = row[kept].numpy()
        octave = max(len(tokens), 1).bit_length() - 1
        for k in range(18):
            if len(tokens) >= 2**k:
                prefix[octave, k] += 1, tokens[: 2**k].sum(), tokens[: 2**k].sum() ** 2
            inside = tokens[2**k - 1 : 2 ** (k + 1) - 1]
            token[octave, k] += len(inside), inside.sum(), (inside**2).sum()
    np.testing.assert_allclose(whole.prefix_LPF, prefix, atol=1e-12)
    np.testing.assert_allclose(whole.token_LPF, token, atol=1e-12)
    again = np.zeros((18, 18, 6))
    for of_length, of_position, *fields in whole.rows():
        again[int(of_length), int(of_position)] = fields
    np.testing.assert_allclose(again, np.concatenate([prefix, token], axis=-1), atol=1e-12)


class Engine:
    """A part of verl's FSDP engine: what an audit and TrainingWorker ask it for, and a loss over two micro-batches."""

    optimizer = SimpleNamespace(param_groups=[{"lr": 1e-6}])
    is_mp_src_rank_with_outputs = FSDPEngine.is_mp_src_rank_with_outputs
    get_data_parallel_rank = FSDPEngine.get_data_parallel_rank

    def __init__(self, rank: int, registry: dict[str, Any], loss: str, ulysses_rank: int) -> None:
        self.rank, self.registry, self.loss = rank, registry, loss
        at = {"dp": rank, "sp": ulysses_rank}
        self.ulysses_device_mesh = {name: SimpleNamespace(get_local_rank=at[name].__int__) for name in at}

    def get_data_parallel_size(self) -> int:
        return RANKS


class Worker:
    """In the place of verl's TrainingWorker. Like it, only the first rank of a Ulysses group reports."""

    tensors = staticmethod(micro_batch)

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def train_mini_batch(self, step: int) -> list[Any]:
        return [self.train_batch(100 * step + 10 * index, index > 0) for index in range(MINI_BATCHES)]

    def train_batch(self, seed: int, moved: bool) -> Any:
        for micro in range(2):
            new, old, mask, advantage = self.tensors(1000 * self.engine.rank + seed + micro, moved)
            self.engine.registry[self.engine.loss](
                old, new, advantage[:, None].expand(mask.shape), mask, config=SimpleNamespace(clip_ratio=3e-4,
                clip_ratio_low=None, clip_ratio_high=None),
            )  # fmt: skip
        if self.engine.is_mp_src_rank_with_outputs():
            return self._postprocess_output({"metrics": {"grad_norm": 1.0}}, forward_only=False)
        return None

    def _postprocess_output(self, output: dict[str, Any], *, forward_only: bool) -> dict[str, Any]:
        return output["metrics"]


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Starts a rank in this process: its worker, after ``install`` has wrapped the class."""
    monkeypatch.setenv(audit.FOLDER, str(tmp_path))
    monkeypatch.setenv(audit.RUN, json.dumps({"run": "run"}))

    def loss(old: Any, new: Any, advantages: Any, mask: Any, config: Any = None, **_: Any) -> Any:
        return -(advantages * new).masked_fill(~mask, 0.0).sum(), {}

    def start(rank: int, name: str = "gspo", ulysses_rank: int = 0) -> Worker:
        registry, recorder = {name: loss}, Recorder()

        def enter() -> None:
            for module in (audit, policy_loss):
                monkeypatch.setattr(module, "RECORDER", recorder)
            monkeypatch.setattr(policy_loss, "POLICY_LOSS_REGISTRY", registry)

        enter()
        wrapped = type("Wrapped", (Worker,), {"enter": staticmethod(enter)})
        audit.AuditedWorkers().wrap(wrapped)
        return wrapped(Engine(rank, registry, name, ulysses_rank))

    return start


class Tracking:
    """In the place of verl's."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log(self, data: dict[str, float], step: int) -> None:
        self.logged.append(data)


def tracked() -> Any:
    wrapped = type("Wrapped", (Tracking,), {})
    audit.LiveNumbers().wrap(wrapped)
    return wrapped()


def test_logged_numbers_are_those_of_the_files(verl: Any, tmp_path: Path) -> None:
    tracking, workers = tracked(), [verl(rank) for rank in range(RANKS)]
    for step in (1, 2):
        for worker in workers:
            worker.enter()
            assert worker.train_mini_batch(step) == [{"grad_norm": 1.0}] * MINI_BATCHES, "nothing travels as a metric"
        tracking.log({"actor/grad_norm": 1.0}, step)
    records = read_audit(tmp_path)
    assert records.problems == [] and records.loss == "gspo" and records.acceptance
    for step, logged in enumerate(tracking.logged, start=1):
        parts = [part for key, part in records.sums.items() if key[0] == step and key[1] > 0]
        assert len(parts) == MINI_BATCHES - 1 and len(logged) == 1 + 7
        whole = sum(parts, SequenceSums.zeros())
        counts = acceptance_counts(np.stack([part.sums_KF.numpy() for part in parts]))
        starts = equal_mass_starts(whole.column("count").numpy(), 8)
        lre = plain_lre(*(merge_bins(counted.sum(0), starts) for counted in (counts.accepted, counts.total)))[0]
        assert 0.05 < logged["fspo_audit/lre"] == pytest.approx(float(lre), rel=1e-9)
        accepted = whole.total("accepted") / whole.total("count")
        assert logged["fspo_audit/accept_rate"] == pytest.approx(accepted, rel=1e-12)
        removed = whole.total("clipped_high") + whole.total("clipped_low")
        assert logged["fspo_audit/removed"] == pytest.approx(removed / whole.total("count"), rel=1e-12)
        assert logged["fspo_audit/S_std_long"] > logged["fspo_audit/S_std_short"] > 0


def test_a_growing_audit_gives_every_whole_line_once(tmp_path: Path) -> None:
    train(tmp_path)
    whole = sum(read_audit(tmp_path).moved(), SequenceSums.zeros())
    texts = {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    growing, sums = GrowingAudit(tmp_path, "run"), SequenceSums.zeros()
    for share in (0.1, 0.5, 0.77, 1.0):  # as a reader meets lines that are being written
        for path, text in texts.items():
            path.write_bytes(text[: int(share * len(text))])
        sums = sums + growing.new()
    assert (growing.ranks, growing.expected, growing.acceptance) == (RANKS, RANKS, True)
    torch.testing.assert_close(sums.sums_KF, whole.sums_KF)


def test_a_sequence_counts_once_in_a_ulysses_group(verl: Any, tmp_path: Path) -> None:
    for rank, ulysses_rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        verl(rank, ulysses_rank=ulysses_rank).train_mini_batch(1)
    tensors = [micro_batch(1000 * rank + 100 + 10 + micro) for rank in range(RANKS) for micro in range(2)]
    assert read_audit(tmp_path).sums[1, 1].total("count") == sum(int(mask.any(1).sum()) for _, _, mask, _ in tensors)


@pytest.mark.parametrize("name", ["gspo", "gpg", "mine"])
def test_one_value_that_is_not_finite_ends_no_audit_of_verl(
    name: str, verl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def first_spoiled(seed: int, moved: bool = True) -> Tensors:
        return spoiled(float("nan"), "old") if seed == 110 else micro_batch(seed, moved)

    worker = verl(0, name)
    monkeypatch.setattr(Worker, "tensors", staticmethod(first_spoiled))
    worker.train_mini_batch(1)
    assert "audits nothing more" not in capsys.readouterr().out
    records = read_audit(tmp_path)
    assert (records.left_out, len(records.sums)) == (1, MINI_BATCHES)
    assert all(part.sums_KF.isfinite().all() for part in records.sums.values())


def test_of_an_unknown_loss_only_s_l_and_a_are_summed(verl: Any, tmp_path: Path) -> None:
    for rank in range(RANKS):
        verl(rank, "mine").train_mini_batch(1)
    assert not read_audit(tmp_path).acceptance
    tracking = tracked()
    tracking.log({"actor/grad_norm": 1.0}, 1)
    assert set(tracking.logged[0]) == {"actor/grad_norm"} | {
        f"fspo_audit/{name}" for name in ("length_short", "length_long", "S_std_short", "S_std_long")
    }


@pytest.mark.parametrize("where", ["the file", "the sums"])
def test_an_error_ends_the_audit_and_not_the_run(
    where: str, verl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if where == "the file":
        tmp_path.joinpath("file").touch()
        monkeypatch.setenv(audit.FOLDER, str(tmp_path / "file"))  # no folder
    else:
        monkeypatch.delattr(PositionSums, "add_")
    assert verl(0).train_mini_batch(1) == [{"grad_norm": 1.0}] * MINI_BATCHES
    assert capsys.readouterr().out.count("FSPO_AUDIT: ") == 1


@pytest.mark.parametrize(("ranks", "says"), [(0, "no worker"), (1, f"1 of {RANKS} ranks"), (RANKS, "")])
def test_the_driver_says_once_whose_sums_are_not_there(
    ranks: int, says: str, verl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracking = tracked()
    before = [{"val-core/acc": 1.0}, {"actor/entropy": 0.1}]  # a critic may train alone at first
    for metrics in before:
        tracking.log(metrics, 0)
    for rank in range(ranks):
        verl(rank).train_mini_batch(1)
    assert capsys.readouterr().out == ""
    for step in (1, 2):
        tracking.log({"actor/grad_norm": 2.0}, step)
    output = capsys.readouterr().out
    assert output.count("FSPO_AUDIT: ") == bool(says) and says in output
    assert not says or (str(tmp_path) in output and "install fspo on every node" in output and "share" in output)
    *unchanged, first, second = tracking.logged
    assert unchanged == before and second == {"actor/grad_norm": 2.0}
    assert ("fspo_audit/lre" in first) == (ranks == RANKS)


def test_a_file_that_cannot_be_read_ends_the_numbers_and_not_the_run(
    verl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracking = tracked()
    (tmp_path / "audit-run-00000.jsonl").write_text("none of an audit\n")
    for step in (1, 2):
        tracking.log({"actor/grad_norm": 2.0}, step)
    assert tracking.logged == [{"actor/grad_norm": 2.0}] * 2
    assert capsys.readouterr().out.count("FSPO_AUDIT: ") == 1


def test_rays_workers_get_the_variables_and_the_driver_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(audit.FOLDER, str(tmp_path))
    monkeypatch.setenv(audit.RUN, "")
    constants = SimpleNamespace(get_ppo_ray_runtime_env=lambda config=None: {"env_vars": {"A": "1"}})
    audit._forward_environment(constants)
    actor = {"actor": {"policy_loss": {"loss_mode": "gspo"}}}
    v1 = {"trainer_mode": "separate_async", "separate_async": {"parameter_sync_step": 4}}
    config = {"actor_rollout_ref": actor, "trainer": {"v1": v1}, "data": {"max_response_length": 96}}
    environment = constants.get_ppo_ray_runtime_env(config=config)["env_vars"]
    assert (environment["A"], environment[audit.FOLDER]) == ("1", str(tmp_path))
    run = json.loads(environment[audit.RUN])
    assert run["run"] and (run["updates_per_rollout_batch"], run["on_policy"]) == (4, True)
    assert run["max_response_length"] == 96
    output = capsys.readouterr().out
    assert "gspo" in output and str(tmp_path) in output and output.count("\n") == 1


def test_the_logger_is_wrapped_when_a_process_imports_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what cannot be wrapped, in another verl, ends the audit of this process and not its import."""
    import verl.utils.tracking as original

    for name in (audit.FOLDER, audit.RUN):
        monkeypatch.setenv(name, str(tmp_path) if name == audit.FOLDER else "")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(audit.AuditedWorkers, "wrap", lambda *_: None)
    monkeypatch.setattr(audit, "_forward_environment", lambda constants: constants.not_there)
    monkeypatch.delitem(sys.modules, "verl.utils.tracking")
    monkeypatch.setattr(sys.modules["verl.utils"], "tracking", original)
    audit.install()
    assert "verl.utils.tracking" not in sys.modules
    again = importlib.import_module("verl.utils.tracking")
    assert again.Tracking.log.__wrapped__.__code__ == original.Tracking.log.__code__
    importlib.import_module("verl.trainer.constants_ppo")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("FSPO_AUDIT: AttributeError") and "not_there" in line


def test_a_module_that_is_already_imported_is_wrapped_at_once() -> None:
    modules: list[Any] = []
    WhenImported("json", modules.append)
    assert modules == [json]


@pytest.mark.parametrize(("norms", "warnings"), [([2.0] * 11, 1), ([2.0] * 9 + [0.5] + [2.0] * 9, 0)])
def test_a_norm_clip_that_always_binds_is_reported_once(norms: list[float], warnings: int) -> None:
    watch = NormClipWatch(1.0)
    sentences = [sentence for norm in norms if (sentence := watch.warning(norm)) is not None]
    assert len(sentences) == warnings and all("clip_grad=1" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("key", "override"),
    [("rollout_is=token", "+algorithm.rollout_correction.rollout_is=token"), ("gae", "algorithm.adv_estimator=gae")],
)
@pytest.mark.parametrize("loss", ["fspo", "vanilla"])
def test_plain_verl_refuses_before_ray_what_a_sequence_loss_cannot_use(key: str, override: str, loss: str) -> None:
    constants = SimpleNamespace(get_ppo_ray_runtime_env=lambda config=None: {"env_vars": {}})
    check_before_ray(constants)
    overrides = [f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}", "algorithm.adv_estimator=grpo", override]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", ["actor_rollout_ref.rollout.n=4", *overrides])
    if loss == "vanilla":
        assert constants.get_ppo_ray_runtime_env(config) == {"env_vars": {}}
        return
    with pytest.raises(ValueError, match=key):
        constants.get_ppo_ray_runtime_env(config)


TYPED = "actor_rollout_ref.actor.policy_loss._target_=recipe.fspo.config.SequencePolicyLossConfig"


@pytest.mark.parametrize(
    ("loss", "fields", "says"),
    [
        *((name, "", (f"loss_mode={name} ", "loss_mode=fspo,")) for name in ("fspo_v1", "fspo_quantile")),
        ("fspo_quantile", TYPED, ("loss_mode=fspo_quantile ", "loss_mode=fspo,")),
        ("fspo", f"{TYPED} +drift=kl", ("drift=kl ", "leave it out")),
        ("seq_gspo", "+drift=kl", ("drift=kl ", "leave it out")),
        ("seq_rloo", f"{TYPED} +band=quantile +target_acceptance=0.7", ("band=quantile ", "leave it out")),
        ("fspo", f"{TYPED} +c_low=-1", ("c_low=-1 ",)),
        ("fspo", f"{TYPED} +c_low=much", ("c_low=much ",)),
        ("seq_rloo", f"{TYPED} +clip_low=0.2", ("clip_low=0.2 ", "c_low=0.223144")),
        ("seq_gspo", "+clip_high=4e-4", ("clip_high=0.0004 ", "c_high=0.00039992")),
        (
            "fspo",
            f"{TYPED} +clip_low=0.05 +clip_high=0.06",
            ("clip_low=0.05 clip_high=0.06 ", "c_low=0.05 c_high=0.06"),
        ),
        ("fspo", f"{TYPED} +exponent=3", ("exponent=3",)),
        ("fspo", f"{TYPED} +exponent=0.43 +c_low=0.04 +c_high=0.04", ()),
        ("fspo_v1", f"{TYPED} +drift=none", ()),
        ("fspo", f"{TYPED} +c_low=0.05", ()),
        ("luspo", "", ()),
    ],
)
def test_plain_verl_refuses_before_ray_a_band_that_nothing_measures_there(
    loss: str, fields: str, says: tuple[str, ...]
) -> None:
    constants = SimpleNamespace(get_ppo_ray_runtime_env=lambda config=None: {"env_vars": {}})
    check_before_ray(constants)
    key = "actor_rollout_ref.actor.policy_loss"
    overrides = [word.replace("+", f"+{key}.") for word in fields.split()]
    overrides += [f"{key}.loss_mode={loss}", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    if not says:
        assert constants.get_ppo_ray_runtime_env(config) == {"env_vars": {}}
        return
    remedy = ("recipe.fspo.main",) if says[0].startswith(("loss_mode", "drift", "band")) else ()
    with pytest.raises(ValueError, match=holds(f"{key}.{says[0]}", *says[1:], *remedy)):
        constants.get_ppo_ray_runtime_env(config)


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size=1024", True),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=1024 actor_rollout_ref.actor.ppo_epochs=2", False),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=1024 trainer.v1.trainer_mode=separate_async", False),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=512", False),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=1024 actor_rollout_ref.actor.policy_loss.loss_mode=gspo", False),
    ],
)
def test_plain_verl_notes_a_clip_that_never_acts(
    overrides: str, noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    constants = SimpleNamespace(get_ppo_ray_runtime_env=lambda config=None: {"env_vars": {}})
    check_before_ray(constants)
    chosen = ["actor_rollout_ref.rollout.n=4", "algorithm.adv_estimator=grpo", "data.train_batch_size=1024"]
    chosen += ["actor_rollout_ref.actor.policy_loss.loss_mode=fspo"] * ("loss_mode" not in overrides)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*chosen, *overrides.split()])
    assert constants.get_ppo_ray_runtime_env(config) == {"env_vars": {}}
    output = capsys.readouterr().out
    assert ("ppo_mini_batch_size=1024 " in output and "data.train_batch_size" in output) == noted
