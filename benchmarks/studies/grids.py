"""Tables of docs/studies from the runs of a grid. Missing cells are ``not run``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.pages import Table
from fspo.acceptance import Counts, acceptance_counts
from fspo.calibration import BandController, leans
from fspo.conclusion import spread_exponent, squares_about_mean
from fspo.fairness.bootstrap import pooled_difference
from fspo.fairness.lre import MIN_CLUSTERS, Array, debiased_lre, merge_bins
from fspo.losses import ALGORITHMS, acceptance_band
from fspo.matching import Sequences, match_clip
from fspo.records import LENGTH_STATS_FILE, MiniBatches, from_record, read_sequences, step_lines
from fspo.report.groups import RunGroup, group_runs, shared_starts, standard_measures
from fspo.report.runs import Run, expand_paths, load_run
from fspo.report.tables import final_numbers, grid_table, group_heads, lre_interval, paired_differences
from fspo.sums import FINE_LENGTH_EDGES, SequenceSums
from fspo.types import BandState, SequenceLossSettings

VIEWS: Final = ("symmetric", "active", "mass")
#: Views of the tables of the active band, and the first step that it has something to go by.
ACTIVE_VIEWS: Final = ("active_nonzero_advantage", "active", "symmetric")
_ACTIVE_FIRST: Final = 2
CLIP_RATE: Final = 0.15
#: Step from which a calibrated band has at least two steps behind it.
_FIRST: Final = 3
CLIP_VALUES: Final = ("published", "matched", "matched_active", "measured")
_BASELINES: Final = {"fspo": "fspo", "rloo": "seq_rloo", "gspo": "seq_gspo"}
#: By measured band: views, the first step that is judged, and targets with their windows and the share that the
#: baselines keep beside them.
_MEASURED: Final = {
    "fspo_quantile": (VIEWS, _FIRST, ((0.85, (2, 4, 8), 0.85), (0.9, (2, 4, 8), 0.9))),
    "fspo_active": (ACTIVE_VIEWS, _ACTIVE_FIRST, ((0.85, (2, 3, 4, 8), None), (0.8, (3,), 0.9))),
}

Runs = Mapping[int, Run]


def _bin(length: Array) -> np.ndarray:
    return np.searchsorted(FINE_LENGTH_EDGES.numpy(), length, side="right") - 1


def causal_states(run: Path, settings: SequenceLossSettings, window: int) -> dict[int, BandState]:
    """For each step the state that a calibrated band would have had: measured on the steps before it."""
    moved: dict[int, list[Array]] = {}
    if settings.band == "active" and (records := read_sequences(run)) is not None:
        for step, *columns in zip(records.step, records.s, records.length, records.advantage, strict=True):
            moved.setdefault(step, [np.zeros((0, 2))]).append(leans(*columns))  # first the mini-batch that is left out
    rounds: dict[int, dict[int, SequenceSums]] = {}
    for record in step_lines(run / LENGTH_STATS_FILE):
        rounds.setdefault(record["step"], {})[record["minibatch"]] = from_record(record)
    controller, states = BandController(settings, window=window), {}
    for step in sorted(rounds):
        states[step] = controller.state
        controller.update([rounds[step][index] for index in sorted(rounds[step])], moved.get(step, []))
    return states


def band_counts(
    records: MiniBatches,
    settings: SequenceLossSettings,
    view: str,
    states: Mapping[int, BandState] | None = None,
    first_step: int = 1,
) -> Counts:
    """What a band would have done with recorded sequences, under one view of acceptance."""
    size = len(FINE_LENGTH_EDGES) - 1
    accepted, total, squared = [], [], []
    for step, s, length, advantage in zip(records.step, records.s, records.length, records.advantage, strict=True):
        if step < first_step:
            continue
        state = states[step] if states else None
        low_B, high_B = acceptance_band(torch.from_numpy(length).long(), settings, state, dtype=torch.float64)
        inside = (low_B.numpy() <= s) & (s <= high_B.numpy())
        if view.startswith("active"):
            inside = inside | ~np.where(s > 0, advantage > 0, advantage < 0)
        if view == "active_nonzero_advantage":
            s, length, inside = (x[advantage != 0] for x in (s, length, inside))
        log_weight = s if settings.weight == "sequence" else s / length
        weight = np.exp(np.minimum(log_weight, settings.s_max)) if view == "mass" else np.ones_like(s)
        where = _bin(length)
        accepted.append(np.bincount(where, weight * inside, size))
        total.append(np.bincount(where, weight, size))
        squared.append(np.bincount(where, weight**2, size))
    return Counts(np.stack(accepted), np.stack(total), np.stack(squared) if view == "mass" else None)


def own_counts(run: Run, view: str, first_step: int = 1) -> Counts:
    """What a run's own band did, from its exact sums."""
    return acceptance_counts(run.lengths.sums_MKF[run.lengths.step_M >= first_step], view)


