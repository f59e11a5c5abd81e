"""Files of others: the reader's bounds, and hostile run folders in a report, an audit and a resumed run."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from composing import composed
from hostile_folders import (
    FILES,
    PART,
    STREAM,
    VALUES,
    Spoil,
    of_config,
    of_files,
    of_lines,
    of_phase,
    of_run_json,
    of_table,
)
from hydra.errors import HydraException
from omegaconf import OmegaConf
from test_report import STEPS, run_files, write_run
from test_run_folder import begun, ready

from fspo.audit import read_audit
from fspo.audit.__main__ import main as audit_command
from fspo.reading import parse_json, printable, read_text, read_yaml
from fspo.records import numbered_lines, read_info
from fspo.report.build import build_report
from fspo.report.runs import expand_paths
from fspo.table import COLUMNS, FOLDER, TableWriter, read_table
from recipe.fspo.accounting.funnel import LengthFunnel
from recipe.fspo.job import JOB
from recipe.runner.faults.phase import read_phase
from recipe.runner.launch import run_folder
from recipe.runner.launch.compose import compose, parsed
from recipe.runner.launch.end_of_turn import add_stop_token
from recipe.runner.launch.run_folder import Start
from recipe.runner.launch.run_settings import resume_of
from recipe.runner.launch.values import PreflightError

#: For one hostile folder, or its file: the slow tests alone look at the time, because a busy machine takes longer.
LIMIT_S = 10.0


def spoiled(base: Path, folder: Path, cases: list[tuple[str, Spoil]]) -> Iterator[tuple[str, Path]]:
    """Copies of a run folder, each with one thing wrong."""
    for number, (name, spoil) in enumerate(cases):
        copy = folder / f"run{number}"
        shutil.copytree(base, copy)
        info = json.loads((copy / "run.json").read_text(encoding="utf-8"))
        (copy / "run.json").write_text(json.dumps(info | {"seed": number + 1}), encoding="utf-8")  # no two are alike
        spoil(copy)
        yield name, copy


def chosen(cases: Iterator[tuple[str, Spoil]], n: int, seed: int = 0) -> list[tuple[str, Spoil]]:
    """``n`` of them, and all that are fewer."""
    every = list(cases)
    return every if len(every) <= n else random.Random(seed).sample(every, n)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run with all the files that a report reads."""
    folder = write_run(tmp_path_factory.mktemp("whole") / "run", "fspo", 0)
    funnel, ends = LengthFunnel(), []
    for step in (1, 2):
        funnel.start(4)
        funnel.end("surplus", [5, 9])
        funnel.train([5, 7], [0, 1], [1, 1])
        ends.append(json.dumps(funnel.end_step(step)[1]) + "\n")
    (folder / "funnel.jsonl").write_text("".join(ends))
    under_way = TableWriter(folder / FOLDER, {"loss": "fspo", "rule": "known"}, run="run", first_step=STEPS + 1)
    under_way.append(run_files("fspo", 0)[1][0] | {"step": STEPS + 1})
    assert (folder / PART).is_file() and (folder / STREAM).is_file()
    (folder / "config.yaml").write_text("trainer: {validation_data_dir: validation}\n")
    dumps = folder / "validation"
    dumps.mkdir()
    for name in ("1", "\u00b23", "9" * 30, "\u0663"):
        (dumps / f"{name}.jsonl").write_text('{"input": "2+2", "output": "4", "acc": 1}\n')
    return folder


def check_reports(base: Path, folder: Path, cases: list[tuple[str, Spoil]], limit_s: float = math.inf) -> None:
    """One report over all of them: it names every folder of which something is left out, and says nothing else."""
    runs = dict(spoiled(base, folder, cases))
    began = time.monotonic()
    report = build_report([base, *runs.values()], folder / "out")
    assert time.monotonic() - began < limit_s * len(runs)
    text = "\n".join(report.problems)
    for name, run in runs.items():
        wrong = ("deep", "a FIFO", "a device", "texts", "NaN", "infinite", "huger", "a bomb")
        if name.startswith("table: ") or (
            not name.startswith("phase.json") and any(f": {what}" in name for what in wrong)
        ):
            assert str(run) in text, f"{name} is not said"
    assert report.runs >= 1 and report.page.stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_every_hostile_folder_is_reported_on(reported: Path, tmp_path: Path, part: int) -> None:
    names = ("metrics.jsonl", "funnel.jsonl")
    cases = [*of_run_json(), *of_files(*FILES), *of_config(), *of_lines(*names), *of_table()][part::10]
    check_reports(reported, tmp_path, cases, LIMIT_S)


