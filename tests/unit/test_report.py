"""Whole reports from real run folders, complete, partial and broken."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from fspo.audit import Audit, read_audit
from fspo.audit.description import what_follows
from fspo.diagnostics import LengthDiagnostics
from fspo.fairness.lre import lre_in_words
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.report.__main__ import main
from fspo.report.__main__ import main as report_command
from fspo.report.build import NothingReadError, build_report
from fspo.report.common_records import common_records
from fspo.report.figures import COLOURS, algo_looks, curves, draw_curve
from fspo.report.findings import clip_values_in_words, compared, differing_settings, findings
from fspo.report.groups import clip_profiles, group_runs, length_profile, pooled_lre_difference, standard_measures
from fspo.report.runs import Run, load_run, load_runs
from fspo.report.summary import summarise
from fspo.report.tables import show_lre
from fspo.responses import Responses, rows_of
from fspo.table import FOLDER, Rows, TableWriter, join_rows

STUDY = Path(__file__).parents[2] / "benchmarks/study"

STEPS = 4
PNG = b"\x89PNG\r\n\x1a\n"
ACCURACY = "val-core/sums/acc/mean@1"


@functools.cache
def run_files(loss: str, seed: int, moves: float = 1.0, advantage: float = 1.0) -> tuple[str, tuple[Rows, ...], str]:
    """Text of metrics.jsonl, rows of each step, and text of run.json of a small run."""
    generator = torch.Generator().manual_seed(seed)
    diagnostics = LengthDiagnostics()
    metrics, tables = [{"step": 0, "metrics": {ACCURACY: 0.2 + 0.01 * seed}}], []
    for step in range(1, STEPS + 1):
        parts = []
        for update, scale in enumerate((0.0, 0.03, 0.04, 0.04)):
            length_B = (torch.rand(64, generator=generator) * 180).long() + 1
            mask_BT = torch.arange(181)[None] < length_B[:, None]
            log_prob_BT = torch.randn(64, 181, generator=generator) * scale * moves
            advantages_BT = advantage * torch.randn(64, 1, generator=generator).expand(-1, 181)
            output = sequence_policy_loss(
                log_prob_BT, torch.zeros_like(log_prob_BT), advantages_BT, mask_BT, ALGORITHMS[loss]
            )
            place = {"update": update, "minibatch": update, "truncated": 0.0}
            parts.append(rows_of(output) | {name: np.full(64, value) for name, value in place.items()})
        tables.append(join_rows([part | {"step": np.full(64, step)} for part in parts]))
        values = diagnostics.update(Responses.of_rows(tables[-1])) | {
            "critic/rewards/mean": 0.1 * step,
            "response_length/mean": 90.0 + step,
        }
        metrics.append({"step": step, "metrics": values})
    metrics.append({"step": STEPS, "metrics": {ACCURACY: 0.5 + 0.01 * seed}})
    settings = ALGORITHMS[loss]
    info = {
        "algo": loss.removeprefix("seq_"), "seed": seed, "status": "finished", "validation_problems": {"sums": 200},
        "loss": {"loss_mode": loss, "c_low": settings.c_low, "c_high": settings.c_high, "x": 1},
        "command": ["python", "-m", "x"], "versions": {"torch": "2"},
    }  # fmt: skip
    return "\n".join(map(json.dumps, metrics)) + "\n", tuple(tables), json.dumps(info)


def write_table(folder: Path, steps: Sequence[Rows], first_step: int = 0) -> None:
    writer = TableWriter(folder / FOLDER, {"loss": "fspo", "rule": "known"}, run="run", first_step=first_step)
    for rows in steps:
        writer.append(rows)


def write_run(folder: Path, loss: str, seed: int, /, **info: object) -> Path:
    folder.mkdir(parents=True)
    metrics, steps, described = run_files(loss, seed)
    (folder / "metrics.jsonl").write_text(metrics)
    write_table(folder, steps)
    (folder / "run.json").write_text(json.dumps(json.loads(described) | info))
    return folder


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    folder, plan = tmp_path / "grid", []
    for loss in ("fspo", "seq_rloo"):
        for seed in (0, 1, 2, 3):
            plan.append({"path": f"{loss}/{seed}", "algo": loss.removeprefix("seq_"), "seed": seed})
            if (loss, seed) != ("seq_rloo", 3):
                write_run(folder / loss / str(seed), loss, seed)
    (folder / "grid.json").write_text(json.dumps({"runs": plan}))
    return folder


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report without its figures, which take most of its time."""
    monkeypatch.setattr("fspo.report.build.comparison_figures", lambda *arguments: [])


