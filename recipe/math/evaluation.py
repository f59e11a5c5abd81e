"""Accuracy of a policy from scored generations: avg@k, pass@k and intervals, per data set and by length.

The input is one record per generated response. Responses to one problem are not independent, so all intervals are over
whole problems: a bootstrap, or Wilson's where all problems have one value.

`python -m recipe.fspo.main evaluate=true` generates the responses and prints the tables;
`python -m recipe.math.evaluation FILE` prints them of responses that are there, such as verl's dump of a validation.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fspo.fairness.lre import cluster_interval, wilson_interval
from fspo.files import read_lines, write_json
from fspo.markdown import markdown_table

LENGTH_EDGES: Final = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Record(NamedTuple):
    """One scored response: its data set, its problem, its length in tokens and its score in [0, 1] (1 is correct)."""

    data_source: str
    problem_id: Any
    response_length: int
    score: float


def read_records(path: Path) -> list[Record]:
    """Records of a JSONL file with the keys data_source, problem_id, response_length and score.

    A key `acc` is preferred to `score`, which may hold a shaped reward: verl's dumps of validation generations. Raises
    ValueError for a line that is not such a record, and for a file without lines.
    """
    records, problems = list[Record](), list[str]()
    for row in read_lines(path, problems, data_source=str, response_length=int):
        score: Any = row.get("score") if row.get("acc") is None else row["acc"]
        record = Record(row["data_source"], row.get("problem_id"), row["response_length"], score)
        if record.problem_id is None or not isinstance(score, int | float) or not 0 <= score <= 1:
            raise ValueError(f"{path}: {record} needs a problem_id, and acc or score in [0, 1]")
        records.append(record)
    if problems or not records:
        raise ValueError("".join(problems) or f"{path}: no records; evaluate writes one line per response")
    return records


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n responses, drawn without replacement, hold a correct one: `1 - C(n-c, k) / C(n, k)`.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, equation 1), in its numerically stable product form;
    0 <= correct <= n and 1 <= k <= n.
    """
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def evaluate(records: Iterable[Record]) -> dict[str, Any]:
    """For every data set the numbers of problems and responses and, as `share`s, accuracy:

    - `avg`: the mean over problems of the mean score of their responses (avg@k for k responses each);
    - `pass`: pass@k for powers of two up to the smallest number of responses to a problem, and for that number. A
      response counts as correct if its score is 1;
    - `by_length`: the mean score of the responses in each bin `[low, high)` of the length in tokens; a problem weighs
      by its responses in the bin.
    """
    by_source: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        by_source[record.data_source][record.problem_id].append(record)
    return {source: _of_problems(list(problems.values())) for source, problems in sorted(by_source.items())}


def share(sums: Sequence[float], counts: Sequence[float]) -> dict[str, float | None]:
    """`sum(sums) / sum(counts)` of one value per problem each: {value, low, high} with a 95% interval over problems.

    Where all problems have one value, 0 or 1 say, the bootstrap has no width: the interval is Wilson's for so many
    problems. One problem has no interval.
    """
    with np.errstate(invalid="ignore"):  # 0 / 0 in a resample without any count, which is left out
        columns = [np.reshape(one, (-1, 1)) for one in (sums, counts)]
        found = cluster_interval(lambda total, count: float(total[0] / count[0]), columns)
    values = [total / count for total, count in zip(sums, counts, strict=True) if count > 0]
    low, high = found.low, found.high
    if len(values) > 1 and max(values) - min(values) < 1e-9:
        low, high = map(float, wilson_interval(values[0], len(values)))
    ends = {"value": found.value, "low": low, "high": high}
    return {name: end if math.isfinite(end) else None for name, end in ends.items()}  # JSON has no nan


def _of_problems(problems: list[list[Record]]) -> dict[str, Any]:
    ones, each = [1.0] * len(problems), [len(records) for records in problems]
    solved = [sum(record.score == 1.0 for record in records) for records in problems]
    by_length = []
    for low, high in itertools.pairwise((*LENGTH_EDGES, math.inf)):
        inside = [[r.score for r in records if low <= r.response_length < high] for records in problems]
        if any(inside):
            accuracy = share([math.fsum(scores) for scores in inside], [float(len(scores)) for scores in inside])
            ends = {"low": low, "high": None if math.isinf(high) else high}
            by_length.append({**ends, "responses": sum(map(len, inside)), "accuracy": accuracy})
    return {
        "problems": len(problems),
        "responses": sum(each),
        "responses_per_problem": {"min": min(each), "max": max(each)},
        "avg": share([statistics.fmean(record.score for record in records) for records in problems], ones),
        "pass": {
            str(k): share([pass_at_k(n, correct, k) for n, correct in zip(each, solved, strict=True)], ones)
            for k in sorted({*(2**i for i in range(min(each).bit_length())), min(each)})
        },
        "by_length": by_length,
    }


def format_table(result: Mapping[str, Any]) -> str:
    """Markdown tables of `evaluate`'s result: one row per data set, then one per data set and length bin."""

    def show(entry: Mapping[str, float | None] | None) -> str:
        ends = "" if entry is None or entry["low"] is None else f" [{entry['low']:.1%}, {entry['high']:.1%}]"
        return f"{entry['value']:.1%}{ends}" if entry else ""

    ks = sorted({k for scores in result.values() for k in scores["pass"]}, key=int)
    sets, lengths = [], []
    for name, scores in result.items():
        each = " to ".join(map(str, dict.fromkeys(scores["responses_per_problem"].values())))
        passes = [show(scores["pass"].get(k)) for k in ks]
        sets.append([name, str(scores["problems"]), each, show(scores["avg"]), *passes])
        for entry in scores["by_length"]:
            span = f"{entry['low']} to {entry['high'] - 1}" if entry["high"] else f"from {entry['low']}"
            lengths.append([name, span, str(entry["responses"]), show(entry["accuracy"])])
    heads = ["data set", "problems", "responses each", "avg@k", *(f"pass@{k}" for k in ks)]
    by_length = markdown_table(["data set", "response length", "responses", "accuracy"], lengths)
    return f"{markdown_table(heads, sets)}\n\n{by_length}\n"


def conclude_evaluation(folder: Path) -> str:
    """Evaluate the newest generations in ``folder/validation`` and write ``folder/evaluation.json``.

    Returns the tables, and where the files are. Raises ValueError if there are no generations, or none with a score in
    [0, 1].
    """
    newest = max((folder / "validation").glob("*.jsonl"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise ValueError(f"{folder / 'validation'} has no generations: the evaluation scored nothing")
    result = evaluate(read_records(newest))
    write_json(folder / "evaluation.json", result)
    return f"{format_table(result)}\ngenerations: {newest}\nnumbers: {folder / 'evaluation.json'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 2 for a file that holds no scored responses."""
    parser = argparse.ArgumentParser(prog="python -m recipe.math.evaluation", description=__doc__)
    what = f"JSONL, a response a line, with {', '.join(Record._fields)} (or acc for score)"
    parser.add_argument("file", type=Path, metavar="FILE", help=what)
    try:
        print(format_table(evaluate(read_records(parser.parse_args(argv).file))), end="")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
