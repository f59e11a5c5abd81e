"""Which clock S follows, and the band that follows from it: docs/results.md, "Which clock is right".

``python -m benchmarks.studies evidence FOLDER``: FOLDER holds one parquet file for each of SETTINGS, a row for each
response: seed, step, minibatch, prompt, S, L, A, reward, Q (the sum of the squared token log-ratios), and S_t and Q_t,
both at t = 1, 2, 4, ... up to L. ``--gather RUNS`` writes them from RUNS/SETTING/seed*, runs with
``fspo.record_sequences=true``.

Hypotheses, written before the runs (a pilot with 40 responses of SmolLM2-135M suggested them):

1. By position, S_t spreads like t^a with a below 0.5 in every setting; within one length bin no faster.
2. Token log-ratios are nearly uncorrelated: Var(S) is 0.8 to 1.25 times V(L), the accumulated token variance.
3. Over the clock sqrt(V(t)) the spread has a slope within 0.1 of 0; over sqrt(t) it falls.
4. The mean of S is -V(L) / 2, as where E_old exp S = 1 for small S.
5. A band c sqrt(V(L)) has a symmetric LRE of at most 0.025 in every setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.pages import Table
from benchmarks.studies.fairness import difference_cell, lre_cell
from fspo.acceptance import Counts
from fspo.fairness import Array, equal_mass_starts
from fspo.files import atomic_path
from fspo.positions import OCTAVES
from fspo.records import sequence_lines
from fspo.sums import FINE_LENGTH_EDGES, length_bin

#: By name: the setting, and the shortest position from which exponents are fitted.
SETTINGS: Final = {
    "demo": ("demo", 4),
    "fast": ("demo, 7 x learning rate", 4),
    "words": ("words", 4),
    "stories": ("SmolLM2-135M", 16),
}
VIEWS: Final = ("symmetric", "active", "mass")
KEPT: Final = 0.85
_WINDOW: Final = 8
_RESAMPLES: Final = 200
_T: Final = 2.0 ** np.arange(OCTAVES)


@dataclass(frozen=True)
class Responses:
    """Recorded responses, [N]; S_NP and Q_NP at t = 2**P, nan where L < t. ``batch``: which rollout batch."""

    seed: np.ndarray
    batch: np.ndarray
    step: np.ndarray
    mini: np.ndarray
    s: Array
    length: Array
    advantage: Array
    q: Array
    s_NP: Array
    q_NP: Array

    def __getitem__(self, rows: np.ndarray) -> Responses:
        return Responses(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def gather(runs: Path, out: Path) -> None:
    """Write OUT/SETTING.parquet from the runs; mini-batches before which no weight had moved are left out."""
    for name in SETTINGS:
        rows: dict[str, list[Any]] = {}
        for run in sorted((runs / name).glob("seed*")):
            for line in sequence_lines(run):
                size = len(line["S"]) if line["minibatch"] else 0
                same = {"seed": int(run.name[4:]), "step": line["step"], "minibatch": line["minibatch"]}
                columns = {key: [value] * size for key, value in same.items()}
                columns |= {"prompt": line["uid"], "reward": line["reward"]}
                columns |= {key: line[key] for key in ("S", "L", "A", "Q", "S_t", "Q_t")}
                for key, values in columns.items():
                    rows.setdefault(key, []).extend(values[:size])
        if rows:
            prompts = {uid: number for number, uid in enumerate(dict.fromkeys(rows["prompt"]))}
            rows["prompt"] = [prompts[uid] for uid in rows["prompt"]]
            schema = {
                "seed": pa.int16(),
                "step": pa.int16(),
                "minibatch": pa.int16(),
                "prompt": pa.int32(),
                "L": pa.int32(),
            }
            schema |= {"S_t": pa.list_(pa.float32()), "Q_t": pa.list_(pa.float32())}
            table = pa.table({key: pa.array(rows[key], schema.get(key, pa.float32())) for key in rows})
            with atomic_path(out / f"{name}.parquet") as temporary:
                pq.write_table(table, temporary, compression="zstd", compression_level=19)


def read(file: Path) -> Responses:
    """The responses of one setting."""
    columns = pq.read_table(file).to_pydict()
    seed, step, mini = (np.array(columns[name]) for name in ("seed", "step", "minibatch"))
    batch = np.unique(seed * 10_000 + step, return_inverse=True)[1]

    def padded(name: str) -> Array:
        return np.array([values + [np.nan] * (OCTAVES - len(values)) for values in columns[name]])

    s, length, advantage, q = (np.array(columns[name], dtype=float) for name in ("S", "L", "A", "Q"))
    number = np.unique(batch * 1000 + mini, return_inverse=True)[1]
    return Responses(seed, batch, step, number, s, length, advantage, q, padded("S_t"), padded("Q_t"))


# ---------------------------------------------------------------- exponents


def _even(responses: Responses) -> Responses:
    """Log-ratios over the root mean square of their mini-batch's tokens, so that all mini-batches count alike."""
    size = responses.mini.max() + 1
    scale = np.sqrt(
        np.bincount(responses.mini, responses.q, size) / np.bincount(responses.mini, responses.length, size)
    )
    scale_B = scale[responses.mini]
    parts = _fields(responses) | {"s": responses.s / scale_B, "s_NP": responses.s_NP / scale_B[:, None]}
    parts |= {"q": responses.q / scale_B**2, "q_NP": responses.q_NP / scale_B[:, None] ** 2}
    return Responses(**parts)