def test_hostile_folders_are_reported_on(reported: Path, tmp_path: Path) -> None:
    """80 of 720, drawn with a seed; the others are in the slow test."""
    names = ("metrics.jsonl", "funnel.jsonl")
    cases = [
        chosen(of_run_json(), 20),
        chosen(of_files(*FILES), 10),
        chosen(of_config(), 10),
        chosen(of_lines(*names), 20),
        chosen(of_table(), 20),
    ]
    check_reports(reported, tmp_path, [*itertools.chain(*cases)])


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begun(tmp_path_factory.mktemp("whole") / "run")


def check_resumes(base: Path, folder: Path, cases: list[tuple[str, Spoil]], limit_s: float = math.inf) -> None:
    """What a resumed start reads of each folder and writes to it: it goes on, or is refused in a sentence."""
    config, refused = ready(base), 0
    for name, run in spoiled(base, folder, cases):
        began = time.monotonic()
        config.run.dir = str(run)
        try:
            resume = resume_of(parsed([f"resume={run}"]), JOB)
            assert resume is not None
            compose(JOB, (), resume.base)
            add_stop_token(config, True, True)
            run_folder.begin(Start(config, JOB, tuple(resume.all_overrides(()))))
            run_folder.end(str(run), "failed", "why")
        except (PreflightError, HydraException) as error:
            refused += 1
            assert str(run) in str(error), name
        read_phase(run)
        assert time.monotonic() - began < limit_s, name
    assert refused < len(cases)


@pytest.mark.slow
@pytest.mark.nightly
def test_every_hostile_folder_is_resumed_or_refused(resumed: Path, tmp_path: Path) -> None:
    names = ("run.json", "config.yaml", "metrics.jsonl", "phase.json")
    cases = [*of_run_json(), *of_files(*names), *of_config(), *of_phase()]
    check_resumes(resumed, tmp_path, cases, LIMIT_S)


def test_hostile_folders_are_resumed_or_refused(resumed: Path, tmp_path: Path) -> None:
    """55 of 550, drawn with a seed; the others are in the slow test."""
    names = ("run.json", "config.yaml", "phase.json")
    cases = [chosen(of_run_json(), 15), chosen(of_files(*names), 10), chosen(of_config(), 15), chosen(of_phase(), 15)]
    check_resumes(resumed, tmp_path, [*itertools.chain(*cases)])


