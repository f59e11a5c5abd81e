"""How often the audit tells movement from rounding, on responses with a known answer; docs/tables/movement.csv.

``python -m benchmarks.movement [--sets 200] [--write]``. A set has 45 mini-batches of 128 responses of 50 to 4,000
tokens (log-uniform). Where S is movement, E_old[exp S] = 1 holds exactly; where it is rounding, S is symmetric about 0.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from fspo.audit import read_audit
from fspo.conclusion import movement_verdict, rounding_share
from fspo.fairness.lre import Array
from fspo.responses import Responses

ROOT: Final = Path(__file__).resolve().parents[1]
TABLE: Final = ROOT / "docs/tables/movement.csv"
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


def sigma_by_mini_batch(draws: Draws, moves: bool) -> Array:
    """Normal S, log sigma of a mini-batch with standard deviation 0.5."""
    return normal(draws, moves, SIGMA * np.exp(0.5 * draws.rng.standard_normal(draws.batches)))


def positions(draws: Draws, moves: bool) -> Array:
    """Normal S, sigma 1, 1.4, 1.7 times at the second to fourth mini-batch of a rollout batch."""
    return normal(draws, moves, SIGMA * np.resize([1, 1.4, 1.7], draws.batches))


def walk(draws: Draws, moves: bool) -> Array:
    """Normal S, log sigma a random walk with steps of 0.1."""
    return normal(draws, moves, SIGMA * np.exp(np.cumsum(0.1 * draws.rng.standard_normal(draws.batches))))


def groups(draws: Draws, moves: bool) -> Array:
    """Normal S, correlated 0.5 within groups of eight."""
    draws.group_B = np.arange(len(draws.batch_B)) // 8
    shared_B = draws.rng.standard_normal(len(draws.batch_B) // 8)[draws.group_B]
    z_B = (shared_B + draws.rng.standard_normal(len(draws.batch_B))) / np.sqrt(2)
    std_B = draws.spread()
    return std_B * z_B - moves * std_B**2 / 2


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


def laplace(draws: Draws, moves: bool) -> Array:
    """Laplace S with a scale of at most 0.5 (E[exp S] is infinite from 1 on); moved by the exact tilt."""
    scale_B = np.minimum(draws.spread() / np.sqrt(2), 0.5)
    return draws.rng.laplace(0, scale_B) + moves * np.log(1 - scale_B**2)


def skewed(draws: Draws, moves: bool, side: int) -> Array:
    """An exponential variable to one side, scale at most 0.5, by the exact tilt. Movement only: it is not symmetric."""
    scale_B = side * np.minimum(draws.spread(), 0.5)
    return draws.rng.exponential(1, len(scale_B)) * scale_B + np.log(1 - scale_B)


def student(draws: Draws, moves: bool) -> Array:
    """Student's t with three degrees of freedom. Rounding only: E[exp S] is infinite."""
    return draws.spread() / np.sqrt(3) * draws.rng.standard_t(3, len(draws.batch_B))


@dataclass(frozen=True, slots=True)
class TokenKinds:
    """Tokens with two outcomes: at a position of kind j, the first has probability p_j under pi_old and q_j under pi.

    A token's log-ratio is ``log(q/p)`` with probability p and ``log((1-q)/(1-p))`` otherwise, so its exponential has
    mean ``q + (1 - q) = 1`` exactly, and so has ``exp(S)`` at any length. The kind of each position is drawn uniformly.
    """

    p_J: Array
    q_J: Array

    @classmethod
    def random(cls, sigma: float, rng: np.random.Generator, kinds: int) -> TokenKinds:
        """Half near-certain tokens, half open ones, moved so that Var(S) is about ``sigma**2 * L``."""
        logit = np.where(rng.random(kinds) < 0.5, rng.normal(5.0, 1.0, kinds), rng.normal(0.0, 1.0, kinds))
        p = 1 / (1 + np.exp(-logit))
        shift = rng.normal(0.0, 1.0, kinds)
        shift *= sigma / np.sqrt(float(np.mean(p * (1 - p) * shift**2)))
        return cls(p, 1 / (1 + np.exp(-(logit + shift))))


