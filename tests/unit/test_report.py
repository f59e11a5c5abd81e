"""Whole reports from real run folders, complete, partial and broken."""

from __future__ import annotations

import dataclasses
import functools
import html.parser
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fspo.diagnostics import LengthDiagnostics
from fspo.funnel import STAGES, LengthFunnel
from fspo.losses import ALGORITHMS, sequence_policy_loss
from fspo.noise_floor import NoiseFloor
from fspo.records import to_record
from fspo.report.__main__ import main
from fspo.report.build import build_report
from fspo.report.by_attribute import attribute_table
from fspo.report.common_records import common_records
from fspo.report.figures import comparison_figures
from fspo.report.findings import compared, differing_settings, findings
from fspo.report.groups import (
    clip_profiles,
    group_noise_floor,
    group_runs,
    length_profile,
    pooled_lre_difference,
    shared_starts,
    standard_measures,
)
from fspo.report.runs import load_run
from fspo.report.style import group_looks, styled
from fspo.report.summary import summarise
from fspo.sums import SequenceSums

STEPS = 4
PNG = b"\x89PNG\r\n\x1a\n"


@functools.cache
def run_files(loss: str, seed: int) -> tuple[str, str, str]:
    """Text of metrics.jsonl, length_stats.jsonl and run.json of a small run."""
    generator = torch.Generator().manual_seed(seed)
    diagnostics = LengthDiagnostics(resamples=20)
    metrics, lengths = [{"step": 0, "metrics": {"val-core/sums/acc/mean@1": 0.2 + 0.01 * seed}}], []
    for step in range(1, STEPS + 1):
        parts = []
        for scale in (0.0, 0.03, 0.04, 0.04):
            length_B = (torch.rand(64, generator=generator) * 180).long() + 1
            mask_BT = torch.arange(181)[None] < length_B[:, None]
            log_prob_BT = torch.randn(64, 181, generator=generator) * scale
            advantages_BT = torch.randn(64, 1, generator=generator).expand(-1, 181)
            output = sequence_policy_loss(
                log_prob_BT, torch.zeros_like(log_prob_BT), advantages_BT, mask_BT, ALGORITHMS[loss]
            )
            parts.append(SequenceSums.zeros().add_(output))
        values = diagnostics.update(parts) | {"critic/rewards/mean": 0.1 * step, "response_length/mean": 90.0 + step}
        metrics.append({"step": step, "metrics": values})
        lengths += [to_record(part, step=step, minibatch=i) for i, part in enumerate(parts)]
    metrics.append({"step": STEPS, "metrics": {"val-core/sums/acc/mean@1": 0.5 + 0.01 * seed}})
    settings = ALGORITHMS[loss]
    info = {
        "algo": loss.removeprefix("seq_"), "seed": seed, "status": "finished", "validation_problems": {"sums": 200},
        "loss": {"loss_mode": loss, "clip_low": settings.clip_low, "clip_high": settings.clip_high, "x": 1},
        "command": ["python", "-m", "x"], "versions": {"torch": "2"}, "commit": "<b>abc</b>",
    }  # fmt: skip
    return "\n".join(map(json.dumps, metrics)) + "\n", "\n".join(map(json.dumps, lengths)) + "\n", json.dumps(info)


