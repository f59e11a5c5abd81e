"""What the pages let their reader write: data, a reward and a loss of one's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
DATA, ARCHITECTURE = ((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in ("data", "architecture"))


def blocks(text: str, language: str) -> Iterator[str]:
    """The code of a page in one language."""
    yield from (block for _, block in re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, re.M | re.S))


def write_own_loss(folder: Path) -> None:
    """``my_loss.py`` and the choice of it, of docs/architecture.md."""
    for name, language in (("my_loss.py", "python"), ("conf/algo/fspo_power.yaml", "yaml")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(next(blocks(ARCHITECTURE, language)), encoding="utf-8")


def write_own_data(folder: Path) -> None:
    """The files of docs/data.md, under the names that they give themselves."""
    for block in blocks(DATA, "python"):
        if name := re.match(r'"""(own/\w+\.py):', block):
            (folder / name[1]).parent.mkdir(exist_ok=True)
            (folder / name[1]).write_text(block, encoding="utf-8")
