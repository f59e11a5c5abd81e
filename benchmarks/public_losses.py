"""``python -m benchmarks.public_losses [--trl FOLDER]``: other code bases' losses under fspo.check_loss, one table.

The rows of the installed verl, and of TRL where it is installed in FOLDER, are replaced in public-losses.csv. Those of
other code bases, whose wrappers are at commit 4058c555, stay.
"""

from __future__ import annotations

import argparse
import functools
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

from benchmarks.pages import Table, read_table, write_tables
from benchmarks.trl_losses import trl
from fspo.check_loss import PolicyLoss, configured, load
from fspo.check_loss.by_length import normalisation, sides, weight_and_bound
from fspo.check_loss.call import Batch, synthetic_batch
from fspo.check_loss.checks import checks
from fspo.check_loss.like import TOLERANCE, compare

_GSPO: Final = ("clip_ratio_low=3e-4", "clip_ratio_high=4e-4")
_COV: Final = ("policy_loss.clip_cov_ratio=2e-4", "policy_loss.clip_cov_lb=1", "policy_loss.clip_cov_ub=5")
_DPPO_KL: Final = ("clip_ratio_low=0.05", "clip_ratio_high=0.05", "clip_ratio_c=20")
#: verl's losses with the settings of their rows, averaged by verl's default, token-mean. bypass_mode is another inside.
VERL: Final[dict[str, tuple[str, ...]]] = {
    **{"gspo": _GSPO, "vanilla": (), "sapo": (), "geo_mean": (), "cispo": ()},
    **{"dppo_tv": ("clip_ratio_c=20",), "dppo_kl": ("clip_ratio_c=20",), "gpg": (), "clip_cov": _COV},
    **{"kl_cov": ("policy_loss.kl_cov_ratio=2e-4", "policy_loss.ppo_kl_coef=1"), "dro": ("policy_loss.dro_beta=0.1",)},
}
#: The losses that a row may equal: name, verl's loss, settings, averaging. *By response*: each counts alike.
NAMED: Final = (
    ("GSPO", "gspo", _GSPO, "seq-mean-token-mean"),
    ("GSPO, token-mean", "gspo", _GSPO, "token-mean"),
    ("LUSPO", "gspo", _GSPO, "seq-mean-token-sum"),
    ("PPO, token-mean", "vanilla", ("clip_ratio_c=1e9",), "token-mean"),
    ("PPO by response", "vanilla", ("clip_ratio_c=1e9",), "seq-mean-token-mean"),
    ("dual-clip PPO, token-mean", "vanilla", (), "token-mean"),
    ("dual-clip PPO by response", "vanilla", (), "seq-mean-token-mean"),
    ("policy gradient, token-mean", "gpg", (), "token-mean"),
    ("policy gradient by response", "gpg", (), "seq-mean-token-mean"),
    ("DPPO-TV, token-mean", "dppo_tv", ("clip_ratio_c=20",), "token-mean"),
    ("DPPO-KL, token-mean", "dppo_kl", _DPPO_KL, "token-mean"),
    ("SAPO", "sapo", (), "seq-mean-token-mean"),
)


def of_verl(name: str, *settings: str, mode: str = "token-mean") -> PolicyLoss:
    """A loss of the installed verl, by its function."""
    function, actor = f"verl.trainer.ppo.core_algos:compute_policy_loss_{name}", "verl.workers.config:ActorConfig"
    return load(function, settings, mode, actor)


@functools.cache
def _named() -> list[tuple[str, PolicyLoss, torch.Tensor]]:
    """Each loss of NAMED with its gradient on a batch, with which most comparisons end."""
    losses = [(title, of_verl(name, *settings, mode=mode)) for title, name, settings, mode in NAMED]
    return [(title, loss, loss.gradient(_batch().map(torch.clone))[0]) for title, loss in losses]


def _batch() -> Batch:
    return synthetic_batch((40, 3, 17, 9), (0.3, 1.0, 0.05, 0.01), (1.0, -1.0, 0.5, -0.7), seed=7)


def equal_to(loss: PolicyLoss) -> str:
    """The loss of NAMED whose gradient this one has (``--like``); ``-``: none."""
    gradient_BT = loss.gradient(_batch().map(torch.clone))[0]
    for title, like, their_BT in _named():
        near = float((gradient_BT - their_BT).abs().max()) <= TOLERANCE * float(their_BT.abs().max())
        if near and compare(loss, like).equal:
            return title
    return "-"


def row(loss: PolicyLoss, takes_weights: bool) -> list[str]:
    """What the table has of one loss."""
    exponent, (weight, bound) = normalisation(loss)[1], weight_and_bound(loss)
    limits = [f"{d:.2g}".replace("inf", "never").replace("nan", "all") for d in sides(loss, weight).values()]
    ignored = "ignored" if takes_weights else "-"
    passed = ["fails" if not x.passed else ignored if x.says.startswith("ignores") else "ok" for x in checks(loss)]
    name = f"{weight or 'another'}{bound}".replace("_", "-")
    return [equal_to(loss), name, f"{exponent:.1f}".replace("-0.0", "0.0"), *limits, *passed]


def table(trl_site: Path | None) -> Table:
    """A row for every loss of the installed verl, and of TRL."""
    heads = ["code base", "commit", "date", "loss", "equal to", "weight", "exponent of L"]
    heads += [f"lost from: {sign} {side}" for sign in ("A > 0", "A < 0") for side in ("above", "below")]
    heads += ["repeats", "padding", "gaps", "weights", "micro-batches", "direction", "sides"]
    rows: Table = [heads]
    for name, settings in VERL.items():
        loss = of_verl(name, *settings, f"policy_loss.loss_mode={name}")
        rows.append(["verl", metadata.version("verl"), "installed", f"{name}, token-mean", *row(loss, True)])
    if trl_site is not None:
        (release,) = metadata.distributions(name="trl", path=[str(trl_site)])
        for name, function in trl(trl_site):
            rows.append(["TRL", release.version, "installed", name, *row(PolicyLoss(function, configured([])), False)])
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trl", type=Path, metavar="FOLDER", help="of pip install --no-deps --target FOLDER trl")
    torch.set_num_threads(1)  # small tensors
    heads, *rows = table(parser.parse_args().trl)
    made = {(row[0], *row[2:4]) for row in rows}
    others = [row for row in read_table("public-losses")[1:] if (row[0], *row[2:4]) not in made]
    write_tables({"public-losses": [heads, *rows, *others]})


if __name__ == "__main__":
    main()
