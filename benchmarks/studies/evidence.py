"""Which clock S follows, and the band that follows from it: docs/results.md, "Which clock is right".

``python -m benchmarks.studies evidence FOLDER``: FOLDER holds one parquet file for each of SETTINGS, a row for each
response; benchmarks/study/README.md explains its columns. ``--gather RUNS`` writes them first, from
RUNS/SETTING/seed*: runs with ``fspo.record_sequences=true``, or rounds of benchmarks.studies.token_log_ratios.

Hypotheses, written before the runs (a pilot with 40 responses of SmolLM2-135M suggested them):

1. By position, S_t spreads like t^a with a below 0.5 in every setting; within one length bin no faster.
2. Token log-ratios are nearly uncorrelated: Var(S) is 0.8 to 1.25 times V(L), the accumulated token variance.
3. Over the clock sqrt(V(t)) the spread has a slope within 0.1 of 0; over sqrt(t) it falls.
4. The mean of S is -V(L) / 2, as where E_old exp S = 1 for small S.
5. A band c sqrt(V(L)) has a symmetric LRE of at most 0.025 in every setting.
6. (After four rounds of *long*, judged on the others) In bf16 S of one update is mostly rounding: tokens are equally
   noisy at all positions, S spreads like t^0.5, and logits in fp32 halve its variance.
7. (After the tables above, whose Var(S) / Q is near 1 at every length; judged on FRESH seeds, recorded after this was
   written) The clock of final lengths is Q(L), the mean squared token log-ratios of responses of that length: a band
   c sqrt(Q(L)) has a symmetric LRE of at most 0.025 on demo, words and long, below sqrt(L)'s by an interval that
   excludes 0 on all three; in *fast*, whose tokens are correlated, between 0.025 and 0.05.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.pages import Table
from benchmarks.studies.fairness import difference_cell, lre_cell
from benchmarks.studies.token_log_ratios import LAG, rounds
from fspo.acceptance import Counts
from fspo.calibration import BandController, leans
from fspo.fairness import Array, equal_mass_starts
from fspo.fairness.bootstrap import student_quantile
from fspo.files import atomic_path
from fspo.losses import ALGORITHMS, acceptance_band, judged
from fspo.matching import Sequences, needed_factor
from fspo.positions import OCTAVES, PositionSums, prefixes
from fspo.records import sequence_lines
from fspo.sums import FINE_LENGTH_EDGES, SequenceSums, length_bin
from fspo.types import BandState

#: By name: the setting, and the shortest position from which exponents are fitted. NAME_in_ARRAY is gathered from the
#: rounds of NAME, from another array than ``stale``.
SETTINGS: Final = {
    "demo": ("demo", 4),
    "fast": ("demo, 7 x learning rate", 4),
    "words": ("words", 4),
    "stories": ("SmolLM2-135M, through the stack", 16),
    "two_words": ("SmolLM2-135M, to 256 tokens", 16),
    "long": ("SmolLM2-135M, to 1,024 tokens", 16),
    "long_in_later": ("SmolLM2-135M, to 1,024 tokens, four updates", 16),
    "long_in_bf16": ("SmolLM2-135M, to 1,024 tokens, in bf16", 16),
    "long_in_logits32": ("SmolLM2-135M, to 1,024 tokens, in bf16 with fp32 logits", 16),
}
#: The first of the seeds on which hypothesis 7 is judged.
FRESH: Final = {"demo": 4, "fast": 4, "words": 4, "long": 3}
VIEWS: Final = ("symmetric", "active", "mass")
KEPT: Final = 0.85
_COLUMNS: Final = ("S", "L", "A", "reward", "Q", "S_t", "Q_t", "truncated", "S_fp32")
#: Columns, and their names in a round.
_RECORDED: Final = {"L": "length", "A": "advantage", "reward": "reward", "truncated": "truncated"}
#: Bands with fixed clip values; the files hold what they accept at the defaults.
FIXED: Final = {"fspo": "fspo", "rloo": "seq_rloo", "gspo": "seq_gspo"}
#: Bands of the library that the rollout batches before measure; and two that only this study has, c sqrt(V(L)) and
#: c sqrt(Q(L)), the latter from the last four.
_CAUSAL: Final = ("fspo_v1", "fspo_quantile", "fspo_active")
_VARIANCE: Final = "fspo_variance"
_SQUARES: Final = "fspo_squares"
_WINDOW: Final = 8
_RESAMPLES: Final = 400
_SPLITS: Final = 4
_FEWEST: Final = 100
#: The rate of all tokens counts as much as this many tokens in the rate of an octave, so that no width is 0. On four
#: settings' records 100 forecast the spread of S in the next rollout batch as well as 1; 1,000 did worse on stories.
_PRIOR_TOKENS: Final = 100.0
_T: Final = 2.0 ** np.arange(OCTAVES)
#: CTPO's lower edge at 8,000 tokens over its sigma there, -2.24 / 3.49.
_CTPO: Final = -0.64

#: From how often each rollout batch counts, [R, B], to a statistic of each resample, [R].
Statistic = Callable[[Array], Array]


@dataclass(frozen=True)
class Responses:
    """Recorded responses, [N]; S_NP and Q_NP at t = 2**P, nan where L < t; S in fp32 where S is in bf16, else nan.

    ``place`` is the position of the mini-batch in its rollout batch; ``batch`` and ``mini`` number these over all runs.
    """

    seed: np.ndarray
    step: np.ndarray
    place: np.ndarray
    batch: np.ndarray
    mini: np.ndarray
    s: Array
    length: Array
    advantage: Array
    q: Array
    s_NP: Array
    q_NP: Array
    fp32: Array

    def __getitem__(self, rows: np.ndarray) -> Responses:
        return Responses(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


def _write(rows: Mapping[str, Sequence[Any]], file: Path) -> None:
    """Write the responses, with whether the fixed bands accept them."""
    s, length, a = (torch.tensor(rows[key], dtype=torch.float64) for key in ("S", "L", "A"))
    whole = {"seed": pa.int16(), "step": pa.int16(), "minibatch": pa.int16(), "prompt": pa.int32(), "L": pa.int32()}
    schema = whole | {"truncated": pa.bool_()} | dict.fromkeys(("S_t", "Q_t"), pa.list_(pa.float32()))
    columns = {key: pa.array(values, schema.get(key, pa.float32())) for key, values in rows.items()}
    for band, loss in FIXED.items():
        columns[band] = pa.array(judged(s, length.long(), a, ALGORITHMS[loss]).accepted_B.tolist())
    with atomic_path(file) as temporary:
        pq.write_table(pa.table(columns), temporary, compression="zstd", compression_level=19)


def gather(runs: Path, out: Path) -> None:
    """Write OUT/SETTING.parquet from the runs; mini-batches before which no weight had moved are left out."""
    for name in SETTINGS:
        rows: dict[str, list[Any]] = defaultdict(list)
        prompts: dict[str, int] = {}
        source, _, what = name.partition("_in_")
        for run in sorted((runs / source).glob("seed*")):
            of_rounds = any(run.glob("round-*.npz"))
            for line in _rounds(run, what) if of_rounds else sequence_lines(run):
                if not line["minibatch"]:
                    continue
                columns = {key: line[key] for key in _COLUMNS if key in line}
                same = {"seed": int(run.name[4:]), "step": line["step"], "minibatch": line["minibatch"]}
                columns |= {key: [value] * len(line["S"]) for key, value in same.items()}
                columns["prompt"] = [prompts.setdefault(uid.split("_")[0], len(prompts)) for uid in line["uid"]]
                for key, values in columns.items():
                    rows[key].extend(values)
        if rows:
            _write(rows, out / f"{name}.parquet")


def _rounds(folder: Path, what: str) -> Iterator[dict[str, Any]]:
    """As :func:`fspo.records.sequence_lines`: S of responses that no update uses, over one, LAG more, in bf16."""
    of_rounds = dict(rounds(folder))
    for number, source in of_rounds.items():
        data = of_rounds.get(number + LAG, {}) if what == "later" else source
        if (d := data.get(what or "stale")) is None:
            continue
        ends = source["length"].cumsum()
        size = int((ends <= len(d)).sum())
        parts = torch.from_numpy(d.astype(float)).split(source["length"][:size].tolist())
        d_BT, mask_BT = (pad_sequence(each, batch_first=True) for each in (parts, [torch.ones_like(d) for d in parts]))
        of_BP = [[values[~np.isnan(values)] for values in part.numpy()] for part in prefixes(d_BT, mask_BT)]
        columns = {key: source[name][:size] for key, name in _RECORDED.items()} | {"S_t": of_BP[0], "Q_t": of_BP[1]}
        columns |= {"S": d_BT.sum(1).tolist(), "Q": (d_BT**2).sum(1).tolist()}
        if what in ("bf16", "logits32"):
            columns["S_fp32"] = np.diff(source["stale"].astype(float).cumsum()[ends[:size] - 1], prepend=0.0).tolist()
        columns["uid"] = [f"{folder.name}-{number}-{prompt}" for prompt in source["prompt"][:size]]
        yield {"step": number + 1, "minibatch": 1, **columns}


def read(file: Path) -> Responses:
    """The responses of one setting."""
    columns = pq.read_table(file).to_pydict()
    seed, step, place = (np.array(columns[name]) for name in ("seed", "step", "minibatch"))
    batch = np.unique(seed * 10_000 + step, return_inverse=True)[1]

    padded = (np.array([x + [np.nan] * (OCTAVES - len(x)) for x in columns[name]]) for name in ("S_t", "Q_t"))
    s, length, advantage, q = (np.array(columns[name], dtype=float) for name in ("S", "L", "A", "Q"))
    mini = np.unique(batch * 1000 + place, return_inverse=True)[1]
    fp32 = np.array(columns.get("S_fp32", [None] * len(s)), dtype=float)
    return Responses(seed, step, place, batch, mini, s, length, advantage, q, *padded, fp32)


# ---------------------------------------------------------------- statistics of resampled rollout batches


def _sum(values_N: Array, group: np.ndarray) -> Array:
    """Sums over the first axis by group, nan as 0."""
    sums = np.zeros((group.max() + 1, *values_N.shape[1:]))
    np.add.at(sums, group, np.nan_to_num(values_N))
    return sums


def _moments(responses: Responses, values_NP: Array, pooled: bool = False) -> tuple[Array, Array]:
    """Squares about the means of mini-batches (pooled: of all), and their degrees of freedom, by rollout batch."""
    there_NP = (~np.isnan(values_NP)).astype(float)
    if pooled:
        return _sum((values_NP - np.nanmean(values_NP, 0)) ** 2, responses.batch), _sum(there_NP, responses.batch)
    n_MP, total_MP, squares_MP = (_sum(x, responses.mini) for x in (there_NP, values_NP, values_NP**2))
    batch_M = np.zeros(len(n_MP), int)
    batch_M[responses.mini] = responses.batch
    return _sum(squares_MP - total_MP**2 / np.maximum(n_MP, 1), batch_M), _sum(np.maximum(n_MP - 1, 0), batch_M)


def _mean(values_NP: Array, batch: np.ndarray) -> Callable[[Array], Array]:
    """Means of the columns without nan, [R, P]."""
    total_BP, n_BP = _sum(values_NP, batch), _sum(~np.isnan(values_NP), batch)
    return lambda weights_RB: _ratio(weights_RB @ total_BP, weights_RB @ n_BP)


def _ratio(top: Array, bottom: Array) -> Array:
    return np.asarray(np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=bottom > 0))


def _log_std(responses: Responses, values_NP: Array, pooled: bool = False) -> Callable[[Array], tuple[Array, Array]]:
    """Log of the standard deviation within mini-batches of each column and its degrees of freedom, both [R, P]."""
    squares_BP, freedom_BP = _moments(responses, values_NP, pooled)

    def statistic(weights_RB: Array) -> tuple[Array, Array]:
        freedom_RP = weights_RB @ freedom_BP
        variance_RP = _ratio(weights_RB @ squares_BP, freedom_RP)
        usable_RP = (freedom_RP >= 20) & (np.nan_to_num(variance_RP) > 0)
        return np.log(np.where(usable_RP, variance_RP, np.nan)) / 2, freedom_RP

    return statistic


def _slope(*blocks: tuple[Array, Array, Array]) -> Array:
    """Slope of y_RP on x_P with weights, without nan; each block has a level of its own. nan below two points."""
    top_R, bottom_R = np.zeros(1), np.zeros(1)
    for x_P, y_RP, weight_RP in blocks:
        weight_RP = np.where(np.isnan(y_RP), 0.0, weight_RP)
        x_RP = x_P - _ratio((weight_RP * x_P).sum(1), weight_RP.sum(1))[:, None]
        top_R = top_R + np.nansum(weight_RP * x_RP * y_RP, axis=1)
        bottom_R = bottom_R + np.nansum(weight_RP * x_RP**2, axis=1)
    return _ratio(top_R, np.where(bottom_R > 1e-9, bottom_R, 0.0))


def show(statistic: Statistic, responses: Responses, digits: int = 2) -> str:
    """A statistic with 95% intervals: rollout batches resampled within seeds; from three seeds on also whole seeds.

    Both as in :func:`fspo.fairness.bootstrap.pooled_difference`.
    """
    size, rng = responses.batch.max() + 1, np.random.default_rng(0)
    seed_B = np.full(size, -1)
    seed_B[responses.batch] = responses.seed
    seeds = np.unique(responses.seed)
    within_RB, whole_RB = np.zeros((2, _RESAMPLES, size))
    drawn_RS = rng.multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), _RESAMPLES)
    for number, seed in enumerate(seeds):
        own = np.flatnonzero(seed_B == seed)
        within_RB[:, own] = rng.multinomial(len(own), np.full(len(own), 1 / len(own)), _RESAMPLES)
        whole_RB[:, own] = drawn_RS[:, [number]]
    value = float(statistic(np.ones((1, size)))[0])

    def interval(weights_RB: Array, factor: float = 1.0) -> str:
        drawn_R = statistic(weights_RB)
        low, high = value + factor * (np.nanpercentile(drawn_R, [2.5, 97.5]) - np.nanmean(drawn_R))
        return f"[{low:.{digits}f}, {high:.{digits}f}]"

    if np.isnan(value):
        return ""
    text = f"{value:.{digits}f} {interval(within_RB)}"
    if (n := len(seeds)) > 2:
        factor = np.sqrt(n / (n - 1)) * student_quantile(0.975, n - 1) / 1.96
        text += f", seeds {interval(whole_RB, factor)}"
    return text


# ---------------------------------------------------------------- exponents


def even(responses: Responses, of: str = "mini", sequences: bool = False) -> Responses:
    """Log-ratios over the root mean square of their mini-batch's tokens (or ``batch``'s), so that all count alike.

    ``sequences``: over that of S / sqrt(L), in which the short responses of a mini-batch count for more.
    """
    group, s, length = getattr(responses, of), responses.s, responses.length
    square, unit = (s * s / length, np.ones_like(s)) if sequences else (responses.q, length)
    scale_B = np.sqrt(_sum(square, group) / _sum(unit, group))[group]
    q_NP = responses.q_NP / scale_B[:, None] ** 2
    changed = {"s": responses.s / scale_B, "s_NP": responses.s_NP / scale_B[:, None], "q": responses.q / scale_B**2}
    return dataclasses.replace(responses, q_NP=q_NP, **changed)


def by_position(
    responses: Responses, first: int, clock: Callable[[Array], Array] | None = None, sides: Sequence[np.ndarray] = ()
) -> Statistic:
    """Exponent of the spread of S_t within mini-batches over t, among all responses that reach t.

    Args:
        responses: What is judged.
        first: The first t.
        clock: Of S_t**2 at t = 2**P, [R, P]; the exponent is then that of the spread over its root.
        sides: Rollout batches that are judged by a clock of the others, so that it is out of sample; all copies of a
            batch in a resample are on one side. The mean of the exponents counts.
    """
    start = int(np.log2(first))
    spread = _log_std(responses, responses.s_NP[:, start:])

    def statistic(weights_RB: Array) -> Array:
        slopes = []
        for judged_RB, other_RB in [(weights_RB * side, weights_RB * ~side) for side in sides] or [(weights_RB,) * 2]:
            y_RP, freedom_RP = spread(judged_RB)
            if clock is not None:
                y_RP = y_RP - np.log(clock(other_RB)[:, start:]) / 2
            slopes.append(_slope((np.log(_T[start:]), y_RP, freedom_RP)))
        return np.asarray(np.mean(slopes, axis=0))

    return statistic


def within_bins(responses: Responses, first: int) -> Statistic:
    """The same within octaves of the final length, one slope for all of them."""
    start, octave = int(np.log2(first)), np.floor(np.log2(responses.length)).astype(int)
    parts = []
    for k in range(start + 1, octave.max() + 1):
        inside = np.where((octave == k)[:, None], responses.s_NP[:, start : k + 1], np.nan)
        parts.append((np.log(_T[start : k + 1]), _log_std(responses, inside)))
    return lambda weights_RB: _slope(*((x_P, *spread(weights_RB)) for x_P, spread in parts))


def by_length(responses: Responses, first: int, pooled: bool = False) -> Statistic:
    """Exponent of the spread of S over the final length by half octaves, within mini-batches or over all of them."""
    half = np.where(responses.length >= first, np.floor(2 * np.log2(responses.length)), -1)
    bins = np.unique(half[half >= 0])
    x_P = np.array([np.log(responses.length[half == k].mean()) for k in bins])
    spread = _log_std(responses, np.where(half[:, None] == bins, responses.s[:, None], np.nan), pooled)
    return lambda weights_RB: _slope((x_P, *spread(weights_RB)))


def accumulated(responses: Responses) -> Callable[[Array], Array]:
    """V(t) at t = 2**P, [R, P]: the squared token log-ratios of each octave of positions, of those that reach its end.

    The terms are of different responses, as those of a band are that is measured on past ones.
    """
    gain = _mean(np.diff(responses.q_NP, axis=1, prepend=0.0), responses.batch)
    return lambda weights_RB: np.cumsum(gain(weights_RB), axis=1)


def sides(responses: Responses) -> list[np.ndarray]:
    """Both halves of the rollout batches of a few splits."""
    size, rng = responses.batch.max() + 1, np.random.default_rng(0)
    halves = [rng.permutation(size) < size // 2 for _ in range(_SPLITS)]
    return [*halves, *(~half_B for half_B in halves)]


def exponents(named: Mapping[str, Responses]) -> Table:
    """How S spreads: exponents by position and by final length, and the slope over the clock sqrt(V(t))."""
    heads = ["setting", "responses", "batches", "by position", "by position, one length", "by final length"]
    heads += ["by final length, S / sqrt(L) alike", "by final length, pooled", "one length - by position"]
    rows = [[*heads, "over sqrt(V(t))"]]
    for name, responses in named.items():
        setting, first = SETTINGS[name]
        same = even(responses)
        position, within = by_position(same, first), within_bins(same, first)
        cells = [show(position, same), show(within, same)]
        cells += [show(by_length(part, first), part) for part in (same, even(responses, sequences=True))]
        cells.append(show(by_length(responses, first, pooled=True), responses))
        cells.append(show(lambda w_RB, a=within, b=position: a(w_RB) - b(w_RB), same))
        cells.append(show(by_position(same, first, accumulated(same), sides(same)), same))
        rows.append([setting, str(len(responses.s)), str(len(np.unique(responses.batch))), *cells])
    return rows


def octaves(named: Mapping[str, Responses]) -> Table:
    """The exponent from t to 2 t: of all responses that reach either, of those that reach 2 t, and of sqrt(V)."""
    rows = [["setting", "positions", "responses", "all that reach", "those that reach the second", "sqrt(V(t))"]]
    for name, responses in named.items():
        setting, first = SETTINGS[name]
        same, v = even(responses), accumulated(even(responses))
        for p in range(int(np.log2(first)), OCTAVES - 1):
            reach = same[~np.isnan(same.s_NP[:, p + 1])]
            if len(reach.s) < _FEWEST:
                break
            cells = [show(_doubling(part, p), part) for part in (same, reach)]
            clock = show(lambda w_RB, p=p, v=v: np.diff(np.log2(v(w_RB)))[:, p] / 2, same)
            rows.append([setting, f"{_T[p]:.0f} to {_T[p + 1]:.0f}", str(len(reach.s)), *cells, clock])
    return rows


def _doubling(responses: Responses, p: int) -> Statistic:
    spread = _log_std(responses, responses.s_NP[:, p : p + 2])
    return lambda weights_RB: np.diff(spread(weights_RB)[0])[:, 0] / np.log(2)


def split(named: Mapping[str, Responses]) -> Table:
    """Var(S) by length, over the mean of Q: token variance (1), shifts between responses, correlation; and the mean.

    S is the sum of its increments over octaves of positions. A shift that all tokens of a response share gives any two
    octaves of n and m tokens the covariance n m tau^2, so the covariances between octaves measure tau^2, and L^2 tau^2
    is *shift*. What Var(S) has beyond that and Q is *correlation* within octaves. A correlation that reaches over
    octaves counts as shift here; a shift of a part of the response counts as correlation. Only over all lengths does
    theory give 0 for both, and -1 for the mean over Q / 2: a length selects responses, and a policy that comes to
    prefer it has a higher S there.
    """
    heads = ["setting", "lengths", "responses", "token rms", "Var(S) / V(L)", "Var(S) / Q", "shift of responses / Q"]
    heads += ["correlation / Q", "shift of mini-batches / Var(S)", "mean S / (Q / 2)", "mean S / std S"]
    rows = [[*heads, f"share with S below {_CTPO} std of the rollout batch, also A < 0, of the mini-batch"]]
    for name, responses in named.items():
        octave = np.floor(np.log2(responses.length)).astype(int)
        views = even(responses), even(responses, "batch")
        tokens_P, _, squares_P = position_sums(views[0]).token_LPF.sum(0).numpy().T
        clock = accumulated_variance(squares_P / np.maximum(tokens_P, 1), responses.length)
        for k in (*np.unique(octave), None):
            chosen = np.ones(len(octave), bool) if k is None else octave == k
            if chosen.sum() < _FEWEST:
                continue
            part, same, batch = responses[chosen], views[0][chosen], views[1][chosen]
            cells = [show(statistic, same) for statistic in _variances(same, clock[chosen])]
            cells += [show(statistic, part) for statistic in _means(part)]
            low, low_mini = (sample.s < _CTPO * np.std(sample.s) for sample in (batch, same))
            shares = [f"{share.mean():.2f}" for share in (low, low & (part.advantage < 0), low_mini)]
            rms = f"{np.sqrt(part.q.sum() / part.length.sum()):.4f}"
            span = "all" if k is None else f"{2**k} to {2 ** (k + 1) - 1}"
            rows.append([SETTINGS[name][0], span, str(len(part.s)), rms, *cells, ", ".join(shares)])
    return rows


def _variances(part: Responses, clock: Array) -> list[Statistic]:
    """Var(S) over the mean of V(L) and of Q, and shift and correlation over that of Q."""
    s_B1, length_B1 = part.s[:, None], part.length[:, None]
    steps_NP = np.diff(np.where(np.isnan(part.s_NP), s_B1, part.s_NP), axis=1, prepend=0.0, append=s_B1)
    sizes_NP = np.diff(np.minimum(_T, length_B1), axis=1, prepend=0.0, append=length_B1)
    across = 1 - float((sizes_NP**2).sum() / (part.length**2).sum())
    whole, parts = _log_std(part, s_B1), _log_std(part, steps_NP)
    q, v = (_mean(values[:, None], part.batch) for values in (part.q, clock))

    def variance(weights_RB: Array) -> Array:
        return np.asarray(np.exp(2 * whole(weights_RB)[0][:, 0]) / q(weights_RB)[:, 0])

    def shift(weights_RB: Array) -> Array:
        own_R = np.nansum(np.exp(2 * parts(weights_RB)[0]), axis=1) / q(weights_RB)[:, 0]
        return np.asarray((variance(weights_RB) - own_R) / across)

    def over_v(weights_RB: Array) -> Array:
        return np.asarray(variance(weights_RB) * (q(weights_RB) / v(weights_RB))[:, 0])

    return [over_v, variance, shift, lambda weights_RB: variance(weights_RB) - 1 - shift(weights_RB)]


def _means(part: Responses) -> list[Statistic]:
    """The share of Var(S) between mini-batches, and the mean of S over that of Q / 2 and over the spread."""
    within, whole = (_log_std(part, part.s[:, None], pooled) for pooled in (False, True))
    mean = _mean(np.column_stack([part.s, part.q]), part.batch)

    def between(weights_RB: Array) -> Array:
        return np.asarray(1 - np.exp(2 * (within(weights_RB)[0] - whole(weights_RB)[0]))[:, 0])

    def over_q(weights_RB: Array) -> Array:
        s_R, q_R = mean(weights_RB).T
        return np.asarray(2 * s_R / q_R)

    return [between, over_q, lambda weights_RB: mean(weights_RB)[:, 0] / np.exp(within(weights_RB)[0][:, 0])]


def bf16(named: Mapping[str, Responses]) -> Table:
    """S in bf16 (autocast of fp32 weights) beside S in fp32 of the same responses, pooled over rounds."""
    rows = [["setting", "responses", "batches", "std S in bf16 / in fp32", "correlation", "slope of bf16 on fp32"]]
    for name, responses in named.items():
        x, y = responses.fp32, responses.s
        if np.isnan(x).all():
            continue
        mean = _mean(np.column_stack([x, y, x * x, y * y, x * y]), responses.batch)

        def fit(weights_RB: Array, mean: Callable[[Array], Array] = mean) -> Array:
            x, y, xx, yy, xy = mean(weights_RB).T
            xx, yy, xy = xx - x * x, yy - y * y, xy - x * y
            return np.stack([np.sqrt(yy / xx), xy / np.sqrt(xx * yy), xy / xx])

        cells = [show(lambda w_RB, k=k, fit=fit: fit(w_RB)[k], responses) for k in range(3)]
        rows.append([SETTINGS[name][0], str(len(x)), str(len(np.unique(responses.batch))), *cells])
    return rows


# ---------------------------------------------------------------- bands


def position_sums(part: Responses) -> PositionSums:
    """Tokens and their squares by octave of position, interpolated between the t at which Q_t is recorded."""
    sums = PositionSums.zeros()
    reached_NP, q_B1, length_B1 = ~np.isnan(part.q_NP), part.q[:, None], part.length[:, None]
    last_NP = np.diff(part.q_NP, axis=1) / _T[:-1]  # the square at t = 2**(P + 1): the mean of the octave before it
    before_NP = np.where(reached_NP, part.q_NP - np.column_stack([part.q_NP[:, 0], last_NP]), q_B1)
    squares_NP = np.diff(np.column_stack([before_NP, q_B1]), axis=1)
    tokens_NP = np.clip(length_B1 + 1, _T, [*_T[1:], np.inf]) - _T
    sums.prefix_LPF[0, :, 0] = torch.from_numpy(reached_NP.sum(0))
    sums.token_LPF[0, :, 0], sums.token_LPF[0, :, 2] = (torch.from_numpy(x.sum(0)) for x in (tokens_NP, squares_NP))
    return sums


def accumulated_variance(rate_P: Array, length: npt.ArrayLike) -> Array:
    """V(L), nats squared: the sum over octaves of rate_P times the tokens at positions 1..L that lie in octave P.

    Args:
        rate_P: Mean squared token log-ratio at the positions 2**P <= t < 2**(P + 1), nats squared, [18].
        length: L, of any shape, which is that of V(L); between whole numbers V is linear.
    """
    reach = np.clip(np.asarray(length, dtype=np.float64)[..., None] + 1, _T, [*_T[1:], np.inf])
    return np.asarray((reach - _T) @ rate_P)


def variance_half_widths(tokens_P: Array, squared_P: Array, reference_length: float) -> tuple[float, ...]:
    """The band of fspo_variance over that of fspo by fine length bin: sqrt(L_ref V(L) / (V(L_ref) L)). Defined here.

    If token log-ratios are uncorrelated, Var(S) at length L is V(L) (:func:`accumulated_variance`). With equal rates
    all widths are 1. An octave's rate is shrunk towards that of all tokens, (sum d^2 + 100 rate) / (tokens + 100), so
    that it is above 0. An octave without tokens takes the rate of the nearest one that has some, the earlier of two.

    Args:
        tokens_P: Number of tokens by octave of their position.
        squared_P: Sum of their squared log-ratios d_t, nats squared.
        reference_length: L_ref, at which the width is 1.

    Returns:
        One width per fine bin, at the middle of its lengths (at the lower edge of the open one); empty if no token
        moved.
    """
    if squared_P.sum() <= 0:
        return ()
    rate = squared_P.sum() / tokens_P.sum()
    filled = np.flatnonzero(tokens_P)
    nearest_P = filled[np.abs(np.arange(OCTAVES)[:, None] - filled).argmin(axis=1)]
    rate_P = ((squared_P + _PRIOR_TOKENS * rate) / (tokens_P + _PRIOR_TOKENS))[nearest_P]
    edges = FINE_LENGTH_EDGES.numpy()
    length_K = np.append((edges[:-2] + edges[1:-1] - 1) / 2, edges[-2])
    per_token_K = accumulated_variance(rate_P, length_K) / length_K
    per_token = accumulated_variance(rate_P, reference_length) / reference_length
    return tuple(np.sqrt(per_token_K / per_token).tolist())


def variance_state(past: Sequence[PositionSums]) -> BandState:
    """fspo_variance as half-widths for ``band="quantile"``; at the mean length of past responses it is the fspo band.

    Without a token that has moved there are none, and the band is that of fspo.
    """
    total = sum(past, PositionSums.zeros())
    tokens_P, _, squared_P = total.token_LPF.sum(0).numpy().T
    mean_length = float(tokens_P.sum() / max(total.prefix_LPF[:, 0, 0].sum().item(), 1))
    widths_K = variance_half_widths(tokens_P, squared_P, mean_length)
    return BandState(half_width_K=tuple(ALGORITHMS["fspo"].clip_low * width for width in widths_K))


def squares_half_width(past: Responses, length_N: Array) -> Array:
    """The band of fspo_squares over c: sqrt(L_ref Q(L) / Q(L_ref)), L_ref the mean length of past responses.

    Q(L) is the mean of Q among past responses of length L. Q / L is measured in half octaves of L, shrunk towards that
    of all tokens by ten tokens, and log-linear in log L between the mean lengths of the half octaves.
    """
    length, q = past.length, past.q
    group = np.unique((2 * np.log2(length)).astype(int), return_inverse=True)[1]
    n, tokens, squares = np.bincount(group), np.bincount(group, length), np.bincount(group, q)
    rate = np.log((squares + 10 * q.sum() / length.sum()) / (tokens + 10))
    at = [np.interp(np.log(x), np.log(tokens / n), rate) for x in (length_N, length.mean())]
    return np.asarray(np.sqrt(length_N * np.exp(at[0] - at[1])))


def placed(responses: Responses) -> dict[str, tuple[Array, Array]]:
    """Centre and half-width by measured band, from the rollout batches before; nan in the first one."""
    settings = {band: ALGORITHMS[band] for band in _CAUSAL} | {_VARIANCE: ALGORITHMS["fspo_quantile"]}
    bands = {band: np.full((2, len(responses.s)), np.nan) for band in (*settings, _SQUARES)}
    for seed in np.unique(responses.seed):
        own = responses.seed == seed
        controllers = {band: BandController(ALGORITHMS[band], window=_WINDOW) for band in _CAUSAL}
        past: deque[PositionSums] = deque(maxlen=_WINDOW)
        steps = np.unique(responses.step[own])
        for number, step in enumerate(steps):
            now = own & (responses.step == step)
            states = {band: controller.state for band, controller in controllers.items()}
            states[_VARIANCE] = variance_state(past)
            if number:
                last = responses[own & np.isin(responses.step, steps[max(number - 4, 0) : number])]
                centre_N, half_N = bands[_SQUARES]
                centre_N[now], half_N[now] = 0.0, squares_half_width(last, responses.length[now])
            sums, leaned = [SequenceSums.zeros()], [np.zeros((0, 2))]
            for place in range(1, responses.place[now].max() + 1):
                rows = np.flatnonzero(now & (responses.place == place))
                s, length, a = responses.s[rows], responses.length[rows], responses.advantage[rows]
                length_B = torch.from_numpy(length).long()
                for band, state in states.items() if number else ():
                    at_place = state.at_mini_batch(place)
                    low_B, high_B = acceptance_band(length_B, settings[band], at_place, torch.float64)
                    bands[band][:, rows] = ((low_B + high_B) / 2).numpy(), ((high_B - low_B) / 2).numpy()
                values = torch.from_numpy(s), length_B, torch.from_numpy(a)
                sums.append(SequenceSums.zeros().add_(judged(*values, ALGORITHMS["fspo"])))
                leaned.append(leans(s, length, a))
            past.append(position_sums(responses[now]))
            for controller in controllers.values():
                controller.update(sums, leaned)
    return {band: (values[0], values[1]) for band, values in bands.items()}


def bands(named: Mapping[str, Responses]) -> Table:
    """LRE of all bands on the same responses, as many times as wide as keeps KEPT of them.

    *matched*: of the responses (symmetric), or of the gradients of those with A != 0 (active).
    """
    rows = [["setting", "matched", "band", "width", *VIEWS]]
    samples = {SETTINGS[name][0]: responses for name, responses in named.items()}
    for name, seed in FRESH.items():
        if name in named and (late := named[name].seed >= seed).any():
            samples[f"{SETTINGS[name][0]}, fresh seeds"] = named[name][late]
    for setting, responses in samples.items():
        causal = placed(responses)
        usable = ~np.isnan(causal[_VARIANCE][1])
        sample = responses[usable]
        fine_B = length_bin(torch.from_numpy(sample.length).long()).numpy()
        starts = equal_mass_starts(np.bincount(fine_B, minlength=len(FINE_LENGTH_EDGES) - 1).astype(float), 8)
        pairs = Sequences.from_pairs(sample.s, sample.length)
        judge = {band: (sample.s, needed_factor(pairs, ALGORITHMS[loss])) for band, loss in FIXED.items()}
        for band, (centre, half) in causal.items():
            judge[band] = sample.s - centre[usable], np.abs(sample.s - centre[usable]) / half[usable]
        for matched in VIEWS[:2]:
            counts: dict[str, list[list[Counts]]] = {}
            for band, (x_B, z_B) in judge.items():
                pushed_B = x_B * sample.advantage > 0
                aimed_B = z_B if matched == "symmetric" else np.where(pushed_B, z_B, 0.0)[sample.advantage != 0]
                width = float(np.quantile(aimed_B, KEPT))
                log_weight_B = sample.s / sample.length if band == "gspo" else sample.s
                counts[band] = [
                    _counts(sample, fine_B, (z_B <= width) | (~pushed_B & (view == "active")), log_weight_B, view)
                    for view in VIEWS
                ]
                cells = [lre_cell(parts, starts) for parts in counts[band]]
                rows.append([setting, matched, band, f"{width:.3g}", *cells])
            both = [(own, band) for own in (_SQUARES, _VARIANCE) for band in counts if band not in (own, _SQUARES)]
            for first, second in [*both, ("fspo_v1", "fspo"), ("fspo", "rloo"), ("fspo", "gspo")]:
                cells = [difference_cell(*two, starts) for two in zip(counts[first], counts[second], strict=True)]
                rows.append([setting, matched, f"{first} - {second}", "", *cells])
    return rows


def _counts(sample: Responses, fine_B: np.ndarray, kept_B: np.ndarray, log_weight_B: Array, view: str) -> list[Counts]:
    """Of each seed."""
    size, weight_B = len(FINE_LENGTH_EDGES) - 1, np.ones_like(sample.s)
    if view == "mass":
        weight_B = np.exp(np.minimum(log_weight_B, ALGORITHMS["fspo"].s_max))
    counts = []
    for seed in np.unique(sample.seed):
        own = sample.seed == seed
        mini = np.unique(sample.mini[own], return_inverse=True)[1]

        def by_mini(values_B: Array, own: np.ndarray = own, mini: np.ndarray = mini) -> Array:
            flat = np.bincount(mini * size + fine_B[own], values_B[own], (mini.max() + 1) * size)
            return flat.reshape(-1, size)

        squared = by_mini(weight_B**2) if view == "mass" else None
        counts.append(Counts(by_mini(weight_B * kept_B), by_mini(weight_B), squared))
    return counts


def tables(folder: Path) -> dict[str, Table]:
    """The study's tables, of the settings whose file is there."""
    named = {name: read(folder / f"{name}.parquet") for name in SETTINGS if (folder / f"{name}.parquet").exists()}
    return {study.__name__: study(named) for study in (exponents, octaves, split, bf16, bands)}
