"""``python -m benchmarks.settings``: the tables of docs/settings.md, from conf/ and the runner's settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fspo.files import atomic_path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/settings.md"
#: Where the settings of a group stand, each with a comment beside it.
FILES = {"fspo": ROOT / "conf/base.yaml", "run": ROOT / "recipe/runner/conf/run.yaml"}
#: Groups of one file per option; algo= has a page of its own.
GROUPS = ("mode", "experiment")
#: The part of the page between them is made here; people write the rest.
MARKS = ("<!-- made by python -m benchmarks.settings -->\n", "<!-- made until here -->\n")


def linked(comment: str) -> str:
    """A page that a comment names, as a link of the site."""
    return re.sub(r"docs/([\w-]+\.md)(#[\w-]+)?", r"[\1](\1\2)", comment)


def _table(head: str, rows: list[tuple[str, ...]]) -> str:
    columns = head.split("|")
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(cell.strip() for cell in line)} |\n" for line in lines)


def settings_of(group: str) -> Iterator[tuple[str, str, str]]:
    """Key, default and comment of each setting of a group.

    Raises:
        ValueError: If a setting has no comment beside it.
    """
    text = FILES[group].read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    inside = {f"{group}.{key}": (f"  {key}", value) for key, value in content[group].items()}
    alone = {key: (key, value) for key, value in content.items() if not isinstance(value, dict)}
    for name, (key, value) in (alone | inside).items():
        line = re.search(rf"^{key}: (.*?) +# (.+)$", text, re.M)
        if line is None:
            raise ValueError(f"{FILES[group]}: {name}={value} has no comment beside it: write one")
        yield f"`{name}`", f"`{line[1]}`", linked(line[2])


def other_defaults(group: str) -> str:
    """KEY=VALUE of each key of verl's that a file gives another default."""

    def leaves(node: Any, key: str) -> Iterator[str]:
        if isinstance(node, dict):
            for name, value in node.items():
                yield from leaves(value, f"{key}.{name}" if key else name)
        else:
            yield f"{key}={json.dumps(node).strip(chr(34))}"

    content = yaml.safe_load(FILES[group].read_text(encoding="utf-8"))
    return "\n".join(leaves({key: v for key, v in content.items() if key != group and isinstance(v, dict)}, ""))


def default_of(group: str) -> str:
    """A sentence with the option that a run has unless it names another."""
    (line,) = re.findall(rf"^  - {group}: (.+)$", (ROOT / "conf/fspo.yaml").read_text(encoding="utf-8"), re.M)
    option, _, comment = line.partition("#")
    # Where there is no option, the comment says what decides.
    return f"By default {comment.strip()}:" if option.strip() == "null" else f"By default `{group}={option.strip()}`:"


def options_of(group: str) -> Iterator[tuple[str, str]]:
    """Each option of a group of the configuration, and the comment at the head of its file."""
    for path in sorted((ROOT / "conf" / group).glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = [line[2:] for line in lines if line.startswith("# ") and not line.startswith("# @")]
        yield f"`{group}={path.stem}`", linked(" ".join(comments))


def page() -> str:
    """The page as it should be."""
    parts = [
        "## Of the recipe\n",
        _table("setting | default | meaning", list(settings_of("fspo"))),
        "## Of the run's machinery\n",
        _table("setting | default | meaning", list(settings_of("run"))),
        "## Groups\n\nA group is a file of settings that are chosen together.\n",
        *(f"{default_of(group)}\n\n{_table('option | meaning', list(options_of(group)))}" for group in GROUPS),
        "## Keys of verl's with another default here\n\nAn experiment may set them again.\n",
        *(f"```text\n{other_defaults(group)}\n```\n" for group in FILES),
    ]
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    return head + MARKS[0] + "\n" + "\n".join(parts) + "\n" + MARKS[1] + rest.partition(MARKS[1])[2]


def main() -> None:
    """Write the page."""
    with atomic_path(PAGE) as temporary:
        temporary.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