class Page:
    """A page's source, its text, and the addresses in it; every tag must be closed."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text(encoding="utf-8")
        self.text = html.unescape(re.sub(r"<[^>]*>", " ", self.source))
        self.addresses = re.findall(r'(?:src|srcset|href)="([^"]*)"', self.source)
        opened = Counter(tag for tag in re.findall(r"<([a-z]\w*)", self.source) if tag not in ("meta", "img"))
        assert opened == Counter(re.findall(r"</(\w+)>", self.source))


def summary_of(out: Path, comparison: str = "published") -> dict[str, Any]:
    """The findings and tables of a report as its summary.json holds them."""
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())["comparisons"][comparison]
    return summary


def cells(table: dict[str, Any]) -> dict[str, list[str]]:
    return {head: row for head, _, row in table["rows"]}


def test_report_of_a_grid(grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([str(grid), "--out", str(out), "--title", "T<1>"]) == 0
    assert "7 runs, 1 not run" in capsys.readouterr().out
    page = Page(out / "report.html")
    assert "T<1>" in page.text, "escaped"
    assert "not run" in page.text and "on rloo's records" in page.text
    assert page.text.index("Even?") < page.text.index("Final numbers") < page.text.index("Settings: published")
    clip = page.text.index("actor_rollout_ref.actor.policy_loss.c_low")
    assert page.text[clip:].split()[1:3] == ["0.03", "0.223144"], "settings that differ"
    assert "policy_loss.s_max" not in page.text, "and no others"
    assert 'id="problems"' not in page.source and "<script" not in page.source
    assert page.addresses and all(a.startswith(("data:image/png;", "#")) for a in page.addresses), "self-contained"
    pictures = {path.name: path.read_bytes() for path in (out / "figures").iterdir()}
    curves = ("reward", "held_out_0", "response_length", "clip_rate", "lre", "clip_by_length", "removed_by_length")
    assert pictures.keys() == {f"comparison1_{name}.png" for name in (*curves, "distribution1", "distribution2")}
    assert all(png.startswith(PNG) for png in pictures.values())
    summary = summary_of(out)
    assert "lower than rloo" in summary["findings"][0]["sentence"]
    assert cells(summary["final"])["held-out sums/acc/mean@1"][0].startswith("0.515 [")
    assert summary["paired"]["heads"] == ["fspo - rloo (3 paired)"]
    assert cells(summary["paired"])["LRE, symmetric"][0].startswith("*-"), "below RLOO's in these data, beyond noise"


def claims(sentence: str) -> list[str]:
    return re.findall(r"(?:lower|higher) than \w+", sentence)


def sentences(folder: Path, **groups: tuple[str, dict[int, int]]) -> dict[str, str]:
    """The findings' sentences by subject; of each algorithm the loss, and the seeds with those of their data."""
    runs = [
        load_run(write_run(folder / algo / str(seed), loss, data, algo=algo, seed=seed))
        for algo, (loss, seeds) in groups.items()
        for seed, data in seeds.items()
    ]
    chosen = group_runs(runs)
    results = findings(chosen, clip_profiles(chosen), standard_measures(runs))
    return {finding.subject: finding.sentence for finding in results}


def test_a_difference_that_is_there_is_told_with_its_sign(tmp_path: Path) -> None:
    # S has a standard deviation proportional to sqrt(L), so a sqrt(L) band accepts evenly and a constant one does not.
    same = {0: 0, 1: 1, 2: 2}
    texts = sentences(tmp_path, fspo=("fspo", same), rloo=("seq_rloo", same), gspo=("fspo", {0: 3, 1: 4, 2: 5}))
    assert claims(texts["Acceptance by length"]) == ["lower than rloo"], "gspo has other sequences and the same band"
    assert claims(texts["What the clip removes"])[0] == "lower than rloo"
    # The accuracies are equal by seed for rloo, and 0.03 higher for each seed of gspo.
    assert claims(texts["Learning"]) == ["lower than gspo"]
    swapped = sentences(tmp_path / "swapped", fspo=("seq_rloo", same), rloo=("fspo", same))
    assert claims(swapped["Acceptance by length"]) == ["higher than rloo"]
    for name, seeds in (("two", {0: 0, 1: 1}), ("apart", {7: 0, 8: 1, 9: 2})):
        few = sentences(tmp_path / name, fspo=("fspo", same), rloo=("seq_rloo", seeds))
        assert len(few) == 3 and not any(claims(sentence) for sentence in few.values())


