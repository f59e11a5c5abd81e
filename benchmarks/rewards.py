"""What normalisation does to the labelled pairs, by class; and throughput against verl's own math-verify scorer.

    python -m benchmarks.rewards                          # the table of docs/data-and-rewards.md
    python -m benchmarks.rewards --speed --answers 2000 --rounds 3

For the throughput the two alternate, each with warm processes, its default number of them and the same number of
calling threads. Wall-clock and processor time are reported: on a machine
that others use at the same time only the latter's ratio means something. A second part times a batch of 512 with and
without 5% hostile answers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from benchmarks.hostile import CATEGORIES, NAMED, hostile_answers
from fspo.markdown import markdown_table
from fspo.rewards import MathScorer

Answer = tuple[str, str]

PAIRS = Path(__file__).resolve().parents[1] / "tests" / "unit" / "assets" / "answer_classes.jsonl"
#: Processes of ours (verl's pool has 4), and threads that call.
WORKERS, THREADS = 2, 8

_SENTENCES = (
    "Let us consider the expression $a_n = n^2 + 3n$ for $n = {0}$ and simplify it step by step.",
    "Since ${0} + {1}$ is even, we may divide both sides by 2 and obtain a smaller problem.",
    "By symmetry the cases $x < {1}$ and $x \\geq {1}$ contribute the same amount.",
    "We substitute $u = \\frac{{x}}{{{1}}}$, which gives $du = \\frac{{dx}}{{{1}}}$ and new bounds.",
    "Checking the value {0} by hand confirms the formula.",
)


def _forms(rng: random.Random) -> tuple[str, list[str], list[str]]:
    """A ground truth that is not an integer, equivalent ways to write it, and wrong answers of the same kind."""
    a, b, c = rng.randint(2, 30), rng.randint(2, 12), rng.randint(2, 9)
    (kind,) = rng.choices(range(6), (36, 18, 18, 7, 12, 9))
    if kind == 0:
        d = 2 * b + 1
        return rf"\frac{{{a}}}{{{d}}}", [f"{a}/{d}", rf"\dfrac{{{a}}}{{{d}}}"], [rf"\frac{{{a + 1}}}{{{d}}}", str(a)]
    if kind == 1:
        return rf"{b}\sqrt{{{c}}}", [rf"\sqrt{{{b * b * c}}}"], [rf"{b + 1}\sqrt{{{c}}}", rf"\sqrt{{{b * c + 1}}}"]
    if kind == 2:
        return f"x^2+{b + c}x+{b * c}", [f"(x+{b})(x+{c})"], [f"x^2+{b * c + 1}x+{b + c}", f"x^2+{b}x"]
    if kind == 3:
        return f"[{a},{a + b})", [rf"\left[{a},{a + b}\right)"], [f"[{a},{a + b}]", f"({a},{a + b + 1})"]
    if kind == 4:
        return f"({a},-{b})", [rf"\left({a}, -{b}\right)"], [f"(-{b},{a})", f"({a},{b})"]
    return (
        rf"\frac{{{a}\pi}}{{{2 * b + 1}}}",
        [rf"{a}\pi/{2 * b + 1}"],
        [rf"{a}\pi", rf"\frac{{{a + 1}\pi}}{{{2 * b + 1}}}"],
    )


def ordinary_answers(n: int, seed: int) -> list[Answer]:
    """Responses and ground truths as a training batch holds them: groups of 8 responses to a problem.

    Six problems in ten have an integer answer (all of DAPO-Math-17k, AMC and AIME do), the others one of six LaTeX
    forms in roughly the proportions of MATH. Half of the responses are right, a third of those in LaTeX written in
    another way than the ground truth; one in ten gives its answer without a box, one in fifty gives none. 300 to 9,000
    characters.
    """
    rng = random.Random(seed)
    answers: list[Answer] = []
    while len(answers) < n:
        if rng.random() < 0.6:
            value = rng.randint(0, 2_000)
            truth, same, other = str(value), [str(value)], [str(value + rng.randint(1, 50)) for _ in range(4)]
        else:
            truth, same, other = _forms(rng)
        for _ in range(min(8, n - len(answers))):
            right = rng.random() < 0.5
            answer = (rng.choice(same) if rng.random() < 1 / 3 else truth) if right else rng.choice(other)
            lines = [
                rng.choice(_SENTENCES).format(rng.randint(1, 999), rng.randint(2, 99))
                for _ in range(int(10 ** rng.uniform(0.5, 2.0)))
            ]
            draw = rng.random()
            ending = rf"Therefore the final answer is $\boxed{{{answer}}}$."
            if draw < 0.10:
                ending = f"Therefore the answer is ${answer}$."
            elif draw < 0.12:
                ending = "We are left with one more case, which"
            elif draw < 0.5:
                ending = f"Hence\n\\[\n\\boxed{{{answer}}}\n\\]"
            answers.append((" ".join(lines) + " " + ending, truth))
    return answers


def class_table() -> str:
    """Accepted answers by class, "math-verify -> normalised of all"; a Markdown table.

    A line of the file is [class, part, label, ground truth, response]; the rules were not fitted to the part "held".
    """
    pairs = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    with MathScorer(n_workers=WORKERS) as scorer:
        verdicts = scorer.score_batch([pair[4] for pair in pairs], [pair[3] for pair in pairs])
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


def _processor_time() -> float:
    """User and system time of this process and its living descendants, in seconds."""
    process = psutil.Process()
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def compare_with_verl(n: int, rounds: int) -> dict[str, float]:
    from verl.utils.reward_score import math_verify as verl_scorer

    wall_s: dict[str, list[float]] = {"verl": [], "ours": []}
    processor_s: dict[str, list[float]] = {"verl": [], "ours": []}
    agreement = []
    with MathScorer(n_workers=WORKERS) as ours, ThreadPoolExecutor(THREADS) as executor:
        scorers = {"verl": verl_scorer.compute_score, "ours": lambda answer, truth: ours.score(answer, truth).score}
        for score in scorers.values():  # all processes are started and warm before the clock runs
            list(executor.map(score, [f"\\boxed{{x+{i}}}" for i in range(32)], ["x+40"] * 32))
        for i in range(rounds):
            # New answers in every round: what a former round left in a cache must not help.
            responses, truths = zip(*ordinary_answers(n, i), strict=True)
            scores = {}
            for name, score in scorers.items():
                start, used = time.perf_counter(), _processor_time()
                scores[name] = list(executor.map(score, responses, truths))
                wall_s[name].append(time.perf_counter() - start)
                processor_s[name].append(_processor_time() - used)
            agreement += [a == b for a, b in zip(scores["ours"], scores["verl"], strict=True)]
        counts = ours.counts()
    result = {key: counts[key] / (n * rounds + 32) for key in ("decided_exactly", "from_cache")}
    result |= {"agreement": statistics.fmean(agreement), "timeouts": float(counts["timeout"])}
    for unit, times in (("s", wall_s), ("processor_s", processor_s)):
        medians = {name: statistics.median(values) for name, values in times.items()}
        result |= {f"{name}_{unit}": value for name, value in medians.items()}
        result[f"speedup_{unit}"] = medians["verl"] / medians["ours"]
    return result


def hostile_slowdown(rounds: int, names: Sequence[str] = NAMED) -> dict[str, float]:
    """Time of a batch of 512 with 5% hostile answers in place of ordinary ones, over that of the clean batch."""
    slowdowns = []
    size, n_hostile = 512, 26
    for i in range(rounds):
        clean = ordinary_answers(size, i)
        mixed = list(clean)
        positions = random.Random(i).sample(range(size), n_hostile)
        for position, (_, *answer) in zip(positions, hostile_answers(n_hostile, i, names), strict=True):
            mixed[position] = tuple(answer)
        seconds = []
        for answers in (clean, mixed):
            with MathScorer(n_workers=WORKERS) as scorer:
                scorer.score_batch(["about 1"] * 8 * WORKERS, [str(k) for k in range(8 * WORKERS)])
                start = time.perf_counter()
                scorer.score_batch(*map(list, zip(*answers, strict=True)))
                seconds.append(time.perf_counter() - start)
        slowdowns.append(seconds[1] / seconds[0])
    return {"median": statistics.median(slowdowns), "worst": max(slowdowns)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true", help="measure throughput instead (minutes)")
    parser.add_argument("--answers", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not args.speed:
        print(class_table())
        return
    result = {
        "throughput": compare_with_verl(args.answers, args.rounds),
        "hostile": hostile_slowdown(args.rounds),
        "hostile_with_expensive": hostile_slowdown(args.rounds, tuple(CATEGORIES)),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
