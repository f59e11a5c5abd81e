"""Which answers the scorer accepts, by kind, beside other scorers: ``python -m benchmarks.rewards [FILE ...]``.

``python -m benchmarks.rewards --load N`` times N responses, 5% of them pathological, and a sample by the other scorers.

A line of a file is ``{"kind": ..., "truth": ..., "response": ..., "label": 1 or 0}``, or the list [kind, part, label,
truth, response]. Without a file it reads the labelled pairs of the tests. A cell is "right accepted / wrong accepted".

TRL is not a dependency: its column is a reconstruction from the public definition of `accuracy_reward`.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fspo.markdown import markdown_table
from recipe.math.answers import MathScorer, Verdict

ASSETS = Path(__file__).resolve().parents[1] / "tests" / "unit" / "assets"
PAIRS = ASSETS / "answer_classes.jsonl"
KINDS = ASSETS / "answer_kinds.jsonl"
SIBLINGS = ASSETS / "answer_siblings.jsonl"
Scorer = Callable[[str, str], bool]


class Pair(NamedTuple):
    """A response to a problem with that ground truth, and whether it is right."""

    kind: str
    truth: str
    response: str
    label: bool


def read_pairs(path: Path) -> list[Pair]:
    """The labelled pairs of a file."""
    with path.open(encoding="utf-8") as lines:  # which end at "\n" alone: an answer may hold another line separator
        rows = [json.loads(line) for line in lines]
    rows = [
        row if isinstance(row, dict) else dict(zip(("kind", "", "label", "truth", "response"), row, strict=True))
        for row in rows
    ]
    return [Pair(row["kind"], row["truth"], row["response"], bool(row["label"])) for row in rows]


def score_all(scorer: MathScorer, responses: Sequence[str], ground_truths: Sequence[str]) -> list[Verdict]:
    """Verdicts in the order of the responses, two at a time."""
    with ThreadPoolExecutor(2) as executor:
        return list(executor.map(scorer.score, responses, ground_truths))


def plain_math_verify(response: str, truth: str) -> bool:
    """As math-verify's README calls it."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${truth}$"), parse(response)))


def trl(response: str, truth: str) -> bool:
    """TRL's `accuracy_reward`, rebuilt; where it returns None, because the truth cannot be read, this is no."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    gold = parse(truth)
    normalization = NormalizationConfig(units=True)
    config = LatexExtractionConfig(
        boxed_match_priority=0, normalization_config=normalization, try_extract_without_anchor=False
    )
    return bool(gold) and bool(verify(gold, parse(response, extraction_config=[config], extraction_mode="first_match")))


def _verl(name: str) -> Scorer:
    import importlib

    module = importlib.import_module(f"verl.utils.reward_score.{name}")

    def accepts(response: str, truth: str) -> bool:
        result = module.compute_score(response, truth)
        result = result["acc"] if isinstance(result, dict) else result[0] if isinstance(result, tuple) else result
        return float(result) > 0

    return accepts


def others() -> dict[str, Scorer]:
    """The scorers beside ours, by name."""
    verls = {f"verl {name}": _verl(name) for name in ("prime_math", "math_reward", "math_dapo")}
    return {"math-verify": plain_math_verify, "TRL, rebuilt": trl, **verls}


def verdicts_of(accepts: Scorer, pairs: Iterable[Pair]) -> list[bool]:
    """Whether a scorer accepts each response; an exception is no."""
    verdicts = []
    for pair in pairs:
        verdicts.append(False)
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            verdicts[-1] = accepts(pair.response, pair.truth)
    return verdicts


def table(pairs: Sequence[Pair], beside: bool = True) -> str:
    """Accepted answers by kind, "right / wrong", of the scorer, of math-verify with verl's targets, and of others."""
    columns = {}
    for name, normalise in (("ours", True), ("normalise=false", False)):
        with MathScorer(n_workers=2, normalise=normalise) as scorer:
            verdicts = score_all(scorer, [pair.response for pair in pairs], [pair.truth for pair in pairs])
        columns[name] = [verdict.status == "correct" for verdict in verdicts]
    columns |= {name: verdicts_of(accepts, pairs) for name, accepts in (others() if beside else {}).items()}
    rows = []
    for kind in [*dict.fromkeys(pair.kind for pair in pairs), "all"]:
        chosen = [number for number, pair in enumerate(pairs) if kind in (pair.kind, "all")]
        labels = [pairs[number].label for number in chosen]
        cells = [
            " / ".join(
                str(sum(column[number] and pairs[number].label is label for number in chosen))
                for label in (True, False)
            )
            for column in columns.values()
        ]
        rows.append([kind.replace("_", " "), f"{sum(labels)} / {len(labels) - sum(labels)}", *cells])
    return markdown_table(["kind", "right / wrong", *columns], rows)