def tokens(draws: Draws, moves: bool) -> Array:
    """Tokens of two outcomes, half near-certain ones with heavy tails (:class:`TokenKinds`), log sigma of a mini-batch
    with standard deviation 0.3. Movement only.
    """
    s_B = np.zeros(len(draws.batch_B))
    for batch in range(draws.batches):
        kinds = TokenKinds.random(SIGMA * np.exp(0.3 * draws.rng.standard_normal()), draws.rng, _KINDS)
        rows = np.flatnonzero(draws.batch_B == batch)
        count_BJ = draws.rng.multinomial(draws.length_B[rows], np.full(_KINDS, 1 / _KINDS))
        hits_BJ = draws.rng.binomial(count_BJ, kinds.p_J)
        first_J, second_J = np.log(kinds.q_J / kinds.p_J), np.log((1 - kinds.q_J) / (1 - kinds.p_J))
        s_B[rows] = hits_BJ @ first_J + (count_BJ - hits_BJ) @ second_J
    return s_B


def by_new_policy(draws: Draws, moves: bool) -> Array:
    """Normal S of responses that the new policy has written in place of pi_old: mean +Var(S) / 2."""
    return -normal(draws, True)


Kind = Callable[[Draws, bool], Array]
#: Each kind, and which of movement and rounding it can be.
KINDS: Final[dict[str, tuple[Kind, Sequence[str]]]] = {
    "normal": (normal, ("movement", "rounding")),
    "normal, sigma 0.005": (partial(normal, sigma=0.005), ("movement", "rounding")),
    "normal, sigma 0.05": (partial(normal, sigma=0.05), ("movement", "rounding")),
    "sigma by mini-batch": (sigma_by_mini_batch, ("movement", "rounding")),
    "sigma by position": (positions, ("movement", "rounding")),
    "sigma a random walk": (walk, ("movement", "rounding")),
    "correlated groups": (groups, ("movement", "rounding")),
    "selected groups": (selected, ("movement", "rounding")),
    "mixture": (mixture, ("movement", "rounding")),
    "Laplace": (laplace, ("movement", "rounding")),
    "skewed up": (partial(skewed, side=1), ("movement",)),
    "skewed down": (partial(skewed, side=-1), ("movement",)),
    "tokens of two outcomes": (tokens, ("movement",)),
    "Student's t, 3 degrees": (student, ("rounding",)),
    "written by the new policy": (by_new_policy, ("neither",)),
}


def responses_of(kind: Kind, truth: str, seed: int, batches: int = BATCHES) -> Responses:
    """One set."""
    draws = Draws(seed, batches)
    s_B = kind(draws, truth != "rounding")
    columns = {"S": s_B, "L": draws.length_B, "minibatch": draws.batch_B + 1}
    return Responses.of_rows(columns if draws.group_B is None else columns | {"prompt": draws.group_B})


def row(name: str, kind: Kind, truth: str, sets: int) -> list[str]:
    """How often each verdict came, and the mean share of rounding."""
    shares = [rounding_share(responses_of(kind, truth, seed)) for seed in range(sets)]
    verdicts = Counter(movement_verdict(share) for share in shares)
    neither = 0 if truth == "neither" else verdicts["neither"]
    wrong = sets - verdicts[truth] - verdicts["both"] - neither
    mean = f"{np.mean([share.value for share in shares]):.2f}"
    return [name, truth, *map(str, (verdicts[truth], verdicts["both"], neither, wrong)), mean]


def recorded(path: Path) -> list[str]:
    """The verdict on recorded responses."""
    share = rounding_share(read_audit(path).responses.moved())
    return [path.stem, movement_verdict(share), f"{share.value:.2f} [{share.low:.2f}, {share.high:.2f}]"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    chosen = parser.parse_args()
    for path in sorted((ROOT / "benchmarks/study").glob("*.parquet")):
        print(*recorded(path), sep="  ")
    lines = [["S", "truth", "right", "not told apart", "neither", "wrong", "mean share of rounding"]]
    for name, (kind, truths) in KINDS.items():
        for truth in truths:
            lines.append(row(name, kind, truth, chosen.sets))
            print(*lines[-1], sep="  ", flush=True)
    if chosen.write:
        with TABLE.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)


if __name__ == "__main__":
    main()
