"""Tables of ``docs/algorithms.md``: how acceptance depends on length, on ratios that satisfy E_old[exp S] = 1.

``python -m benchmarks.bands acceptance|drift|calibration`` prints Markdown. Seeded; under a minute each on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.pages import markdown
from benchmarks.synthetic import (
    gaussian_acceptance,
    gaussian_log_ratios,
    measured_acceptance,
    sums_of_log_ratios,
    uneven_rollout_batch,
)
from fspo.calibration import BandController, drift_per_token
from fspo.check_loss.token_kinds import TokenKinds
from fspo.fairness import equal_mass_starts, length_reweighting_error, merge_bins
from fspo.losses import ALGORITHMS
from fspo.sums import SequenceSums
from fspo.types import Band, BandState, SequenceLossSettings

Array = npt.NDArray[np.float64]
Round = list[tuple[Array, npt.NDArray[np.int64]]]

LENGTHS: Final = np.array([1, 4, 16, 64, 256, 1024, 4096, 8192, 16384, 32768])


def acceptance_table(sigma: float = 0.03, samples: int = 20_000, seed: int = 0) -> str:
    """Measured and (in brackets) Gaussian-predicted acceptance by length, with and without drift correction."""
    rng = np.random.default_rng(seed)
    kinds = TokenKinds.random(sigma, rng)
    state = BandState(drift_per_token=kinds.kl_per_token)
    statistics = {int(length): kinds.log_ratios(np.full(samples, length), rng) for length in LENGTHS}
    rows: list[Sequence[str]] = [("band", "drift", *(f"L = {length:,}" for length in LENGTHS))]
    for name in ("fspo", "seq_rloo", "seq_gspo"):
        for settings in (ALGORITHMS[name], dataclasses.replace(ALGORITHMS[name], drift="kl")):
            predicted = gaussian_acceptance(LENGTHS, kinds.sigma, kinds.kl_per_token, settings, state)
            cells = []
            for length, expected in zip(LENGTHS, predicted, strict=True):
                inside = measured_acceptance(statistics[int(length)], np.full(samples, length), settings, state)
                cells.append(f"{inside.mean():.3f} ({expected:.3f})")
            rows.append((f"{settings.band} {settings.clip_low:g}/{settings.clip_high:g}", settings.drift, *cells))
    return markdown(rows[0], rows[1:])


def _central_k2(S_B: Array, L_B: Array) -> float:
    """Solution of ``2 kl = mean((S + L * kl)**2 / L)``: half the dispersion about the drift that it implies."""
    a, b, c = float(L_B.sum()), float(S_B.sum()) - S_B.size, float((S_B**2 / L_B).sum())
    discriminant = b * b - a * c
    return (-b - math.sqrt(discriminant)) / a if discriminant >= 0 else -b / a


DRIFT_ESTIMATORS: Final[dict[str, Callable[[Array, Array], float]]] = {
    "k1: -sum S / sum L (used)": lambda S_B, L_B: drift_per_token(float(S_B.sum()), float(L_B.sum())),
    "k2: sum S^2 / (2 sum L)": lambda S_B, L_B: float((S_B**2).sum() / (2 * L_B.sum())),
    "k2 about its own drift": _central_k2,
    "k3: sum (exp S - 1 - S) / sum L": lambda S_B, L_B: float((np.expm1(S_B) - S_B).sum() / L_B.sum()),
}


def drift_table(batch: int = 128, repeats: int = 2000, seed: int = 0) -> str:
    """Relative bias and standard deviation of estimators of the drift per token, from one mini-batch."""
    rng = np.random.default_rng(seed)
    cases = (  # heading, dispersion, median length, spread of the dispersion over sequences (log scale)
        ("L about 100, sigma 0.03", 0.03, 100, 0.0),
        ("L about 2k, sigma 0.01", 0.01, 2000, 0.0),
        ("L about 2k, sigma 0.03", 0.03, 2000, 0.0),
        ("L about 8k, sigma 0.03", 0.03, 8000, 0.0),
        ("L about 2k, sigma 0.03, uneven", 0.03, 2000, 0.7),
    )
    cells: dict[str, list[str]] = {name: [] for name in DRIFT_ESTIMATORS}
    for _, sigma, length, spread in cases:
        estimates: dict[str, list[float]] = {name: [] for name in DRIFT_ESTIMATORS}
        for _ in range(repeats):
            L_B = np.maximum(1, rng.lognormal(math.log(length), 0.5, batch)).astype(np.int64)
            scale_B = np.exp(rng.normal(-(spread**2), spread, batch))  # mean square 1: kl stays sigma**2 / 2
            S_B = gaussian_log_ratios(L_B, sigma * scale_B, rng)
            for name, estimator in DRIFT_ESTIMATORS.items():
                estimates[name].append(estimator(S_B, L_B.astype(np.float64)) / (sigma**2 / 2))
        for name, values in estimates.items():
            cells[name].append(f"{np.mean(values) - 1:+.2f} ± {np.std(values):.2f}")
    return markdown(["estimator", *(case[0] for case in cases)], [(name, *row) for name, row in cells.items()])


def calibration_table(seed: int = 0, burn_in: int = 8) -> str:
    """LRE at equal acceptance: constant clip values chosen in hindsight against bands calibrated causally."""
    rows: list[Sequence[str]] = [
        ("sequences a batch", "target", "band", "acceptance", "LRE", "LRE debiased", "acceptance by bin, short to long")
    ]
    for batch, rounds in ((64, 200), (512, 25)):
        rng = np.random.default_rng(seed)
        run = [uneven_rollout_batch(rng, batch) for _ in range(burn_in + rounds)]
        counted = [part for parts in run[burn_in:] for part in parts[1:]]
        S_B, L_B = (np.concatenate(column) for column in zip(*counted, strict=True))
        all_sums = sums_of_log_ratios(S_B, L_B)
        starts = equal_mass_starts(all_sums.column("count").numpy(), 8)
        total = merge_bins(all_sums.column("count").numpy(), starts)
        for target in (0.85, 0.9):
            bands: dict[str, SequenceLossSettings] = {
                f"{band}, matched in hindsight": _matched(band, S_B, L_B, target)  # type: ignore[arg-type]
                for band in ("constant", "linear", "sqrt")
            }
            bands["adaptive"] = SequenceLossSettings(band="adaptive", target_acceptance=target)
            bands["quantile"] = SequenceLossSettings(band="quantile", target_acceptance=target)
            for name, settings in bands.items():
                accepted = merge_bins(_accepted(run, burn_in, settings).column("count").numpy(), starts)
                error = length_reweighting_error(accepted, total)
                rows.append(
                    (
                        f"{3 * batch}",
                        f"{target:g}",
                        name,
                        f"{accepted.sum() / total.sum():.3f}",
                        f"{error.lre:.4f}",
                        f"{error.debiased.value:.4f}",
                        " ".join(f"{rate:.2f}".lstrip("0") for rate in accepted / total),
                    )
                )
    return markdown(rows[0], rows[1:])


def _matched(band: Band, S_B: Array, L_B: npt.NDArray[np.int64], target: float) -> SequenceLossSettings:
    """The band, symmetric in S, with the clip value that accepts the target share of exactly these sequences."""
    if band == "sqrt":
        c = float(np.quantile(np.abs(S_B) / np.sqrt(L_B), target))
        return SequenceLossSettings(band=band, clip_low=c, clip_high=c)
    half = float(np.quantile(np.abs(S_B) / (L_B if band == "linear" else 1), target))
    return SequenceLossSettings(band=band, clip_low=-math.expm1(-half), clip_high=math.expm1(half))


def _accepted(run: list[Round], burn_in: int, settings: SequenceLossSettings) -> SequenceSums:
    """Apply a band causally through a run; the sums of the sequences it accepts after the burn-in."""
    controller = BandController(settings)
    result = SequenceSums.zeros()
    for number, parts in enumerate(run):
        for index, (S_B, L_B) in enumerate(parts):
            if number >= burn_in and index > 0:
                inside = measured_acceptance(S_B, L_B, settings, controller.state.at_mini_batch(index))
                result += sums_of_log_ratios(S_B[inside], L_B[inside])
        controller.update([sums_of_log_ratios(*part) for part in parts])
    return result


TABLES: Final[dict[str, Callable[[], str]]] = {
    "acceptance": acceptance_table,
    "drift": drift_table,
    "calibration": calibration_table,
}


def main() -> None:
    """Entry point of ``python -m benchmarks.bands``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=sorted(TABLES))
    print(TABLES[parser.parse_args().table]())


if __name__ == "__main__":
    main()