@pytest.mark.usefixtures("undrawn")
def test_runs_that_ended_at_different_steps_are_not_compared(tmp_path: Path) -> None:
    plan, out = [("fspo", "fspo"), ("rloo", "seq_rloo")], tmp_path / "out"
    runs = [write_run(tmp_path / algo / str(s), loss, s, algo=algo, seed=s) for s in range(4) for algo, loss in plan]

    def claimed(*shortened: int) -> list[str]:
        for seed in shortened:
            path = tmp_path / "rloo" / str(seed) / "metrics.jsonl"
            lines = path.read_text().splitlines(True)
            path.write_text("".join(line for line in lines if json.loads(line)["step"] < STEPS))
            write_table(path.parent, (), first_step=STEPS)
        build_report(runs, out)
        return [claim for finding in summary_of(out)["findings"] for claim in claims(finding["sentence"])]

    assert "lower than rloo" in claimed(1)
    assert "over 3 seeds, without seed 1" in summary_of(out)["findings"][0]["differences"]
    assert summary_of(out)["paired"]["heads"] == ["fspo - rloo (3 paired)"]
    assert not claimed(0, 2, 3)
    assert not cells(summary_of(out)["paired"])


def test_settings_that_differ_are_those_that_a_reader_wants_to_see(tmp_path: Path) -> None:
    runs = []
    for algo, rate in (("fspo", 1e-4), ("rloo", 1e-5)):
        for seed in (0, 1):
            folder = write_run(tmp_path / algo / str(seed), "fspo", seed, algo=algo)
            config = {
                "run": {"dir": str(folder)}, "fspo": {"algo": algo}, "data": {"seed": seed, "file": f"{folder}/x"},
                "optim": {"lr": rate, "beta": 0.9}, "micro": seed if algo == "rloo" else 0,
                "ray_kwargs": {"ray_init": {"id": f"{algo}{seed}"}},
            }  # fmt: skip
            (folder / "config.yaml").write_text(json.dumps(config))
            runs.append(load_run(folder))
    groups = group_runs(runs)
    assert {head: row for head, _, row in compared(groups, differing_settings(groups)).rows} == {
        "seeds": ["0, 1", "0, 1"], "steps": ["4", "4"], "lr": ["0.0001", "1e-05"], "micro": ["0", "0 or 1"]
    }  # fmt: skip
    (runs[0].path / "config.yaml").unlink()
    assert not differing_settings(groups), "of one run only the loss is known"


def test_a_report_writes_below_its_folder_and_reads_below_the_run(tmp_path: Path) -> None:
    run, out = tmp_path / "given" / "run", tmp_path / "out"
    write_run(run, "fspo", 0, clip_values=f"{tmp_path}/escaped/x", algo="../../up/<b>y")
    write_run(tmp_path / "given" / "other", "fspo", 1, clip_values="../../escaped", algo="a/b")
    (mine := tmp_path / "mine").mkdir()
    (tmp_path / "given/grid.json").write_text(
        json.dumps({"runs": [{"path": path, "algo": "x", "seed": 1} for path in ("run", "other", "../elsewhere")]})
    )
    write_run(tmp_path / "elsewhere", "fspo", 3, algo="ELSEWHERE")
    linked = write_run(tmp_path / "linked", "fspo", 2, algo="LINKED")
    (mine / "mine.yaml").write_text("trainer: {x: SECRET}")
    (linked / "config.yaml").symlink_to(mine / "mine.yaml")
    before = {*tmp_path.rglob("*")}
    report = build_report([tmp_path / "given", linked], out)
    assert report.runs == 2
    assert all(path.is_relative_to(out) for path in {*tmp_path.rglob("*")} - before)
    text = report.page.read_text()
    assert len([*(out / "figures").iterdir()]) == text.count("data:image"), "a file for each figure"
    assert "SECRET" not in text and "ELSEWHERE" not in text and "up/&lt;b&gt;y" in text and "up/<b>y" not in text
    for part in ("../elsewhere", f"{linked}/config.yaml"):
        assert any(part in problem for problem in report.problems), part


