"""``python -m benchmarks.public_losses CHECKOUT ...``: other code bases' losses under fspo.check_loss, one table.

CHECKOUT is a git checkout (or its git directory) of verl, SkyRL, slime or OpenRLHF, told apart by the files that it
holds. Of its newest commit the functions of a loss are read from their file and run by themselves: nothing of the code
base is imported, and nothing of it is kept here. Writes public-losses.csv, with commit and date.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import math
import subprocess
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from benchmarks.pages import Table, write_tables
from fspo.check_loss import check, configured
from fspo.check_loss.call import Config, PolicyLoss
from fspo.check_loss.length_bias import DISPERSIONS, sides
from fspo.check_loss.robust import survived

Loss = Callable[..., Any]
#: GSPO's clip values, from its authors (verl#2775).
_GSPO: Final = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}


class Source:
    """A code base at its newest commit."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self.commit, self.date = self._git("log", "-1", "--format=%h %cs").split()

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(self.checkout), *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    def holds(self, path: str) -> bool:
        """Whether the commit has this file."""
        return bool(self._git("ls-tree", "--name-only", "HEAD", path).strip())

    def definitions(self, path: str, names: Sequence[str], given: Mapping[str, Any] | None = None) -> SimpleNamespace:
        """Functions and classes of a file, without decorators, run with torch and ``given`` alone in sight."""
        tree = ast.parse(self._git("show", f"HEAD:{path}"))
        nodes = [x for x in tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name in names]
        if missing := set(names) - {node.name for node in nodes}:
            raise SystemExit(f"{self.checkout}: {path} at {self.commit} has no {', '.join(sorted(missing))}")
        for node in nodes:
            node.decorator_list = []
        space: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "np": np, **vars(typing)}
        space |= dict(given or {})
        flags = __future__.annotations.compiler_flag
        exec(compile(ast.Module(nodes, []), path, "exec", flags, True), space)
        return SimpleNamespace(**{name: space[name] for name in names})


def verl(source: Source) -> Iterator[tuple[str, Loss, str, dict[str, float]]]:
    """verl's losses by their own signature, with verl's default averaging unless the name says otherwise."""
    masked = source.definitions("verl/utils/torch_functional.py", ("masked_sum", "masked_mean"))
    names = ("gspo", "vanilla", "sapo", "geo_mean", "cispo", "dppo_tv", "dppo_kl")
    functions = [f"compute_policy_loss_{name}" for name in names]
    given = {"ActorConfig": Config, "AlgoConfig": type("AlgoConfig", (), {}), "verl_F": masked}
    losses = source.definitions("verl/trainer/ppo/core_algos.py", ("agg_loss", *functions), given)
    for name in names:
        more = _GSPO if name == "gspo" else {"clip_ratio_c": 20.0} if name.startswith("dppo") else {}
        yield name, getattr(losses, f"compute_policy_loss_{name}"), "token-mean", more


def skyrl(source: Source) -> Iterator[tuple[str, Loss, str, dict[str, float]]]:
    """SkyRL's losses: sums, of advantages that its trainer has divided by the sizes of the mini-batch."""
    names = {"regular": "ppo", "dual_clip": "ppo", "gspo": "gspo", "sapo": "sapo"}
    functions = [f"{name}_policy_loss" for name in ("ppo", "gspo", "sapo")]
    path = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
    given: dict[str, Any] = {"apply_off_policy_correction": lambda loss, old, rollout, mask, config: (loss, mask, {})}
    given |= vars(source.definitions("skyrl/backends/skyrl_train/utils/torch_utils.py", ("masked_mean",)))
    given |= vars(source.definitions("skyrl/backends/skyrl_train/utils/torch_utils.py", ("safe_exp_delta",)))
    losses = source.definitions(path, ("reduce_loss", *functions), given)

    def wrapped(name: str, function: Loss) -> Loss:
        by_response = name in ("gspo", "sapo")

        def loss(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, **_: Any) -> Any:
            info, length = config.global_batch_info, response_mask.sum(-1, keepdim=True).clamp(min=1)
            size = info["global_batch_size"] * length if by_response else info["batch_num_tokens"]
            low, high = (3e-4, 4e-4) if name == "gspo" else (0.2, 0.2)
            own = SimpleNamespace(
                policy_loss_type=name, eps_clip_low=low, eps_clip_high=high, clip_ratio_c=3.0,
                loss_reduction="sequence_mean", off_policy_correction=None,
                sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
            )  # fmt: skip
            return function(log_prob, old_log_prob, advantages / size * info["dp_size"], own, response_mask)[0]

        return loss

    for name, function in names.items():
        yield name, wrapped(name, getattr(losses, f"{function}_policy_loss")), "", {}


