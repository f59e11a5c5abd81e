"""Sort words and drop repeated ones: a task of experiment=demo_words, whose lists are short or long, none between.

A problem lists animals, some of them twice (task defined here). The response is the same words in alphabetical order,
each once; a word with the space before it is one token::

     owl cat owl hen=  ->   cat hen owl

Six lists in ten have 2 to 9 different words, the others 40 to 60: so many tokens has the response. A quarter of the
words, at least one, is there twice. The split is decided by the answer: train and test have no answer in common.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

DATA_SOURCE = "fspo/words"
_ANIMALS = """
ant ape ass auk bat bear bee bird boa boar bug bull calf cat chick clam cod colt cow crab crane crow cub deer doe dog
dove duck eagle eel egret elk emu ewe fawn ferret finch fish flea fly foal fox frog gecko gnat goat goose grouse gull
hare hawk hen heron horse hound ibex ibis jay kid kite koala lamb lark lion llama lynx mink mole moose moth mouse mule
newt otter owl ox panda perch pig pike pony puma pup ram rat raven rook seal shark sheep shrew skunk slug snail snake
stag stork swan tick tiger toad trout
"""
ANIMALS = tuple(_ANIMALS.split())
VOCABULARY = ("=", *(f" {animal}" for animal in ANIMALS))
SHORT, LONG = (2, 9), (40, 60)  # numbers of different words, ends included
SHORT_SHARE = 0.6
REPEATED_SHARE_INVERSE = 4


class WordList(NamedTuple):
    """Words as they are listed in the question. No dataclass: verl loads the file without naming it in sys.modules."""

    words: tuple[str, ...]

    @property
    def question(self) -> str:
        """The question, without the ``=`` that the chat template adds: `` owl cat owl hen``."""
        return _text(self.words)

    @property
    def working(self) -> str:
        """The full response: `` cat hen owl``."""
        return _text(sorted(set(self.words)))

    @property
    def answer(self) -> str:
        return " ".join(sorted(set(self.words)))

    @property
    def size(self) -> int:
        """Number of different words."""
        return len(set(self.words))

    @property
    def split_key(self) -> str:
        return self.answer

    @property
    def slips(self) -> range:
        """Every word but the last can change places with the next."""
        return range(self.size - 1)

    def slip(self, place: int) -> str:
        """The answer with two neighbours in the wrong order, which keeps its length: `` hen cat owl``."""
        words = sorted(set(self.words))
        words[place], words[place + 1] = words[place + 1], words[place]
        return _text(words)


def _text(words: Iterable[str]) -> str:
    return "".join(f" {word}" for word in words)


def draw(rng: np.random.Generator) -> WordList:
    """One problem, of either split."""
    low, high = SHORT if rng.random() < SHORT_SHARE else LONG
    words = [str(word) for word in rng.choice(ANIMALS, int(rng.integers(low, high + 1)), replace=False)]
    words += words[: max(1, len(words) // REPEATED_SHARE_INVERSE)]
    return WordList(tuple(words[int(place)] for place in rng.permutation(len(words))))


def score_answer(text: str, ground_truth: str) -> float:
    """1.0 if ``text`` has the words of ``ground_truth`` in its order, else 0.0; more white space does not matter."""
    return float(text.split() == ground_truth.split())


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The reward of experiment=demo_words."""
    return score_answer(solution_str, ground_truth)
