"""Which answers the scorer accepts, by kind, beside other scorers: ``python -m benchmarks.rewards [FILE ...]``.

A line of a file is ``{"kind": ..., "truth": ..., "response": ..., "label": 1 or 0}``, or the list [kind, part, label,
truth, response]. Without a file it reads the labelled pairs of the tests. A cell is "right accepted / wrong accepted".

TRL is not a dependency: its column is a reconstruction from the public definition of `accuracy_reward`.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
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
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
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


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    for path in [Path(word) for word in sys.argv[1:]] or [PAIRS, KINDS, SIBLINGS]:
        print(table(read_pairs(path)), end="\n\n")