@pytest.mark.usefixtures("undrawn")
def test_broken_and_partial_runs_are_named_and_the_rest_is_used(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, (part,) = grid / "fspo/0/metrics.jsonl", (grid / "fspo/1/responses").iterdir()
    metrics.write_text('{"step": 1, "metrics": {"critic/rewards/mean": 0.5, "a": null}}\nnonsense\n{"step": 2, "m')
    part.write_bytes(part.read_bytes()[:-50])
    absent = tmp_path / "absent"
    report = build_report([grid, absent], tmp_path / "out")
    for place, what in (
        (f"{metrics}:2", "JSON"), (f"{metrics}:3", "cut short"), (part, "Parquet"),
        (absent, "does not exist"),
    ):  # fmt: skip
        assert any(problem.startswith(str(place)) and what in problem for problem in report.problems), (place, what)
    assert not any(problem.startswith(f"{metrics}:1:") for problem in report.problems), "null means undefined"
    assert report.runs == 7
    assert 'id="problems"' in report.page.read_text()
    page = report.page.read_text()
    (tmp_path / "file.csv").touch()
    for path, what in ((absent, "does not exist"), (tmp_path / "file.csv", "no .parquet"), (tmp_path, "run.json")):
        assert main([str(path), "--out", str(tmp_path / "out")]) == 2, "nothing can be read"
        error = capsys.readouterr().err
        assert str(path) in error and what in error and "give folders" in error
    assert report.page.read_text() == page


@pytest.mark.usefixtures("undrawn")
def test_files_that_no_report_has_written_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = write_run(tmp_path / "run", "fspo", 0), tmp_path / "out"
    for name in ("report.html", "summary.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("[1]")
        assert main([str(run), "--out", str(folder)]) == 2
        assert f"{folder / name} exists" in capsys.readouterr().err
        assert [file.name for file in folder.iterdir()] == [name] and (folder / name).read_text() == "[1]"
    assert [main([str(run), "--out", str(out)]) for _ in range(2)] == [0, 0], "its own are replaced"


def test_what_a_run_has_left_by_going_back_is_in_no_figure(tmp_path: Path) -> None:
    """Four steps; then from the checkpoint of the first one another second step, of which the validation is worse."""
    once, back = (write_run(tmp_path / name, "fspo", 0) for name in ("once", "back"))
    text = (back / "metrics.jsonl").read_text()
    again = [line for line in text.splitlines(True) if json.loads(line)["step"] == 2]
    again.append(json.dumps({"step": 2, "metrics": {ACCURACY: 0.1}}) + "\n")
    (back / "metrics.jsonl").write_text(text + "".join(again))
    write_table(back, run_files("fspo", 0)[1][1:2], first_step=2)
    whole, left = load_run(once), load_run(back)
    assert (list(whole.steps), list(left.steps)) == ([0, 1, 2, 3, 4], [0, 1, 2])
    assert left.series(ACCURACY)[1].tolist() == [0.2, 0.1]
    assert np.unique(left.responses.step_B).tolist() == [1, 2] and left.responses.batches == 6
    first_two = whole.responses.select(whole.responses.step_B <= 2)
    for name in ("s_B", "length_B", "batch_B", "kept_B"):
        np.testing.assert_array_equal(getattr(left.responses, name), getattr(first_two, name))


@pytest.mark.usefixtures("undrawn")
def test_a_seed_run_twice_counts_once_unless_its_clip_values_differ(tmp_path: Path) -> None:
    twice = [write_run(tmp_path / name, "fspo", 0) for name in ("a", "b")]
    matched = write_run(tmp_path / "c", "fspo", 0, clip_values="matched")
    report = build_report([*twice, matched], tmp_path / "out")
    assert report.runs == 2
    (problem,) = report.problems
    assert problem.startswith(f"{twice[0]}: ") and str(twice[1]) in problem
    text = Page(report.page).text
    assert text.index("Comparison: published") < text.index("Comparison: matched")
    assert summary_of(tmp_path / "out", "matched")["final"]["heads"] == ["fspo (n = 1)"]


def test_settings_come_from_the_loss_mode_and_what_overrides_it(tmp_path: Path) -> None:
    loss = {"loss_mode": "seq_gspo", "c_low": 0.01, "drift": None, "other": 3}
    run = load_run(write_run(tmp_path / "a", "seq_gspo", 0, loss=loss))
    assert run.loss_settings == dataclasses.replace(ALGORITHMS["seq_gspo"], c_low=0.01)
    for unknown in ({"loss_mode": "vanilla"}, {"band": "round"}, [1], None):
        assert dataclasses.replace(run, info={"loss": unknown}).loss_settings is None


def test_summary_of_whole_partial_and_empty_runs(tmp_path: Path) -> None:
    whole, part, empty = (tmp_path / name for name in ("whole", "part", "empty"))
    starts = [{"started": "2026-01-01T00:00:00+00:00"}, {"started": "2026-01-01T00:10:00+00:00"}]
    write_run(whole, "fspo", 0, starts=starts)
    shutil.copytree(whole, part)
    shutil.rmtree(part / FOLDER)
    metrics = {ACCURACY: 3.7, "fspo/truncated_frac": 0.755, "response_length/clip_ratio": 0.1}
    (part / "metrics.jsonl").write_text(f'{json.dumps({"step": 3, "metrics": metrics})}\n{{"step": 4, "met')
    empty.mkdir()
    for folder in (whole, part, empty):
        assert f"figure: {folder / 'run.png'}" in summarise(folder)
        assert (folder / "run.png").read_bytes().startswith(PNG)
    text = summarise(whole)
    assert re.search(r"\(step 0\): 0\.200  .*\[0\.\d+, 0\.\d+\] over 200 problems", text)
    assert "were cut" not in text
    run = load_run(whole)
    other = write_run(tmp_path / "other", "seq_gspo", 1)
    lre = show_lre(length_profile([run]).error)  # type: ignore[union-attr]
    for beside in ([], [other]):  # one number: console, claim, common records and table
        title = Page(build_report([whole, *beside], tmp_path / "out").page).text
        assert f"Clipping by response length: fspo{', gspo' * len(beside)} (2026-01-01)" in title
        summary = summary_of(tmp_path / "out")
        assert lre in text and f"fspo: LRE {lre}" in summary["findings"][0]["numbers"]
        (own,) = re.findall(r"(0\.\d+) \[(0\.\d+), (0\.\d+)\]", cells(summary["common_records"])["fspo, own clips"][0])
        assert lre == lre_in_words(*map(float, own))
        assert cells(summary["final"])["LRE, symmetric"][0] == own[0]
    assert summarise(part).count("(step 3): 3.700\n") == 1, "one validation, and no interval of what is no share"
    assert "in step 3 76% of the responses were cut at data.max_response_length" in summarise(part)


def test_a_validation_before_the_last_step_is_not_called_the_one_after_training(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "fspo", 0)
    lines = [{"step": step, "metrics": {"critic/rewards/mean": 0.1}} for step in (1, 2, 3)]
    for at, step in ((0, 0), (2, 1)):  # before training, and where the run was resumed
        lines.insert(at, {"step": step, "metrics": {ACCURACY: 0.25}})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shutil.rmtree(folder / FOLDER)
    (folder / "config.yaml").write_text("trainer: {test_freq: -1}\n")
    text = summarise(folder)
    assert re.search(r"before +\(step 0\): 0\.250", text) and "after  (step" not in text, text
    assert re.search(r"during +\(step 1\): 0\.250(.|\n)* 3.*trainer\.test_freq=-1", text), text


@pytest.mark.parametrize(
    ("moves", "advantage", "clip_rate", "says"),
    [(1e-6, 1.0, "0.0%", "nothing was clipped"), (0.0, 1.0, "-", "could be"), (1e-6, 0.0, "-", "could be")],
)
def test_a_run_that_clips_nothing_has_no_lre(
    moves: float, advantage: float, clip_rate: str, says: str, tmp_path: Path, undrawn: None
) -> None:
    for seed in (0, 1, 2):
        write_run(tmp_path / "fspo" / str(seed), "fspo", seed)
        folder = write_run(tmp_path / "none" / str(seed), "fspo", seed, algo="none")
        files = run_files("fspo", seed, moves, advantage)
        (folder / "metrics.jsonl").write_text(files[0])
        shutil.rmtree(folder / FOLDER)
        write_table(folder, files[1])
    (line,) = (line for line in summarise(folder).splitlines() if line.startswith("LRE"))
    assert re.search(rf": - \(.*{says}", line), line
    build_report(sorted(tmp_path.glob("*/*")), tmp_path / "out")
    summary = summary_of(tmp_path / "out")
    final, paired = cells(summary["final"]), cells(summary["paired"])
    assert final["clip rate"][1].split()[0] == clip_rate and final["zero advantage"][1] != "-"
    assert final["LRE, symmetric"][1] == "-" and "LRE, symmetric" not in paired
    assert "nan" not in json.dumps(summary)
    assert "none: LRE -" in summary["findings"][0]["numbers"]
    assert "undefined numbers" in summary["findings"][0]["sentence"]


def test_a_run_without_a_mini_batch_after_an_update_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "fspo", 0)
    first = run_files("fspo", 0)[1][0]
    shutil.rmtree(folder / FOLDER)
    write_table(folder, [{name: values[first["minibatch"] == 0] for name, values in first.items()}])
    (line,) = (line for line in summarise(folder).splitlines() if line.startswith("LRE"))
    assert re.search(r": - \(.*no mini-batch", line), line


def test_final_numbers_are_of_the_metrics_and_sums_of_a_run(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", "fspo", 1, validation_problems={"a/sums": 31, "sums": 200}))
    assert run.problems == [] and {"critic/rewards/mean", ACCURACY} <= run.steps[STEPS].keys(), "two lines of one step"
    assert len(run.responses) == 3 * STEPS * 64
    problems = [run.validation_problems(f"val-core/{name}/acc/mean@1") for name in ("sums", "a/sums", "other")]
    assert problems == [200, 31, None], "a data source may have a slash"
    for step, margin in ((1, 7.5), (2, 9.0)):
        run.steps[step]["fspo/noise_floor/margin"] = margin
    values: dict[str, Any] = {measure.label: measure.of(run) for measure in standard_measures([run])}
    assert values["held-out sums/acc/mean@1"] == 0.51 and values["gain in sums/acc/mean@1"] == pytest.approx(0.3)
    assert values["reward in training"] == pytest.approx(0.1 * STEPS)
    assert values["response-length growth"] == pytest.approx((90 + STEPS) / 91)
    assert values["largest reward drop"] == 0 and values["band over rounding"] == 7.5
    assert values["gradient norm, largest"] is None, "not logged"
    assert values["clip rate"] == pytest.approx(1 - run.responses.inside_B.mean()) and 0 < values["clip rate"] < 1
    assert 0 < values["gradient removed"] < values["clip rate"]
    assert values["truncated"] == 0 and 0 < values["LRE noise floor"] < 0.1


def test_common_records_rank_bands_on_the_same_sequences(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / a, a, 0)) for a in ("fspo", "seq_rloo", "seq_gspo")]
    groups = group_runs(runs)
    assert [group.algo for group in groups] == ["fspo", "rloo", "gspo"]
    errors = common_records(groups, 0.85)
    assert len(errors) == 3 * 3 * 2
    own = length_profile([runs[0]])
    assert own is not None
    assert errors["fspo", False, "fspo"].rate == pytest.approx(own.error.rate, abs=1e-3)
    for source in ("fspo", "rloo", "gspo"):
        assert errors["fspo", True, source].rate == pytest.approx(0.85, abs=0.005)
        assert errors["fspo", True, source].debiased.value < errors["rloo", True, source].debiased.value
    differences = pooled_lre_difference(groups[0], groups[1], "symmetric")
    assert differences is not None and differences[0].high < 0


