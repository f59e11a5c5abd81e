"""The programs behind the pages: figures, losses of verl and of other code bases."""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import figures, losses, public_losses
from benchmarks.pages import STUDY, read_table
from fspo.audit import read_audit

ROOT = Path(__file__).resolve().parents[2]


def test_the_figure_of_the_readme_has_its_audits_lres() -> None:
    axes = Figure().subplots()
    figures.clip_by_length(axes, read_audit(STUDY / "demo.parquet").responses.moved())
    shown = [bars.get_label() for bars in axes.containers]
    (line,) = re.findall(r"^\| LRE .*", (ROOT / "docs/audit.md").read_text(encoding="utf-8"), re.M)
    found = re.findall(r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]", line)
    assert shown == [f"{name}: LRE {lre}" for lre, name in zip(found, figures.TITLES.values(), strict=True)]


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