def write_run(folder: Path, loss: str, seed: int, /, **info: object) -> Path:
    folder.mkdir(parents=True)
    metrics, lengths, described = run_files(loss, seed)
    (folder / "metrics.jsonl").write_text(metrics)
    (folder / "length_stats.jsonl").write_text(lengths)
    (folder / "run.json").write_text(json.dumps(json.loads(described) | info))
    return folder


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    folder = tmp_path / "grid"
    plan = []
    for loss in ("fspo", "seq_rloo"):
        for seed in (0, 1, 2, 3):
            path = f"{loss}/{seed}"
            plan.append({"path": path, "algo": loss.removeprefix("seq_"), "seed": seed})
            if (loss, seed) != ("seq_rloo", 3):
                write_run(folder / path, loss, seed)
    (folder / "grid.json").write_text(json.dumps({"runs": plan}))
    return folder


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report without its figures, which take most of its time."""
    monkeypatch.setattr("fspo.report.build.comparison_figures", lambda *given: [])


class Checker(html.parser.HTMLParser):
    """Collects text and addresses, and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.tags: set[str] = set()
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids |= {value or "" for key, value in attrs if key == "id"}
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)
        self.addresses += [value or "" for key, value in attrs if key in ("src", "srcset", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read_page(path: Path) -> Checker:
    checker = Checker()
    checker.feed(path.read_text(encoding="utf-8"))
    assert not checker.open
    return checker


def test_report_of_a_grid(grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(grid), "--out", str(tmp_path / "out"), "--title", "T<1>"]) == 0
    assert "7 runs, 1 not run" in capsys.readouterr().out
    page = read_page(tmp_path / "out" / "report.html")
    text = " ".join(page.text)
    assert "T<1>" in text and "<b>abc</b>" in text, "escaped"
    assert "not run" in text and "fspo - rloo (3 paired)" in text and "on rloo's records" in text
    clip = text.index("actor_rollout_ref.actor.policy_loss.clip_low")
    assert text[clip:].split()[1:3] == ["0.03", "0.2"], "settings that differ"
    assert "policy_loss.s_max" not in text, "and no others"
    assert text.index("Symmetric LRE: fspo is lower than rloo.") < text.index("LRE, symmetric")
    assert "problems" not in page.ids and "length funnel" not in text
    assert page.addresses and all(a.startswith("data:image/png;base64,") for a in page.addresses), "self-contained"
    assert "script" not in page.tags
    pictures = list((tmp_path / "out" / "figures").glob("*.png"))
    assert {p.name for p in pictures} >= {
        "default_reward.png", "default_lre.png", "default_clip_by_length.png", "default_distribution_rloo.png"
    }  # fmt: skip
    assert all(p.read_bytes().startswith(PNG) for p in pictures)
    assert not list((tmp_path / "out").rglob("*.part"))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    final = {row[0]: row[2] for row in summary["comparisons"]["default"]["final"]["rows"]}
    assert final["held-out sums/acc/mean@1"][0].startswith("0.515 [")
    paired = {row[0]: row[2] for row in summary["comparisons"]["default"]["paired"]["rows"]}
    assert paired["LRE, symmetric"][0].startswith("*-"), "FSPO's LRE is below RLOO's in these data, beyond noise"


def sentences(tmp_path: Path, *runs: tuple[str, str, int, int]) -> dict[str, str]:
    """The findings' sentences by subject; a run is (name given to it, loss, seed of its data, seed given to it)."""
    loaded = [
        load_run(write_run(tmp_path / f"{algo}{seed}", loss, data, algo=algo, seed=seed))
        for algo, loss, data, seed in runs
    ]
    groups, starts = group_runs(loaded), shared_starts(loaded)
    return {
        found.subject: found.sentence
        for found in findings(groups, clip_profiles(groups, starts), standard_measures(loaded, starts), starts)
    }


def claims(sentence: str) -> list[str]:
    return re.findall(r"(?:lower|higher) than \w+", sentence)


def test_a_difference_that_is_there_is_told_with_its_sign(tmp_path: Path) -> None:
    # S has a standard deviation proportional to sqrt(L), so a sqrt(L) band accepts evenly and a constant one does not.
    said = sentences(
        tmp_path,
        *(("fspo", "fspo", seed, seed) for seed in range(3)),
        *(("rloo", "seq_rloo", seed, seed) for seed in range(3)),
        *(("gspo", "fspo", seed + 3, seed) for seed in range(3)),  # other sequences, the same band
    )
    assert claims(said["Acceptance by length"]) == ["lower than rloo"]
    assert claims(said["What the clip removes"])[0] == "lower than rloo"
    # The accuracies are equal by seed for rloo, and 0.03 higher for each seed of gspo.
    assert claims(said["Learning"]) == ["lower than gspo"]
    swapped = sentences(
        tmp_path / "swapped",
        *(("fspo", "seq_rloo", seed, seed) for seed in range(3)),
        *(("rloo", "fspo", seed, seed) for seed in range(3)),
    )
    assert claims(swapped["Acceptance by length"]) == ["higher than rloo"]


def test_few_runs_make_no_claim(tmp_path: Path) -> None:
    one = sentences(tmp_path / "one", ("fspo", "fspo", 0, 0))
    assert [sentence.split(":")[0] for sentence in one.values()] == [
        "Symmetric LRE", "Active LRE", "Held-out sums/acc/mean@1"
    ]  # fmt: skip
    two = sentences(tmp_path / "two", *((algo, loss, 0, 0) for algo, loss in (("fspo", "fspo"), ("rloo", "seq_rloo"))))
    apart = sentences(tmp_path / "apart", *(("fspo", "fspo", s, s) for s in range(3)), ("rloo", "seq_rloo", 0, 7))
    assert not any(claims(sentence) for sentence in (*one.values(), *two.values(), apart["Learning"]))
    assert len(two) == 3 and all("fewer than 3" in sentence for sentence in two.values())


@pytest.mark.usefixtures("undrawn")
def test_runs_that_ended_at_different_steps_are_not_compared(tmp_path: Path) -> None:
    plan = [("fspo", "fspo"), ("rloo", "seq_rloo")]
    runs = [write_run(tmp_path / algo / str(s), loss, s, algo=algo, seed=s) for s in range(4) for algo, loss in plan]

    def shorten(folder: Path) -> None:
        for name in ("metrics.jsonl", "length_stats.jsonl"):
            kept = [x for x in (folder / name).read_text().splitlines(True) if json.loads(x)["step"] < STEPS]
            (folder / name).write_text("".join(kept))

    def summary() -> dict[str, Any]:
        build_report(runs, tmp_path / "out")
        found: dict[str, Any] = json.loads((tmp_path / "out" / "summary.json").read_text())
        return found["comparisons"]["default"]  # type: ignore[no-any-return]

    shorten(tmp_path / "rloo" / "1")
    one = summary()
    assert claims(one["findings"][0]["sentence"]) == ["lower than rloo"]
    assert "over 3 seeds, without seed 1" in one["findings"][0]["differences"]
    assert one["paired"]["heads"] == ["fspo - rloo (3 paired)"]
    for seed in (0, 2, 3):
        shorten(tmp_path / "rloo" / str(seed))
    every = summary()
    assert not any(claims(finding["sentence"]) for finding in every["findings"])
    assert {cell for _, _, cells in every["paired"]["rows"] for cell in cells} <= {"(ended at different steps)"}


@pytest.mark.usefixtures("undrawn")
def test_settings_that_differ_within_a_group_are_named(tmp_path: Path) -> None:
    runs = []
    for seed, rate in enumerate((1e-4, 1e-2)):
        runs.append(write_run(tmp_path / str(seed), "fspo", seed))
        (runs[-1] / "config.yaml").write_text(
            f"actor: {{optim: {{lr: {rate}}}}}\nfspo: {{run_dir: {runs[-1]}}}\n"
            f"ray_kwargs: {{ray_init: {{runtime_env: {{env_vars: {{FSPO_RUN_ID: id{seed}}}}}}}}}\n"  # of a start
        )
    report = build_report(runs, tmp_path / "out")
    (problem,) = report.problems
    assert "fspo" in problem and "actor.optim.lr (0.0001 or 0.01)" in problem
    assert "0.0001 or 0.01" in read_page(report.page).text


def test_settings_that_differ_come_from_the_whole_configuration(tmp_path: Path) -> None:
    runs = []
    for algo, rate in (("fspo", 1e-4), ("rloo", 1e-5)):
        for seed in (0, 1):
            folder = write_run(tmp_path / algo / str(seed), "fspo", seed, algo=algo)
            config = {"fspo": {"run_dir": str(folder), "algo": algo}, "data": {"seed": seed, "file": f"{folder}/x"},
                      "optim": {"lr": rate, "beta": 0.9}, "micro": seed}  # fmt: skip
            (folder / "config.yaml").write_text(json.dumps(config))
            runs.append(load_run(folder))
    groups = group_runs(runs)
    rows = {head: cells for head, _, cells in compared(groups, differing_settings(groups)).rows}
    assert rows == {
        "seeds": ["0, 1", "0, 1"], "steps": ["4", "4"], "optim.lr": ["0.0001", "1e-05"], "micro": ["0 or 1", "0 or 1"]
    }  # fmt: skip
    (runs[0].path / "config.yaml").unlink()
    assert "optim.lr" not in {head for head, _, _ in compared(groups, differing_settings(groups)).rows}, (
        "of one run it is not known"
    )


def test_noise_floor_is_held_against_the_band(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", "fspo", 0))
    (group,) = group_runs([run])
    starts = shared_starts([run])
    assert isinstance(group_noise_floor(group, starts), str), "exactly 0"
    length_B = torch.arange(1, 181)
    mask_BT = torch.arange(181)[None] < length_B[:, None]
    noise_BT = 0.002 / length_B.sqrt()[:, None] * torch.ones(180, 181)  # S = 0.002 sqrt(L), a 15th of the band
    output = sequence_policy_loss(noise_BT, 0 * noise_BT, torch.ones(180, 181), mask_BT, ALGORITHMS["fspo"])
    lines = (run.path / "length_stats.jsonl").read_text()
    noise = json.dumps(to_record(SequenceSums.zeros().add_(output), step=5, minibatch=0))
    (run.path / "length_stats.jsonl").write_text(
        "".join(x for x in lines.splitlines(True) if '"minibatch": 0' not in x) + noise
    )
    noisy = load_run(run.path)
    floor = group_noise_floor(group_runs([noisy])[0], starts)
    assert isinstance(floor, NoiseFloor)
    np.testing.assert_allclose(floor.half_width_J / floor.rms_J, 15, rtol=0.05)
    assert len(floor.length_J) == len(starts)
    with styled():
        groups = group_runs([noisy])
        drawn = comparison_figures(groups, clip_profiles(groups, starts), {"fspo": floor})
        (figure,) = [each for each in drawn if each.name == "noise_floor"]
    line, five = figure.figure.axes[0].get_lines()
    np.testing.assert_allclose(line.get_ydata(), floor.half_width_J / floor.rms_J)
    assert set(five.get_ydata()) == {5.0}
    measured = dataclasses.replace(noisy, info=noisy.info | {"loss": {"loss_mode": "fspo_quantile"}})
    measured.steps[1]["fspo/noise_floor/margin"] = 7.5
    assert "7.5" in str(group_noise_floor(group_runs([measured])[0], starts)), "the band is not known, the log is"


@pytest.mark.usefixtures("undrawn")
def test_dumped_responses_can_be_read_and_filtered(tmp_path: Path) -> None:
    folder, dumps = write_run(tmp_path / "run", "fspo", 0), tmp_path / "dumps"
    (folder / "config.yaml").write_text(
        f"trainer: {{rollout_data_dir: {dumps}, validation_data_dir: /elsewhere/run/val}}"
    )
    attack = "</pre><script>alert(1)</script><b>"

    def dump(path: Path, *lines: dict[str, object]) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            "".join(json.dumps({"input": "2+2=", "output": "4", "score": 1.0} | line) + "\n" for line in lines)
        )

    for step in range(1, 21):
        dump(dumps / f"{step}.jsonl", *({"output": f"{step}", "score": float(i > 4)} for i in range(10)))
    dump(dumps / "20.jsonl", {"output": attack, "score": 1.0, "acc": 0.0})
    (dumps / "1.jsonl").write_text('{"output": "cut')
    dump(folder / "val/7.jsonl", {"output": "a" * 9000})  # of a run folder that was moved
    report = build_report([folder], tmp_path / "out")
    assert report.problems == [
        f"{dumps}/1.jsonl:1: not JSON (Unterminated string starting at); the last line is cut short"
    ]
    text = report.page.read_text(encoding="utf-8")
    assert attack not in text and text.count("<script>") == 1
    page = " ".join(read_page(report.page).text)
    assert attack in page, "shown as it was written"
    assert text.count('<details class="sample"') == 4 * 6 + 1 + 1, "three right and three wrong ones of some steps"
    assert (
        text.count('data-from="training"') == 25 and 'data-from="validation" data-step="7" data-verdict="right"' in text
    )
    assert 'data-step="20" data-verdict="wrong"' in text, "acc, where there is one"
    assert "6000 characters left out" in page and "<option>validation</option>" in text


@pytest.mark.slow
def test_broken_and_partial_runs_are_named_and_the_rest_is_used(grid: Path, tmp_path: Path) -> None:
    metrics = grid / "fspo/0/metrics.jsonl"
    metrics.write_text(
        '{"step": 1, "metrics": {"critic/rewards/mean": "high", "a": null}}\nnonsense\n' + '{"step": 2, "met'
    )
    lengths = grid / "fspo/1/length_stats.jsonl"
    lines = lengths.read_text().splitlines()
    lengths.write_text(
        "\n".join([lines[0], '{"step": 1}', lines[1].replace('"layout": 1', '"layout": 99'), *lines[2:]])
    )
    (grid / "seq_rloo/0/run.json").write_text("[1]")
    (grid / "seq_rloo/1/metrics.jsonl").write_bytes(b"\xff\xfe\n[1]\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    report = build_report([grid, empty, tmp_path / "absent"], tmp_path / "out")
    problems = "\n".join(report.problems)
    for expected in (
        f"{metrics}:1: not a finite number, left out: critic/rewards/mean", f"{metrics}:2: not JSON",
        f"{metrics}:3: not JSON", "cut short", f"{lengths}:2: needs an integer", f"{lengths}:3: layout is 99",
        f"{grid / 'seq_rloo/0/run.json'}: must hold a JSON object", f"{grid / 'seq_rloo/1/metrics.jsonl'}:2: must hold",
        f"{empty / 'run.json'}: missing", f"{tmp_path / 'absent'}: not a folder",
    ):  # fmt: skip
        assert expected in problems, expected
    assert "left out: a" not in problems, "null means undefined, which is no fault"
    assert report.runs == 7
    assert "problems" in read_page(report.page).ids


def test_values_of_a_wrong_kind_are_named_and_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "fspo", 0, starts=None, effective_time_ratio="high")
    huge = json.dumps({"step": 9, "metrics": {"a": 10**400}})
    (folder / "metrics.jsonl").write_text(f'{huge}\n{{"step": {"1" * 5000}}}\n')
    record = json.loads((folder / "length_stats.jsonl").read_text().splitlines()[1])
    (folder / "length_stats.jsonl").write_text(json.dumps(record | {"hist": [[3, -1, 2]]}) + "\n")
    (tmp_path / "grid.json").write_text('{"runs": null}')
    problems = "\n".join(build_report([folder, tmp_path], tmp_path / "out").problems)
    for expected in (
        f"{folder / 'run.json'}: 'starts' must be a list", "'effective_time_ratio' must be a number",
        "metrics.jsonl:1: not a finite number, left out: a", "metrics.jsonl:2: not JSON",
        "length_stats.jsonl:1: malformed record of length statistics: a bin or a count is negative",
        f"{tmp_path / 'grid.json'}: needs a list 'runs'",
    ):  # fmt: skip
        assert expected in problems, expected


@pytest.mark.usefixtures("undrawn")
def test_files_that_no_report_has_written_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = write_run(tmp_path / "run", "fspo", 0), tmp_path / "out"
    for name in ("report.html", "summary.json"):
        out.mkdir()
        (out / name).write_text("[1]")
        assert main([str(run), "--out", str(out)]) == 2
        assert f"{out / name} exists and was not written by a report" in capsys.readouterr().err
        assert [file.name for file in out.iterdir()] == [name] and (out / name).read_text() == "[1]"
        shutil.rmtree(out)
    assert [main([str(run), "--out", str(out)]) for _ in range(2)] == [0, 0], "its own are replaced"
    assert main([str(run), "--out", str(run / "run.json" / "out")]) == 2
    assert "run.json is not a folder that can be written to" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_what_a_run_has_left_by_going_back_is_in_no_figure(tmp_path: Path) -> None:
    """Four steps; then from the checkpoint of the first one another second step, of which the validation is worse."""
    once, back = (write_run(tmp_path / name, "fspo", 0) for name in ("once", "back"))
    metrics, lengths = (back / "metrics.jsonl", back / "length_stats.jsonl")
    again = [line for line in metrics.read_text().splitlines() if json.loads(line)["step"] == 2]
    again.append(json.dumps({"step": 2, "metrics": {"val-core/sums/acc/mean@1": 0.1}}))
    metrics.write_text(metrics.read_text() + "\n".join(again) + "\n")
    redone = [line for line in lengths.read_text().splitlines() if json.loads(line)["step"] == 2]
    lengths.write_text(lengths.read_text() + "\n".join(redone) + "\n")
    whole, left = load_run(once), load_run(back)
    assert (list(whole.steps), list(left.steps)) == ([0, 1, 2, 3, 4], [0, 1, 2])
    assert left.series("val-core/sums/acc/mean@1")[1].tolist() == [0.2, 0.1]
    assert left.lengths.step_M.tolist() == [1, 1, 1, 2, 2, 2]
    np.testing.assert_array_equal(left.lengths.sums_MKF, whole.lengths.sums_MKF[:6])
    unmoved = [run.lengths.unmoved.column("count").sum().item() for run in (whole, left)]
    assert unmoved == [4 * 64, 2 * 64]


def test_a_seed_run_twice_counts_once(tmp_path: Path) -> None:
    twice = [write_run(tmp_path / name, "fspo", 0) for name in ("a", "b")]
    report = build_report(twice, tmp_path / "out")
    assert report.runs == 1
    assert report.problems == [f"{twice[0]}: left out: {twice[1]} is a run of fspo with the same seed 0"]


def test_settings_come_from_the_loss_mode_and_what_overrides_it(tmp_path: Path) -> None:
    loss = {"loss_mode": "seq_gspo", "clip_low": 0.01, "drift": None, "other": 3}
    run = load_run(write_run(tmp_path / "a", "seq_gspo", 0, loss=loss))
    assert run.loss_settings == dataclasses.replace(ALGORITHMS["seq_gspo"], clip_low=0.01)
    for unknown in ({"loss_mode": "vanilla"}, {"band": "round"}, [1], None):
        assert dataclasses.replace(run, info={"loss": unknown}).loss_settings is None


def test_validation_problems_of_a_data_source_with_a_slash(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a", "fspo", 0, validation_problems={"fspo/sums": 31}))
    assert run.validation_problems("val-core/fspo/sums/acc/mean@1") == 31
    assert run.validation_problems("val-core/other/acc/mean@1") is None


def test_a_reward_that_is_no_share_has_no_interval(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "fspo", 0)
    (folder / "metrics.jsonl").write_text('{"step": 3, "metrics": {"val-core/sums/acc/mean@1": 3.7}}\n')
    assert "  after  (step 3): 3.700\n" in summarise(folder)


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_was_restarted_says_so(tmp_path: Path) -> None:
    starts = [{"started": "2026-01-01T00:00:00+00:00"}, {"started": "2026-01-01T00:10:00+00:00", "reason": "a death"}]
    folder = write_run(tmp_path / "run", "fspo", 1, starts=starts, effective_time_ratio=0.934)
    told = "finished, after 1 restart(s); 93% of the time in steps that count"
    assert f"status: {told}\n" in summarise(folder)
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 0
    assert f"{told}, {STEPS} steps" in read_page(tmp_path / "out" / "report.html").text


def test_nothing_readable_still_gives_a_page_and_a_status(tmp_path: Path) -> None:
    assert main([str(tmp_path / "absent"), "--out", str(tmp_path / "out")]) == 2
    assert "not a folder" in " ".join(read_page(tmp_path / "out" / "report.html").text)


@pytest.mark.slow
def test_default_and_matched_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, "fspo", 0, comparison=name) for name in ("default", "matched")]
    page = read_page(build_report(runs, tmp_path / "out").page)
    text = " ".join(page.text)
    assert "Comparison: default" in text and "Comparison: matched" in text
    assert {p.name for p in (tmp_path / "out/figures").iterdir()} >= {"matched_lre.png", "default_lre.png"}


