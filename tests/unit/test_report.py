"""Reports from real run folders, complete, partial and broken. A sweep and one run: tests/promises/test_reports.py."""

from __future__ import annotations

import functools
import html
import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from fspo.audit import read_audit
from fspo.audit.show import verdict, what_follows
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.metrics import LengthDiagnostics
from fspo.report.__main__ import main
from fspo.report.build import build_report
from fspo.report.compare import difference, measures, over_seeds
from fspo.report.figures import COLOURS, algo_looks, draw_curve
from fspo.report.runs import Group, load_runs
from fspo.report.summary import summarise
from fspo.responses import Responses, rows_of
from fspo.table import FOLDER, Rows, TableWriter, join_rows

STUDY = Path(__file__).parents[2] / "benchmarks/study"
STEPS = 4
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
        "loss": {"loss_mode": loss, "c_low": settings.c_low, "c_high": settings.c_high},
    }  # fmt: skip
    return "\n".join(map(json.dumps, metrics)) + "\n", tuple(tables), json.dumps(info)


def write_table(folder: Path, steps: Sequence[Rows], first_step: int = 0) -> None:
    writer = TableWriter(folder / FOLDER, {"loss": "fspo", "rule": "known"}, run="run", first_step=first_step)
    for rows in steps:
        writer.append(rows)


