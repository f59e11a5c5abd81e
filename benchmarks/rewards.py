"""Which answers the scorer accepts, beside verl's scorers: ``python -m benchmarks.rewards [FILE ...]``.

A line of a file is ``{"response": ..., "truth": ..., "right": true}``; without `right` it is an attempt to earn without
an answer. Without a file it reads the tests' sets. A cell is "right accepted / wrong or attempts accepted".

``python -m benchmarks.rewards --load N`` times N responses from 32 threads, 5% of them hostile.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fspo.markdown import markdown_table
from recipe.math.answers import MathScorer

ASSETS = Path(__file__).resolve().parents[1] / "tests" / "unit" / "assets"
SETS = tuple(ASSETS / f"{name}.jsonl" for name in ("realistic_answers", "attempts", "labelled_answers"))
VERLS = ("math_verify", "prime_math", "math_dapo", "math_reward")
HOSTILE = (
    r"\boxed{9^{9^{9^9}}+%d}", r"\boxed{((9^{999})^{999})^{999}+%d}", r"\boxed{100000000!+%d}", "\\boxed{" * 300 + "%d",
    r"\boxed{\sum_{k=1}^{10^9} \sin k+%d}", r"\boxed{(a+b+c+d+x)^{99}-%d}",
    "\\boxed{%d" + "(" * 60 + "1" + ")" * 60 + "}",
    "a" * 300_000 + "%d", r"\boxed{\sin^{99}(\sin^{99}(x^{99}+%d))}", "\\boxed{%d\ud800}",
)  # fmt: skip
Pair = tuple[str, str, bool]


def read_pairs(path: Path) -> list[Pair]:
    """Response, truth and whether it is right, of the lines of a file."""
    with path.open(encoding="utf-8", newline="\n") as lines:  # an answer may hold another line separator
        rows = [json.loads(line) for line in lines]
    return [(row["response"], row["truth"], bool(row.get("right", False))) for row in rows]


def verls(name: str) -> Callable[[str, str], bool]:
    """A scorer of verl's; an exception is no."""
    module = importlib.import_module(f"verl.utils.reward_score.{name}")

    def accepts(response: str, truth: str) -> bool:
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            result = module.compute_score(response, truth)
            result = result["acc"] if isinstance(result, dict) else result[0] if isinstance(result, tuple) else result
            return float(result) > 0
        return False

    return accepts


def load(n: int, n_threads: int = 32) -> str:
    """n responses from many threads through two workers, of which every twentieth is hostile.

    Raises:
        AssertionError: a verdict is lost, in another place than its response, or accepts a hostile response.
    """
    rng = random.Random(0)
    boxed = [(f"\\boxed{{{a}/{b}}}", f"\\frac{{{a + k}}}{{{b}}}", k == 0) for a, b, k in
             ((rng.randrange(1, 10**5), rng.randrange(2, 10**5), rng.randrange(2)) for _ in range(n))]  # fmt: skip
    tasks = [(HOSTILE[i // 20 % len(HOSTILE)] % i, "17", False) if i % 20 == 19 else boxed[i] for i in range(n)]
    took = [0.0] * n
    with contextlib.closing(MathScorer(n_workers=2)) as scorer, ThreadPoolExecutor(n_threads) as executor:
        scorer.judge(r"\boxed{x}", "y")  # a worker starts

        def timed(i: int) -> bool:
            start = time.perf_counter()
            verdict = scorer.judge(*tasks[i][:2]).score == 1
            took[i] = time.perf_counter() - start
            return verdict

        start = time.perf_counter()
        assert list(executor.map(timed, range(n))) == [right for *_, right in tasks]
        whole = time.perf_counter() - start
    waits = sorted(seconds for i, seconds in enumerate(took) if i % 20 != 19)
    median, p99 = waits[len(waits) // 2], waits[-len(waits) // 100]
    return f"{n / whole:.0f} a second; the others: median {median:.3f} s, p99 {p99:.2f} s, longest {waits[-1]:.2f} s"


def table(files: Sequence[Path]) -> str:
    """Right ones and others of each file that each scorer accepts."""
    rows = []
    with contextlib.closing(MathScorer(n_workers=1)) as scorer:
        scorers = [lambda response, truth: scorer.judge(response, truth).score == 1, *map(verls, VERLS)]
        for path in files:
            pairs = read_pairs(path)
            accepted = [[right for response, truth, right in pairs if accepts(response, truth)] for accepts in scorers]
            columns = [[right for *_, right in pairs], *accepted]
            rows.append([path.stem, *(f"{sum(column)} / {len(column) - sum(column)}" for column in columns)])
    return markdown_table(["set", "right / other", "ours", *(f"verl {name}" for name in VERLS)], rows)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    words = sys.argv[1:]
    print(load(int(words[1])) if words[:1] == ["--load"] else table([*map(Path, words)] or SETS))
