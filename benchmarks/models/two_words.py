"""The task of "A pretrained model" in docs/results.md, and its reward.

A line, a few sentences or a story on a subject, with two given words. SmolLM2-135M-Instruct writes 10 to 300 tokens
and sometimes uses both words, so that there is something to learn at every length.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fspo.files import write_rows

FORMS: Final = ("Name one thing", "Write one sentence", "Write three sentences", "Write a short story")
#: Of real lengths: 10 to about 1,024 tokens.
LONG_FORMS: Final = ("Write one sentence", "Write three sentences", "Write one paragraph", "Write a long story")
SUBJECTS: Final = (
    "the sea", "a small dog", "rain", "a train", "winter", "a garden", "bread", "the moon", "a letter", "a bridge",
    "music", "a teacher", "the forest", "an old house", "a clock", "a boat",
)  # fmt: skip
WORDS: Final = ("blue", "happy", "old", "night", "friend", "water", "light", "small")
TRAIN, TEST = 320, 64


def rows(forms: Sequence[str] = FORMS, seed: int = 0) -> list[dict[str, Any]]:
    """Distinct prompts in verl's schema, in a random order."""
    drawn = list(itertools.product(forms, SUBJECTS, itertools.combinations(WORDS, 2)))
    random.Random(seed).shuffle(drawn)
    return [
        {
            "data_source": "two_words",
            "prompt": [{"role": "user", "content": f'{form} about {subject}. Use the words "{a}" and "{b}".'}],
            "ability": "writing",
            "reward_model": {"style": "rule", "ground_truth": f"{a} {b}"},
            "extra_info": {"index": index},
        }
        for index, (form, subject, (a, b)) in enumerate(drawn[: TRAIN + TEST])
    ]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """1 if a response has both words, or longer ones that begin so."""
    return float(all(re.search(rf"\b{word}", solution_str.lower()) for word in ground_truth.split()))


def write_data(folder: Path, forms: Sequence[str] = FORMS) -> None:
    """Write ``train.parquet`` and ``test.parquet``."""
    everything = rows(forms)
    write_rows(everything[:TRAIN], folder / "train.parquet")
    write_rows(everything[TRAIN:], folder / "test.parquet")
