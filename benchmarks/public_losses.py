"""``python -m benchmarks.public_losses CHECKOUT ...``: other code bases' losses under fspo.check_loss, one table.

CHECKOUT is a git checkout (or its git directory) of a code base that benchmarks/code_bases.py knows, told by its files,
or a folder of installed packages for verl's release. The rows of their losses in public-losses.csv are replaced, with
commit and date; those of others, whose wrappers are at commit 4058c555, stay. A loss that cannot run outside its
package has a row that says why.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from benchmarks.checkouts import Source
from benchmarks.code_bases import CODE_BASES
from benchmarks.pages import Table, read_table, write_tables
from fspo.check_loss import LossError, PolicyLoss, check, configured, load
from fspo.check_loss.by_length import DISPERSIONS, clip_by_length, sides, synthetic
from fspo.check_loss.call import Batch, synthetic_batch
from fspo.check_loss.like import TOLERANCE, compare
from fspo.kept import UnclippedWeight

#: The one clip rate: the mean share that every loss keeps at a dispersion of its own, nats per sqrt(token).
KEPT: Final = 0.85
_NARROWEST, _WIDEST, _HALVINGS, _MINI_BATCHES = 1e-4, 1.0, 12, 5


_GSPO: Final = ("clip_ratio_low=3e-4", "clip_ratio_high=4e-4")
_DPPO_KL: Final = ("clip_ratio_low=0.05", "clip_ratio_high=0.05", "clip_ratio_c=20")
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


@functools.cache
def _named() -> list[tuple[str, PolicyLoss, torch.Tensor]]:
    """Each loss of NAMED with its gradient on a batch, with which most comparisons end."""
    function, actor = "verl.trainer.ppo.core_algos:compute_policy_loss_", "verl.workers.config:ActorConfig"
    losses = [(title, load(f"{function}{name}", settings, mode, actor)) for title, name, settings, mode in NAMED]
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


def at_one_rate(loss: PolicyLoss, weight: UnclippedWeight) -> str:
    """Kept of the shortest and of the longest responses at the dispersion at which KEPT is kept, and that dispersion.

    The log-ratios are scaled instead of the clip, so that no loss needs a setting for its width.
    """
    low, high = math.log(_NARROWEST), math.log(_WIDEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        clip = clip_by_length(loss, weight, synthetic(math.exp(middle), _MINI_BATCHES))
        low, high = (middle, high) if clip.error.rate > KEPT else (low, middle)
    if not abs(clip.error.rate - KEPT) < 0.02:
        return "-"
    return f"{clip.error.rate_K[0]:.2f}, {clip.error.rate_K[-1]:.2f} ({math.exp(middle):.2g})"


def row(loss: PolicyLoss, takes_weights: bool) -> list[str]:
    """What the table has of one loss."""
    report = check(loss)
    smallest = sides(loss, report.weight)
    limits = [f"{d:.2g}".replace("inf", "never").replace("nan", "all") for d in smallest.values()]
    kept = report.clips[DISPERSIONS[0]].error.rate_K
    ignored = "ignored" if takes_weights else "-"
    passed = ["fails" if not x.passed else ignored if x.says.startswith("ignores") else "ok" for x in report.checks]
    weight = f"{report.weight or 'another'}{report.bound}".replace("_", "-")
    exponent = f"{report.exponent:.1f}".replace("-0.0", "0.0")
    rates = [f"{kept[0]:.2f}, {kept[-1]:.2f}", at_one_rate(loss, report.weight or "none")]
    return [equal_to(loss), weight, exponent, *rates, *limits, *passed]


def table(checkouts: Sequence[Path]) -> Table:
    """A row for every loss of every checkout."""
    heads = ["code base", "commit", "date", "loss", "equal to", "weight", "exponent of L"]
    heads += ["kept at 0.03: shortest, longest", f"at one clip rate, {KEPT:g} kept: shortest, longest (sigma)"]
    heads += [f"lost from: {sign} {side}" for sign in ("A > 0", "A < 0") for side in ("above", "below")]
    heads += ["repeats", "padding", "gaps", "weights", "micro-batches", "direction", "sides"]
    rows: Table = [heads]
    for checkout in checkouts:
        source = Source(checkout)
        code_bases = [(name, losses) for name, (path, losses) in CODE_BASES.items() if source.holds(path)]
        if not code_bases:
            raise SystemExit(f"{checkout}: no file of {', '.join(CODE_BASES)}; give one of their checkouts")
        for code_base, losses in code_bases[-1:]:  # a fork of verl holds its file, too
            for name, function, settings in losses(source):
                print(f"{code_base} {name}", flush=True)
                config = configured([f"{key}={value}" for key, value in settings.items()])
                config.policy_loss["loss_mode"] = name.partition(",")[0]
                takes_weights = "rollout_is_weights" in inspect.signature(function).parameters
                try:
                    cells = row(PolicyLoss(function, config), takes_weights)
                except LossError as error:
                    if not isinstance(error.__cause__, NotImplementedError):  # of checkouts.not_run
                        raise
                    cells = ["-", f"not run: {error.__cause__}", *["-"] * (len(heads) - 6)]
                rows.append([code_base, *source.version(code_base), name, *cells])
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    torch.set_num_threads(1)  # small tensors
    heads, *rows = table(parser.parse_args().checkouts)
    made = {(row[0], row[3]) for row in rows}
    others = [row for row in read_table("public-losses")[1:] if (row[0], row[3]) not in made]
    write_tables({"public-losses": [heads, *rows, *others]})


if __name__ == "__main__":
    main()
