"""Responses to read on the page: some of each run's samples.jsonl, cut to what a page can hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fspo.report.runs import Run, read_lines
from fspo.samples import is_right, quarters, spread
from fspo.sums import FINE_LENGTH_EDGES

SAMPLES_FILE: Final = "samples.jsonl"
KINDS: Final = ("training", "validation")
_ON_A_PAGE: Final = 240
_PER_RUN: Final = (4, 48)
_CHARACTERS: Final = 1500  # at either end of a text


_CLIP: Final = {"True": "accepted", "False": "clipped"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One response as the page shows it: what it can be filtered by, what is seen of it closed, and its texts."""

    tags: dict[str, str]
    line: str
    prompt: str
    response: str


def read_samples(run: Run, problems: list[str]) -> list[dict[str, Any]]:
    """The lines of a run's samples.jsonl with texts cut to their ends; none for a run that kept none.

    A resumed run may repeat a step; then the later samples of the step count.
    """
    path, kept = run.path / SAMPLES_FILE, dict[tuple[int, str], dict[int, dict[str, Any]]]()
    if not path.is_file():
        return []
    for number, line in read_lines(path, problems):
        step, kind, sample = line.get("step"), line.get("kind"), line.get("sample")
        if not isinstance(step, int) or kind not in KINDS or not isinstance(sample, int):
            problems.append(
                f"{path}:{number}: needs integers 'step' and 'sample', and a 'kind' of {' or '.join(KINDS)}"
            )
            continue
        if sample == 0:
            kept[step, kind] = {}
        length = line.get("L")
        cut = {name: _cut(str(line.get(name, ""))) for name in ("prompt", "response")}
        kept.setdefault((step, kind), {})[sample] = line | cut | {"L": length if isinstance(length, int) else None}
    return [line for _, samples in sorted(kept.items()) for _, line in sorted(samples.items())]


def shown_samples(runs: Sequence[Run], starts: npt.NDArray[np.int64], problems: list[str]) -> list[Sample]:
    """A bounded number of every run's samples, spread over steps, lengths and verdicts."""
    n = int(np.clip(_ON_A_PAGE // max(1, len(runs)), *_PER_RUN))
    edges = [int(FINE_LENGTH_EDGES[start]) for start in starts]
    spans = [f"{low} to {high - 1}" for low, high in itertools.pairwise(edges)] + [f"{edges[-1]} or more"]
    found = []
    for run in runs:
        lines = read_samples(run, problems)
        if not lines:
            continue
        right = [is_right(line, line.get("reward")) for line in lines]
        columns: list[Any] = [[str(line.get(name)) for line in lines] for name in ("step", "kind", "accepted")]
        columns += [right, quarters([line["L"] or 0 for line in lines])]
        for i in sorted(spread(columns, n, seed=0)):
            line, length = lines[i], lines[i]["L"]
            place = None if length is None else max(0, int(np.searchsorted(edges, length, side="right")) - 1)
            tags = {
                "run": f"{run.algo}, seed {run.seed}" + ("" if run.comparison == "default" else f", {run.comparison}"),
                "from": line["kind"],
                "length": "unknown" if place is None else spans[place],
                "verdict": "right" if right[i] else "wrong",
                "clip": _CLIP.get(str(line.get("accepted")), "no clip recorded"),
            }
            found.append(Sample(tags, _line(line, tags), line["prompt"], line["response"]))
    return found


def filters(samples: Sequence[Sample]) -> dict[str, list[str]]:
    """The values of each tag that occur, lengths in their order."""
    names = samples[0].tags if samples else {}
    found = {name: list(dict.fromkeys(sample.tags[name] for sample in samples)) for name in names}
    return {
        name: sorted(values, key=lambda v: int(v.split()[0]) if v[0].isdigit() else -1) if name == "length" else values
        for name, values in found.items()
    }


def _line(line: dict[str, Any], tags: dict[str, str]) -> str:
    said = [f"step {line['step']}", tags["run"], tags["from"]]
    said.append("length unknown" if line["L"] is None else f"L = {line['L']}")
    told = line.get("status") in (None, "correct", "wrong")
    said.append(tags["verdict"] if told else f"{tags['verdict']} ({line['status']})")
    if isinstance(line.get("reward"), (int, float)):
        said.append(f"reward {line['reward']:.3g}")
    if isinstance(line.get("S"), (int, float)):
        said.append(f"S = {line['S']:+.3g}, {tags['clip']}" + (", gradient removed" if line.get("removed") else ""))
    return " | ".join(said)


def _cut(text: str) -> str:
    left = len(text) - 2 * _CHARACTERS
    return text if left <= 0 else f"{text[:_CHARACTERS]}\n[... {left} characters left out ...]\n{text[-_CHARACTERS:]}"
