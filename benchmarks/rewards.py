"""What normalisation does to the labelled pairs, by class: ``python -m benchmarks.rewards``.

docs/data-and-rewards.md has its last row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fspo.markdown import markdown_table
from fspo.rewards import MathScorer, Verdict

PAIRS = Path(__file__).resolve().parents[1] / "tests" / "unit" / "assets" / "answer_classes.jsonl"


def score_all(scorer: MathScorer, responses: Sequence[str], ground_truths: Sequence[str]) -> list[Verdict]:
    """Verdicts in the order of the responses, two at a time."""
    with ThreadPoolExecutor(2) as executor:
        return list(executor.map(scorer.score, responses, ground_truths))


def class_table() -> str:
    """Accepted answers by class, "math-verify -> normalised of all"; a Markdown table.

    A line of the file is [class, part, label, ground truth, response]; the rules were not fitted to the part "held".
    """
    pairs = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    with MathScorer(n_workers=2) as scorer:
        verdicts = score_all(scorer, [pair[4] for pair in pairs], [pair[3] for pair in pairs])
    columns = [(part, label) for part in ("dev", "held") for label in (1, 0)]
    rows = []
    for name in [*dict.fromkeys(pair[0] for pair in pairs), "all"]:
        cells = [name.replace("_", " ")]
        for column in columns:
            chosen = [
                verdict
                for verdict, (kind, part, label, *_) in zip(verdicts, pairs, strict=True)
                if (part, label) == column and name in (kind, "all")
            ]
            plain = sum(verdict.plain == "correct" for verdict in chosen)
            cells.append(f"{plain} -> {sum(verdict.status == 'correct' for verdict in chosen)} of {len(chosen)}")
        rows.append(cells)
    return markdown_table(["class", *(f"{part}: {'right' if label else 'wrong'}" for part, label in columns)], rows)


if __name__ == "__main__":
    print(class_table())