def test_summary_of_whole_partial_and_empty_runs(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", "fspo", 0)
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    (part / "length_stats.jsonl").unlink()
    (part / "metrics.jsonl").write_text((whole / "metrics.jsonl").read_text()[:-700])
    (tmp_path / "empty").mkdir()
    for folder in (whole, part, tmp_path / "empty"):
        assert f"figure: {folder / 'run.png'}" in summarise(folder)
        assert (folder / "run.png").read_bytes().startswith(PNG)


def test_loading_joins_lines_and_leaves_out_the_first_minibatch(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", "fspo", 1))
    assert run.problems == []
    assert list(run.steps) == list(range(STEPS + 1))
    assert {"critic/rewards/mean", "val-core/sums/acc/mean@1"} <= run.steps[STEPS].keys()
    assert len(run.lengths.step_M) == 3 * STEPS and run.lengths.hist_KH().sum() == 3 * STEPS * 64
    assert run.validation_problems("val-core/sums/acc/mean@1") == 200
    profile = length_profile([run])
    assert profile is not None and run.lengths.sums_MKF[..., 0].sum() == 3 * STEPS * 64
    assert profile.error.debiased.n == 3 * STEPS


def test_a_report_of_accuracies_of_0_and_of_a_clip_value_of_0(tmp_path: Path) -> None:
    """Of 40 problems none is solved: the lower end of Wilson's interval is 1e-17, not 0."""
    runs = [write_run(tmp_path / a, a, 0, validation_problems={"sums": 40}) for a in ("fspo", "seq_rloo")]
    for run in runs:
        metrics = (run / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").write_text(re.sub(r'("val-core/sums/acc/mean@1"): [\d.]+', r"\1: 0.0", metrics))
    info = json.loads((runs[0] / "run.json").read_text())
    (runs[0] / "run.json").write_text(json.dumps(info | {"loss": info["loss"] | {"clip_low": 0.0}}))
    build_report(runs, tmp_path / "out")
    assert (tmp_path / "out" / "report.html").is_file()


def test_common_records_rank_bands_on_the_same_sequences(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / a, a, 0)) for a in ("fspo", "seq_rloo", "seq_gspo")]
    groups = group_runs(runs)
    assert [group.algo for group in groups] == ["fspo", "rloo", "gspo"]
    starts = shared_starts(runs)
    records = common_records(groups, starts)
    assert len(records) == 3 * 3 * 2
    by_key = {(r.band, r.matched, r.records): r.error for r in records}
    own = length_profile([runs[0]], starts=starts)
    assert own is not None
    assert by_key["fspo", False, "fspo"].rate == pytest.approx(own.error.rate, abs=0.01), "recomputed from histograms"
    for source in ("fspo", "rloo", "gspo"):
        assert by_key["fspo", True, source].rate == pytest.approx(0.85, abs=0.005)
        assert by_key["fspo", True, source].debiased.value < by_key["rloo", True, source].debiased.value
    differences = pooled_lre_difference(groups[0], groups[1], "symmetric", starts)
    assert differences is not None and differences[0].high < 0


def test_groups_look_different() -> None:
    algos = ["fspo", "rloo", "gspo", "fspo_quantile", "new", "newer"]
    looks = group_looks(algos)
    assert len({look.colour for look in looks.values()}) == len(algos)
    assert len({look.marker for look in looks.values()}) == len(algos)
    for look in looks.values():
        assert _contrast(look.colour, "#ffffff") >= 2.4, "visible against the page"


def _contrast(first: str, second: str) -> float:
    def luminance(colour: str) -> float:
        channel = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(channel <= 0.03928, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_other_attributes_are_pooled_over_steps_and_runs(tmp_path: Path) -> None:
    def line(step: int, minibatch: int, rewards: dict[str, list[float]], accepted: list[int], cut: int = 0) -> str:
        uids = [f"{prompt}_{i}_0" for prompt, values in rewards.items() for i in range(len(values))]
        truncated = [i < cut for i in range(len(uids))]
        columns = {
            "uid": uids,
            "reward": [value for values in rewards.values() for value in values],
            "accepted": accepted,
            "truncated": truncated,
        }
        return json.dumps({"step": step, "minibatch": minibatch, "data_source": ["math"] * len(uids)} | columns) + "\n"

    runs = [write_run(tmp_path / name, "fspo", seed) for seed, name in enumerate("ab")]
    (runs[0] / "sequences.jsonl").write_text(
        line(1, 0, {"p": [0.0, 0.0]}, [1, 1]) + line(1, 1, {"q": [0.0, 1.0], "r": [1.0, 1.0]}, [1, 0, 1, 1], cut=1)
    )
    (runs[1] / "sequences.jsonl").write_text(
        line(1, 1, {"p": [0.0, 0.0]}, [0, 0], cut=1)
        + line(2, 1, {"q": [0.0]}, [1])
        + line(2, 2, {"r": [0.0, 0.5]}, [1, 1])
    )
    other = write_run(tmp_path / "c", "seq_gspo", 0)
    groups = group_runs([load_run(run) for run in (*runs, other)])
    table = attribute_table(groups)
    assert table is not None
    rows = {(why, head): cells for head, why, cells in table.rows}
    assert {head: cells[0] for (why, head), cells in rows.items() if why == "difficulty"} == {
        "below 0.125": "33.3% of 3", "0.25 to 0.375": "100.0% of 2", "0.5 to 0.625": "50.0% of 2",
        "0.875 or more": "100.0% of 2",
    }  # fmt: skip
    assert rows["reward dispersion", "below 1e-09"] == ["60.0% of 5", "(no sequences)"]
    assert rows["truncation", "truncated"][0] == "50.0% of 2" and rows["truncation", "ended"][0] == "71.4% of 7"
    assert rows["data source", "math"][0] == "66.7% of 9"
    lre = rows["debiased, symmetric acceptance", "difficulty: LRE"]
    assert float(lre[0].split()[0]) > 0 and lre[1] == "(not recorded)"
    assert attribute_table(groups[1:]) is None


def funnel_lines(steps: int, seed: int, lost_short: float, lost_long: float) -> list[str]:
    """Records of a run in which long and short responses are stale at these rates."""
    rng, funnel, lines = np.random.default_rng(seed), LengthFunnel(), []
    for step in range(1, steps + 1):
        funnel.start(66)
        funnel.end("failed", [], unknown=2)
        for length, rate in ((20, lost_short), (150, lost_long)):
            stale = int(rng.binomial(32, rate))
            funnel.end("stale", [length] * stale)
            funnel.train([length] * (32 - stale), [length // 50] * (32 - stale), [1 + length // 100] * (32 - stale))
        lines.append(json.dumps(funnel.end_step(step)[1]))
    return lines


def test_the_length_funnel_of_runs_that_lose_responses(tmp_path: Path) -> None:
    uneven, even, whole = (write_run(tmp_path / name, name, 0) for name in ("fspo", "seq_rloo", "seq_gspo"))
    again = funnel_lines(3, 7, 1.0, 1.0)  # of steps that were done twice, the later record counts
    (uneven / "funnel.jsonl").write_text("\n".join([*again, *funnel_lines(20, 1, 0.0, 0.4), "{}"]) + "\n")
    (even / "funnel.jsonl").write_text("\n".join(funnel_lines(20, 2, 0.3, 0.3)) + "\n")
    all_kept = LengthFunnel()
    all_kept.train([5], [0], [1])
    (whole / "funnel.jsonl").write_text(json.dumps(all_kept.end_step(1)[1]) + "\n")
    report = build_report([uneven, even, whole], tmp_path / "out")
    assert [p for p in report.problems if "funnel" in p] == [f"{uneven / 'funnel.jsonl'}:24: needs an integer 'step'"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["comparisons"]["default"]
    rows = {row[0]: row[2] for row in summary["funnel"]["rows"]}
    records = [json.loads(line) for line in funnel_lines(20, 1, 0.0, 0.4)]
    ends = [np.sum([row[1:6] for each in records for row in each["rows"]], axis=0)[STAGES.index(s)] for s in STAGES]
    stale, trained = ends[STAGES.index("stale")], ends[STAGES.index("trained")]
    assert rows["stale"] == [f"{stale} ({stale / 1320:.1%})", rows["stale"][1], "(none lost)"]
    assert rows["failed"][0] == "40 (3.0%)" and rows["trained"][0].startswith(f"{trained} ")
    assert rows["mean length, lost"][0].startswith("150.0 [150.0, 150.0]")
    tokens = sum(each["tokens"]["trained"] for each in records)
    assert rows["mean length, trained on"][0].startswith(f"{tokens / trained:.1f} [")
    assert rows["tokens lost"][0].startswith(f"{stale * 150 / (stale * 150 + tokens):.1%} [")
    assert rows["stale: LRE"][0] == rows["trained on: LRE"][0] != rows["stale: LRE"][1]
    (found,) = [each for each in summary["findings"] if each["subject"] == "The length funnel"]
    uneven_says, even_says = found["sentence"].split(";")
    assert "fspo" in uneven_says and "150 lost" in uneven_says
    assert "rloo" in even_says and "lost" not in even_says and "gspo" not in found["sentence"]