@pytest.mark.parametrize(("name", "value"), [("S", np.nan), ("L", np.nan), ("L", 0.0), ("L", np.inf), ("A", -np.inf)])
def test_a_parquet_with_a_value_that_is_none_is_refused(tmp_path: Path, name: str, value: float) -> None:
    columns = {"S": [0.1, 0.2], "L": [3.0, 4.0], "A": [1.0, -1.0]} | {name: [1.0, value]}
    pd.DataFrame(columns).to_parquet(tmp_path / "own.parquet")
    (run,) = load_runs(tmp_path / "own.parquet")
    assert re.search(rf"own\.parquet: column {name} .* {value:g} .*: leave out", run.problems[0])


@pytest.mark.parametrize(
    ("minibatch", "says"), [([0, 0], "no row with minibatch > 0"), ([], "it is empty"), ([1, -1], "minibatch has")]
)
def test_a_parquet_that_holds_nothing_to_read_says_so(tmp_path: Path, minibatch: list[int], says: str) -> None:
    columns = {name: np.ones(len(minibatch)) for name in "SLA"} | {"minibatch": np.array(minibatch, np.int64)}
    pd.DataFrame(columns).to_parquet(tmp_path / "own.parquet")
    (run,) = load_runs(tmp_path / "own.parquet")
    assert len(run.problems) == 1 and f"{tmp_path / 'own.parquet'}: " in run.problems[0] and says in run.problems[0]


