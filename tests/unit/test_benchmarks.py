"""The programs behind the pages: figures, losses of verl and of other code bases."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks import code_bases, figures, losses
from benchmarks.checkouts import Source
from benchmarks.pages import STUDY, read_table
from fspo.audit import read_audit
from fspo.check_loss import PolicyLoss, configured
from fspo.check_loss.by_length import normalisation

ROOT = Path(__file__).resolve().parents[2]


def test_the_figure_of_the_readme_has_its_audits_lres() -> None:
    axes = Figure().subplots()
    figures.clip_by_length(axes, read_audit(STUDY / "demo.parquet").responses.moved())
    shown = [bars.get_label() for bars in axes.containers]
    (line,) = re.findall(r"^\| LRE .*", (ROOT / "docs/audit.md").read_text(encoding="utf-8"), re.M)
    found = re.findall(r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]", line)
    assert shown == [f"{name}: LRE {lre}" for lre, name in zip(found, figures.BANDS.values(), strict=True)]


def test_the_table_of_losses_has_every_loss() -> None:
    known = losses.known()
    heads, *rows = read_table("check-losses")
    assert [row[0] for row in rows] == [*known]
    some = {name: known[name] for name in ("gspo", "geo_mean")}
    assert losses.table_of_losses(some) == [heads, *(row for name in some for row in rows if row[0] == name)]


def test_a_release_is_read_where_it_is_installed() -> None:
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    release = Source(Path(spec.origin).parents[1])
    path = code_bases.CODE_BASES["verl"][0]
    assert release.holds(path) and release.version("verl") == (metadata.version("verl"), "installed")
    gspo = next(code_bases.verl(release))
    config = configured([f"{key}={value}" for key, value in gspo.settings.items()])
    assert normalisation(PolicyLoss(gspo.loss, config))[1] == pytest.approx(0, abs=0.01)
    assert normalisation(PolicyLoss(gspo.loss, config, "seq-mean-token-mean"))[1] == pytest.approx(-1, abs=0.01)
