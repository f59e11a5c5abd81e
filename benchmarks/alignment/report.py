"""From the measurements (``round_N.npz``) to ``alignment.json`` and the table on the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from omegaconf import DictConfig, OmegaConf

from benchmarks.alignment.gradients import VIEWS, ClippedObjective, GradientPlan, Jackknife, embed, mean_over_rounds
from fspo.files import write_json
from fspo.markdown import markdown_table


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
    accepted_OVB: np.ndarray
    held_out_sequences: int

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


def read_rounds(folder: Path, count: int) -> list[Round]:
    """The first ``count`` rounds' measurements (an earlier measurement may have left more)."""
    rounds = []
    for path in (folder / f"round_{index}.npz" for index in range(count)):
        with np.load(path) as file:
            data = dict(file)
        plan = GradientPlan(**json.loads(str(data.pop("plan"))), family_O=tuple(data.pop("family_O").tolist()))
        rounds.append(
            Round(
                plan=plan,
                objectives=json.loads(str(data.pop("objectives"))),
                vectors_VD=embed(data.pop("gram_VV")),
                held_out_sequences=int(data.pop("held_out_sequences")),
                **data,
            )
        )
    return rounds


def analyse(rounds: Sequence[Round]) -> dict[str, Any]:
    """Every figure of every objective with its interval and its value in each round. Plain values."""
    objectives = []
    for index, objective in enumerate(rounds[0].objectives):
        knives = [Jackknife.of(each.clipped(index).figures, each.plan.folds) for each in rounds]
        figures = {}
        for name in knives[0].whole:
            values = [knife.whole[name] for knife in knives]
            finite = [value if math.isfinite(value) else None for value in values]
            figures[name] = mean_over_rounds(knives, name).to_json() | {"rounds": finite}
        clips = {key: [each.objectives[index][key] for each in rounds] for key in ("clip_low", "clip_high")}
        objectives.append({"algo": objective["algo"], "clips": objective["clips"], **clips, "figures": figures})
    return {
        "objectives": objectives,
        "rounds": [
            {
                "sequences": len(each.length_B),
                "held_out_sequences": each.held_out_sequences,
                "std_S_over_sqrt_L": float(np.std(each.log_ratio_B / np.sqrt(each.length_B))),
            }
            for each in rounds
        ],
    }


_HEAD: Final = (
    "algo", "clips", "low / high", "accepted", "kept", "cos(clipped, own unclipped)", "norm ratio",
    "cos(unclipped, held-out)", "change by clipping",
)  # fmt: skip


def _cell(figure: Mapping[str, Any]) -> str:
    value, low, high = ("-" if figure[key] is None else f"{figure[key]:.3f}" for key in ("value", "low", "high"))
    return value if low == "-" else f"{value} [{low}, {high}]"


def table(result: Mapping[str, Any]) -> str:
    """What clipping does to the gradient, by objective; ``alignment.json`` has every other figure."""
    rows = []
    for objective in result["objectives"]:
        figures = objective["figures"]
        clips = " / ".join(f"{np.mean(objective[key]):.3g}" for key in ("clip_low", "clip_high"))
        accepted = [f"{figures[f'{view}/acceptance']['value']:.3f}" for view in VIEWS]
        cells = [_cell(figures[name]) for name in ("cosine", "norm_ratio", "held_out_unclipped", "held_out_change")]
        rows.append([objective["algo"], objective["clips"], clips, *accepted, *cells])
    return markdown_table(_HEAD, rows)


def write_report(folder: Path, config: DictConfig, rounds: Sequence[Round]) -> str:
    """Write ``alignment.json``; returns the table and where it is."""
    result = {
        "settings": OmegaConf.to_container(config.alignment, resolve=True),
        "seed": config.seed,
        "trained_with": config.fspo.algo,
        "experiment": config.trainer.experiment_name,
        **analyse(rounds),
    }
    write_json(folder / "alignment.json", result)
    return f"{table(result)}\n\nnumbers: {folder / 'alignment.json'}"
