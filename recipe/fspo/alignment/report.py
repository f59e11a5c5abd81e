"""From the measurements (``round_N.npz``) to ``alignment.json``, ``alignment.md`` and the table on the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from omegaconf import DictConfig, OmegaConf

from fspo.fairness.alignment import (
    VIEWS,
    ClippedObjective,
    GradientPlan,
    Jackknife,
    embed,
    mean_over_rounds,
    noise_ceiling,
    split_half_cosine,
)
from fspo.files import atomic_path, write_json

#: Names of the weights in the order in which they appear.
_WEIGHT_NAMES: Final = {"sequence": "exp(S)", "length_normalised": "exp(S/L)"}


@dataclass(frozen=True, slots=True)
class Round:
    """One round: the plan's vectors, embedded, and the measured sequences with their acceptance by objective."""

    plan: GradientPlan
    objectives: list[dict[str, Any]]
    vectors_VD: np.ndarray
    fold_B: np.ndarray
    bin_B: np.ndarray
    length_B: np.ndarray
    log_ratio_B: np.ndarray
    advantage_B: np.ndarray
    accepted_OVB: np.ndarray
    held_out_sequences: int
    repeated_prompts: int

    def by_cell(self, values_B: np.ndarray) -> np.ndarray:
        """Sums [J, K] by fold and bin."""
        total_JK = np.zeros((self.plan.folds, self.plan.bins))
        np.add.at(total_JK, (self.fold_B, self.bin_B), values_B.astype(np.float64))
        return total_JK

    def clipped(self, index: int) -> ClippedObjective:
        """What the mathematics needs of one objective."""
        unclipped_FJKD, clipped_OJKD, held_out_HD = self.plan.split(self.vectors_VD)
        return ClippedObjective(
            unclipped_JKD=unclipped_FJKD[self.plan.family_O[index]],
            clipped_JKD=clipped_OJKD[index],
            held_out_HD=held_out_HD,
            total_JK=self.by_cell(np.ones(len(self.fold_B))),
            accepted_VJK=np.stack([self.by_cell(accepted_B) for accepted_B in self.accepted_OVB[index]]),
        )

    def noise(self) -> dict[str, float]:
        """Split-half cosines of the held-out and the unclipped gradients, and what noise leaves between the two."""
        unclipped_FJKD, _, held_out_HD = self.plan.split(self.vectors_VD)
        found = {"held_out_split_half": split_half_cosine(held_out_HD)}
        for family, unclipped_JKD in enumerate(unclipped_FJKD):
            half = split_half_cosine(unclipped_JKD.sum(axis=1))
            found[f"unclipped_split_half/{family}"] = half
            found[f"ceiling/{family}"] = noise_ceiling(half, found["held_out_split_half"])
        return found


def read_rounds(folder: Path, count: int) -> list[Round]:
    """The first ``count`` rounds' measurements (an earlier measurement may have left more).

    Raises:
        FileNotFoundError: if one is missing.
    """
    rounds = []
    for path in (folder / f"round_{index}.npz" for index in range(count)):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the measurement did not finish all its rounds")
        with np.load(path) as file:
            data = {name: file[name] for name in file.files}
        plan = GradientPlan(**json.loads(str(data.pop("plan"))), family_O=tuple(data.pop("family_O").tolist()))
        rounds.append(
            Round(
                plan=plan,
                objectives=json.loads(str(data.pop("objectives"))),
                vectors_VD=embed(data.pop("gram_VV")),
                held_out_sequences=int(data.pop("held_out_sequences")),
                repeated_prompts=int(data.pop("repeated_prompts")),
                **data,
            )
        )
    return rounds


