"""The grid of a comparison: command line, cells, resuming. Its runs are in tests/e2e/test_compare.py."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from composing import composed, composed_from
from messages import holds
from test_run_folder import begun
from waiting import wait_until

from fspo.records import PlannedRun
from recipe.fspo import compare
from recipe.fspo.compare import Request, Starts, parse, plan
from recipe.fspo.job import JOB, choices
from recipe.runner.faults.preemption import STOP_VARIABLE, Ending
from recipe.runner.launch.commands import BadInput
from recipe.runner.launch.compose import parsed
from recipe.runner.launch.run_settings import resume_of


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "compose", composed_from)


def write_run(folder: Path, status: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"overrides": [f"algo={folder.parent.name}"], "status": status}))
    (folder / "metrics.jsonl").write_text("{}\n")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Runs that train nothing: those that have ``begun``, in order, and the exit ``codes`` of those that fail."""
    runs = SimpleNamespace(begun=[], codes={})
    monkeypatch.setattr(compare, "problems", lambda request: [])

    def command_of(run: PlannedRun, request: Request) -> list[str]:
        folder, code = request.out / run.path, runs.codes.get(run.path, 0)
        runs.begun.append(run.path)
        write_run(folder, "failed" if code else "finished")
        if code != 2:
            (folder / "metrics.jsonl").touch()
        return ["sh", "-c", f"exit {code}" if code >= 0 else f"kill {code} $$"]

    monkeypatch.setattr(compare, "command_of", command_of)
    return runs


def test_whole_seeds_first() -> None:
    request = parse(["experiment=demo", "algos=[fspo,gspo]", "seeds=[3,1]", "clip_values=[published,measured]"])
    assert [run.path for run in request.runs()] == [
        f"{clip_values}/{algo}/seed{seed}"
        for clip_values in ("published", "measured")
        for seed in (3, 1)
        for algo in ("fspo", "gspo")
    ]
    for run in request.runs():
        assert composed(*compare.command_of(run, request)[3:]).fspo.clip_values == run.clip_values


def test_the_conditions_of_a_fair_comparison_hold_unless_overridden() -> None:
    for algo in ("fspo", "rloo", "gspo"):
        config = composed(*parse([]).overrides, f"algo={algo}", "seed=7")
        assert config.algorithm.adv_estimator == "grpo", "one advantage estimator for all"
        assert not config.actor_rollout_ref.actor.use_kl_loss and not config.algorithm.use_kl_in_reward
        assert config.fspo.match_scale == "matched"
        assert config.data.seed == config.actor_rollout_ref.rollout.seed == 7
    for argument, estimator in (("advantage=native", "rloo"), ("algorithm.adv_estimator=opo", "opo")):
        overrides = parse([argument]).overrides
        assert composed(*overrides, "algo=rloo").algorithm.adv_estimator == estimator


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("advantage=mine", ("advantage=mine", "shared", "native")),
        ("algos=[fsop]", ("algos", "'fsop'", "fspo")),
        ("algos=[]", ("algos=[]",)),
        ("seeds=[a]", ("seeds=['a']",)),
        ("seeds=[1,1]", ("seeds",)),
        ("clip_values=[equal]", ("clip_values", "'equal'", "measured", "published")),
        ("run=9", ("run=9", " 8")),
        ("algo=fspo", ("algo=fspo", "algos=[...]")),
        ("run.dir=x", ("run.dir", "out=FOLDER")),
        ("--algos", ("'--algos'", "algos=VALUE")),
        ("evaluate=true", ("evaluate=true",)),
        ("+algos=[fsop]", ("algos", "'fsop'", "fspo")),
        ("fspo.clip_values=published", ("fspo.clip_values=published", "clip_values")),
        ("fspo.algo=mine", ("fspo.algo=mine", "algos")),
        ("dry_run=maybe", ("dry_run=maybe", "true")),
        ("trainer.save_freq=1,2", ("trainer.save_freq=1,2", "trainer.save_freq=[A,B]")),
        ("experiment=nowhere", ("nowhere",)),
        ("trainer.experiment_name=${oc.env:NO_SUCH_NAME}", ("trainer.experiment_name", "NO_SUCH_NAME")),
        ("trainer.total_steps=3", ("total_steps",)),
    ],
)
def test_bad_input_is_named_with_its_remedy(argument: str, says: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match=holds(*says)):
        parse(argument.split())


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.train_batch_size=abc"], ["data.train_batch_size=abc must"]),
        (["actor_rollout_ref.rollout.n=1"], ["algorithm.adv_estimator=grpo "]),
        # fspo's runs would train before grpo's is refused
        (["actor_rollout_ref.actor.clip_ratio_high=0.28"], ["algo=fspo: actor_rollout_ref.actor.clip_ratio_high=0.28"]),
    ],
)
def test_what_would_end_a_run_is_named_before_the_first_one(
    tmp_path: Path, overrides: list[str], says: list[str]
) -> None:
    environment = dict(os.environ)
    request = parse(["algos=[fspo,grpo]", "seeds=[1,2]", f"out={tmp_path}/grid", *overrides])
    for dry_run in (True, False):
        with pytest.raises(BadInput) as error:
            compare.run(dataclasses.replace(request, dry_run=dry_run))
        for problem, begins in zip(str(error.value).splitlines(), says, strict=True):
            assert problem.startswith(begins)
    assert dict(os.environ) == environment and not (tmp_path / "grid").exists()
    write_run(tmp_path / "grid/measured/fspo/seed1", "failed")  # it has its settings
    assert all(problem.startswith("algo=grpo: ") for problem in compare.problems(request))