def _variance(values: Array, group: np.ndarray) -> float:
    """Variance within groups: sum of squares about each group's mean over the degrees of freedom; nan below 20."""
    _, group = np.unique(group, return_inverse=True)
    n = np.bincount(group)
    squares = np.sum(values**2) - np.sum(np.bincount(group, values) ** 2 / n)
    return float(squares / (n - 1).sum()) if (n - 1).sum() >= 20 else float("nan")


def _slope(x: Sequence[float], y: Sequence[float], weight: Sequence[float]) -> float:
    if len(x) < 2:
        return float("nan")
    return float(np.polyfit(np.log(x), np.log(y), 1, w=np.sqrt(weight))[0])


def by_position(responses: Responses, first: int, of: str = "s", clock_N: Array | None = None) -> float:
    """Exponent of the spread of S_t within mini-batches over t, among all responses that reach t."""
    points = []
    for p in range(int(np.log2(first)), OCTAVES):
        there = ~np.isnan(responses.s_NP[:, p])
        values = responses.s_NP[there, p] / (1 if clock_N is None else clock_N[p])
        if not (variance := _variance(values, responses.mini[there])) > 0:
            break
        points.append((_T[p], np.sqrt(variance), there.sum()))
    return _slope(*zip(*points, strict=True))


def within_bins(responses: Responses, first: int) -> float:
    """The same within octaves of the final length, one slope for all of them."""
    x, y, weight = [], [], []
    octave = np.floor(np.log2(responses.length)).astype(int)
    for k in np.unique(octave):
        points = []
        for p in range(int(np.log2(first)), k + 1):
            there = octave == k
            if (variance := _variance(responses.s_NP[there, p], responses.mini[there])) > 0:
                points.append((np.log(_T[p]), np.log(variance) / 2, there.sum()))
        if len(points) > 1:
            columns = np.array(points).T
            x += list(columns[0] - columns[0].mean())
            y += list(columns[1] - columns[1].mean())
            weight += list(columns[2])
    return float(np.sum(np.multiply(weight, x) * y) / np.sum(np.multiply(weight, x) * x)) if x else float("nan")


def by_length(responses: Responses, first: int, pooled: bool = False) -> float:
    """Exponent of the spread of S over the final length, within mini-batches or over all of them."""
    octave = np.floor(2 * np.log2(responses.length)).astype(int)
    points = []
    for k in np.unique(octave):
        rows = (octave == k) & (responses.length >= first)
        group = np.zeros(rows.sum(), int) if pooled else responses.mini[rows]
        if rows.any() and (variance := _variance(responses.s[rows], group)) > 0:
            points.append((responses.length[rows].mean(), np.sqrt(variance), rows.sum()))
    return _slope(*zip(*points, strict=True)) if len(points) > 1 else float("nan")


