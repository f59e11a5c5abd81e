"""``python -m benchmarks.losses``: docs/tables/check-losses.csv and check-aggregations.csv, of every loss by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from benchmarks.pages import Table, write_tables
from fspo.check_loss import PolicyLoss, Report, check, load
from fspo.check_loss.by_length import DISPERSIONS
from fspo.losses import ALGORITHMS

AGGREGATIONS: Final = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm",
)  # fmt: skip
#: Where a loss of verl's has other settings than verl's defaults and the mean by response: its authors' clip values,
#: DAPO's and DPPO's averaging, and what verl has no default for. ``loss_mode`` where it is not the name.
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "dapo": {"loss_mode": "vanilla", "clip_ratio_high": 0.28, "loss_agg_mode": "token-mean"},
    "gspo": {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    "geo_mean": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4},
    "cispo": {"clip_ratio_low": 10.0, "clip_ratio_high": 0.2, "loss_agg_mode": "token-mean"},
    "dppo_tv": {"clip_ratio_c": 20.0, "loss_agg_mode": "token-mean"},
    "dppo_kl": {
        "clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0, "loss_agg_mode": "token-mean"
    },
    "dro": {"policy_loss": {"dro_beta": 0.1}},
    "bypass_mode": {"policy_loss": {"rollout_correction": {}}},
}  # fmt: skip


def of_verl(name: str, **changed: Any) -> PolicyLoss:
    """A loss of verl's registry with verl's own configuration."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    settings = {"loss_agg_mode": "seq-mean-token-mean"} | SETTINGS.get(name, {}) | changed
    loss = PolicyLossConfig(loss_mode=settings.pop("loss_mode", name), **settings.pop("policy_loss", {}))
    actor = FSDPActorConfig(strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1, policy_loss=loss, **settings)
    return PolicyLoss(get_policy_loss_fn(loss.loss_mode), actor, settings["loss_agg_mode"])


def known() -> dict[str, PolicyLoss]:
    """Every loss of verl's registry and DAPO's settings of ``vanilla``, then this library's."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    names = [*dict.fromkeys([*POLICY_LOSS_REGISTRY, *SETTINGS])]
    return {name: of_verl(name) for name in names if name not in ALGORITHMS} | {x: load(x) for x in ALGORITHMS}


def _checks(report: Report) -> str:
    failed = [one.name for one in report.checks if not one.passed]
    return f"fails {', '.join(failed)}" if failed else "all pass"


def _exponent(report: Report) -> str:
    return f"L^{report.exponent:.0f}".replace("L^-0", "1").replace("L^0", "1").replace("L^-1", "1/L")


def table_of_losses(losses: Mapping[str, PolicyLoss]) -> Table:
    """Every loss: the checks, its normalisation, its weight, and what its clip keeps of synthetic log-ratios."""
    rows = []
    for name, loss in losses.items():
        report = check(loss)
        errors = [clip.error for clip in report.clips.values()]
        lres = [f"{lre.value:.3f} [{lre.low:.3f}, {lre.high:.3f}]" for lre in (error.debiased for error in errors)]
        kept = [f"{error.rate:.3f}, {lre}" for error, lre in zip(errors, lres, strict=True)]
        weight = str(report.weight or "another").replace("_", "-")
        rows.append([name, _checks(report), _exponent(report), weight, *kept])
    clips = [f"kept, active LRE at {sigma:g}" for sigma in DISPERSIONS]
    return [["loss", "checks", "gradient per token", "weight", *clips], *rows]


def table_of_aggregations() -> Table:
    """verl's vanilla loss under each ``loss_agg_mode``."""
    rows = []
    for mode in AGGREGATIONS:
        report = check(of_verl("vanilla", loss_agg_mode=mode))
        wrong = next((f": {one.says}" for one in report.checks if not one.passed), "")
        rows.append([mode, f"{_checks(report)}{wrong}", _exponent(report)])
    return [["loss_agg_mode", "checks", "gradient per token"], *rows]


def main() -> None:
    """Command line."""
    torch.set_num_threads(1)
    write_tables({"check-losses": table_of_losses(known()), "check-aggregations": table_of_aggregations()})


if __name__ == "__main__":
    main()