def test_all_that_is_shipped_can_be_compared(tmp_path: Path) -> None:
    algos = f"algos=[{','.join(choices('algo'))}]"
    assert list(compare.problems(parse([algos, f"out={tmp_path}/grid"]))) == []


def test_a_grid_can_grow_but_its_conditions_cannot_change(tmp_path: Path) -> None:
    first = ["algos=[fspo]", "seeds=[1]", f"out={tmp_path}"]
    assert [cell.path for cell in plan(parse(first))] == ["measured/fspo/seed1"]
    grown = plan(parse([*first[1:], "algos=[gspo]"]))
    assert [cell.path for cell in grown] == ["measured/fspo/seed1", "measured/gspo/seed1"]
    assert len(json.loads((tmp_path / "grid.json").read_text())["runs"]) == 2
    write_run(tmp_path / "measured/gspo/seed1", "finished")
    with pytest.raises(BadInput, match=str(tmp_path)):
        plan(parse([*first, "actor_rollout_ref.actor.optim.lr=1e-5"]))


def test_conditions_may_change_as_long_as_no_run_has_begun(tmp_path: Path) -> None:
    """A run that came to nothing keeps no settings then: else its next start would go on with those of its folder."""
    plan(parse(["algos=[fspo]", "seeds=[1,2]", f"out={tmp_path}"]))
    folder = begun(tmp_path / "measured/fspo/seed1", step=0)
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"status": "failed"}))
    request = parse(["algos=[fspo]", "seeds=[1]", f"out={tmp_path}", "trainer.test_freq=5"])
    assert resume_of(parsed([f"run.dir={folder}"]), JOB) is not None
    plan(request)
    assert resume_of(parsed([f"run.dir={folder}"]), JOB) is None
    made = json.loads((tmp_path / "grid.json").read_text())
    assert (made["overrides"][-1], len(made["runs"])) == ("trainer.test_freq=5", 1)