def write_run(folder: Path, loss: str, seed: int, /, files: Any = None, **info: object) -> Path:
    folder.mkdir(parents=True)
    metrics, steps, described = files or run_files(loss, seed)
    (folder / "metrics.jsonl").write_text(metrics)
    write_table(folder, steps)
    (folder / "run.json").write_text(json.dumps(json.loads(described) | info))
    return folder


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report without its figures, which take most of its time."""
    monkeypatch.setattr("fspo.report.build.figures", lambda groups: [])


def summary_of(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "summary.json").read_text()))


def cells(table: dict[str, Any]) -> dict[str, list[str]]:
    return {head: row for head, _, row in table["rows"]}


def claims(sentences: Sequence[str]) -> list[str]:
    return re.findall(r"(?:lower|higher) than \w+", "\n".join(sentences))


def test_the_page_of_a_sweep_stands_alone_and_names_what_differs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for loss in ("fspo", "seq_rloo"):
        for seed in (0, 1, 2):
            folder = write_run(tmp_path / f"sweep/{loss}<b>/seed{seed}", loss, seed)
            config = {
                "run": {"dir": str(folder)}, "data": {"seed": seed, "file": "x"}, "micro": seed // 2,
                "optim": {"lr": 0.1 if loss == "fspo" else 0.2}, "trainer": {"default_local_dir": str(folder)},
            }  # fmt: skip
            (folder / "config.yaml").write_text(json.dumps(config))
    assert main([str(tmp_path / "sweep"), "--out", str(out)]) == 0
    source = (out / "report.html").read_text()
    opened = Counter(tag for tag in re.findall(r"<([a-z]\w*)", source) if tag not in ("meta", "img"))
    assert opened == Counter(re.findall(r"</(\w+)>", source)), "every tag is closed"
    addresses = re.findall(r'(?:src|srcset|href)="([^"]*)"', source)
    assert len(addresses) == 7 and all(address.startswith("data:image/png;") for address in addresses)
    assert {path.name for path in out.iterdir()} == {"report.html", "summary.json"}
    summary = summary_of(out)
    assert claims(summary["verdicts"]["Even?"]) == ["lower than rloo"]
    assert cells(summary["final"])[f"held-out {ACCURACY.removeprefix('val-core/')}"][0].startswith("0.510 [")
    assert summary["paired"]["heads"] == ["fspo - rloo (3 paired)"]
    differing = cells(summary["settings"])
    assert differing["lr"] == ["0.1", "0.2"] and differing["micro"] == ["0 or 1", "0 or 1"]
    assert differing.keys() == {"seeds", "steps", "status", "lr", "micro"}
    assert summary["problems"] == [] and summary["follows"] == []


def verdicts_of(folder: Path, **groups: tuple[str, dict[int, int]]) -> dict[str, list[str]]:
    """The verdicts by subject; of each algorithm the loss, and the seeds with those of their data."""
    runs = [
        write_run(folder / algo / str(seed), loss, data, algo=algo, seed=seed)
        for algo, (loss, seeds) in groups.items()
        for seed, data in seeds.items()
    ]
    build_report(runs, folder / "out")
    return dict(summary_of(folder / "out")["verdicts"])


@pytest.mark.usefixtures("undrawn")
def test_a_difference_that_is_there_is_told_with_its_sign(tmp_path: Path) -> None:
    # S has a standard deviation proportional to sqrt(L), so a sqrt(L) band accepts evenly and a constant one does not.
    same = {0: 0, 1: 1, 2: 2}
    texts = verdicts_of(tmp_path, fspo=("fspo", same), rloo=("seq_rloo", same), gspo=("fspo", {0: 3, 1: 4, 2: 5}))
    assert claims(texts["Even?"]) == ["lower than rloo"], "gspo has other sequences and the same band"
    # The accuracies are equal by seed for rloo, and 0.03 higher for each seed of gspo.
    assert claims(texts["Learning?"]) == ["lower than gspo"]
    swapped = verdicts_of(tmp_path / "swapped", fspo=("seq_rloo", same), rloo=("fspo", same))
    assert claims(swapped["Even?"]) == ["higher than rloo"]
    for name, seeds in (("two", {0: 0, 1: 1}), ("apart", {7: 0, 8: 1, 9: 2})):
        few = verdicts_of(tmp_path / name, fspo=("fspo", same), rloo=("seq_rloo", seeds))
        assert len(few) == 3 and not any(claims(sentences) for sentences in few.values())


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
        return [claim for sentences in summary_of(out)["verdicts"].values() for claim in claims(sentences)]

    assert "lower than rloo" in claimed(1)
    assert "over 3 seeds, without 1" in "".join(summary_of(out)["verdicts"]["Even?"])
    assert not claimed(0, 2, 3) and "paired" not in summary_of(out)


@pytest.mark.parametrize("seeds", [3, 5])
def test_an_interval_over_seeds_covers(seeds: int) -> None:
    rng = np.random.default_rng(4)
    means = [over_seeds(np.mean, rng.normal(0, 1, seeds).tolist()) for _ in range(1000)]
    assert 0.92 <= np.mean([i is not None and i.low <= 0 <= i.high for i in means]) <= 0.98, "four errors of 0.007"
    assert (one := over_seeds(np.mean, [1.0])) is not None and np.isnan(one.low)


def test_the_lre_of_equal_bands_is_not_told_apart(tmp_path: Path) -> None:
    """Responses of two groups of three seeds, drawn alike and accepted alike, with shifts of each mini-batch."""
    rng, claimed = np.random.default_rng(1), 0

    def group(name: str) -> Group:
        runs = []
        for seed in range(3):
            (run,) = load_runs(tmp_path)
            length, batch = rng.integers(1, 200, 640), np.arange(640) // 32
            shift = rng.normal(size=20)[batch] + 0.5 * rng.normal(size=(20, 8))[batch, length * 8 // 200]
            inside = rng.random(640) < 1 / (1 + np.exp(-2 - shift - 0.005 * length))
            rows = {"S": rng.normal(size=640), "L": length, "A": np.ones(640), "inside": inside, "kept": inside}
            run.responses, run.info = Responses.of_rows(rows | {"minibatch": batch + 1}), {"seed": seed}
            runs.append(run)
        return Group(name, runs)

    for _ in range(40):
        groups = group("a"), group("b")
        (lre,) = [measure for measure in measures(groups) if measure.view == "outside"]
        interval = difference(*groups, lre)
        claimed += interval is not None and not interval.low <= 0 <= interval.high
    assert claimed <= 8  # of 40; with a probability of 0.06 more than 8 has one below 1 in 10,000


def test_what_a_run_has_left_by_going_back_is_in_no_figure(tmp_path: Path) -> None:
    """Four steps; then from the checkpoint of the first one another second step, of which the validation is worse."""
    once, back = (write_run(tmp_path / name, "fspo", 0) for name in ("once", "back"))
    text = (back / "metrics.jsonl").read_text()
    again = [line for line in text.splitlines(True) if json.loads(line)["step"] == 2]
    again.append(json.dumps({"step": 2, "metrics": {ACCURACY: 0.1}}) + "\n")
    (back / "metrics.jsonl").write_text(text + "".join(again))
    write_table(back, run_files("fspo", 0)[1][1:2], first_step=2)
    (whole,), (left,) = load_runs(once), load_runs(back)
    assert (list(whole.steps), list(left.steps)) == ([0, 1, 2, 3, 4], [0, 1, 2])
    assert left.series(ACCURACY)[1].tolist() == [0.2, 0.1]
    first_two = whole.responses.select(whole.responses.step_B <= 2)
    np.testing.assert_array_equal(left.responses.s_B, first_two.s_B)


@pytest.mark.usefixtures("undrawn")
def test_a_seed_run_twice_counts_once_unless_its_clip_values_differ(tmp_path: Path) -> None:
    twice = [write_run(tmp_path / name, "fspo", 0) for name in ("a", "b")]
    report = build_report([*twice, write_run(tmp_path / "c", "fspo", 0, clip_values="measured")], tmp_path / "out")
    (problem,) = report.problems
    assert problem.startswith(f"{twice[0]}: ") and str(twice[1]) in problem
    heads = summary_of(tmp_path / "out")["final"]["heads"]
    assert heads == ["fspo, measured (n = 1)", "fspo, published (n = 1)"]


def test_one_run_has_one_lre_wherever_it_stands(tmp_path: Path) -> None:
    """Console, verdict, final numbers, table by length and figure; and it gets a verdict, too."""
    run = write_run(tmp_path / "run", "seq_gspo", 0)
    more = [rows | {"step": rows["step"] + STEPS} for rows in run_files("seq_gspo", 0)[1]]
    write_table(run, more, first_step=STEPS + 1)  # 24 mini-batches, and a conclusion needs 20
    records = read_audit(run)
    lre, says = records.responses.moved().error("outside").words, verdict(records.responses.moved())
    assert says.startswith("uneven") and f"LRE {lre};" in says
    assert says in summarise(run)
    summary = summary_of(run)
    assert f"gspo: {says}" in summary["verdicts"]["Even?"]
    assert cells(summary["final"])["LRE, outside"] == [lre]
    text = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", (run / "report.html").read_text())).split())
    assert re.search(rf"LRE {re.escape(lre)} ", text), "the last row of the table by length"
    follows = what_follows(records)
    assert summary["follows"] == follows and len(follows) >= 4
    assert all(" ".join(line.split()) in text for line in follows)


def test_the_summary_of_whole_partial_and_empty_runs(tmp_path: Path) -> None:
    whole, part, empty = write_run(tmp_path / "whole", "fspo", 0), tmp_path / "part", tmp_path / "empty"
    shutil.copytree(whole, part)
    shutil.rmtree(part / FOLDER)
    lines = [{"step": step, "metrics": {ACCURACY: value}} for step, value in ((0, 0.25), (1, 3.7))]
    lines.insert(1, {"step": 1, "metrics": {"fspo/truncated_frac": 0.755}})
    text = "".join(f"{json.dumps(line)}\n" for line in [*lines, {"step": 3, "metrics": {"critic/rewards/mean": 1}}])
    (part / "metrics.jsonl").write_text(text + '{"step": 4, "met')
    empty.mkdir()
    said = summarise(whole)
    assert re.search(r"before \(step 0\): 0\.200  .*\[0\.\d+, 0\.\d+\] over 200 problems", said)
    assert re.search(r"after  \(step 4\): 0\.500", said) and "were cut" not in said
    assert f"report: {whole / 'report.html'}" in said and (whole / "report.html").exists()
    said = summarise(part)
    assert "during (step 1): 3.700\n" in said, "not the last step, and no interval of what is no share"
    assert "in step 1 76% of the responses were cut" in said
    assert "report: none" in summarise(empty)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("moves", "advantage", "clip"), [(1e-6, 1.0, "0.0%"), (0.0, 1.0, "-"), (1e-6, 0.0, "-")])
def test_a_run_that_clips_nothing_has_no_lre(moves: float, advantage: float, clip: str, tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        write_run(tmp_path / "fspo" / str(seed), "fspo", seed)
        files = run_files("fspo", seed, moves, advantage)
        folder = write_run(tmp_path / "none" / str(seed), "fspo", seed, files, algo="none")
    assert "nothing was clipped" in summarise(folder)
    build_report([tmp_path / "fspo", tmp_path / "none"], tmp_path / "out")
    summary = summary_of(tmp_path / "out")
    final = cells(summary["final"])
    assert final["outside"][1].split()[0] == clip and final["LRE, outside"][1] == "-"
    assert "LRE, outside" not in cells(summary["paired"]) and "nan" not in json.dumps(summary)
    assert not claims(summary["verdicts"]["Even?"])


def test_the_numbers_of_a_run_are_those_of_its_metrics_and_rows(tmp_path: Path) -> None:
    (run,) = load_runs(write_run(tmp_path / "run", "fspo", 1, validation_problems={"a/sums": 31, "sums": 200}))
    assert run.problems == [] and len(run.responses) == 3 * STEPS * 64
    counts = [run.validation_problems(f"val-core/{name}/acc/mean@1") for name in ("sums", "a/sums", "other")]
    assert counts == [200, 31, None], "a data source may have a slash"
    for step, norm, reward in ((1, 2.0, 0.5), (2, 3.0, 0.1), (3, 9.0, 0.3), (4, 3.0, 0.4)):
        run.steps[step] |= {"actor/grad_norm": norm, "critic/rewards/mean": reward}
    values = {measure.label: measure.of([run]) for measure in measures([Group("fspo", [run])]) if not measure.view}
    assert values == pytest.approx({
        "held-out sums/acc/mean@1": 0.51, "gain in sums/acc/mean@1": 0.3, "reward in training": 0.4,
        "largest reward drop": 0.4, "response length": 94.0, "response-length growth": 94 / 91, "truncated": 0.0,
        "outside": 1 - run.responses.inside_B.mean(), "gradient removed": 1 - run.responses.kept_B.mean(),
        "gradient norm, largest": 3.0,
    })  # fmt: skip
    assert 0 < values["gradient removed"] < values["outside"] < 1


@pytest.mark.parametrize("path", sorted(STUDY.glob("*.parquet")), ids=lambda path: path.stem)
def test_a_file_is_reported_under_each_band_as_its_audit_reads_it(path: Path) -> None:
    rows, audited = pd.read_parquet(path), read_audit(path).responses.moved()
    batches = rows[rows.minibatch > 0].groupby(["seed", "step", "minibatch"]).size()
    runs = load_runs(path)
    assert [run.algo for run in runs] == ["fspo", "rloo", "gspo"] and not any(run.problems for run in runs)
    for run in runs:
        assert np.bincount(run.responses.batch_B).tolist() == batches.tolist()
        np.testing.assert_array_equal(run.responses.s_B, audited.s_B)


def test_a_loss_has_one_colour_in_every_figure() -> None:
    shown = algo_looks(["mine", "gspo", "fspo", "yours"])
    assert all(shown[name]["color"] == COLOURS[name] for name in ("gspo", "fspo"))
    assert len({look["color"] for look in shown.values()}) == 4, "other names take what no loss beside them has"
    assert len(algo_looks([*COLOURS, *map(str, range(9))])) == len(COLOURS) + 9, "more names than colours"


def curve_of(folder: Path, values: Sequence[float]) -> Any:
    lines = [{"step": step, "metrics": {"x": value}} for step, value in enumerate(values, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    axes = Figure().subplots()
    assert draw_curve(axes, [Group("fspo", load_runs(folder))], "X", ["x"], algo_looks(["fspo"]))
    return axes


def test_a_value_of_one_step_is_seen_and_a_curve_shows_all(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "fspo", 0)
    assert curve_of(folder, [0.1]).lines[0].get_marker() not in ("", "None")
    shares = [0.0, *np.random.default_rng(0).uniform(0.05, 0.2, 47)]
    axes = curve_of(folder, shares)
    points, line = axes.lines
    assert points.get_linestyle() == "None" and list(points.get_ydata()) == pytest.approx(shares)
    wide = int(re.search(r"mean of (\d+) steps", axes.get_title(loc="left") + axes.get_title())[1])  # type: ignore[index]
    assert line.get_ydata()[24] == pytest.approx(np.mean(shares[24 - wide // 2 : 25 + wide // 2]))