def analyse(rounds: Sequence[Round]) -> dict[str, Any]:
    """Every figure of every objective with its interval and its value in each round, and the noise. Plain values."""
    objectives = []
    for index, objective in enumerate(rounds[0].objectives):
        knives = [Jackknife.of(each.clipped(index).figures, each.plan.folds) for each in rounds]
        figures = {
            name: mean_over_rounds(knives, name).to_json() | {"rounds": [_finite(k.whole[name]) for k in knives]}
            for name in knives[0].whole
        }
        clips = {key: [each.objectives[index][key] for each in rounds] for key in ("clip_low", "clip_high")}
        objectives.append(
            {
                "algo": objective["algo"],
                "clips": objective["clips"],
                "unclipped_objective": rounds[0].plan.family_O[index],
                **clips,
                "figures": figures,
            }
        )
    noise = [each.noise() for each in rounds]
    return {
        "objectives": objectives,
        "noise": {
            name: {
                "value": _finite(float(np.mean([n[name] for n in noise]))),
                "rounds": [_finite(n[name]) for n in noise],
            }
            for name in noise[0]
        },
        "rounds": [
            {
                "sequences": len(each.length_B),
                "held_out_sequences": each.held_out_sequences,
                "repeated_prompts": each.repeated_prompts,
                "zero_advantage": int((each.advantage_B == 0).sum()),
                "std_S_over_sqrt_L": float(np.std(each.log_ratio_B / np.sqrt(each.length_B))),
                "bins": [
                    {
                        "shortest": int(each.length_B[each.bin_B == k].min()),
                        "longest": int(each.length_B[each.bin_B == k].max()),
                        "sequences": int((each.bin_B == k).sum()),
                    }
                    for k in np.unique(each.bin_B).tolist()
                ],
            }
            for each in rounds
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---------------------------------------------------------------- text


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _with_interval(figure: Mapping[str, Any]) -> str:
    text = _number(figure["value"])
    return text if figure["low"] is None else f"{text} [{_number(figure['low'])}, {_number(figure['high'])}]"


def _rows(result: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for objective in result["objectives"]:
        figures = objective["figures"]
        low, high = (float(np.mean(objective[key])) for key in ("clip_low", "clip_high"))
        ceiling = result["noise"][f"ceiling/{objective['unclipped_objective']}"]["value"]
        rows.append(
            [
                objective["algo"],
                objective["clips"],
                f"{low:.3g} / {high:.3g}",
                *(_number(figures[f"{view}/acceptance"]["value"]) for view in VIEWS),
                _with_interval(figures["cosine"]),
                _with_interval(figures["norm_ratio"]),
                _with_interval(figures["held_out_unclipped"]),
                _with_interval(figures["held_out_change"]),
                _number(ceiling),
            ]
        )
    return rows


def _bound_rows(result: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for objective in result["objectives"]:
        figures = objective["figures"]
        for view in VIEWS:
            names = ("lre", "lre_max", "eta", "r", "bound", "mean_bound")
            rows.append(
                [
                    objective["algo"],
                    objective["clips"],
                    view,
                    _number(figures["kappa"]["value"]),
                    *(_number(figures[f"{view}/{name}"]["value"]) for name in names),
                    _number(figures["cosine"]["value"]),
                ]
            )
    return rows


_HEAD: Final = (
    "algo", "clips", "low / high", "accepted", "kept", "cos(clipped, own unclipped)", "norm ratio",
    "cos(unclipped, held-out)", "change by clipping", "noise ceiling",
)  # fmt: skip
_BOUND_HEAD: Final = (
    "algo", "clips", "acceptance", "kappa", "LRE", "LRE_max", "eta", "r", "bound", "mean bound", "measured cosine",
)  # fmt: skip


def _bins(result: Mapping[str, Any]) -> range:
    return range(sum(name.startswith("share/") for name in result["objectives"][0]["figures"]))


def _share_rows(result: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            objective["algo"],
            objective["clips"],
            name.replace("_", ", "),
            *(_with_interval(objective["figures"][f"{name}/{k}"]) for k in _bins(result)),
        ]
        for objective in result["objectives"]
        for name in ("share_unclipped", "share")
    ]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, readable on a terminal too."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text_of(result: Mapping[str, Any]) -> str:
    """``alignment.md``."""
    settings, rounds = result["settings"], result["rounds"]
    noise = {name: _number(entry["value"]) for name, entry in result["noise"].items()}
    halves = ", ".join(
        f"{name} {noise[f'unclipped_split_half/{index}']}" for index, name in enumerate(result["unclipped_objectives"])
    )
    repeated = sum(each["repeated_prompts"] for each in rounds)
    lines = [
        f"# Gradient alignment of {settings['checkpoint']}",
        "",
        f"{len(rounds)} round(s), seed {result['seed']}; in each {settings['updates']} updates with the run's loss "
        f"({result['trained_with']}), then {rounds[0]['sequences']} sequences of {settings['prompts']} prompts "
        f"measured in {settings['bins']} length bins and {settings['folds']} folds, and "
        f"{rounds[0]['held_out_sequences']} "
        "held-out sequences sampled by the policy after the updates. Means over rounds; 95% jackknife intervals over "
        "folds of prompts. Definitions: docs/alignment.md.",
        "",
        markdown_table(_HEAD, _rows(result)),
        "",
        f"Noise floor, split-half cosine: held-out {noise['held_out_split_half']}; unclipped gradients: {halves}. "
        "Noise ceiling: the cosine that sampling noise alone leaves between unclipped and held-out gradient if both "
        "estimate one direction.",
        "",
        "Next to the bound sqrt(1 - r^2), r = kappa * LRE_max + eta (-1: r >= 1, it says nothing):",
        "",
        markdown_table(_BOUND_HEAD, _bound_rows(result)),
        "",
        "What each length bin, from the shortest, adds to the gradient along its direction:",
        "",
        markdown_table(("algo", "clips", "", *(f"bin {k + 1}" for k in _bins(result))), _share_rows(result)),
        "",
        "Length bins of the first round: "
        + ", ".join(f"{b['shortest']}-{b['longest']} ({b['sequences']})" for b in rounds[0]["bins"])
        + f"; std(S / sqrt(L)) {_number(rounds[0]['std_S_over_sqrt_L'], 4)}; "
        f"{rounds[0]['zero_advantage']} sequences with zero advantage.",
    ]
    if repeated:
        lines += ["", f"Note: {repeated} held-out prompts equal a measured one: the data set is small."]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, config: DictConfig, rounds: Sequence[Round]) -> str:
    """Write ``alignment.json`` and ``alignment.md``; returns the latter and where both are."""
    settings = OmegaConf.to_container(config.fspo.alignment, resolve=True)
    chosen = {algo: (values["weight"], values["grad_scale"]) for algo, values in settings["settings"].items()}
    result = {
        "settings": settings,
        "seed": config.seed,
        "trained_with": config.fspo.algo,
        "experiment": config.trainer.experiment_name,
        "unclipped_objectives": [
            f"{_WEIGHT_NAMES[weight]}{'' if scale == '1' else ' / L'}"
            for weight, scale in dict.fromkeys(chosen.values())
        ],
        **analyse(rounds),
    }
    write_json(folder / "alignment.json", result)
    text = text_of(result)
    with atomic_path(folder / "alignment.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    return f"{text}\nnumbers: {folder / 'alignment.json'}\ntables: {folder / 'alignment.md'}"