@pytest.mark.parametrize("path", sorted(STUDY.glob("*.parquet")), ids=lambda path: path.stem)
def test_a_report_of_recorded_responses_has_the_mini_batches_of_their_audit(path: Path) -> None:
    rows, audited = pd.read_parquet(path), read_audit(path).responses.moved()
    batches = rows[rows.minibatch > 0].groupby(["seed", "step", "minibatch"]).size()
    runs = load_runs(path)
    assert [run.algo for run in runs] == ["fspo", "rloo", "gspo"] and not any(run.problems for run in runs)
    for run in runs:
        assert np.bincount(run.responses.batch_B).tolist() == batches.tolist()
        for name in ("s_B", "length_B", "batch_B"):
            np.testing.assert_array_equal(getattr(run.responses, name), getattr(audited, name))


def test_clip_values_that_are_not_recorded_are_the_published_ones_everywhere(tmp_path: Path) -> None:
    run, recorded = (
        Run(tmp_path, {"algo": "gspo", "seed": 1}),
        Run(tmp_path, {"algo": "gspo", "clip_values": "measured"}),
    )
    assert run.clip_values == "published" and "published" in run.name
    assert recorded.clip_values == "measured" and "published" not in recorded.name


def test_an_audit_of_one_update_a_rollout_batch_says_so(tmp_path: Path) -> None:
    audit = Audit(tmp_path, ALGORITHMS["fspo"])
    audit.add(-torch.ones(4, 3), -torch.ones(4, 3), torch.ones(4, 3), torch.ones(4))
    audit.end_mini_batch(1)
    (run,) = load_runs(tmp_path)
    assert any(str(tmp_path) in problem and "two optimizer steps" in problem for problem in run.problems)