def accumulated(responses: Responses) -> Array:
    """V(t) at t = 2**P: the squared token log-ratios of each octave of positions, from those that reach its end."""
    gains = np.diff(responses.q_NP, axis=1)
    with np.errstate(invalid="ignore"):
        mean = np.array([np.nanmean(column) if (~np.isnan(column)).any() else np.nan for column in gains.T])
    return np.concatenate([[np.nanmean(responses.q_NP[:, 0])], np.nanmean(responses.q_NP[:, 0]) + np.cumsum(mean)])


def _interval(statistic: Callable[[Responses], float], responses: Responses) -> str:
    """A statistic with its interval over rollout batches."""
    rng = np.random.default_rng(0)
    rows = [np.flatnonzero(responses.batch == batch) for batch in np.unique(responses.batch)]
    drawn = []
    for _ in range(_RESAMPLES):
        chosen = rng.integers(0, len(rows), len(rows))
        # A batch that is drawn twice is two batches.
        sample = responses[np.concatenate([rows[k] for k in chosen])]
        shift = np.repeat(np.arange(len(chosen)), [len(rows[k]) for k in chosen]) * (responses.mini.max() + 1)
        drawn.append(statistic(Responses(**{**_fields(sample), "mini": sample.mini + shift})))
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return f"{statistic(responses):.2f} [{low:.2f}, {high:.2f}]"


def _fields(responses: Responses) -> dict[str, np.ndarray]:
    return {name: getattr(responses, name) for name in responses.__dataclass_fields__}


def exponents(named: Mapping[str, Responses]) -> Table:
    """How S spreads: three exponents, and the slope over the two clocks."""
    heads = ["setting", "responses", "batches", "by position", "by position, one length", "by final length"]
    rows = [[*heads, "by final length, pooled", "over sqrt(t)", "over sqrt(V(t))"]]
    for name, responses in named.items():
        setting, first = SETTINGS[name]
        even = _even(responses)

        def over_v(sample: Responses, first: int = first) -> float:
            return by_position(sample, first, clock_N=np.sqrt(accumulated(sample)))

        cells = [
            _interval(lambda sample, first=first: by_position(sample, first), even),  # type: ignore[misc]
            _interval(lambda sample, first=first: within_bins(sample, first), even),  # type: ignore[misc]
            _interval(lambda sample, first=first: by_length(sample, first), even),  # type: ignore[misc]
            _interval(lambda sample, first=first: by_length(sample, first, True), responses),  # type: ignore[misc]
            _interval(lambda sample, first=first: by_position(sample, first) - 0.5, even),  # type: ignore[misc]
            _interval(over_v, even),
        ]
        rows.append([setting, str(len(responses.s)), str(len(np.unique(responses.batch))), *cells])
    return rows


def split(named: Mapping[str, Responses]) -> Table:
    """Var(S) by length: token variance, correlation within a response, shifts between mini-batches; and the mean."""
    heads = [
        "setting",
        "lengths",
        "responses",
        "Var(S) / Q",
        "shift of mini-batches / Var(S)",
        "mean S / (mean Q / 2); -1 expected",
    ]
    rows = [[*heads, "token rms"]]
    for name, responses in named.items():
        octave = np.floor(np.log2(responses.length)).astype(int)
        for k in np.unique(octave):
            part = responses[octave == k]
            if len(part.s) < 100:
                continue
            within, whole = _variance(part.s, part.mini), float(np.var(part.s))
            ratio = _interval(lambda sample: _variance(sample.s, sample.mini) / float(sample.q.mean()), part)
            mean = _interval(lambda sample: float(sample.s.mean() / (sample.q.mean() / 2)), part)
            rms = np.sqrt(part.q.sum() / part.length.sum())
            shift = f"{max(0.0, 1 - within / whole):.2f}"
            rows.append(
                [SETTINGS[name][0], f"{2**k} to {2 ** (k + 1) - 1}", str(len(part.s)), ratio, shift, mean, f"{rms:.4f}"]
            )
    return rows


# ---------------------------------------------------------------- bands


