"""The documentation builds as it is published, and says of the code what the code says."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from fspo.losses import ALGORITHMS
from fspo.rewards import Status
from fspo.types import SequenceLossSettings
from recipe.fspo.config import policy_loss_settings
from recipe.runner.launch.progress import STEP_COLUMNS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return [
        b for _, b in re.findall(rf"^( *)```{language}\n(.*?)^\1```$", path.read_text(encoding="utf-8"), re.M | re.S)
    ]


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Header and rows of each table of a page, as cells."""
    for match in re.finditer(r"(?:^\|.*\|\n)+", text + "\n", re.M):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in match[0].splitlines()]
        yield rows[0], rows[2:]


def code(cell: str) -> list[str]:
    """The code spans of a cell, those with backticks inside included."""
    return [a.strip() or b for a, b in re.findall(r"``(.+?)``(?!`)|`([^`]+)`", cell)]


# ---------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)  # aborts on a warning: a page outside the navigation, a broken link or anchor
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site: Path) -> None:
    built = {path.relative_to(site).with_suffix(".md") for path in site.rglob("*.html")}
    assert {path.relative_to(DOCS) for path in PAGES} <= built


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = r"""<(?:(?:script|img|iframe|source)[^>]+src|link[^>]+href)=["']?((?:https?:)?//[^"' >]+)"""
    for page in site.rglob("*.html"):
        assert re.findall(loads, page.read_text(encoding="utf-8")) == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import\s)[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.parametrize("page", OUTSIDE, ids=name_of)
def test_links_outside_the_site_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [*OUTSIDE, *PAGES], ids=name_of)
def test_every_block_names_its_language(page: Path) -> None:
    # A block without one would not be seen by the test of commands.
    opening = re.findall(r"^ *```(.*)$", page.read_text(encoding="utf-8"), re.M)[::2]
    assert set(opening) <= {"bash", "python", "text", "json", "yaml"}


# ---------------------------------------------------------------- names and values


def test_every_metric_is_explained() -> None:
    """The fspo/ ones of the library: tests/unit/test_diagnostics.py."""
    explained = {
        span
        for _, rows in tables((DOCS / "metrics.md").read_text("utf-8"))
        for r in rows
        for c in r
        for span in code(c)
    }
    logged = set(re.findall(r'"(actor/\w+)"', (ROOT / "recipe/fspo/policy_loss.py").read_text(encoding="utf-8")))
    statuses = {f"reward/status/{status.value}" for status in Status}
    assert logged | statuses | {metric for _, metric, _ in STEP_COLUMNS} <= explained


def test_every_setting_has_a_row() -> None:
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    (rows,) = [rows for header, rows in tables(text) if header[0] == "setting"]
    named = [name for row in rows for name in code(row[0])]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(SequenceLossSettings))


def test_every_setting_of_a_run_has_a_row() -> None:
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    (rows,) = [rows for header, rows in tables(text) if header[0] == "setting of a run"]
    named = [name for row in rows for name in code(row[0])]
    keys = yaml.safe_load((ROOT / "conf/base.yaml").read_text(encoding="utf-8"))["fspo"]
    groups = {"algo", "mode", "advantage", "match_scale", "experiment"}
    assert set(named) == groups | {"seed", "evaluate"} | {f"fspo.{key}" for key in keys}


def test_the_settings_of_the_cpu_page_are_those_of_the_demo() -> None:
    demo = (ROOT / "conf/experiment/demo.yaml").read_text(encoding="utf-8")
    (rows,) = [rows for header, rows in tables((DOCS / "cpu.md").read_text("utf-8")) if header == ["setting", "reason"]]
    for span in [span for row in rows for span in code(row[0])]:
        setting = span.rpartition(".")[2] if ": " in span else f"{span.rpartition('.')[2]}:"
        assert re.search(rf"\b{re.escape(setting)}", demo), span


def test_every_file_of_a_run_is_explained() -> None:
    text = (DOCS / "run-folder.md").read_text(encoding="utf-8")
    written = set()
    for path in (ROOT / "fspo/records.py", *(ROOT / "recipe").rglob("*.py")):
        written |= set(re.findall(r'^[A-Z_]+_FILE\b.* = "(.+)"$', path.read_text(encoding="utf-8"), re.M))
    assert {"run.json", "metrics.jsonl"} <= written
    assert {name for name in written if name not in text} == set()


def sections_by_algo() -> dict[str, str]:
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    found = {}
    for title, body in re.findall(r"^### (.+)\n((?:(?!^#).*\n)+)", text, re.M):
        found |= {span.removeprefix("algo="): body for span in code(title) if span.startswith("algo=")}
    return found


def test_every_algorithm_has_a_section_with_the_values_that_it_runs_with() -> None:
    sections = sections_by_algo()
    assert set(sections) == {path.stem for path in (ROOT / "conf/algo").glob("*.yaml")}
    for algo, body in sections.items():
        policy_loss = OmegaConf.load(ROOT / f"conf/algo/{algo}.yaml").actor_rollout_ref.actor.policy_loss
        settings = policy_loss_settings(policy_loss)
        if settings is None:
            continue  # verl's own
        assert "```text" in body, algo  # the formula
        (said,) = re.findall(r"Settings:\s(.*?)\.(?:\s|$)", body, re.S)
        runs_with = dataclasses.asdict(settings) | {"loss_mode": policy_loss.loss_mode}
        pairs = [span.split("=", 1) for span in code(said.replace("\n", " ")) if "=" in span]
        assert pairs, algo
        for name, value in pairs:
            real = runs_with[name]
            assert (float(value) if isinstance(real, float) else value) == real, (algo, name)


def test_the_table_of_losses_is_complete() -> None:
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    (rows,) = [rows for header, rows in tables(text) if "`loss_mode`" in header]
    assert [name for row in rows for name in code(row[1])] == list(ALGORITHMS)


# ---------------------------------------------------------------- examples


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(POLICY_LOSS_REGISTRY)
    yield
    POLICY_LOSS_REGISTRY.clear()
    POLICY_LOSS_REGISTRY.update(before)


def run_examples(page: Path) -> dict[str, Any]:
    """Execute a page's Python blocks in order, in one namespace."""
    module = sys.modules[page.stem] = ModuleType(page.stem)  # dataclasses look it up
    try:
        for block in blocks(page, "python"):
            exec(compile(block, str(page), "exec"), module.__dict__)
    finally:
        del sys.modules[page.stem]
    return module.__dict__


@pytest.mark.parametrize("page", [page for page in [*OUTSIDE, *PAGES] if blocks(page, "python")], ids=name_of)
def test_python_examples_run(
    page: Path, registry: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    run_examples(page)
    assert capsys.readouterr().out
