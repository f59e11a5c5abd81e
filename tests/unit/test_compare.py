"""The grid of a comparison: command line, cells, resuming, calibration. Its runs are in tests/e2e/test_compare.py."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from composing import composed, composed_from
from messages import holds

from fspo.records import PlannedRun
from recipe.fspo.compare import grid
from recipe.fspo.compare.__main__ import FAIR, parse
from recipe.fspo.compare.grid import Request, plan
from recipe.fspo.compare.matched_clips import calibrate, recorded_sequences
from recipe.runner.launch.commands import BadInput


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("__main__", "losses"):
        monkeypatch.setattr(f"recipe.fspo.compare.{module}.compose", composed_from)


def write_sequences(run: Path, rng: np.random.Generator, n: int = 400) -> None:
    """Two mini-batches, S = 0 in the first, S = 0.03 sqrt(L) * normal in the second; this one done twice."""
    run.mkdir(parents=True, exist_ok=True)
    length, a = rng.integers(4, 200, n), np.arange(n) % 3 - 1.0
    s = 0.03 * np.sqrt(length) * rng.standard_normal(n)
    rows = [
        {"step": 1, "minibatch": i, "S": (i * s).tolist(), "L": length.tolist(), "A": a.tolist()} for i in (0, 1, 1)
    ]
    (run / "sequences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1, "mini')


def write_run(folder: Path, status: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"algo": folder.parent.name, "status": status}))
    (folder / "length_stats.jsonl").write_text("{}\n")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Runs that train nothing: those that have ``begun``, in order, and the exit ``codes`` of those that fail."""
    runs = SimpleNamespace(begun=[], codes={})

    def command_of(run: PlannedRun, request: Request) -> list[str]:
        folder, code = request.out / run.path, runs.codes.get(run.path, 0)
        runs.begun.append(run.path)
        write_run(folder, "failed" if code else "finished")
        if run.path == "default/fspo/seed1":
            write_sequences(folder, np.random.default_rng(0))
        if code != 2:
            (folder / "metrics.jsonl").touch()
        return ["sh", "-c", f"exit {code}"]

    monkeypatch.setattr(grid, "command_of", command_of)
    return runs


def test_whole_seeds_first_and_default_clips_before_matched_ones() -> None:
    request = parse(["experiment=demo", "algos=[fspo,gspo]", "seeds=[3,1]", "comparisons=[matched,default]"])
    assert [run.path for run in request.runs()] == [
        f"{comparison}/{algo}/seed{seed}"
        for comparison in ("default", "matched")
        for seed in (3, 1)
        for algo in ("fspo", "gspo")
    ]
    assert request.pilot().path == "default/fspo/seed3"


def test_the_conditions_of_a_fair_comparison_hold_unless_overridden() -> None:
    for algo in ("fspo", "rloo", "gspo"):
        config = composed(*FAIR, f"algo={algo}", "seed=7")
        assert config.algorithm.adv_estimator == "grpo", "one advantage estimator for all"
        assert config.actor_rollout_ref.actor.kl_loss_coef == 0
        assert config.fspo.match_scale == "matched"
        assert config.data.seed == config.actor_rollout_ref.rollout.seed == 7
    native = parse(["advantage=native"])
    assert composed(*native.overrides, "algo=rloo").algorithm.adv_estimator == "rloo"


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("algos=[fsop]", ("algos", "'fsop'", "fspo")),
        ("algos=[]", ("algos=[]",)),
        ("seeds=[a]", ("seeds=['a']",)),
        ("seeds=[1,1]", ("seeds",)),
        ("comparisons=[equal]", ("comparisons", "'equal'", "default", "matched", "matched_active")),
        ("target_clip_rate=1.5", ("target_clip_rate=1.5", " 0 ", " 1")),
        ("run=9", ("run=9", " 8")),
        ("algo=fspo", ("algo=fspo", "algos=[...]")),
        ("comparisons=[matched] fspo.record_sequences=false", ("record_sequences=false", "comparisons=[default]")),
        ("run.dir=x", ("run.dir", "out=FOLDER")),
        ("--algos", ("'--algos'", "KEY=VALUE")),
        ("evaluate=true", ("evaluate=true",)),
        ("experiment=nowhere", ("nowhere",)),
        ("trainer.total_steps=3", ("total_steps",)),
    ],
)
def test_bad_input_is_named_with_its_remedy(argument: str, says: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match=holds(*says)):
        parse(argument.split())