def v_of_length(past: Responses, length: Array) -> Array:
    """V(L), from the squared token log-ratios by octave of position of past responses."""
    rate = np.empty(OCTAVES)
    for p in range(OCTAVES):
        before = 0.0 if p == 0 else np.where(np.isnan(past.q_NP[:, p]), past.q, past.q_NP[:, p])
        after = past.q if p == OCTAVES - 1 else np.where(np.isnan(past.q_NP[:, p + 1]), past.q, past.q_NP[:, p + 1])
        start, end = (0.0 if p == 0 else _T[p]), (np.inf if p == OCTAVES - 1 else _T[p + 1])
        tokens = np.clip(past.length, start, end) - start
        rate[p] = np.sum(after - before) / tokens.sum() if tokens.sum() > 0 else np.nan
    rate = np.where(np.isnan(rate), rate[~np.isnan(rate)][-1], rate)
    edges = np.concatenate([[0.0], _T[1:], [np.inf]])
    reach = np.clip(length[:, None], edges[:-1], edges[1:]) - edges[:-1]
    return np.asarray(reach @ rate)


def clocks(responses: Responses) -> Iterator[tuple[str, Array]]:
    """What each band holds |S| against, up to its clip value, by response; 0 where a band has no past to go by."""
    length = responses.length
    yield "fspo", np.sqrt(length)
    yield "rloo", np.ones_like(length)
    yield "gspo", length
    measured = np.zeros_like(length)
    for seed in np.unique(responses.seed):
        own = responses.seed == seed
        for step in np.unique(responses.step[own]):
            past = own & (responses.step < step) & (responses.step >= step - _WINDOW)
            now = own & (responses.step == step)
            if past.any():
                reference = responses.length[past].mean()
                v_now, v_reference = (
                    v_of_length(responses[past], length[now]),
                    v_of_length(responses[past], np.array([reference])),
                )
                measured[now] = np.sqrt(reference * v_now / v_reference)
    yield "V(L)", measured


def bands(named: Mapping[str, Responses]) -> Table:
    """LRE of each band on the same responses, with the clip value at which it keeps KEPT of them."""
    rows = [["setting", "band", "clip value", *VIEWS]]
    size = len(FINE_LENGTH_EDGES) - 1
    for name, responses in named.items():
        clock = dict(clocks(responses))
        usable = clock["V(L)"] > 0
        sample, clock = responses[usable], {band: values[usable] for band, values in clock.items()}
        fine_B = length_bin(torch.from_numpy(sample.length.astype(np.int64))).numpy()
        starts = equal_mass_starts(np.bincount(fine_B, minlength=size).astype(float), 8)
        counts: dict[str, list[list[Counts]]] = {}
        for band, values in clock.items():
            z = np.abs(sample.s) / values
            clip = float(np.quantile(z, KEPT))
            counts[band] = [
                [_counts(sample, fine_B, z <= clip, view, sample.seed == seed) for seed in np.unique(sample.seed)]
                for view in VIEWS
            ]
            rows.append([SETTINGS[name][0], band, f"{clip:.3g}", *(lre_cell(parts, starts) for parts in counts[band])])
        for band in ("fspo", "rloo", "gspo"):
            cells = [difference_cell(v, other, starts) for v, other in zip(counts["V(L)"], counts[band], strict=True)]
            rows.append([SETTINGS[name][0], f"V(L) - {band}", "", *cells])
    return rows


def _counts(responses: Responses, fine_B: np.ndarray, inside: np.ndarray, view: str, chosen: np.ndarray) -> Counts:
    s, a = responses.s[chosen], responses.advantage[chosen]
    kept = inside[chosen]
    if view == "active":
        kept = kept | ~np.where(s > 0, a > 0, a < 0)
    weight = np.exp(np.minimum(s, 10.0)) if view == "mass" else np.ones_like(s)
    size = len(FINE_LENGTH_EDGES) - 1
    _, mini = np.unique(responses.mini[chosen], return_inverse=True)

    def by_mini(values: Array) -> Array:
        flat = np.bincount(mini * size + fine_B[chosen], values, (mini.max() + 1) * size)
        return flat.reshape(-1, size)

    return Counts(by_mini(weight * kept), by_mini(weight), by_mini(weight**2) if view == "mass" else None)


def tables(folder: Path) -> dict[str, Table]:
    """The study's tables, of the settings whose file is there."""
    named = {name: read(folder / f"{name}.parquet") for name in SETTINGS if (folder / f"{name}.parquet").exists()}
    return {"exponents": exponents(named), "split": split(named), "bands": bands(named)}