def slime(source: Source) -> Iterator[tuple[str, Loss, str, dict[str, float]]]:
    """slime's losses, of lists of samples, each its mean over tokens."""
    functions = ("compute_policy_loss", "compute_gspo_kl", "compute_cispo_loss")
    losses = source.definitions("slime/utils/ppo_utils.py", functions)

    def wrapped(name: str) -> Loss:
        def loss(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, **_: Any) -> Any:
            info, new, old, mask = config.global_batch_info, list(log_prob), list(old_log_prob), list(response_mask)
            gspo_kl = losses.compute_gspo_kl(new, old, new, mask)
            kl = gspo_kl if name == "gspo" else (old_log_prob - log_prob).flatten()
            if name == "cispo":
                terms, _ = losses.compute_cispo_loss(kl, log_prob.flatten(), advantages.flatten(), 1.0, 0.2)
            else:
                terms, _ = losses.compute_policy_loss(
                    kl, advantages.flatten(), *((3e-4, 4e-4) if name == "gspo" else (0.2, 0.2))
                )
            means_B = (terms.view_as(log_prob) * response_mask).sum(-1) / response_mask.sum(-1).clamp(min=1)
            return means_B.sum() / info["global_batch_size"] * info["dp_size"]

        return loss

    for name in ("grpo", "gspo", "cispo"):
        yield name, wrapped(name), "", {}


def openrlhf(source: Source) -> Iterator[tuple[str, Loss, str, dict[str, float]]]:
    """OpenRLHF's losses with the sizes of the mini-batch."""
    utils = source.definitions("openrlhf/models/utils.py", ("masked_mean",))
    names = ("aggregate_loss", "PolicyLoss")
    losses = source.definitions("openrlhf/models/loss.py", names, {"masked_mean": utils.masked_mean})

    def wrapped(**settings: Any) -> Loss:
        module = losses.PolicyLoss(**settings)

        def loss(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, **_: Any) -> Any:
            info = config.global_batch_info
            sizes = {name: info[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
            return module(log_prob, old_log_prob, advantages, response_mask, **sizes)[0]

        return loss

    yield "ppo", wrapped(), "", {}
    yield "ppo, dual clip", wrapped(dual_clip=3.0), "", {}
    yield "gspo", wrapped(policy_loss_type="gspo", clip_eps_low=3e-4, clip_eps_high=4e-4), "", {}


#: Each code base by a file that only it has.
CODE_BASES: Final = {
    "verl": ("verl/trainer/ppo/core_algos.py", verl),
    "SkyRL": ("skyrl/backends/skyrl_train/utils/ppo_utils.py", skyrl),
    "slime": ("slime/utils/ppo_utils.py", slime),
    "OpenRLHF": ("openrlhf/models/loss.py", openrlhf),
}


def row(loss: PolicyLoss) -> list[str]:
    """What the table has of one loss."""
    report = check(loss)
    smallest = sides(loss, report.weight)
    limits = ["never" if d is None else "all" if math.isnan(d) else f"{d:.2g}" for d in smallest.values()]
    (up, down), (sum_up, sum_down) = survived(loss).values()
    kept = report.clips[DISPERSIONS[0]].kept_J
    passed = ["fails" if not x.passed else "ignored" if x.says.startswith("ignores") else "ok" for x in report.checks]
    weight = f"{report.weight or 'another'}{report.bound}".replace("_", "-")
    exponent = f"{report.exponent:.1f}".replace("-0.0", "0.0")
    ends = f"{up}, -{down}; {sum_up}, -{sum_down}"
    return [weight, exponent, f"{kept[0]:.2f}, {kept[-1]:.2f}", *limits, *passed, ends]


def table(checkouts: Sequence[Path]) -> Table:
    """A row for every loss of every checkout."""
    heads = ["code base", "commit", "date", "loss", "weight", "exponent of L", "kept at 0.03: shortest, longest"]
    heads += [f"lost from: {sign} {side}" for sign in ("A > 0", "A < 0") for side in ("above", "below")]
    heads += ["repeats", "padding", "gaps", "weights", "micro-batches", "order", "ranks", "gradient", "direction"]
    heads += ["sides", "survives a token; a response"]
    rows: Table = [heads]
    for checkout in checkouts:
        source = Source(checkout)
        known = [(name, losses) for name, (path, losses) in CODE_BASES.items() if source.holds(path)]
        if not known:
            raise SystemExit(
                f"{checkout}: none of {', '.join(CODE_BASES)} at {source.commit}; give one of their checkouts"
            )
        ((code_base, losses),) = known
        for name, function, mode, settings in losses(source):
            config = configured([f"{key}={value}" for key, value in settings.items()])
            config.policy_loss["loss_mode"] = name
            loss = PolicyLoss(function, config, mode or "token-mean")
            print(f"{code_base} {name}", flush=True)
            rows.append([code_base, source.commit, source.date, f"{name}{f', {mode}' if mode else ''}", *row(loss)])
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    torch.set_num_threads(1)  # small tensors
    write_tables({"public-losses": table(parser.parse_args().checkouts)})


if __name__ == "__main__":
    main()