def test_an_audit_names_file_and_column_and_uses_the_rest(
    reported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = len(read_table(reported))
    for name, run in spoiled(reported, tmp_path, [*of_table()]):
        records = read_audit(run)
        if name.startswith("quiet: "):
            assert len(records.responses) == whole and not records.problems, name
            continue
        assert any(f"{run}/{FOLDER}/" in problem for problem in records.problems), name
        file, _, what = name.removeprefix("table: ").partition(": ")
        if file in COLUMNS and what not in ("no column", "deep"):  # of these the whole file is left out
            assert any(f"column {file} " in problem or f"columns {file}" in problem for problem in records.problems), (
                name
            )
        assert len(records.responses) < whole or file not in (PART, STREAM), name
    for name, run in spoiled(
        reported, tmp_path / "audits", chosen((case for case in of_table() if case[0].startswith("table")), 8)
    ):
        assert audit_command([str(run)]) in (1, 2), name
        assert f"{run}/{FOLDER}/" in capsys.readouterr().err, name


def test_a_table_is_gone_on_with_or_refused_by_name(reported: Path, tmp_path: Path) -> None:
    """A resumed start writes to it: the rows of its steps are there, whatever became of the others."""
    cases = [
        *of_files(PART, STREAM),
        *of_table(),
        *(case for case in of_files(FOLDER) if case[0] != f"{FOLDER}: a folder"),
    ]
    rows, refused = run_files("fspo", 0)[1][0] | {"step": 3}, 0
    for name, run in spoiled(reported, tmp_path, cases):
        try:
            writer = TableWriter(run / FOLDER, {"loss": "fspo", "rule": "known"}, run="run", first_step=3)
            writer.append(rows)
            writer.close()
        except OSError as error:
            refused += 1
            assert str(run / FOLDER) in str(error), name
            continue
        table = read_table(run)
        assert (table.columns["step"] == 3).sum() == len(rows["S"]), name
        assert (table.columns["step"] <= 3).all(), name
    assert refused < len(cases) / 4


def test_a_plan_names_the_runs_that_are_none(tmp_path: Path, reported: Path) -> None:
    shutil.copytree(reported, tmp_path / "grid/a")
    runs = [
        {"path": "a", "algo": "fspo", "seed": 0},
        {"path": [1], "algo": "x", "seed": 0},
        7,
        {"path": "b", "seed": 1},
    ]
    for planned in (*VALUES.values(), json.dumps(runs)):
        (tmp_path / "grid/grid.json").write_text(f'{{"runs": {planned}}}')
        _, known, problems = expand_paths([tmp_path / "grid"])
    assert list(known) == [tmp_path / "grid/a"] and len(problems) == 3
    assert all(f"{tmp_path}/grid/grid.json: run {number}:" in "".join(problems) for number in (2, 3, 4))


def test_a_table_of_responses_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows = pa.table({"S": pa.array([0.0] * 4), "L": pa.array([1e300, 5, 5, 5]), "step": pa.array([1.0, 1e300, 1, 1])})
    pq.write_table(rows, path)
    with pytest.raises(ValueError, match=f"{path}.*(step|L) .*1e\\+300"):
        read_table(path)
    with pq.ParquetWriter(path, pa.schema({"S": pa.float32(), "L": pa.float32()})) as writer:
        part = pa.table({name: pa.array(np.ones(2**20, np.float32)) for name in ("S", "L")})
        for _ in range(10):
            writer.write_table(part)
    with pytest.raises(ValueError, match=f"{path}.*10485760 rows"):
        read_table(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=str(path)):
        read_table(path)


def test_yaml_is_understood_as_omegaconf_does(tmp_path: Path) -> None:
    path, resolved = tmp_path / "config.yaml", composed("algo=gspo")
    path.write_text(OmegaConf.to_yaml(resolved))
    assert read_yaml(path) == OmegaConf.to_container(OmegaConf.load(path))
    path.write_text(
        "a: 1e-6\nb: 2020-01-01\nc: yes\nd: 'yes'\ne:\nf: ~\ng: .inf\nh: 1_000\ni: 0x1f\nj: -1.5\nk: [Null, '']\n"
    )
    assert read_yaml(path) == OmegaConf.to_container(OmegaConf.load(path))


def test_a_file_that_is_wrong_throughout_is_not_read_to_its_end(tmp_path: Path) -> None:
    path, problems = tmp_path / "metrics.jsonl", list[str]()
    path.write_text("x\n" * 5000 + '{"step": 1}\n')
    assert not list(numbered_lines(path, problems))
    assert 1000 <= len(problems) <= 1001 and "line 1000" in problems[-1]


def test_texts_hold_nothing_that_cannot_be_written_or_that_a_terminal_obeys(tmp_path: Path) -> None:
    assert parse_json('"\\ud83d\\ude00 \\ud800"') == "\U0001f600 ?"
    assert printable("a\x1b[2J\u202eb\tc") == "a\\x1b[2J\\u202eb\tc"
    (tmp_path / "run.json").write_text('{"algo": "a\\u001b[2J"}')
    problems: list[str] = []
    assert read_info(tmp_path, problems) == {} and "algo" in problems[0] and "\x1b" not in problems[0]
    with pytest.raises(OSError, match="larger"):
        read_text(tmp_path / "run.json", limit=5)


def test_an_override_that_is_nested_too_deep_is_refused() -> None:
    assert parsed(["a=[[1],{b:[2]}]", "b='" + "[]" * 100 + "'"])
    with pytest.raises(HydraException, match="deep"):
        parsed([f"a={'{a:' * 5000}1{'}' * 5000}"])