def joined(parts: Sequence[Counts]) -> Counts:
    """The counts of several runs as those of one."""
    names = ("accepted", "total") if parts[0].squared is None else ("accepted", "total", "squared")
    return Counts(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def lre_cell(parts: Sequence[Counts], starts: Array) -> str:
    """Debiased LRE over all seeds with its interval, the noise floor and the overall rate."""
    error = joined(parts).error(starts)
    return f"{lre_interval(error)} (floor {error.noise_floor:.3f}, kept {error.rate:.3f})"


def lre_row(name: str, counts: Callable[[str], Sequence[Counts]], views: Sequence[str], starts: Array) -> list[str]:
    """Name, and the LRE of the counts under each view."""
    return [name, *(lre_cell(counts(view), starts) for view in views)]


def difference_cell(first: Sequence[Counts], second: Sequence[Counts], starts: Array) -> str:
    """Difference of debiased LREs with its intervals over mini-batches and over seeds."""

    def merged(parts: Sequence[Counts]) -> list[tuple[Array, Array]]:
        return [(merge_bins(part.accepted, starts), merge_bins(part.total, starts)) for part in parts]

    a, b = merged(first), merged(second)
    here, beyond = (pooled_difference(a, b, debiased_lre, over=over) for over in ("mini_batches", "seeds"))
    text = f"{here.value:+.3f} [{here.low:+.3f}, {here.high:+.3f}]"
    if here.n > 2:
        text += f", seeds [{beyond.low:+.3f}, {beyond.high:+.3f}]"
    return text


def paired_cells(first: Runs, second: Runs, views: Sequence[str], starts: Array, first_step: int = 1) -> list[str]:
    """Own runs that have seeds in common: the difference of their LREs under each view."""
    seeds = sorted(first.keys() & second.keys())
    counts = [[[own_counts(runs[s], view, first_step) for s in seeds] for runs in (first, second)] for view in views]
    return [difference_cell(*pair, starts) for pair in counts]


def paired_row(
    algos: tuple[str, str], first: Runs, second: Runs, views: Sequence[str], starts: Array, first_step: int = 1
) -> list[str]:
    """:func:`paired_cells` of two algorithms, after a name."""
    name = f"{algos[0]} - {algos[1]} ({len(first.keys() & second.keys())} paired seeds)"
    return [name, *paired_cells(first, second, views, starts, first_step)]


def own_rows(groups: Sequence[RunGroup], starts: Array) -> Table:
    """Each algorithm's own runs: LRE in the three views, and FSPO's differences to the others."""
    rows = [
        lre_row(head, lambda view, runs=group.runs: [own_counts(r, view) for r in runs], VIEWS, starts)
        for head, group in zip(group_heads(groups), groups, strict=True)
    ]
    by_algo = {group.algo: group.by_seed() for group in groups}
    first = by_algo.pop("fspo", {})
    pairs = [(algo, runs) for algo, runs in by_algo.items() if first.keys() & runs.keys()]
    return rows + [paired_row(("fspo", algo), first, runs, VIEWS, starts) for algo, runs in pairs]


def common_rows(group: RunGroup, starts: Array) -> Table:
    """All bands on the sequences of one group's runs, with default and with matched clip values."""
    records = recorded([group])
    if not records:
        return []
    pooled, rows = pool(records), []
    default = {name: ALGORITHMS[loss] for name, loss in _BASELINES.items()}
    matched = {name: match_clip(pooled, band, CLIP_RATE).settings for name, band in default.items()}
    for clips, bands in (("default", default), ("matched", matched)):
        counts, judged = {}, []
        for name, band in bands.items():
            counts[name] = {view: [band_counts(sequences, band, view) for _, sequences in records] for view in VIEWS}
            head = f"{name} ({band.clip_low:.3g} / {band.clip_high:.3g})"
            judged.append(lre_row(head, counts[name].__getitem__, VIEWS, starts))
        for other in ("rloo", "gspo"):
            cells = [difference_cell(counts["fspo"][view], counts[other][view], starts) for view in VIEWS]
            judged.append([f"fspo - {other}", *cells])
        rows += [[group.algo, str(pooled.length_B.size), clips, *row] for row in judged]
    return rows


def recorded(groups: Sequence[RunGroup]) -> list[tuple[Path, MiniBatches]]:
    """The runs with recorded sequences."""
    runs = [run for group in groups for run in group.runs]
    return [(run.path, records) for run in runs if (records := read_sequences(run.path)) is not None]


def pool(records: Sequence[tuple[Path, MiniBatches]], first_step: int = 0, active: bool = False) -> Sequences:
    """The sequences of all runs together, from a step on; ``active``: with their advantages."""
    columns = []
    for name in ("s", "length", "advantage") if active else ("s", "length"):
        pairs = [pair for _, part in records for pair in zip(getattr(part, name), part.step, strict=True)]
        columns.append(np.concatenate([values for values, step in pairs if step >= first_step]))
    return Sequences.from_pairs(*columns)


def spread_rows(group: RunGroup, starts: Array) -> Table:
    """How S spreads by length: mean per token, std of z = S / sqrt(L), kurtosis of z, and a in std(S) ~ L**a.

    For the last two, z is divided by its root mean square in the mini-batch, so that all count alike; a is the slope of
    log std(S) on log L over the bins, and mini-batches are resampled for its interval.
    """
    batches = [
        pair for _, run in recorded([group]) for pair in zip(run.s, run.length, strict=True) if np.any(pair[0] != 0)
    ]
    if not batches:
        return []
    size, powers = len(FINE_LENGTH_EDGES) - 1, []
    for s, length in batches:
        z = s / np.sqrt(length)
        even = z / np.sqrt(np.mean(z**2))
        even_s = even * np.sqrt(length)
        cell = np.searchsorted(starts, _bin(length), side="right") - 1
        squares, several = squares_about_mean(even_s, cell)
        within = (several.astype(np.float64), length * several, squares * several)
        columns = (np.ones_like(s), length, s, z, z**2, *(even**n for n in range(1, 5)), *within)
        powers.append(merge_bins(np.stack([np.bincount(_bin(length), column, size) for column in columns]), starts))
    powers_MFK = np.stack(powers)
    count_K, length_K, s_K, z_K, z2_K, e1_K, e2_K, e3_K, e4_K, *_ = powers_MFK.sum(0)
    mean_K, second_K, third_K = e1_K / count_K, e2_K / count_K, e3_K / count_K
    fourth_K = e4_K / count_K - 4 * mean_K * third_K + 6 * mean_K**2 * second_K - 3 * mean_K**4

    exponent = spread_exponent(*(powers_MFK[:, column] for column in (-3, -2, -1)))
    rows = [
        ["sequences", *(f"{n:.0f}" for n in count_K)],
        ["sum S / sum L, nats a token", *(f"{value:+.5f}" for value in s_K / length_K)],
        ["std of S / sqrt(L)", *(f"{value:.4f}" for value in np.sqrt(z2_K / count_K - (z_K / count_K) ** 2))],
        ["kurtosis", *(f"{value:.1f}" for value in fourth_K / (second_K - mean_K**2) ** 2)],
    ]
    shown = f"{exponent.value:.2f} [{exponent.low:.2f}, {exponent.high:.2f}]"
    return [[group.algo, shown, *row] for row in rows]


def spread_table(groups: Sequence[RunGroup], starts: Array) -> Table:
    """:func:`spread_rows` of all groups."""
    heads = ["runs of", "a in std(S) ~ L^a", "bin from", *(str(edge) for edge in FINE_LENGTH_EDGES.numpy()[starts])]
    return [heads, *(row for group in groups for row in spread_rows(group, starts))]


def measured_table(groups: Sequence[RunGroup], starts: Array, algo: str) -> Table:
    """A measured band, calibrated on the steps before, on the runs of all groups: per target and window.

    Beside it bands with fixed clip values, at which they keep the same share in hindsight.
    """
    records, rows = recorded(groups), []
    views, first_step, targets = _MEASURED[algo]

    def row(name: str, band: SequenceLossSettings, states: Sequence[Mapping[int, BandState] | None]) -> list[str]:
        runs = [(sequences, state) for (_, sequences), state in zip(records, states, strict=True)]
        return lre_row(
            name, lambda view: [band_counts(s, band, view, state, first_step) for s, state in runs], views, starts
        )

    for target, windows, matched in targets:
        band = dataclasses.replace(ALGORITHMS[algo], target_acceptance=target)
        for window in windows:
            states = [causal_states(path, band, window) for path, _ in records]
            rows.append(row(f"{algo.removeprefix('fspo_')}, target {target:g}, last {window} steps", band, states))
        if matched is not None:
            pooled = pool(records, first_step, active=algo == "fspo_active")
            for name, loss in _BASELINES.items():
                band = match_clip(pooled, ALGORITHMS[loss], 1 - matched).settings
                rows.append(row(f"{name}, matched to {matched:g}", band, [None] * len(records)))
    return [[f"steps {first_step} and later, {len(records)} runs", *views], *rows]


def active_own_rows(groups: Sequence[RunGroup], starts: Array) -> Table:
    """Own runs in the views of the active band, with mini-batches and, from eight seeds on, with seeds resampled."""
    rows = []
    for head, group in zip(group_heads(groups), groups, strict=True):
        counts = {view: [own_counts(run, view, _ACTIVE_FIRST) for run in group.runs] for view in ACTIVE_VIEWS}
        rows.append(lre_row(head, counts.__getitem__, ACTIVE_VIEWS, starts))
        if len(group.runs) >= MIN_CLUSTERS:
            by_seed = {
                view: [Counts(part.accepted.sum(0)[None], part.total.sum(0)[None]) for part in parts]
                for view, parts in counts.items()
            }
            rows.append(lre_row(f"{group.algo}, seeds resampled", by_seed.__getitem__, ACTIVE_VIEWS, starts))
    return rows


def beside_rows(grid: Path, other: Path) -> Table:
    """The active band's own runs less those of another grid with default clip values, paired by seed."""

    def by_algo(folder: Path) -> dict[str, Runs]:
        runs = [run for run in map(load_run, expand_paths([folder])[0]) if run.status == "finished"]
        return {group.algo: group.by_seed() for group in group_runs(runs) if group.clip_values == "published"}

    ours, rows = by_algo(grid)["fspo_active"], []
    for algo, theirs in by_algo(other).items():
        starts = shared_starts([runs[seed] for runs in (ours, theirs) for seed in ours.keys() & theirs.keys()])
        rows.append(paired_row(("fspo_active", algo), ours, theirs, ACTIVE_VIEWS, starts, _ACTIVE_FIRST))
    return rows


def tables(grid: Path, common: bool = True, measured: bool = True) -> dict[str, Table]:
    """A grid's tables by name; ``common``: also those that judge the same records with other bands, ``measured``: and
    with measured ones."""
    folders, planned, problems = expand_paths([grid])
    for problem in problems:
        print(problem)
    loaded = [load_run(folder) for folder in folders]
    # A run in progress has no place in a comparison; the table of runs says how far it is.
    runs = [run for run in loaded if run.status == "finished" and len(run.lengths.step_M)]
    ended = grid_table(planned, loaded)
    named = {"runs": [["algo", "clip values", *ended.heads], *([*row[:2], *row[2]] for row in ended.rows)]}
    if not runs:
        return named
    groups, starts = group_runs(runs), shared_starts(runs)
    begin = ", ".join(str(edge) for edge in FINE_LENGTH_EDGES.numpy()[starts])
    # The LREs have tables of their own, over all seeds' sequences together.
    measures = [measure for measure in standard_measures(runs) if not measure.label.startswith("LRE")]
    named["own"] = [["clip values", f"bins from {begin} tokens", *VIEWS]]
    named["removed"] = [["clip values", f"steps {_ACTIVE_FIRST} and later", *ACTIVE_VIEWS]]
    named["learning"] = [["clip values", "runs", "measure", "value"]]
    for origin in CLIP_VALUES:
        chosen = [group for group in groups if group.clip_values == origin]
        if not chosen:
            continue
        named["own"] += [[origin, *row] for row in own_rows(chosen, starts)]
        if any(group.algo == "fspo_active" for group in chosen):
            named["removed"] += [[origin, *row] for row in active_own_rows(chosen, starts)]
        if origin == "published" and common:
            rows = [row for group in chosen for row in common_rows(group, starts)]
            named["common"] = [["records of", "sequences", "clip values", "band", *VIEWS], *rows]
            named["spread"] = spread_table(chosen, starts)
        if origin == "published" and common and measured:
            named["quantile"] = measured_table(chosen, starts, "fspo_quantile")
            named["active"] = measured_table(groups, starts, "fspo_active")
        for table in filter(None, (final_numbers(chosen, measures), paired_differences(chosen, measures))):
            for measure, note, cells in table.rows:
                what = f"{measure} ({note})" if note else measure
                pairs = zip(table.heads, cells, strict=True)
                named["learning"] += [[origin, head, what, cell.removeprefix("*")] for head, cell in pairs]
    for calibration in sorted(grid.glob("calibration*.json")):
        clips = json.loads(calibration.read_text(encoding="utf-8"))
        rows = [
            [algo, " ".join(override.rpartition("policy_loss.")[2] for override in entry["overrides"])]
            for algo, entry in clips["algos"].items()
        ]
        named["clips"] = [["algo", f"matched on {clips['sequences']} sequences of {clips['pilot']}"], *rows]
    return {name: table for name, table in named.items() if len(table) > 1}
