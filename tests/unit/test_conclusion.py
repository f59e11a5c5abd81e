"""What the audit concludes, on responses with a known answer and on recorded runs.

The bounds: 7,680 responses in eight bins give log std(S) of a bin to 0.023, the exponent to 0.007, and the 85% quantile
to 1.4% of the spread; the tests allow 4.4 standard errors and more, which chance exceeds once in 100,000 runs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.movement import KINDS, responses_of
from fspo.audit import AuditRecords, describe
from fspo.audit.__main__ import main
from fspo.conclusion import conclude, even_band, exponent_of, movement_verdict, rounding_share
from fspo.responses import Responses
from recipe.fspo.overrides import override

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "benchmarks/study"
BATCHES, SIZE = 30, 256


def drawn(exponent: float = 0.5, sigma: float = 0.04, drift: bool = False, batches: int = BATCHES) -> pd.DataFrame:
    """S and L of mini-batches: S is normal with standard deviation sigma L**exponent, L log-uniform from 8 to 511."""
    draw = np.random.default_rng(0)
    length = np.exp(draw.uniform(np.log(8), np.log(512), batches * SIZE)).astype(int)
    std = sigma * length**exponent
    s = draw.normal(-(std**2) / 2 * drift, std)
    sign = draw.choice([-1.0, 0.0, 1.0], len(s))
    return pd.DataFrame({"S": s, "L": length, "A": sign, "minibatch": np.repeat(np.arange(batches), SIZE) + 1})


def rows_of(table: pd.DataFrame, **columns: object) -> Responses:
    return Responses.of_rows({name: table[name].to_numpy() for name in table} | columns)


@pytest.mark.parametrize("view", ["symmetric", "active"])
@pytest.mark.parametrize(("exponent", "band"), [(0.0, "constant"), (0.5, "sqrt(L)"), (0.75, None), (1.0, "linear")])
def test_the_exponent_of_the_spread_is_that_of_the_even_band(exponent: float, band: str | None, view: str) -> None:
    """S is normal about 0: a band that grows as S spreads is even, by all responses and by removed gradients.

    The most even exponent has a standard deviation of at most 0.03 (over 100 sets; 0.04 by removed gradients).
    """
    table = drawn(exponent, sigma=0.04 if exponent < 0.7 else 0.01 if exponent < 1 else 0.001)
    responses = rows_of(table)
    a = exponent_of(responses)
    assert a.value == pytest.approx(exponent, abs=0.03)
    assert 0.015 < a.high - a.low < 0.05  # 2 x 1.96 x 0.0068, with what 30 clusters make of it
    even = even_band(responses, view=view)
    assert even is not None and even.exponent.value == pytest.approx(exponent, abs=0.16)
    named = {0.0: "constant", 0.5: "sqrt(L)", 1.0: "linear"}
    lre = {power: error.debiased for power, error in even.errors.items()}
    assert lre[even.exponent.value].value < 0.03
    assert all(lre[power].low > 0.03 for power in named if abs(power - exponent) > 0.4)
    assert [error.rate for error in even.errors.values()] == pytest.approx([0.85] * len(lre), abs=2e-3)
    line = next(
        line for line in conclude(responses) if "most even" in line and ("gradients" in line) == (view == "active")
    )
    assert band is None or f"not told apart from {band}" in line


def test_the_override_trains_the_most_even_exponent() -> None:
    """Half-way between two that have a name, which both are farther than six standard errors of 0.03."""
    text = "\n".join(conclude(rows_of(drawn(0.75, sigma=0.01)), "fspo", override=override))
    exponent, c = (float(re.findall(rf"policy_loss\.{key}=([\d.e-]+)", text)[0]) for key in ("exponent", "c_high"))
    assert exponent == pytest.approx(0.75, abs=0.16)
    table = drawn(0.75, sigma=0.01)
    assert (np.abs(table["S"]) <= c * table["L"] ** exponent).mean() == pytest.approx(0.85, abs=5e-3)


@pytest.mark.parametrize(("loss", "key", "value"), [
    ("fspo", "c_low", 1.44 * 0.04), ("mine", "c_high", 1.44 * 0.04), ("seq_rloo", "c_high", None),
])  # fmt: skip
def test_the_clip_value_is_that_of_the_loss_for_the_wanted_share(loss: str, key: str, value: float | None) -> None:
    responses = rows_of(drawn())
    text = "\n".join(conclude(responses, loss, override=override))
    shown = float(re.findall(rf"policy_loss\.{key}=([\d.e-]+)", text)[0])
    assert value is None or shown == pytest.approx(value, rel=0.07)
    assert ("policy_loss.loss_mode=fspo" in text) == (loss != "fspo"), "whoever audits another may want to change"
    assert all(not line.startswith("50%") for line in text.splitlines())
    half, *_ = [line for line in conclude(responses, loss, 0.5, override=override) if line.startswith("50%")]
    assert float(re.findall(rf"{key}=([\d.e-]+)", half)[0]) < 0.6 * shown


WIDE = ("normal, sigma 0.005", "Student's t, 3 degrees", "skewed up", "skewed down")
CASES = [(name, truth) for name, (_, truths) in KINDS.items() for truth in truths]


@pytest.mark.parametrize(("name", "truth"), CASES, ids=[f"{name}, {truth}" for name, truth in CASES])
def test_movement_is_told_from_rounding_however_s_is_distributed(name: str, truth: str) -> None:
    """The other cause, 1 away, is never named.

    The standard error of the share, over 400 sets of each kind, is at most 0.19 (normal with sigma 0.005; Student's t),
    0.15 for skewed S, and 0.09 for the others. The bounds are four of them and more, which chance exceeds in fewer than
    one of 10,000 runs; so is the other cause, 1 away, within the interval.
    """
    share = rounding_share(responses_of(KINDS[name][0], truth, seed=1))
    expected = {"movement": 0.0, "rounding": 1.0, "neither": 1.73}[truth]
    assert movement_verdict(share) not in {"movement", "rounding"} - {truth}
    assert share.value == pytest.approx(expected, abs=0.8 if name in WIDE else 0.4)


def test_the_wrong_cause_is_named_in_fewer_than_three_sets_of_a_hundred() -> None:
    """docs/tables/movement.csv, made by ``python -m benchmarks.movement --write``, which takes a few minutes."""
    table = pd.read_csv(ROOT / "docs/tables/movement.csv")
    assert [*zip(table["S"], table["truth"], strict=True)] == CASES
    counts = table[["right", "not told apart", "neither", "wrong"]]
    assert (counts.sum(axis=1) == 200).all() and (counts["wrong"] < 6).all()


def test_the_last_line_names_the_cause_and_what_else_it_can_be() -> None:
    for drift, says in ((True, "that of movement;"), (False, "that of rounding;")):
        table = drawn(drift=drift)
        assert says in conclude(rows_of(table))[-1]
    table["S"] = table["S"] + 3 * table["S"].std()
    last = conclude(rows_of(table))[-1]
    assert "neither" in last and all(word in last for word in ("temperature", "top_p", "reward"))
    few = conclude(rows_of(drawn(sigma=0.0005)))[-1]
    assert "not told apart" in few


def test_responses_that_an_update_was_made_on_are_no_sign_of_rounding() -> None:
    """The update raises S of its own responses, so that the mean of exp(S) is no longer 1."""
    table = drawn(drift=True).assign(A=1.0)
    first, later = (table.assign(step=table["minibatch"], update=update) for update in (1, 3))
    later["S"] += 3 * table["S"].std()
    unmoved = [table.assign(step=table["minibatch"], update=update, L=table["L"] + 1) for update in (0, 2)]
    responses = rows_of(pd.concat([first, later, *unmoved]))
    moved = responses.select(responses.update_B % 2 == 1)
    assert "that of movement;" in conclude(moved)[-1]
    few = moved.again_B | (moved.step_B < 5)
    for part in (moved.select(moved.again_B), moved.select(few)):
        assert all(word in conclude(part)[-1] for word in ("says nothing", "epoch", "too few"))


def test_the_spread_is_that_within_mini_batches() -> None:
    """Half the mini-batches have moved four times as far: the exponent stays, to 4.4 standard errors of 0.007."""
    table = drawn(drift=True, sigma=0.02)
    far = drawn(drift=True, sigma=0.08)
    table.loc[table["minibatch"] % 2 == 0] = far
    assert exponent_of(rows_of(table)).value == pytest.approx(0.5, abs=0.03)
    assert movement_verdict(rounding_share(rows_of(table))) == "movement"


@pytest.mark.parametrize("loss", ["gspo", None])
def test_wrong_or_diverged_log_ratios_give_no_clip_value(loss: str | None) -> None:
    table = drawn()
    text = "\n".join(conclude(rows_of(table), loss, override=override))
    assert "inside fspo" in text and "no clip value" not in text
    wrong = "\n".join(conclude(rows_of(table), loss, wrong="old log-probabilities are not the policy's"))
    assert "no clip value" in wrong and "old log-probabilities" in wrong
    table["S"] = np.where(np.arange(len(table)) % 2, 3.0, -3.0) * table["L"]  # three nats a token
    diverged = "\n".join(conclude(rows_of(table), loss))
    assert "no clip value" in diverged and "s_max=10" in diverged
    for text in (wrong, diverged):
        assert "c_low" not in text and "clip_ratio" not in text and "inside fspo" not in text


def test_long_responses_have_a_clip_value_of_gspo_though_s_is_past_s_max() -> None:
    """30,000 tokens at sigma 0.04: |S| is above 10 in one of seven, |S| / L below 0.001 in nearly all."""
    table = drawn()
    table["L"] = table["L"] * 100
    table["S"] = 0.07 * np.sqrt(table["L"]) * np.random.default_rng(1).standard_normal(len(table))
    text = "\n".join(conclude(rows_of(table), "gspo"))
    assert "inside seq_gspo" in text and "no clip value for fspo" in text


def test_an_audit_whose_first_mini_batch_is_off_gives_no_clip_value() -> None:
    table = drawn(sigma=0.3, batches=60)
    table["step"] = table["minibatch"]
    table["minibatch"] = table["step"] % 3
    records = AuditRecords(loss="gspo", responses=rows_of(table))
    text = describe(records)
    assert "old log-probabilities are not the policy's" in text and "no conclusion and no clip value" in text
    assert "clip_ratio_low" not in text and "c_low" not in text
    records.responses = records.responses.moved()
    assert "clip_ratio_low" in describe(records, override=override)


def test_whole_prompt_groups_are_resampled_where_there_are_some() -> None:
    """Eight equal responses to a prompt are worth one: the interval is sqrt(8) times as wide as of single ones."""
    table = drawn(batches=7).iloc[::8].loc[lambda rows: rows.index.repeat(8)].reset_index(drop=True)
    widths = {}
    for name, group in {"group": np.arange(len(table)) // 8, "row": np.arange(len(table))}.items():
        responses = rows_of(table, prompt=group)
        interval = exponent_of(responses)
        assert (interval.n, responses.unit) == (len(set(group)), "prompt groups")
        widths[name] = interval.high - interval.low
    assert widths["group"] / widths["row"] == pytest.approx(8**0.5, rel=0.25)


def test_too_few_responses_give_a_reason_and_no_number() -> None:
    few, still = drawn(batches=19), drawn()
    still["S"] = 0.0
    for table, says in ((few, "19 mini-batches, and it needs 20"), (still, "every S is 0")):
        (line,) = conclude(rows_of(table))
        assert says in line and "LRE" not in line and "L^" not in line
    text = describe(AuditRecords(responses=rows_of(few)))
    assert text.splitlines()[-1].startswith("- too few responses") and "c_low" not in text
    assert conclude(Responses.join([]))[0].startswith("too few")


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


def test_of_a_loss_in_bf16_the_mean_is_that_of_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(STUDY / "long_in_bf16.parquet")]) == 0
    text = capsys.readouterr().out
    assert "that of rounding" in text and "252 prompt groups" in text
    assert text.count("not told apart from sqrt(L)") == 2


def test_a_file_that_is_no_record_of_responses_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.parquet"
    for columns, says in (
        ({"S": [0.1]}, "S and L"),
        ({"S": [0.1], "L": [0]}, "column L"),
        ({"S": ["a"], "L": [1]}, "column S"),
        (None, "own.parquet"),
    ):
        path.write_text("no table") if columns is None else pd.DataFrame(columns).to_parquet(path)
        assert main([str(path)]) == 2
        assert str(path) in (message := capsys.readouterr().err) and says in message
    pd.DataFrame({"S": [0.1, 0.2], "L": [3, 4]}).to_parquet(path)
    assert main([str(path)]) == 0
    assert "too few responses" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(path), "--accept", "85"])
    assert "--accept 85" in (message := capsys.readouterr().err) and "0.85" in message


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
    assert any(
        "image/png" in output.get("data", {}) for cell in notebook["cells"] for output in cell.get("outputs", [])
    )
    assert len(namespace["axes"].lines) == 4  # type: ignore[attr-defined]
    assert sum(cell["cell_type"] == "code" for cell in notebook["cells"]) >= 3


def test_a_bin_of_equal_s_and_few_responses_decide_nothing() -> None:
    rng = np.random.default_rng(0)
    length = np.repeat([1, 10, 40, 160], 400)
    s = np.where(length > 1, 0.03 * np.sqrt(length) * rng.standard_normal(1600), 0.0)
    spread, *_ = conclude(Responses.of_rows({"S": s, "L": length, "minibatch": 1 + np.arange(1600) // 16}))
    exponent = float(re.findall(r"L\^(-?[\d.]+)", spread)[0])
    assert exponent == pytest.approx(0.5, abs=0.2), "its standard deviation is below 0.03"
    few = conclude(Responses.of_rows({"S": s[::80], "L": length[::80], "minibatch": 1 + np.arange(20)}))
    assert len(few) == 1 and "too few" in few[0] and "20" in few[0]
    nothing = "\n".join(
        conclude(
            Responses.of_rows(
                {"S": 0.1 * (np.arange(1600) // 400), "L": length, "minibatch": 1 + np.arange(1600) // 16}
            )
        )
    )
    assert "nan" not in nothing and "no exponent" in nothing


def test_each_of_many_mini_batches_is_scaled_by_itself() -> None:
    table = drawn(batches=250)
    responses = rows_of(table)
    assert len(np.unique(responses.batch_B)) == 250 and exponent_of(responses).n == 100
    assert "(100 groups of neighbouring mini-batches resampled)" in conclude(responses)[0]


def test_responses_of_one_length_get_a_clip_value() -> None:
    """Of S ~ N(0, 0.02^2 L), 85% lie within 1.44 standard deviations; 4,000 draws give c within 10%."""
    n, generator = 4000, np.random.default_rng(0)
    columns = {"S": 0.02 * 30 * generator.standard_normal(n), "L": np.full(n, 900), "A": np.ones(n)}
    lines = conclude(Responses.of_rows(columns | {"minibatch": 1 + np.arange(n) % 40}), "seq_gspo")
    assert "bins of length" in lines[0]
    (line,) = [line for line in lines if "fspo's band" in line]
    assert float(line.partition("c = ")[2].split()[0]) == pytest.approx(0.0288, rel=0.1)
    assert any("gspo's band" in line for line in lines)
