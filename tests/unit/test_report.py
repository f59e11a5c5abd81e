"""Reports from real run folders, complete, partial and broken. A sweep and one run: tests/promises/test_reports.py."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from recorded_runs import ACCURACY, write_run

from fspo.audit import read_audit
from fspo.audit.show import verdict, what_follows
from fspo.report.__main__ import main
from fspo.report.build import build_report, summarise
from fspo.report.compare import measures, over_seeds
from fspo.report.runs import Group, load_runs
from fspo.table import FOLDER, TableWriter

STUDY = Path(__file__).parents[2] / "benchmarks/study"
STEPS = 4


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report without its figures, which take most of its time."""
    monkeypatch.setattr("fspo.report.build.figures", lambda groups: [])


def summary_of(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "summary.json").read_text()))


def cells(table: dict[str, Any]) -> dict[str, list[str]]:
    return {head: row for head, _, row in table["rows"]}


def claims(sentences: Sequence[str]) -> list[str]:
    return re.findall(r"(?:lower|higher) than \w+", "\n".join(sentences))


def verdicts_of(folder: Path, **groups: tuple[str, dict[int, int]]) -> dict[str, list[str]]:
    """The verdicts by subject; of each algorithm the loss, and the seeds with those of their data."""
    runs = [
        write_run(folder / algo / str(seed), loss, data, algo=algo, seed=seed)
        for algo, (loss, seeds) in groups.items()
        for seed, data in seeds.items()
    ]
    build_report(runs, folder / "out")
    return dict(summary_of(folder / "out")["verdicts"])


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


def test_runs_that_ended_at_different_steps_are_not_compared(tmp_path: Path) -> None:
    plan, out = [("fspo", "fspo"), ("rloo", "seq_rloo")], tmp_path / "out"
    runs = [write_run(tmp_path / algo / str(s), loss, s, algo=algo, seed=s) for s in range(4) for algo, loss in plan]

    def claimed(*shortened: int) -> list[str]:
        for seed in shortened:
            path = tmp_path / "rloo" / str(seed) / "metrics.jsonl"
            lines = path.read_text().splitlines(True)
            path.write_text("".join(line for line in lines if json.loads(line)["step"] < STEPS))
            TableWriter(path.parent / FOLDER, {"loss": "fspo", "rule": "known"}, run="run", first_step=STEPS)
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


def test_a_seed_run_twice_counts_once_unless_its_clip_values_differ(tmp_path: Path) -> None:
    twice = [write_run(tmp_path / name, "fspo", 0) for name in ("a", "b")]
    *_, problems = build_report(
        [*twice, write_run(tmp_path / "c", "fspo", 0, clip_values="measured")], tmp_path / "out"
    )
    (problem,) = problems
    assert problem.startswith(f"{twice[0]}: ") and str(twice[1]) in problem
    heads = summary_of(tmp_path / "out")["final"]["heads"]
    assert heads == ["fspo, measured (n = 1)", "fspo, published (n = 1)"]


@pytest.mark.parametrize("loss", [0.3, {"loss_mode": "fspo", "c_low": -1}])
def test_somebody_elses_run_json_costs_no_other_run(loss: object, tmp_path: Path) -> None:
    odd = {"seed": "a", "validation_problems": [1], "clip_values": [1]}
    other = write_run(tmp_path / "other", "fspo", 1, loss=loss, **odd)
    *_, runs, (problem,) = build_report([write_run(tmp_path / "run", "fspo", 0), other], tmp_path / "out")
    assert runs == 2 and problem.startswith(f"{other / 'run.json'}: ")


def test_one_run_has_one_lre_wherever_it_stands(tmp_path: Path) -> None:
    """Console, verdict, final numbers, table by length; and it gets a verdict, too."""
    run = write_run(tmp_path / "run", "seq_gspo", 0, steps=7)  # 21 mini-batches, and a conclusion needs 20
    records = read_audit(run)
    lre, says = records.responses.moved().error("outside").words, verdict(records.responses.moved())
    assert says.startswith("uneven") and f"LRE {lre};" in says
    assert says in summarise(run)
    summary = summary_of(run)
    assert f"gspo: {says}" in summary["verdicts"]["Even?"]
    assert cells(summary["final"])["LRE, outside"] == [lre]
    text = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", (run / "report.html").read_text())).split())
    assert re.search(rf"LRE {re.escape(lre)} ", text), "the last row of the table by length"
    follows = what_follows(records, records.accept)
    assert summary["follows"] == follows and len(follows) >= 4
    assert all(" ".join(line.split()) in text for line in follows)


def test_the_summary_of_whole_partial_and_empty_runs(tmp_path: Path) -> None:
    part, empty, problems = tmp_path / "part", tmp_path / "empty", {"sums": 200}
    whole = write_run(tmp_path / "whole", "fspo", 0, validation_problems=problems)
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


@pytest.mark.parametrize(("moves", "advantage", "clip"), [(1e-6, 1.0, "0.0%"), (0.0, 1.0, "-"), (1e-6, 0.0, "-")])
def test_a_run_that_clips_nothing_has_no_lre(moves: float, advantage: float, clip: str, tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        write_run(tmp_path / "fspo" / str(seed), "fspo", seed)
        none = tmp_path / "none" / str(seed)
        folder = write_run(none, "fspo", seed, moves=moves, advantage=advantage, algo="none")
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


def test_a_view_with_few_responses_is_drawn_at_their_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    count_B = np.arange(64)
    rows = {"S": np.sin(count_B), "L": count_B + 1, "A": count_B < 3, "step": count_B // 8, "minibatch": 1}
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    assert main([str(tmp_path / "rows.parquet"), "--out", str(tmp_path / "out")]) == 0


def test_a_file_is_reported_under_each_band_as_its_audit_reads_it() -> None:
    path = STUDY / "words.parquet"
    rows, audited = pd.read_parquet(path), read_audit(path).responses.moved()
    batches = rows[rows.minibatch > 0].groupby(["seed", "step", "minibatch"]).size()
    runs = load_runs(path)
    assert [run.algo for run in runs] == ["fspo", "rloo", "gspo"] and not any(run.problems for run in runs)
    for run in runs:
        assert np.bincount(run.responses.batch_B).tolist() == batches.tolist()
        np.testing.assert_array_equal(run.responses.s_B, audited.s_B)