#: Responses that are expensive or broken, of which `load` mixes one into twenty.
PATHOLOGICAL = (
    "\\boxed{9^{9^{9^9}}}", "\\boxed{100000000!}", "\\boxed{" + "(" * 60 + "1" + ")" * 60 + "}", "\\boxed{" * 300,
    "a" * 300_000, "\\boxed{\\sum_{k=1}^{10^9} \\sin k}", "\\boxed{\\int_0^1 x^{x^{x}} dx}", "\\boxed{\ud800}", "",
    "\x00" * 50,
)  # fmt: skip


def load(n: int, n_threads: int = 32) -> str:
    """n responses from many threads through a pool of two workers; other scorers on 200 of the ordinary ones.

    An empty box stands before every ordinary response, so that no verdict comes from the scorer's cache of only boxes.

    Raises:
        AssertionError: a verdict is lost, in another place than its response, or accepts a pathological response.
    """
    pairs = [pair for pair in read_pairs(PAIRS) + read_pairs(SIBLINGS) if "boxed" in pair.response]
    tasks = [
        (PATHOLOGICAL[number // 20 % len(PATHOLOGICAL)], "17", False)
        if number % 20 == 19
        else (f"\\boxed{{}} {pairs[number % len(pairs)].response}", pairs[number % len(pairs)].truth, True)
        for number in range(n)
    ]
    with MathScorer(n_workers=2) as scorer:
        alone = {pair: scorer.score(pair.response, pair.truth).status for pair in pairs}

    def timed(task: tuple[str, str, bool]) -> tuple[str, float]:
        start = time.perf_counter()
        return scorer.score(task[0], task[1]).status, time.perf_counter() - start

    with MathScorer(n_workers=2) as scorer, ThreadPoolExecutor(n_threads) as executor:
        scorer.score("about 1", "2")
        start = time.perf_counter()
        results = list(executor.map(timed, tasks))
        whole = time.perf_counter() - start
    moved = sum(
        status != (alone[pairs[number % len(pairs)]] if ordinary else status)
        for number, ((status, _), (*_, ordinary)) in enumerate(zip(results, tasks, strict=True))
    )
    accepted = sum(
        status == "correct" and not ordinary for (status, _), (*_, ordinary) in zip(results, tasks, strict=True)
    )
    assert len(results) == n and not accepted
    waits = sorted(seconds for _, seconds in results)
    rows = [["ours, two workers, with the pathological", "", f"{1000 * whole / n:.1f}"]]
    sample = pairs[:: max(1, len(pairs) // 200)]
    for name, accepts in {"ours": None, **others()}.items():
        if name in ("ours", "math-verify", "verl prime_math"):
            with MathScorer(n_workers=1) as scorer:
                scorer.score("about 1", "2")
                judge = accepts or (lambda response, truth: bool(scorer.score(response, truth).score))
                took = []
                for pair in sample:
                    start = time.perf_counter()
                    verdicts_of(judge, [pair])
                    took.append(1000 * (time.perf_counter() - start))
                rows.append(
                    [f"{name}, one at a time", f"{statistics.median(took):.1f}", f"{statistics.mean(took):.1f}"]
                )
    return (
        f"{n} responses, {n_threads} threads: {whole:.1f} s, median {1000 * waits[n // 2]:.0f} ms, p99 "
        f"{waits[int(n * 0.99)]:.2f} s, longest {waits[-1]:.2f} s; statuses that differ from those alone: {moved}\n\n"
        + markdown_table(["scorer", "median ms an answer", "mean"], rows)
    )


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    if sys.argv[1:2] == ["--load"]:
        print(load(int(sys.argv[2])))
        sys.exit()
    for path in [Path(word) for word in sys.argv[1:]] or [PAIRS, KINDS, SIBLINGS]:
        print(table(read_pairs(path)), end="\n\n")