def test_a_grid_can_grow_but_its_conditions_cannot_change(tmp_path: Path) -> None:
    first = ["algos=[fspo]", "seeds=[1]", f"out={tmp_path}"]
    assert [cell.path for cell in plan(parse(first))] == ["default/fspo/seed1"]
    grown = plan(parse([*first[1:], "algos=[gspo]"]))
    assert [cell.path for cell in grown] == ["default/fspo/seed1", "default/gspo/seed1"]
    assert len(json.loads((tmp_path / "grid.json").read_text())["runs"]) == 2
    write_run(tmp_path / "default/gspo/seed1", "finished")
    with pytest.raises(BadInput, match=str(tmp_path)):
        plan(parse([*first, "actor_rollout_ref.actor.optim.lr=1e-5"]))
    with pytest.raises(BadInput, match=holds("target_clip_rate=0.15", "0.3")):
        plan(parse([*first, "target_clip_rate=0.3"]))


def test_conditions_may_change_as_long_as_no_run_has_begun(tmp_path: Path) -> None:
    plan(parse(["algos=[fspo]", "seeds=[1,2]", f"out={tmp_path}"]))
    plan(parse(["algos=[fspo]", "seeds=[1]", f"out={tmp_path}", "trainer.test_freq=5"]))
    made = json.loads((tmp_path / "grid.json").read_text())
    assert (made["overrides"][-1], len(made["runs"])) == ("trainer.test_freq=5", 1)


