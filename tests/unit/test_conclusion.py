"""What the audit concludes, on responses with a known answer and on recorded runs.

The bounds: 7,680 responses in eight bins give log std(S) of a bin to 0.023, the exponent to 0.007, and the 85% quantile
to 1.4% of the spread; the tests allow 4.4 standard errors and more, which chance exceeds once in 100,000 runs.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import recorded_runs
from hydra.core.override_parser.overrides_parser import OverridesParser

from fspo.audit import AuditRecords, describe
from fspo.audit.__main__ import main
from fspo.conclusion import conclude, even_band
from fspo.losses import ALGORITHMS, resolve_settings
from fspo.responses import Responses

ROOT = Path(__file__).resolve().parents[2]


def drawn(exponent: float = 0.5, sigma: float = 0.04, drift: bool = False, batches: int = 30) -> pd.DataFrame:
    return pd.DataFrame(recorded_runs.drawn(exponent, sigma, drift, batches))


def rows_of(table: pd.DataFrame, **columns: object) -> Responses:
    return Responses.of_rows({name: table[name].to_numpy() for name in table} | columns)


def for_verl(lines: list[str]) -> dict[str, object]:
    """The settings of the line for verl, as a shell and Hydra take it."""
    (line,) = [line for line in lines if line.startswith("in verl")]
    (word,) = OverridesParser.create().parse_overrides(shlex.split(line.splitlines()[1]))
    assert word.is_add() and word.key_or_group == "actor_rollout_ref.actor.policy_loss"
    return {str(key): value for key, value in word.value().items()}


@pytest.mark.parametrize(("exponent", "sigma"), [(0.0, 0.04), (0.5, 0.04), (0.75, 0.01), (1.0, 0.001)])
def test_what_is_named_is_told_apart_and_trains_the_wanted_share(exponent: float, sigma: float) -> None:
    """The most even exponent has a standard deviation of at most 0.04, and half-way between two names is 0.25."""
    table = drawn(exponent, sigma)
    responses = rows_of(table)
    even = even_band(responses)
    assert even is not None
    errors = {power: error.debiased for power, error in even.errors.items()}
    assert errors[even.exponent.value].value < 0.03
    assert all(errors[power].low > 0.03 for power in (0, 0.5, 1) if abs(power - exponent) > 0.4)
    words = for_verl(conclude(responses, "mine"))
    settings = resolve_settings(words)
    assert settings is not None
    assert settings.exponent == pytest.approx(exponent if exponent != 0.75 else even.exponent.value)
    x = table["S"] / table["L"] ** settings.exponent
    assert ((x >= -settings.c_low) & (x <= settings.c_high)).mean() == pytest.approx(0.85, abs=5e-3)
    assert exponent == 1 or settings.grad_multiplier == pytest.approx(1 / table["L"].mean(), rel=0.05)


@pytest.mark.parametrize(("loss", "keeps"), [("fspo", True), ("seq_gspo", False), ("gspo", False), ("", False)])
def test_what_is_not_told_apart_is_kept(loss: str, keeps: bool) -> None:
    lines = conclude(rows_of(drawn()), loss)
    words, text = for_verl(lines), "\n".join(lines)
    assert ("keep what you have" in text) == keeps
    assert words["loss_mode"] == "fspo" and words["c_low"] == pytest.approx(1.44 * 0.04, rel=0.07)
    assert ("grad_multiplier" in words) == ("grad_multiplier" in text) == (loss != "fspo")


def test_verls_own_gspo_and_another_exponent_are_kept_as_they_are() -> None:
    own = "\n".join(conclude(rows_of(drawn(1.0, 0.001)), "gspo"))
    assert "clip_ratio_low=" in own and "loss_mode" not in own, "verl's own GSPO takes eps"
    three_quarters = dataclasses.replace(ALGORITHMS["fspo"], exponent=0.75)
    other = conclude(rows_of(drawn(0.75, 0.01)), "fspo", settings=three_quarters)
    assert "keep what you have" in "\n".join(other) and for_verl(other)["exponent"] == 0.75


def test_only_another_band_of_the_other_view_is_said() -> None:
    table = drawn()
    assert "--view removed" not in "\n".join(conclude(rows_of(table)))
    # Short responses are removed on one side only: in that view they lose half as many.
    table["A"] = np.where(table["L"] < 64, 1.0, np.sign(table["S"]))
    assert "--view removed" in "\n".join(conclude(rows_of(table)))
    last = conclude(rows_of(table), view="removed")[-1]
    assert "--view outside" in last and last.endswith("sqrt(L)")


def test_the_cosine_is_that_of_the_audited_loss() -> None:
    for name, scale in (("fspo", 1.0), ("seq_rloo", 1e-6)):
        table = drawn(sigma=0.04 * scale)
        (line,) = [one for one in conclude(rows_of(table).judged_by(ALGORITHMS[name]), name) if "cosine" in one]
        cosine = float(re.findall(r"\d\.\d+", line)[0])
        assert cosine == 1 if scale < 1 else 0.5 < cosine < 0.95
    assert not [one for one in conclude(rows_of(drawn())) if "cosine" in one], "no rule is known"


def test_a_mean_given_for_a_sum_is_noticed() -> None:
    table = drawn()
    table["S"] /= table["L"]
    for data, noticed in ((table, True), (drawn(0.0), False)):
        assert ("mean" in conclude(rows_of(data))[0]) == noticed


def mean_line(responses: Responses) -> str:
    (line,) = [one for one in conclude(responses) if one.startswith("the mean of exp(S)")]
    return line


def test_responses_that_an_update_was_made_on_are_no_sign_of_rounding() -> None:
    """The update raises S of its own responses, so that the mean of exp(S) is no longer 1."""
    table = drawn(drift=True).assign(A=1.0)
    table["row"], table["step"] = np.arange(len(table)) % 256, table["minibatch"]
    first, later = (table.assign(update=update) for update in (1, 2))
    later["S"] += 3 * table["S"].std()
    responses = rows_of(pd.concat([first, later]))
    assert "that of movement;" in mean_line(responses)
    assert "neither" in mean_line(rows_of(pd.concat([first, later]).drop(columns="row"))), "one update is assumed"
    assert all(word in mean_line(responses.select(responses.again_B)) for word in ("says nothing", "too few"))


@pytest.mark.parametrize("loss", ["gspo", ""])
def test_a_diverged_policy_gives_no_clip_value(loss: str) -> None:
    table = drawn()
    assert "c = " in "\n".join(conclude(rows_of(table), loss))
    table["S"] = np.where(np.arange(len(table)) % 2, 3.0, -3.0) * table["L"]  # three nats a token
    diverged = "\n".join(conclude(rows_of(table), loss))
    assert "no clip value" in diverged and "s_max=10" in diverged
    assert not any(word in diverged for word in ("c_low", "clip_ratio", "c = "))
    table["L"] *= 100  # 30,000 tokens: |S| is above 10 in one of seven, |S| / L below 0.001 in nearly all
    table["S"] = 0.0007 * table["L"] * np.random.default_rng(1).standard_normal(len(table))
    assert "clip_ratio_low=" in "\n".join(conclude(rows_of(table), "gspo"))


def test_too_few_or_too_equal_responses_give_no_number() -> None:
    few, still = drawn(batches=19), drawn()
    still["S"] = 0.0
    for table, says in (
        (few, "19 mini-batches, and it needs 20"),
        (still, "every S is 0"),
        (drawn()[::60], "in a bin"),
        (drawn().assign(L=100), "1 bins of length"),
    ):
        (line,) = conclude(rows_of(table))
        assert says in line and "LRE" not in line and "L^" not in line
    assert conclude(Responses.join([]))[0].startswith("too few")
    two = drawn().assign(S=lambda rows: 0.1 * (rows["L"] > 30))
    assert conclude(rows_of(two))[0].startswith("no exponent")


def test_a_mask_of_ones_own_gets_clip_values_and_no_loss() -> None:
    responses = rows_of(drawn())
    for own in (False, True):
        text = describe(AuditRecords(loss="mine", responses=responses, own_mask=own))
        assert "c = " in text and ("in verl" in text) != own


def alike(printed: str, page: str) -> bool:
    """Whether the words are the same, and the numbers but for the last digit, which another processor may round."""
    number = r"[-+]?\d+\.?\d*(?:e-?\d+)?"
    words = [re.sub(number, "#", text).strip() for text in (printed, page)]
    values = [np.array(re.findall(number, text), float) for text in (printed, page)]
    return words[0] == words[1] and bool(np.allclose(*values, rtol=0.02, atol=0.0015))


def test_the_page_shows_what_the_command_prints_of_a_real_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/audit.md").read_text(encoding="utf-8")
    (file,) = re.findall(r"^python -m fspo\.audit (benchmarks/study/\w+\.parquet)$", page, re.M)
    assert main([str(ROOT / file)]) == 0
    printed = capsys.readouterr().out
    (block,) = [text for text in re.findall(r"```text\n(.*?)```", page, re.S) if "S spreads like" in text]
    assert alike(printed, block), printed


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = json.loads(Path("audit.ipynb").read_text(encoding="utf-8"))
    namespace: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), namespace)
            stored = "".join(text for output in cell["outputs"] for text in output.get("text", []))
            assert alike(capsys.readouterr().out, stored)
    assert len(namespace["axes"].lines) == 4  # type: ignore[attr-defined]