@pytest.mark.usefixtures("undrawn")
def test_a_report_of_one_run_begins_with_what_its_audit_concludes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "fspo", 0)
    more = [rows | {"step": rows["step"] + STEPS} for rows in run_files("fspo", 0)[1]]
    write_table(run, more, first_step=STEPS + 1)  # 24 mini-batches, and a conclusion needs 20
    follows = what_follows(read_audit(run))
    assert [line for line in follows if "S spreads like L^" in line] and any("c = 0.0" in line for line in follows)
    text = " ".join(Page(build_report([run], tmp_path / "one").page).text.split())
    places = [text.index(" ".join(line.split())) for line in follows]
    assert len(follows) >= 5 and places == sorted(places) and places[-1] < text.index("Comparison:")
    assert json.loads((tmp_path / "one/summary.json").read_text())["follows"] == follows
    other = write_run(tmp_path / "other", "seq_gspo", 1)
    build_report([run, other], tmp_path / "two")
    assert json.loads((tmp_path / "two/summary.json").read_text())["follows"] == []


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("truncation", [False, True])
def test_a_report_of_an_audit_has_no_rows_that_nobody_recorded(tmp_path: Path, truncation: bool) -> None:
    audit, generator = Audit(tmp_path / "audit", ALGORITHMS["seq_gspo"], loss="gspo"), torch.Generator().manual_seed(0)
    for step in range(3):
        for index in range(2):
            old, length = -torch.rand(64, 40, generator=generator), torch.randint(1, 41, (64, 1), generator=generator)
            new, mask = old + 0.02 * index * torch.randn(64, 40, generator=generator), torch.arange(40) < length
            cut_B = length[:, 0] == 40 if truncation else None
            audit.add(new, old, mask, torch.randn(64, generator=generator), truncated_B=cut_B)
            audit.end_mini_batch(step)
    report = build_report([tmp_path / "audit"], tmp_path / "out")
    text, summary = Page(report.page).text, summary_of(tmp_path / "out")
    assert ("truncated" in cells(summary["final"])) == truncation
    assert report.problems == [] and "too few responses" in text and "3 mini-batches" in text
    for absent in ("after 0 steps", "unknown", "no data", "None", "seed ?", "? (", "Settings:"):
        assert absent not in text, absent


def test_a_comparison_says_what_the_runs_have_recorded_of_their_clip_values(tmp_path: Path) -> None:
    measured = [{"after_step": 2, "c_low": 0.03, "c_high": 0.03}]

    def words(name: str, losses: Sequence[str], of: int, **info: object) -> str:
        runs = [
            load_run(write_run(tmp_path / name / loss, loss, 0, **info, clip_values_measured=measured[: i < of]))
            for i, loss in enumerate(losses)
        ]
        rate = next(measure for measure in standard_measures(runs) if measure.label == "clip rate")
        return clip_values_in_words(group_runs(runs), rate)

    far = words("far", ("fspo", "seq_rloo"), 2, clip_values="measured")
    shares = [float(share) for share in re.findall(r"(?:fspo|rloo) ([\d.]+)%", far)]
    assert "2 of 2 runs" in far and abs(shares[0] - shares[1]) > 5 and "comparable" in far and "5 points" in far
    none = words("none", ("fspo", "seq_gspo"), 0, clip_values="measured")
    assert "0 of 2 runs" in none and "comparable" in none and "not every run" in none
    published = words("published", ("fspo", "seq_rloo"), 0)
    assert "runs" not in published and "comparable" in published and "not every run" not in published
    mixed = words("mixed", ("fspo", "seq_rloo"), 1, clip_values="measured", clip_values_asked="published")
    assert "1 of 1 run" in mixed and "not every run" not in mixed, "a loss that has none to measure"
    one = words("one", ("fspo",), 1, clip_values="measured")
    assert one == "1 of 1 run measured clip values."