def test_a_command_runs_what_it_asks_for_and_a_dry_run_writes_nothing(
    tmp_path: Path, runs: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "grid"
    assert grid.run(parse(["algos=[fspo,rloo]", "seeds=[1,2]", f"out={out}", "dry_run=true"])) == 0
    assert not out.exists() and "default/rloo/seed2: not run" in capsys.readouterr().out
    plan(parse(["algos=[fspo,rloo]", "seeds=[1,2]", f"out={out}"]))  # and interrupted
    assert grid.run(parse(["algos=[fspo]", "seeds=[1,2]", f"out={out}"])) == 0
    assert runs.begun == ["default/fspo/seed1", "default/fspo/seed2"]
    assert "default/rloo/seed1: not run" in capsys.readouterr().out, "the report is on all that was planned"


def test_a_calibration_needs_no_second_pilot_and_says_what_it_lacks(tmp_path: Path, runs: SimpleNamespace) -> None:
    common = ["seeds=[1]", "comparisons=[matched]", f"out={tmp_path}"]
    assert grid.run(parse(["algos=[fspo,rloo]", *common])) == grid.run(parse(["algos=[gspo]", *common])) == 0
    assert runs.begun == ["default/fspo/seed1", *(f"matched/{algo}/seed1" for algo in ("fspo", "rloo", "gspo"))]
    (tmp_path / "default/fspo/seed1/sequences.jsonl").unlink()
    with pytest.raises(BadInput, match=holds("comparisons=matched", "default/fspo/seed1", "record_sequences=true")):
        grid.run(parse(["algos=[luspo]", *common]))
    with pytest.raises(ValueError, match=holds("algo=grpo", "'vanilla'")):
        parse(["algos=[grpo]", *common])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_ends_the_command_ends_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    """Without waiting for it, it would train on, and keep the same command out of its folder."""
    ended = tmp_path / "ended"
    run_trains = f"trap 'echo > {ended}; exit 143' {signum.value}; kill -{signum.value} $PPID; sleep 20 & wait"
    monkeypatch.setattr(grid, "command_of", lambda *_: ["/bin/sh", "-c", run_trains])
    before = signal.signal(signum, signal.SIG_DFL)  # below nohup it would be ignored, and stay so
    try:
        with pytest.raises(KeyboardInterrupt):
            grid.run(parse(["algos=[fspo]", "seeds=[1,2]", f"out={tmp_path}/grid"]))
    finally:
        signal.signal(signum, before)
    assert ended.exists()


@pytest.mark.parametrize("content", ["[]", '{"runs": [', '{"overrides": [], "runs": [1]}'])
def test_a_foreign_or_broken_grid_is_named_and_stays(tmp_path: Path, content: str) -> None:
    (tmp_path / "grid.json").write_text(content)
    with pytest.raises(BadInput, match=r"grid\.json .*out=FOLDER"):
        plan(parse([f"out={tmp_path}"]))
    assert (tmp_path / "grid.json").read_text() == content
    with pytest.raises(BadInput, match=r"out=.*grid\.json"):
        plan(parse([f"out={tmp_path}/grid.json"]))


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    request = parse(["algos=[fspo]", "seeds=[1]", f"out={tmp_path}/jürgen's (1),=[a]&#!"])
    config = composed(*grid.command_of(request.runs()[0], request)[3:])
    assert config.run.dir == f"{tmp_path}/jürgen's (1),=[a]&#!/default/fspo/seed1"
    assert parse(["out=3"]).out == Path.cwd() / "3" and parse(["out=2026_11_23"]).out == Path.cwd() / "2026_11_23"
    assert "~trainer.nnodes" in parse(["~trainer.nnodes", "+trainer.nnodes=1"]).overrides


def test_calibration_gives_every_algorithm_the_same_clip_rate(tmp_path: Path) -> None:
    write_sequences(tmp_path / "pilot", np.random.default_rng(0))
    fixed = calibrate(tmp_path, "pilot", ["fspo", "rloo", "gspo", "fspo_quantile"], FAIR, 0.2, "matched")
    sequences = recorded_sequences(tmp_path / "pilot")
    assert sequences.length_B.size == 400, "the first mini-batch is left out"
    for algo in ("fspo", "rloo", "gspo"):
        assert fixed["algos"][algo]["clip_rate_on_pilot"] == pytest.approx(0.2, abs=1 / 400)
    config = composed(*FAIR, "algo=fspo", *fixed["algos"]["fspo"]["overrides"])
    clip = config.actor_rollout_ref.actor.policy_loss.clip_high
    inside = np.abs(sequences.log_ratio_B) <= clip * np.sqrt(sequences.length_B)
    assert inside.mean() == pytest.approx(0.8, abs=1 / 400)
    key = "actor_rollout_ref.actor.policy_loss"
    first_batch = [f"{key}.clip_low={clip:.6g}", f"{key}.clip_high={clip:.6g}"]
    assert fixed["algos"]["fspo_quantile"]["overrides"] == [*first_batch, f"{key}.target_acceptance=0.8"]
    write_sequences(tmp_path / "other", np.random.default_rng(1))
    later = calibrate(tmp_path, "other", ["fspo", "luspo"], FAIR, 0.2, "matched")
    assert later["algos"]["fspo"] == fixed["algos"]["fspo"] and later["pilot"] == "pilot", "as runs were made with"


def test_calibration_gives_every_algorithm_the_same_active_clip_rate(tmp_path: Path) -> None:
    write_sequences(tmp_path / "pilot", np.random.default_rng(0))
    fixed = calibrate(tmp_path, "pilot", ["fspo", "rloo", "fspo_active", "unclipped"], FAIR, 0.2, "matched_active")
    assert fixed["algos"].pop("unclipped") == {"overrides": [], "clip_rate_on_pilot": 0.0}
    assert not (tmp_path / "calibration.json").exists()
    sequences = recorded_sequences(tmp_path / "pilot", with_advantages=True)
    assert sequences.advantage_B is not None and 0 < sequences.length_B.size < 400, "those with A = 0 are left out"
    key = "actor_rollout_ref.actor.policy_loss"
    first_batch = fixed["algos"]["fspo"]["overrides"]
    assert fixed["algos"]["fspo_active"]["overrides"] == [*first_batch, f"{key}.target_acceptance=0.8"]
    for algo, scale in (("fspo", np.sqrt(sequences.length_B)), ("rloo", 1.0)):
        config = composed(*FAIR, f"algo={algo}", *fixed["algos"][algo]["overrides"])
        clip = config.actor_rollout_ref.actor.policy_loss.clip_high
        lean = np.sign(sequences.advantage_B) * sequences.log_ratio_B
        moved = lean / scale if algo == "fspo" else np.abs(np.expm1(sequences.log_ratio_B)) * (lean > 0)
        assert (moved > clip).mean() == pytest.approx(0.2, abs=1 / sequences.length_B.size)


def test_a_run_that_fails_in_training_does_not_keep_the_others_waiting(tmp_path: Path, runs: SimpleNamespace) -> None:
    request = parse(["algos=[fspo,rloo]", "seeds=[1,2]", f"out={tmp_path}"])
    runs.codes |= {"default/fspo/seed1": 1, "default/fspo/seed2": 2}
    assert grid.run(request) == 2
    assert runs.begun == ["default/fspo/seed1", "default/rloo/seed1", "default/fspo/seed2"]
    runs.codes.clear()
    assert grid.run(request) == 0
    assert runs.begun[3:] == ["default/fspo/seed1", "default/fspo/seed2", "default/rloo/seed2"]


@pytest.mark.parametrize("failing", ["rloo", "fspo"])
def test_matched_runs_wait_for_the_pilot_only(tmp_path: Path, runs: SimpleNamespace, failing: str) -> None:
    runs.codes[f"default/{failing}/seed1"] = 1
    assert grid.run(parse(["algos=[fspo,rloo]", "seeds=[1]", "comparisons=[default,matched]", f"out={tmp_path}"])) == 1
    matched = ["matched/fspo/seed1", "matched/rloo/seed1"] if failing == "rloo" else []
    assert runs.begun == ["default/fspo/seed1", "default/rloo/seed1", *matched]
