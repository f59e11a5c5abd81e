"""The programs behind the pages: figures, the card of the recordings, losses of verl and of other code bases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks import losses, public_losses
from benchmarks.pages import STUDY, read_table
from benchmarks.studies import figures
from fspo.audit import read_audit

ROOT = Path(__file__).resolve().parents[2]


def test_the_figure_of_the_readme_has_its_audits_lres() -> None:
    axes = Figure().subplots()
    figures.clip_by_length(axes, read_audit(STUDY / "demo.parquet").responses.moved())
    shown = [bars.get_label() for bars in axes.containers]
    (line,) = re.findall(r"^\| LRE .*", (ROOT / "docs/audit.md").read_text(encoding="utf-8"), re.M)
    found = re.findall(r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]", line)
    assert shown == [f"{name}: LRE {lre}" for lre, name in zip(found, figures.BANDS.values(), strict=True)]


def test_the_card_judges_a_band_of_one_s_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """L^0.5 has the LRE of FSPO's band in docs/results.md, which clock is right."""
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"```python\n(.*?)```", (STUDY / "README.md").read_text(encoding="utf-8"), re.S)
    for power, low, high in (("0.4", 0.0, 0.03), ("0.5", 0.039, 0.045), ("1.0", 0.08, 0.2)):
        exec(block.replace("L**0.4", f"L**{power}"), {})
        (value,) = re.findall(r"^Interval\(value=([\d.]+), low", capsys.readouterr().out)
        assert low <= float(value) < high


def test_the_table_of_losses_has_every_loss() -> None:
    known = losses.known()
    heads, *rows = read_table("check-losses")
    assert [row[0] for row in rows] == [*known]
    some = {name: known[name] for name in ("gspo", "geo_mean")}
    assert losses.table_of_losses(some) == [heads, *(row for name in some for row in rows if row[0] == name)]


def test_a_row_of_the_public_table_is_made_again() -> None:
    gspo = public_losses.of_verl("gspo", *public_losses.VERL["gspo"])
    recorded = next(row for row in read_table("public-losses") if row[3] == "gspo, token-mean")
    assert public_losses.row(gspo, takes_weights=True) == recorded[4:]