def test_a_loss_has_one_colour_in_every_figure() -> None:
    shown = algo_looks(["mine", "gspo", "fspo", "yours"])
    assert all(shown[name]["color"] == COLOURS[name] for name in ("gspo", "fspo"))
    assert algo_looks(["gspo"])["gspo"] == shown["gspo"]
    assert len({look["color"] for look in shown.values()}) == 4, "other names take what no loss beside them has"
    names = [*COLOURS, *map(str, range(9))]
    assert all(algo_looks(names)[name]["color"] == COLOURS[name] for name in COLOURS), "more names than colours"


def test_a_value_that_one_step_alone_has_is_seen(tmp_path: Path) -> None:
    """A line of one point draws nothing: so looked the LRE of two steps."""
    folder = write_run(tmp_path / "run", "fspo", 0)
    curve = next(one for one in curves([]) if one.name == "lre")
    for steps, is_marked in ((1, True), (3, False)):
        lines = [{"step": step, "metrics": {"fspo/lre_debiased": 0.1}} for step in range(1, steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        axes = Figure().subplots()
        assert draw_curve(axes, group_runs([load_run(folder)]), curve, algo_looks(["fspo"]))
        assert (axes.lines[0].get_marker() not in ("", "None")) == is_marked


def test_a_long_curve_shows_what_was_logged_beside_the_mean_that_its_title_names(tmp_path: Path) -> None:
    """Step 1 of a run that clipped nothing there was drawn at the mean of its first steps."""
    folder = write_run(tmp_path / "run", "fspo", 0)
    shares = [0.0, *np.random.default_rng(0).uniform(0.05, 0.2, 47)]
    lines = [{"step": step, "metrics": {"fspo/clip_frac": share}} for step, share in enumerate(shares, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    axes, curve = Figure().subplots(), next(one for one in curves([]) if one.name == "clip_rate")
    assert draw_curve(axes, group_runs([load_run(folder)]), curve, algo_looks(["fspo"]))
    points, line = axes.lines
    assert points.get_linestyle() == "None" and list(points.get_ydata()) == pytest.approx(shares)
    wide = int(re.search(r"mean of (\d+) steps", axes.get_title(loc="left") + axes.get_title())[1])
    assert line.get_ydata()[24] == pytest.approx(np.mean(shares[24 - wide // 2 : 25 + wide // 2]))


def test_a_missing_extra_ends_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "fspo.report.build"):
        monkeypatch.setitem(sys.modules, name, None) if name == "matplotlib" else monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "fspo.report.figures")
    assert report_command([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "matplotlib" in error and "fspo[report]" in error and error.count("\n") == 1


@pytest.fixture
def every_warning_of_torch() -> Iterator[None]:
    """Torch gives a warning of its own once in a process, unless it is asked for all."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("every_warning_of_torch")
@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
def test_an_audit_and_a_parquet_of_sequences_are_reported(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    audit, tables = Audit(tmp_path / "audit", ALGORITHMS["fspo"], loss="fspo"), []
    for step in range(4):
        for index in range(2):
            old, length = -torch.rand(256, 64, generator=generator), torch.randint(1, 65, (256, 1), generator=generator)
            mask, advantage = torch.arange(64) < length, torch.randn(256, generator=generator)
            new = old + 0.02 * index * torch.randn(256, 64, generator=generator)
            audit.add(new, old, mask, advantage)
            audit.end_mini_batch(step)
            s = ((new - old) * mask).sum(1)
            columns = {"S": s, "L": length[:, 0], "A": advantage}
            tables.append(pd.DataFrame({"step": step, "minibatch": index} | {k: v.numpy() for k, v in columns.items()}))
    pd.concat(tables).to_parquet(tmp_path / "own.parquet")
    (audited,), judged_runs = load_runs(tmp_path / "audit"), load_runs(tmp_path / "own.parquet")
    assert [run.algo for run in judged_runs] == ["fspo", "rloo", "gspo"] and audited.algo == "fspo"
    for name in ("length_B", "inside_B", "kept_B", "batch_B"):
        theirs, ours = (getattr(run.responses, name) for run in (judged_runs[0], audited))
        np.testing.assert_array_equal(theirs, ours)
    report = build_report([tmp_path / "audit", tmp_path / "own.parquet"], tmp_path / "report")
    assert report.runs == 4 and report.problems == []
    pd.DataFrame({"S": [0.1]}).to_parquet(tmp_path / "bad.parquet")
    with pytest.raises(NothingReadError, match=r"bad\.parquet: "):
        build_report([tmp_path / "bad.parquet"], tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
