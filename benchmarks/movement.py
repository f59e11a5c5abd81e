"""How often the audit tells movement from rounding, on responses with a known answer; docs/tables/movement.csv.

``python -m benchmarks.movement [--sets 200] [--write]``. A set has 45 mini-batches of 128 responses of 50 to 4,000
tokens (log-uniform). Where S is movement, E_old[exp S] = 1 holds exactly; where it is rounding, S is symmetric about 0.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from benchmarks.pages import write_tables
from fspo.conclusion import movement_verdict, rounding_share
from fspo.fairness.lre import Array
from fspo.responses import Responses

BATCHES: Final = 45
SIZE: Final = 128
#: Std of S / sqrt(L) in nats.
SIGMA: Final = 0.02
_KINDS: Final = 64


class Draws:
    """Random numbers of one set, and its lengths and mini-batches."""

    def __init__(self, seed: int, batches: int = BATCHES, size: int = SIZE) -> None:
        self.rng = np.random.default_rng(seed)
        self.batch_B = np.repeat(np.arange(batches), size)
        self.length_B = np.exp(self.rng.uniform(np.log(50), np.log(4000), len(self.batch_B))).astype(int)
        self.batches, self.group_B = batches, self.batch_B

    def spread(self, sigma: float | Array = SIGMA) -> Array:
        """Standard deviation of S, by response; sigma of all mini-batches or of each."""
        return np.asarray(np.broadcast_to(sigma, self.batches)[self.batch_B] * np.sqrt(self.length_B))


def normal(draws: Draws, moves: bool, sigma: float | Array = SIGMA) -> Array:
    """Normal S."""
    std_B = draws.spread(sigma)
    return draws.rng.normal(-moves * std_B**2 / 2, std_B)


def walk(draws: Draws, moves: bool) -> Array:
    """Normal S, log sigma a random walk with steps of 0.1."""
    return normal(draws, moves, SIGMA * np.exp(np.cumsum(0.1 * draws.rng.standard_normal(draws.batches))))


def selected(draws: Draws, moves: bool) -> Array:
    """Normal S, groups of eight, only those with right and wrong answers; S correlates 0.2 with the reward."""
    wanted, size = len(draws.batch_B), 8
    more = Draws(int(draws.rng.integers(2**31)), draws.batches, 4 * SIZE)
    std_B, z_B = more.spread(), more.rng.standard_normal(4 * wanted)
    group_B = np.arange(4 * wanted) // size
    solved_B = more.rng.normal(0, 1.5, len(group_B) // size)[group_B]
    right_B = solved_B + 0.2 * z_B + np.sqrt(0.96) * more.rng.standard_normal(4 * wanted) > 0
    mixed_B = np.isin(np.bincount(group_B, right_B), [0, size], invert=True)[group_B]
    kept = np.flatnonzero(mixed_B)[:wanted]
    s_B = std_B * z_B - moves * std_B**2 / 2
    draws.length_B, draws.batch_B, draws.group_B = more.length_B[kept], more.batch_B[kept], group_B[kept]
    return np.asarray(s_B[kept])


def mixture(draws: Draws, moves: bool) -> Array:
    """One response in twenty spreads four times as far as the others, at most one nat; moved by the exact tilt."""
    std_B = np.minimum(draws.spread() / np.sqrt(0.95 + 0.05 * 16), 0.25)
    far_B = draws.rng.random(len(std_B)) < 0.05
    s_B = draws.rng.normal(0, np.where(far_B, 4 * std_B, std_B))
    return s_B - moves * np.log(0.95 * np.exp(std_B**2 / 2) + 0.05 * np.exp(8 * std_B**2))


def student(draws: Draws, moves: bool) -> Array:
    """Student's t with three degrees of freedom. Rounding only: E[exp S] is infinite."""
    return draws.spread() / np.sqrt(3) * draws.rng.standard_t(3, len(draws.batch_B))


def tokens(draws: Draws, moves: bool) -> Array:
    """Tokens of two outcomes, half near-certain ones with heavy tails, log sigma of a mini-batch with std 0.3.

    At a position of kind j the first outcome has probability p_j under pi_old and q_j under pi, so that exp(S) has mean
    1 exactly at any length. The kind of each position is drawn uniformly. Movement only.
    """
    rng, s_B = draws.rng, np.zeros(len(draws.batch_B))
    for batch in range(draws.batches):
        sigma = SIGMA * np.exp(0.3 * rng.standard_normal())
        logit_J = np.where(rng.random(_KINDS) < 0.5, rng.normal(5.0, 1.0, _KINDS), rng.normal(0.0, 1.0, _KINDS))
        p_J, shift_J = 1 / (1 + np.exp(-logit_J)), rng.normal(0.0, 1.0, _KINDS)
        shift_J *= sigma / np.sqrt(np.mean(p_J * (1 - p_J) * shift_J**2))
        q_J = 1 / (1 + np.exp(-(logit_J + shift_J)))
        rows = np.flatnonzero(draws.batch_B == batch)
        count_BJ = rng.multinomial(draws.length_B[rows], np.full(_KINDS, 1 / _KINDS))
        hits_BJ = rng.binomial(count_BJ, p_J)
        s_B[rows] = hits_BJ @ np.log(q_J / p_J) + (count_BJ - hits_BJ) @ np.log((1 - q_J) / (1 - p_J))
    return s_B


def by_new_policy(draws: Draws, moves: bool) -> Array:
    """Normal S of responses that the new policy has written in place of pi_old: mean +Var(S) / 2."""
    return -normal(draws, True)


Kind = Callable[[Draws, bool], Array]
#: Each kind, and which of movement and rounding it can be.
KINDS: Final[dict[str, tuple[Kind, Sequence[str]]]] = {
    "normal": (normal, ("movement", "rounding")),
    "sigma a random walk": (walk, ("movement", "rounding")),
    "selected groups": (selected, ("movement", "rounding")),
    "mixture": (mixture, ("movement", "rounding")),
    "tokens of two outcomes": (tokens, ("movement",)),
    "Student's t, 3 degrees": (student, ("rounding",)),
    "written by the new policy": (by_new_policy, ("neither",)),
}


def responses_of(kind: Kind, truth: str, seed: int, batches: int = BATCHES) -> Responses:
    """One set."""
    draws = Draws(seed, batches)
    s_B = kind(draws, truth != "rounding")
    columns = {"S": s_B, "L": draws.length_B, "minibatch": draws.batch_B + 1, "prompt": draws.group_B}
    return Responses.of_rows(columns)


def row(name: str, kind: Kind, truth: str, sets: int) -> list[str]:
    """How often each verdict came, and the mean share of rounding."""
    shares = [rounding_share(responses_of(kind, truth, seed)) for seed in range(sets)]
    verdicts = Counter(movement_verdict(share) for share in shares)
    neither = 0 if truth == "neither" else verdicts["neither"]
    wrong = sets - verdicts[truth] - verdicts["both"] - neither
    mean = f"{np.mean([share.value for share in shares]):.2f}"
    return [name, truth, *map(str, (verdicts[truth], verdicts["both"], neither, wrong)), mean]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="write docs/tables/movement.csv")
    chosen = parser.parse_args()
    lines = [["S", "truth", "right", "not told apart", "neither", "wrong", "mean share of rounding"]]
    for name, (kind, truths) in KINDS.items():
        for truth in truths:
            lines.append(row(name, kind, truth, chosen.sets))
            print(*lines[-1], sep="  ", flush=True)
    if chosen.write:
        write_tables({"movement": lines})


if __name__ == "__main__":
    main()
