"""A few of the responses that verl has dumped, to read on the page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from fspo.reading import is_below
from fspo.records import CONFIG_FILE, numbered_lines
from fspo.report.runs import Run

#: Settings of verl that name folders with one file of responses for each step.
_FOLDERS: Final = {"training": "trainer.rollout_data_dir", "validation": "trainer.validation_data_dir"}
_STEPS: Final = 6  # shown of a folder, from its first to its last
_OF_EACH: Final = 3  # right responses of a step, and wrong ones
_CHARACTERS: Final = 1500  # at either end of a text


def shown_samples(runs: Sequence[Run], problems: list[str]) -> list[dict[str, Any]]:
    """A bounded number of the responses of every run that dumped any, spread over steps and verdicts.

    Returns:
        Of each response its ``prompt``, its ``response`` and ``tags``, by which a reader can filter.
    """
    samples = []
    for run in runs:
        settings = run.settings()
        for kind, key in _FOLDERS.items():
            if not isinstance(name := settings.get(key), str) or not name:
                continue
            folders = [Path(name), run.path / Path(name).name]  # the second: a run folder that was moved
            # A folder of somebody else's may name any file of the reader's.
            files = [
                path for folder in folders for path in folder.glob("*.jsonl") if re.fullmatch("[0-9]{1,15}", path.stem)
            ]
            if foreign := [path for path in files if not is_below(path, run.path)]:
                problems.append(f"{run.path / CONFIG_FILE}: {key}={name} is not in the run's folder, and is not read")
                files = [path for path in files if path not in foreign]
            dumps = {int(path.stem): path for path in reversed(files)}
            chosen = np.linspace(0, len(dumps) - 1, min(_STEPS, len(dumps))).astype(int)
            for step in np.array(sorted(dumps), dtype=int)[chosen].tolist():
                tags = {"run": run.name, "from": kind, "step": str(step)}
                lines = [line for _, line in numbered_lines(dumps[step], problems)]
                for verdict, line in _some(lines):
                    texts = {"prompt": _cut(line.get("input")), "response": _cut(line.get("output"))}
                    samples.append({"tags": tags | {"verdict": verdict}} | texts)
    return samples


def _some(lines: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    left = {"right": _OF_EACH, "wrong": _OF_EACH}
    for place in np.random.default_rng(0).permutation(len(lines)):
        score = lines[place].get("acc", lines[place].get("score"))
        verdict = "right" if isinstance(score, (int, float)) and score > 0 else "wrong"
        left[verdict] -= 1
        if left[verdict] >= 0:
            yield verdict, lines[place]


def _cut(value: object) -> str:
    text = str(value)
    left = len(text) - 2 * _CHARACTERS
    return text if left <= 0 else f"{text[:_CHARACTERS]}\n[... {left} characters left out ...]\n{text[-_CHARACTERS:]}"
