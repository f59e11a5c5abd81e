"""Hostile answers, a seeded set of them, for the tests of the reward's processes; none of them is a correct answer."""

from __future__ import annotations

import random


def _huge(rng: random.Random) -> str:
    tower = "^{".join(str(rng.randint(2, 99)) for _ in range(4)) + "}" * 3
    power = f"{rng.randint(2, 99)}^{{{rng.randint(10**7, 10**12)}}}"
    binomial = rf"\binom{{{rng.randint(10**6, 10**8)}}}{{{rng.randint(10**5, 10**6)}}}"
    digits = "7" * rng.choice([500, 5_000, 1_000_000])
    inside = [tower, power, binomial, f"{rng.randint(10**6, 10**12)}!", digits, rf"\frac{{1}}{{{digits}}}"]
    return rf"\boxed{{{rng.choice(inside)}}}"


def _nested(rng: random.Random) -> str:
    n = rng.choice([30, 1_000, 10_000])
    pairs = [("(", ")"), ("{", "}"), (r"\frac{1}{1+", "}"), (r"\left(", r"\right)"), ("|", "|")]
    opening, closing = rng.choice(pairs)
    return rf"\boxed{{{opening * n}x{closing * n}}}"


def _megabytes(rng: random.Random) -> str:
    unit = rng.choice(["hello world ", "12 answer 7 ", "$", r"\boxed{1} ", r"\boxed{", "final answer is ", "{", "\n"])
    return unit * (2_000_000 // len(unit)) + rng.choice(["", rf"\boxed{{{rng.randint(0, 9)}}}"])


def _noise(rng: random.Random) -> str:
    signs = "".join(chr(rng.choice([*range(32), 0x7F, 0x200B, 0x202E, 0xFFFE, 0xD800, 0x1F600])) for _ in range(200))
    marks = "".join(rng.choices(["{", "}", "(", r"\frac{", r"\boxed{", "$", r"\[", "^", "_", "1", "x", "&"], k=100))
    return rng.choice([rf"\boxed{{{signs}}}", f"{signs}\\boxed{{1{signs}2}}", f"The answer is {signs}3", marks])


def _expensive(rng: random.Random) -> str:
    n = rng.randint(50, 10**6)
    inside = [
        rf"\prod_{{k=1}}^{{{n}}} \left(1+\frac{{1}}{{k^2}}\right)",
        rf"(x+y+z+w)^{{{rng.randint(50, 500)}}}",
        rf"\sin^{{{rng.randint(50, 200)}}}(x)+\cos^{{{rng.randint(50, 200)}}}(x)",
        rf"\int_0^1 x^x \sin(e^{{x^{rng.randint(2, 9)}}}) dx",
        "".join(f"(x+{i})" for i in range(rng.randint(20, 80))),
    ]
    return rf"\boxed{{{rng.choice(inside)}}}"


KINDS = (_huge, _nested, _megabytes, _noise, _expensive)


def hostile_answers(n: int, seed: int) -> list[tuple[str, str]]:
    """`n` pairs (response, ground truth), the kinds in turn."""
    rng = random.Random(seed)
    return [(KINDS[i % len(KINDS)](rng), rng.choice(["34", r"\frac{x+1}{2}", "0.5", "(1,2]"])) for i in range(n)]