def test_a_command_runs_what_it_asks_for_and_a_dry_run_writes_nothing(
    tmp_path: Path, runs: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "grid"
    assert compare.run(parse(["algos=[fspo,rloo]", "seeds=[1,2]", f"out={out}", "dry_run=true"])) == 0
    assert not out.exists() and "measured/rloo/seed2: not run" in capsys.readouterr().out
    plan(parse(["algos=[fspo,rloo]", "seeds=[1,2]", f"out={out}"]))  # and interrupted
    assert compare.run(parse(["algos=[fspo]", "seeds=[1,2]", f"out={out}"])) == 0
    assert runs.begun == ["measured/fspo/seed1", "measured/fspo/seed2"]
    printed = capsys.readouterr().out
    assert "measured/rloo/seed1: not run" in printed, "the report is on all that was planned"
    assert re.search(holds("run 1 of 2: fspo, seed 1", "run 2 of 2: fspo, seed 2"), printed)
    compare.run(parse(["algos=[fspo]", "seeds=[2,3]", f"out={out}"]))
    assert re.search(holds("run 1 of 2: fspo, seed 2", "finished", "run 2 of 2: fspo, seed 3"), capsys.readouterr().out)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """Of a command of its own."""
    monkeypatch.setattr(compare, "STARTS", Starts())
    return compare.STARTS


@pytest.mark.parametrize(
    ("number", "code", "status"), [(signal.SIGINT, 130, 130), (signal.SIGINT, 0, 130), (signal.SIGTERM, 75, 75)]
)
def test_a_signal_reaches_the_run_and_no_other_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: Starts, number: signal.Signals, code: int, status: int
) -> None:
    """A run in its last step finishes all the same, with status 0."""

    def command_of(run: PlannedRun, request: Request) -> list[str]:
        begun.append(run.path)
        trap = f"trap 'exit {code}' {number.value}; touch {tmp_path}/begun; sleep 20 & wait; exit 9"
        return ["/bin/sh", "-c", trap]

    def come() -> None:
        wait_until((tmp_path / "begun").exists)
        starts.take(number)

    begun: list[str] = []
    monkeypatch.setattr(compare, "command_of", command_of)
    monkeypatch.setattr(compare, "problems", lambda request: [])
    # A shell that starts its tests in the background has them ignore SIGINT, and a shell then sets no trap.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        threading.Thread(target=come).start()
        assert compare.run(parse(["algos=[fspo]", "seeds=[1,2]", f"out={tmp_path}/grid"])) == status
    finally:
        signal.signal(number, before)
    assert begun == ["measured/fspo/seed1"]


def test_a_second_signal_reaches_the_run_and_is_the_status(monkeypatch: pytest.MonkeyPatch, starts: Starts) -> None:
    starts.signals = [signal.SIGUSR1, signal.SIGTERM]
    monkeypatch.setattr(Starts, "run", lambda *_: 143)
    monkeypatch.setattr(Starts, "is_stopped", lambda _: False)
    assert compare._run_all([PlannedRun("a/b/seed1", "b", 1, "a")], parse(["out=/no/such/folder"])) == 143


@pytest.mark.usefixtures("starts")
def test_no_run_begins_once_the_job_asks_for_the_end(
    tmp_path: Path, runs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stop").touch()
    monkeypatch.setenv(STOP_VARIABLE, str(tmp_path / "stop"))
    assert compare.run(parse(["algos=[fspo]", "seeds=[1,2]", f"out={tmp_path}/grid"])) == 75
    assert runs.begun == []


def test_without_a_run_a_signal_ends_the_command_at_once(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(compare, "ENDING", Ending())
    with pytest.raises(SystemExit) as ended:
        starts.take(signal.SIGHUP)
    assert ended.value.code == 75


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
    config = composed(*compare.command_of(request.runs()[0], request)[3:])
    assert config.run.dir == f"{tmp_path}/jürgen's (1),=[a]&#!/measured/fspo/seed1"
    assert parse(["out=3"]).out == Path.cwd() / "3" and parse(["out=2026_11_23"]).out == Path.cwd() / "2026_11_23"
    assert "~trainer.nnodes" in parse(["~trainer.nnodes", "+trainer.nnodes=1"]).overrides


@pytest.mark.parametrize(("codes", "status"), [((1, 2), 1), ((75, 1), 75), ((-9, 0), 1)])
def test_a_run_that_fails_does_not_keep_the_others_waiting(
    tmp_path: Path, runs: SimpleNamespace, starts: Starts, codes: tuple[int, int], status: int
) -> None:
    request = parse(["algos=[fspo,rloo]", "seeds=[1,2]", f"out={tmp_path}"])
    runs.codes |= dict(zip(("measured/fspo/seed1", "measured/fspo/seed2"), codes, strict=True))
    assert compare.run(request) == status
    assert runs.begun == [run.path for run in request.runs()]
    runs.codes.clear()
    assert compare.run(request) == 0
    assert "measured/rloo/seed1" not in runs.begun[4:]
