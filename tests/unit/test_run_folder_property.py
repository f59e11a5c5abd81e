"""Any sequence of starts, ends, moves and files in the way: nothing of the user's is lost, and no run becomes another.

The command line, the checks, the lock, ``run.json`` and the records are the real ones (:func:`launch`). Only what needs
Ray is not: verl's ``run_ppo`` is a function that logs steps and saves checkpoints, and ends as a run may end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import tempfile
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from composing import composed
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from omegaconf import DictConfig

from fspo.records import INFO_FILE
from recipe.fspo.job import JOB
from recipe.runner.checkpoints.integrity import latest, remove_old, restore_tracker, step_folder, step_of
from recipe.runner.launch import run_folder, start
from recipe.runner.launch.run_settings import run_info, with_settings_of_run
from recipe.runner.launch.values import PreflightError

SMALL = ("data.offline_task.n_train=64", "data.offline_task.n_test=8")
LR = "actor_rollout_ref.actor.optim.lr"
FOLDERS = st.sampled_from(["one", "two"])
CHANGES = st.sampled_from(
    [
        *((), (), ("algo=gspo",), ("seed=2",), ("trainer.save_freq=1",), (f"{LR}=1e-5",)),
        (f"{LR}=1e-5", f"run.allow_changed=[{LR}]"),
        *(("trainer.resume_mode=disable",), ("OTHER",), ("BACK",)),
    ]
)
#: What stands for ``trainer.resume_from_path``: a checkpoint of the other folder, or the run's own oldest.
BEGIN_WITH = {"OTHER", "BACK"}
#: Files of the user's; those from the second line on have names that a run uses.
NAMES = st.sampled_from(
    [
        *(".lock", "notes.txt", "data/mine.txt"),
        *("config.yaml", INFO_FILE, "metrics.jsonl", "length_stats.jsonl", "run.png", "phase.json", "driver.log"),
        *("data/train.parquet", "code/mine.py", "checkpoints/global_step_1/mine.txt"),
    ]
)
#: How a start ends: before its first step, in the middle of one, at its end, and so on.
ENDS = st.sampled_from(["at once", "in a step", "in a line", "killed", "interrupted", "failed", "finished", "finished"])


class _Killed(BaseException):
    """SIGKILL: nothing that follows is done."""


def facts(config: DictConfig) -> dict[str, Any]:
    """What every record of a run says of its settings here."""
    return {"fspo.algo": config.fspo.algo, LR: config.actor_rollout_ref.actor.optim.lr, "seed": config.seed}


def begun(config: DictConfig, earlier: str | None) -> tuple[int, str]:
    """The step that a start continues from, and the training that its checkpoint comes from, as verl's trainer does.

    Without a checkpoint a run begins again: documented, and the same training as ``earlier``, that of its records.
    """
    mode, saved = config.trainer.resume_mode, latest(Path(config.trainer.default_local_dir))
    if mode == "resume_path":
        saved = Path(config.trainer.resume_from_path)
    if saved is None or mode == "disable":
        return 0, earlier if earlier and mode == "auto" else uuid.uuid4().hex
    return step_of(saved), training_in(saved) or ""


def training_in(saved: Path) -> str | None:
    """The training that a checkpoint comes from; None if it is not there."""
    if not (saved / "data.pt").exists():
        return None
    with zipfile.ZipFile(saved / "data.pt") as archive:
        return archive.read("training").decode()


def save(config: DictConfig, step: int, training: str) -> None:
    folder = step_folder(Path(config.trainer.default_local_dir), step)
    (folder / "actor").mkdir(parents=True, exist_ok=True)
    names = [f"actor/{kind}_world_size_1_rank_0.pt" for kind in ("model", "optim", "extra_state")]
    for name in (*names, "data.pt"):
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("training", training)
    restore_tracker(folder.parent, folder)
    remove_old(folder.parent, step, 2)


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class RunFolders(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.users: dict[str, bytes] = {}
        self.logged: dict[str, list[dict[str, Any]]] = {}
        self.trainings: dict[str, str] = {}
        #: For each folder the last command that was not refused, and the step and training that the next goes on from.
        self.commands: dict[str, list[str]] = {}
        self.states: dict[str, tuple[int, str]] = {}
        self.must_begin_with: tuple[int, str] | None = None
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(start, "Reaper", lambda *_: SimpleNamespace(bye=lambda: None))
        watchdog = SimpleNamespace(death=None, stop=lambda: None)
        self.patches.setattr(start, "_start_watchdog", lambda *_: watchdog)

    def teardown(self) -> None:
        self.patches.undo()
        shutil.rmtree(self.root)

    # ---------------------------------------------------------------- what may happen

    @rule(folder=FOLDERS, name=NAMES)
    def the_user_makes_a_file(self, folder: str, name: str) -> None:
        path = self.root / folder / name
        ours = run_info(self.root / folder) is not None and name not in (".lock", "notes.txt", "data/mine.txt")
        if ours or path.exists() or path.parent.is_file():  # what a run has made is the run's
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        self.users[f"{folder}/{name}"] = path.read_bytes()

    @rule(folder=FOLDERS)
    @precondition(lambda self: (self.root / "one").exists() != (self.root / "two").exists())
    def the_folder_is_moved(self, folder: str) -> None:
        old, new = ("one", "two") if (self.root / "one").exists() else ("two", "one")
        (self.root / old).rename(self.root / new)
        self.commands.pop(old, None)  # names the old place
        for names in (self.users, self.logged, self.trainings, self.states):
            moved = {name.replace(old, new, 1): value for name, value in names.items()}
            names.clear()
            names.update(moved)  # type: ignore[arg-type]

    @rule(folder=FOLDERS, resume=st.booleans(), change=CHANGES, steps=st.integers(1, 3), end=ENDS, beside=st.booleans())
    def a_run_is_started(
        self, folder: str, resume: bool, change: tuple[str, ...], steps: int, end: str, beside: bool
    ) -> None:
        place, before = self.root / folder, tree(self.root)
        other = self.root / ("two" if folder == "one" else "one")
        if BEGIN_WITH & {*change}:
            saved = sorted(((other if change == ("OTHER",) else place) / "checkpoints").glob("global_step_*"))
            begins = saved[0] if saved else other / "checkpoints" / "global_step_2"
            change = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={begins}")
        command = [f"{'resume' if resume else 'run.dir'}={place}", *SMALL, *change]
        last = (self.logged.get(folder) or [None])[-1]
        held = run_folder.held(str(place)) if beside and place.exists() else contextlib.nullcontext()
        said = io.StringIO()
        with held, contextlib.redirect_stdout(said):
            refused = self.start(command, folder, steps, end)
        if refused is not None:
            assert tree(self.root) == before, f"refused ({refused}), but something was written"
        else:
            assert not (beside and str(place) in before), "two starts in one folder"
            self.changes_are_said(place, last, said.getvalue())
            self.commands[folder] = command

    @rule(folder=FOLDERS, same=st.booleans(), steps=st.integers(1, 3), end=ENDS)
    def a_run_goes_on(self, folder: str, same: bool, steps: int, end: str) -> None:
        """By ``resume=`` as it is printed, or by the same command: a restart, a requeued job, a person."""
        step, training = self.states.get(folder, (0, ""))
        own = self.root / folder / "checkpoints" / f"global_step_{step}"
        command = self.commands.get(folder, []) if same else [f"resume={self.root / folder}"]
        begins = [each.partition("=")[2] for each in command if each.startswith("trainer.resume_from_path=")]
        others = run_info(self.root / folder) or {}
        source = Path((begins or [others.get("resume_from_path") or ""])[0])
        if not command or folder not in self.states or "trainer.resume_mode=disable" in command:
            return
        if step and not own.exists() and training_in(source) != training:
            return  # it has saved nothing, and what it began with is gone
        self.must_begin_with = step, training
        with contextlib.redirect_stdout(io.StringIO()):
            refused = self.start(command, folder, steps, end)
        self.must_begin_with = None
        assert refused is None, refused

    def start(self, command: list[str], folder: str, steps: int, end: str) -> str | None:
        """Run a command line of ``recipe.fspo.main``; what it was refused with, if it was."""
        try:
            overrides = with_settings_of_run(command, JOB)
        except PreflightError as error:
            return str(error)
        ends_well = run_folder.end
        if end in ("killed", "in a line", "in a step"):
            self.patches.setattr(run_folder, "end", lambda *_: None)
        self.patches.setattr(start, "run_ppo", lambda config, **_: self.train(config, folder, steps, end))
        try:
            job = dataclasses.replace(JOB, conclude=lambda config: None)
            start.launch(start.prepare(composed(*overrides)), job, overrides)
        except PreflightError as error:
            return str(error)
        except (_Killed, KeyboardInterrupt, RuntimeError):
            return None
        finally:
            self.patches.setattr(run_folder, "end", ends_well)
        return None

    def train(self, config: DictConfig, folder: str, steps: int, end: str) -> None:
        last, training = begun(config, self.trainings.get(folder))
        assert self.must_begin_with in (None, (last, training)), "not what was done last"
        self.trainings[folder], self.states[folder] = training, (last, training)
        if end == "at once":
            raise RuntimeError
        log, logged = run_folder.RunLog(config, total_steps=99), self.logged.setdefault(folder, [])
        told = facts(config) | {"training": training}
        for step in range(last + 1, last + 1 + steps):
            log.append("length_stats.jsonl", [{"step": step, "metrics": told}])
            if end == "in a step":
                raise _Killed
            log.append("metrics.jsonl", [{"step": step, "metrics": told}])
            logged.append({"step": step, "metrics": told})
            if step % min(2, config.trainer.save_freq) == 0:
                save(config, step, training)
                self.states[folder] = step, training
        if end == "in a line":
            with (Path(config.run.dir) / "metrics.jsonl").open("a") as file:
                file.write('{"step": 9, "metr')
        if end in ("in a line", "killed"):
            raise _Killed
        if end == "interrupted":
            raise KeyboardInterrupt
        if end == "failed":
            raise RuntimeError

    # ---------------------------------------------------------------- what must hold

    def changes_are_said(self, place: Path, last: dict[str, Any] | None, said: str) -> None:
        """A setting with which a run goes on that it did not have before is printed and recorded."""
        new = (self.logged.get(place.name) or [None])[-1]
        if last is None or new is last or new is None:
            return
        recorded = json.loads((place / INFO_FILE).read_text())["changed"]
        for key, value in new["metrics"].items():
            assert key != "training" or value == last["metrics"][key], "another training's weights"
            if value != last["metrics"][key]:
                assert f"note: {key} was {last['metrics'][key]!r}" in said
                assert (key, value) in [(each["key"], each["new"]) for each in recorded]
                assert key == LR, f"{key} changed without leave"

    @invariant()
    def no_file_of_the_users_is_lost_or_rewritten(self) -> None:
        now = tree(self.root)
        assert {name: now.get(name) for name in self.users} == self.users

    @invariant()
    def every_record_is_kept_and_of_the_same_run(self) -> None:
        for folder, logged in self.logged.items():
            assert list(whole_lines(self.root / folder / "metrics.jsonl")) == logged
            records = [*logged, *whole_lines(self.root / folder / "length_stats.jsonl")]
            runs = {tuple(record["metrics"][key] for key in ("fspo.algo", "seed", "training")) for record in records}
            assert len(runs) <= 1, f"{folder} mixes runs: {runs}"
            info = run_info(self.root / folder)
            assert not logged or (info is not None and info["algo"] == logged[-1]["metrics"]["fspo.algo"])


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def explore(examples: int, steps: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        RunFolders,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_few_sequences() -> None:
    explore(examples=6, steps=6)


@pytest.mark.slow
def test_many_sequences() -> None:
    explore(examples=150, steps=12)
