"""Units and scale words behind a number: one table with the dimension and factor of each unit."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any, Final, NamedTuple

#: One unit a line: its abbreviations and names without a plural s, its dimension, and its factor to the base unit.
#: Those before a semicolon may stand behind a number without a text command, "5 km"; nm and mg may be products.
#: ``L T-1`` is length over time. ``inche`` and ``pennie`` are what is left of their plurals.
_TABLE: Final = r"""
m; meter metre | L | 1
km; kilometer kilometre | L | 1000
dm; | L | 1/10
cm; centimeter centimetre | L | 1/100
mm; millimeter millimetre | L | 1/1000
micron | L | 1/1000000
in; inch inche | L | 127/5000
ft; foot feet | L | 381/1250
yd yard | L | 1143/1250
mi; mile | L | 201168/125
kg; kilogram | M | 1
g; gram | M | 1/1000
t ton tonne | M | 1000
lb lbs; pound | W | 1
oz; ounce | W | 1/16
s sec; second | T | 1
min; minute | T | 60
hr hrs; h hour | T | 3600
day | T | 86400
week | T | 604800
year yr | Y | 1
month | Y | 1/12
gal gallon | G | 1
quart | G | 1/4
pint | G | 1/8
cup | G | 1/16
L; liter litre | L3 | 1/1000
ml; milliliter millilitre cc | L3 | 1/1000000
ha hectare | L2 | 10000
acre | L2 | 316160658/78125
mph; | L T-1 | 201168/125/3600
kph kmh | L T-1 | 5/18
USD; dollar buck | USD | 1
dime | USD | 1/10
nickel | USD | 1/20
cent penny pennie | USD | 1/100
EUR; euro | EUR | 1
GBP; | GBP | 1
yen jpy | JPY | 1
yuan rmb cny | CNY | 1
rupee inr | INR | 1
N; newton | M L T-2 | 1
J; joule | M L2 T-2 | 1
W; watt | M L2 T-3 | 1
Pa; pascal | M L-1 T-2 | 1
wh | M L2 T-2 | 3600
kwh | M L2 T-2 | 3600000
eV; electronvolt | E | 1
A amp ampere | I | 1
ohm | V I-1 | 1
mol mole | N | 1
V; volt | V | 1
Hz; hertz | T-1 | 1
K; kelvin | K | 1
c celsius | C | 1
f fahrenheit | F | 1
rad radian | A | 1
deg; degree | A | pi/180
"""
#: Units that take SI prefixes: the symbol, in which upper and lower case differ, and the names.
_PREFIXED: Final = {
    "m": "meter metre", "g": "gram", "s": "second", "L": "liter litre", "l": "liter litre", "Hz": "hertz",
    "V": "volt", "W": "watt", "J": "joule", "Pa": "pascal", "N": "newton", "A": "ampere amp", "eV": "electronvolt",
    "mol": "mole", "Wh": "wh", "ohm": "ohm",
}  # fmt: skip
_PREFIXES: Final = {
    "k": ("kilo", 3), "M": ("mega", 6), "G": ("giga", 9), "d": ("deci", -1), "c": ("centi", -2),
    "m": ("milli", -3), "mu": ("micro", -6), "\\mu": ("micro", -6), "μ": ("micro", -6),
    "n": ("nano", -9),
}  # fmt: skip
#: Words that multiply the number before them.
SCALES: Final = {
    "k": 10**3, "ten": 10, "dozen": 12, "hundred": 100, "thousand": 10**3, "lakh": 10**5, "crore": 10**7, "bn": 10**9,
    "mn": 10**6, "万": 10**4, "亿": 10**8,
} | {name + "illion": 10**power for name, power in (("m", 6), ("b", 9), ("tr", 12))}  # fmt: skip
_NAMES_OF_NUMBERS: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
_CARDINALS: Final = dict(zip(_NAMES_OF_NUMBERS.split(), (*range(20), *range(20, 100, 10)), strict=True))
#: A number in words, as it may stand in a sentence.
NUMBER_WORD: Final = rf"\b(?:{'|'.join(_CARDINALS)}|dozen|hundred|thousand|million|billion)\b"
_POWERS: Final = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_EMPTY: Final = {"of", "in", "the", "point", "percentage"}


class Unit(NamedTuple):
    """The meaning of the words behind a number.

    Attributes:
        scale: Product of the scale words, such as a million.
        percent: Whether the words have "percent".
        factor: Factor to the base units, from all units among the words.
        dimension: Powers of the base dimensions; None without a unit, or if one of the words is unknown.
        degrees: Whether the words have "degree" other than of a temperature.
    """

    scale: int
    percent: bool
    factor: Any
    dimension: frozenset[tuple[str, int]] | None
    degrees: bool


@functools.cache
def _table() -> dict[str, tuple[Any, Counter[str]]]:
    import sympy

    units: dict[str, tuple[Any, Counter[str]]] = {}
    for line in _TABLE.strip().splitlines():
        names, dimension, factor = line.replace(";", "").split(" | ")
        powers = Counter({name: int(power or 1) for name, power in re.findall(r"([A-Z]+)(-?\d*)", dimension)})
        units |= dict.fromkeys((names + " " + names.lower()).split(), (sympy.sympify(factor, rational=True), powers))
    for symbol, names in _PREFIXED.items():
        factor, powers = units[names.split()[0]]
        for prefix, (spelled, power) in _PREFIXES.items():
            prefixed = factor * sympy.Integer(10) ** power, powers
            units |= {prefix + symbol: prefixed} | {spelled + name: prefixed for name in names.split()}
    return units


@functools.lru_cache(maxsize=4096)
def unit(words: str) -> Unit:
    """The unit that the words behind a number name, such as "km/h", "square inches" or "million dollars"."""
    words = re.sub(r"degrees?\s+(?=(?:[CF]|celsius|fahrenheit)\b)", "", words, flags=re.IGNORECASE)
    scale, percent, factor, powers, known, sign, power = 1, False, 1, Counter[str](), True, 1, 1
    tokens = re.findall(r"/|([^\s.,:;()!?'\"/^{}-]+)(?:\^\{?(-?\d+)\}?)?", words)
    for word, exponent in tokens:
        lower = word.lower()
        name = next((form for form in (word, lower) if form in _table()), lower.removesuffix("s"))
        if name in ("", "per", "a", "an"):
            sign = -1
        elif name in SCALES and (name != "k" or word == "k"):
            scale *= SCALES[name]
        elif name == "percent":
            percent = True
        elif name in _POWERS:
            power = _POWERS[name]
        elif name in _table():
            times = sign * power * int(exponent or 1)
            factor *= _table()[name][0] ** times
            for base, count in _table()[name][1].items():
                powers[base] += count * times
            power = 1
        elif name not in _EMPTY:
            known = False
    dimension = frozenset((base, count) for base, count in powers.items() if count) if known and powers else None
    return Unit(scale, percent, factor, dimension, "degree" in words)


def bare_units() -> str:
    """A pattern for the units that may stand behind a number without a text command; a single letter ends the text."""
    names = [name for line in _TABLE.splitlines() if ";" in line for name in line.partition(";")[0].split()]
    long = [name for name in names if len(name) > 1]
    long += [prefix + symbol for prefix in "kMG" for symbol in _PREFIXED if symbol[0].isupper()]
    single = "".join(name for name in names if len(name) == 1)
    one = rf"{'|'.join(sorted(long, key=len)[::-1])}|(?<=\s)[{single}](?=\s*(?:/|\Z))"
    below = "|".join(
        rf"{name}s?" for line in _TABLE.strip().splitlines() for name in re.findall("[a-zA-Z]+", line.split("|")[0])
    )
    # 3 kg / 2 and 3 kg (a + b) are no mass, 3 kg (exactly) is one.
    group = r"\(\s*(?:[-+\d(]|\\(?!approx)[a-z]|[a-zA-Z](?![a-zA-Z]))"
    factor = rf"(?!\s*(?:[}}\d+/-]|{group}|\\(?!land|lor|approx|text)[a-z]))"
    return rf"(?:{one})(?![a-zA-Z])(?:\s*/\s*(?:{below})(?![a-zA-Z]))?{factor}"


def cardinal(words: str) -> int | None:
    """The number that English words spell, such as "two hundred and thirty-one"; None of other words."""
    whole, part, smallest, names = 0, 0, 10**9, re.findall(r"[a-z]+", words.lower())
    for name in names:
        if name in _CARDINALS:
            value = _CARDINALS[name]
            if not value < smallest or (value == 0 and len(names) > 1):
                return None  # "two three"
            part, smallest = part + value, 10 if value >= 20 else 0
        elif SCALES.get(name, 10**3) in (12, 100) and part < 100:
            part, smallest = max(part, 1) * SCALES[name], 100
        elif SCALES.get(name, 0) >= 10**3 and len(name) > 4:
            whole, part, smallest = whole + max(part, 1) * SCALES[name], 0, 10**9
        elif name not in ("a", "and"):
            return None
    return whole + part if set(names) - {"a", "and"} else None
