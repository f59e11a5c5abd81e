"""Rejection masks of 2026 by length, on recorded responses and their token log-probabilities.

``python -m benchmarks.studies masks FOLDER`` reads FOLDER/SETTING.npz. ``--gather ROUNDS`` first makes smollm2.npz of
the rounds of benchmarks.studies.token_log_ratios; demo.npz was made of a run by this program of commit 247873b. Two
log-ratios of the tokens to the weights that wrote them:

* mismatch: the same weights in bf16 (autocast) against fp32;
* stale: the weights one version later, after the updates of a step or round.

Every mask gets the threshold at which it keeps :data:`KEPT` of all responses, or of the tokens where it removes tokens,
so that only lengths differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.pages import Table
from benchmarks.studies.token_log_ratios import rounds
from fspo.acceptance import Counts
from fspo.fairness import Array, equal_mass_starts, merge_bins
from fspo.files import atomic_path
from fspo.report.tables import show_lre
from fspo.sums import FINE_LENGTH_EDGES, length_bin

SETTINGS: Final = {"demo": "demo", "smollm2": "SmolLM2-135M"}
LOG_RATIOS: Final = {"mismatch": "bf16 against fp32", "stale": "one version old"}
KEPT: Final = 0.85
BINS: Final = 5
_RECORDED: Final = ("length", "advantage", "old", "mismatch", "stale")

#: What a mask holds against its threshold, of the token log-ratios d, the old probabilities and A: one value for a
#: response, or one for each token.
Score = Callable[[Array, Array, float], Array]


def _k3(d: Array) -> Array:
    return np.asarray(np.expm1(d) - d)


def _vaco(d: Array, old: Array, advantage: float) -> Array:
    """The mean movement of the response, at the tokens that the gradient would move on; 0 elsewhere."""
    return np.where(advantage * d > 0, np.abs(np.exp(old) * np.expm1(d)).mean(), 0.0)


MASKS: Final[dict[str, Score]] = {
    "Seq-MIS: S, above only": lambda d, old, advantage: d.sum(),
    "constant (seq_sum_k1): |S|": lambda d, old, advantage: np.abs(d.sum()),
    "sqrt (seq_sqrt_k1): |S| / sqrt(L)": lambda d, old, advantage: np.abs(d.sum()) / np.sqrt(len(d)),
    "Geo-RS, seq-mask-tis (seq_mean_k1): |S| / L": lambda d, old, advantage: np.abs(d.mean()),
    "TRM, mean KL (seq_mean_k3)": lambda d, old, advantage: _k3(d).mean(),
    "TRM, largest KL (seq_max_k3)": lambda d, old, advantage: _k3(d).max(),
    "VACO, tokens of a response": _vaco,
    "IcePop, tokens": lambda d, old, advantage: np.abs(d),
}


def gather(record: Path, folder: Path) -> None:
    """Write FOLDER/smollm2.npz of the rounds of benchmarks.studies.token_log_ratios; a step is a round."""
    parts = list(rounds(record))
    arrays = {name: np.concatenate([part[name] for _, part in parts]) for name in _RECORDED}
    arrays["step"] = np.concatenate([np.full(len(part["length"]), number) for number, part in parts])
    with atomic_path(folder / "smollm2.npz") as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _kept(scores: list[Array]) -> tuple[float, Array]:
    """The threshold at which a mask keeps KEPT on average, and the share of each response that it keeps."""
    low, high = float(min(score.min() for score in scores)), float(max(score.max() for score in scores))
    for _ in range(50):
        middle = (low + high) / 2
        kept_B = np.array([np.mean(score <= middle) for score in scores])
        low, high = (middle, high) if kept_B.mean() < KEPT else (low, middle)
    return high, np.array([np.mean(score <= high) for score in scores])


def table(file: Path, setting: str) -> Table:
    """What each mask keeps by length, and its LRE by responses and by importance mass, min(exp S, 100)."""
    data = np.load(file)
    fine_B = length_bin(torch.from_numpy(data["length"])).numpy()
    size = len(FINE_LENGTH_EDGES) - 1
    starts = equal_mass_starts(np.bincount(fine_B, minlength=size).astype(float), BINS)
    edges = [str(int(FINE_LENGTH_EDGES[start])) for start in starts]
    bins = [f"kept, bin {i}" for i in range(1, BINS + 1)]
    rows = [["setting", "log-ratio", "mask", "threshold", *bins, "LRE", "LRE, mass"]]
    rows.append([setting, "", f"{len(fine_B)} responses; bins from", "", *edges, "", ""])
    ends = data["length"].cumsum()[:-1]
    old = np.split(data["old"].astype(float), ends)
    step_B, clusters = data["step"], np.unique(data["step"])

    def counts(value_B: Array) -> Array:
        return np.stack([np.bincount(fine_B[step_B == step], value_B[step_B == step], size) for step in clusters])

    for log_ratio, what in LOG_RATIOS.items():
        d = np.split(data[log_ratio].astype(float), ends)
        weight_B = np.exp(np.minimum([part.sum() for part in d], np.log(100.0)))
        for mask, score in MASKS.items():
            threshold, kept_B = _kept(
                [np.atleast_1d(score(*each)) for each in zip(d, old, data["advantage"], strict=True)]
            )
            every = Counts(counts(kept_B), counts(np.ones_like(kept_B)))
            mass = Counts(counts(weight_B * kept_B), counts(weight_B), counts(weight_B**2))
            by_length = merge_bins(every.accepted.sum(0), starts) / merge_bins(every.total.sum(0), starts)
            errors = [show_lre(each.error(starts)) for each in (every, mass)]
            rows.append([setting, what, mask, f"{threshold:.3g}", *(f"{share:.3f}" for share in by_length), *errors])
    return rows


def tables(folder: Path) -> dict[str, Table]:
    """One table of all settings whose file is there."""
    files = {setting: folder / f"{name}.npz" for name, setting in SETTINGS.items()}
    of_settings = [table(file, setting) for setting, file in files.items() if file.exists()]
    if not of_settings:
        raise FileNotFoundError(f"{', '.join(map(str, files.values()))}: there is none; --gather makes one of them")
    return {"by-length": [of_settings[0][0], *(row for one in of_settings for row in one[1:])]}
