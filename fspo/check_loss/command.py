"""``python -m fspo.check_loss MODULE:FUNCTION``: is this policy loss right, and what does it do by response length?

The function has the signature of verl's registry (:mod:`fspo.check_loss.call`), or is an adapter of three lines to one
that has not; verl itself is not needed. Checks that a loss must pass come first; then, reported and never failed, what
its normalisation and its clip do to responses of different lengths. docs/check-loss.md explains each line.

Exit status: 0 if every check passed, 1 if one failed, 2 if the loss could not be checked.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from fspo.check_loss.call import Batch, Config, LossError, PolicyLoss
from fspo.check_loss.checks import Check, checks
from fspo.check_loss.length_bias import (
    LENGTHS,
    VIEWS,
    Clip,
    Normalisation,
    clip_by_length,
    find_weight,
    normalisation,
    samples_with,
)
from fspo.kept import UnclippedWeight

#: The values that verl's configuration of the actor has unless they are set, as far as its own losses read them.
_ACTOR: Final = {
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "loss_agg_mode": "token-mean",
    "loss_scale_factor": None,
}
_WEIGHTS: Final = {
    "none": "no importance ratio",
    "token": "the ratio of the token",
    "prefix": "the ratio of the response up to the token",
    "sequence": "the ratio of the response",
    "length_normalised": "the geometric mean ratio of the response's tokens",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What was found of one loss.

    Attributes:
        checks: Each property that a loss must have.
        normalisation: Of the gradient on policy; None if a call failed.
        weight: What it weighs by; None if that was not found, and 1 was taken.
        clips: What it keeps, by the name of the log-ratios.
    """

    checks: list[Check]
    normalisation: Normalisation
    weight: UnclippedWeight | None
    clips: dict[str, Clip]

    @property
    def conforms(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def text(self) -> str:
        """For the terminal."""
        lines = [f"{'ok  ' if each.passed else 'FAIL'}  {each.name:13}  {each.says}" for each in self.checks]
        lines += ["", "response length, reported and not judged:"]
        found = self.normalisation
        lines.append(_row("  tokens", [str(length) for length in LENGTHS]))
        lines.append(_row("  gradient per token", [f"{value:.3g}" for value in found.per_token]))
        lines.append(_row("  gradient per response", [f"{value:.3g}" for value in found.per_response]))
        lines.append(f"  {_counts(found)}")
        weighs = "something else than a ratio: kept is measured against the gradient on policy; see --weight"
        lines.append(f"  near the old policy a token is weighed by {_WEIGHTS[self.weight] if self.weight else weighs}")
        for name, clip in self.clips.items():
            lines += ["", f"  clip, {name}: keeps {clip.kept:.1%} of the weight of a response, on average"]
            lines.append(_row("  tokens from", [str(start) for start in clip.starts]))
            lines.append(_row("  kept", [f"{share:.3f}" for share in clip.kept_J]))
            for view in VIEWS:
                error = clip.errors[view]
                low_high = f"[{error.debiased.low:.3f}, {error.debiased.high:.3f}]"
                lines.append(f"  LRE {view:9}  {error.debiased.value:.3f} {low_high}, noise {error.noise_floor:.3f}")
        failed = [each.name for each in self.checks if not each.passed]
        verdict = f"does not conform: {', '.join(failed)}" if failed else f"conforms: {len(self.checks)} checks passed"
        return "\n".join([*lines, "", verdict])


def _row(head: str, cells: Sequence[str]) -> str:
    return f"{head:24}" + "".join(f"{cell:>9}" for cell in cells)


def _counts(found: Normalisation) -> str:
    if math.isnan(found.exponent):
        return "on policy, descent does not make every token of a response with A > 0 likelier"
    if abs(found.exponent) < 0.05:
        return "per token ~ L^0: every token counts alike, so a response counts by its length"
    if abs(found.exponent + 1) < 0.05:
        return "per token ~ 1/L: every response counts alike, so a token counts less the longer its response"
    return f"per token ~ L^{found.exponent:.2f}, per response ~ L^{found.exponent + 1:.2f}"


def check(loss: PolicyLoss, samples: dict[str, list[Batch]], weight: UnclippedWeight | None = None) -> Report:
    """Everything about one loss.

    Args:
        loss: The loss.
        samples: Log-ratios on which to measure its clip, by name.
        weight: What it weighs by without its clip; None: found by probing.

    Raises:
        LossError: If it cannot be called.
    """
    found = checks(loss)
    weight = weight or find_weight(loss)
    clips = {name: clip_by_length(loss, weight or "none", batches) for name, batches in samples.items()}
    return Report(found, normalisation(loss), weight, clips)


def load(name: str) -> Callable[..., Any]:
    """The function that ``module:function`` names.

    Raises:
        LossError: If it cannot be imported, is not there or cannot be called.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise LossError(f"{name} is not of the form module:function: give, for example, my_loss:policy_loss")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise LossError(
            f"{module_name} cannot be imported ({type(error).__name__}: {error}): start in the folder that holds it, "
            "or install its package"
        ) from error
    if not hasattr(module, function_name):
        near = difflib.get_close_matches(function_name, dir(module), 1)
        raise LossError(
            f"{module_name} has no {function_name}{f' (did you mean {near[0]}?)' if near else ''}: name the function "
            "that is to be registered with verl"
        )
    function = getattr(module, function_name)
    if not callable(function):
        raise LossError(f"{name} is {str(function)[:80]!r}, which cannot be called: name the loss function")
    return function  # type: ignore[no-any-return]


def configured(settings: Sequence[str]) -> Config:
    """verl's defaults of the actor as far as a loss reads them, and what ``KEY=VALUE`` adds; a dot goes a level down.

    Raises:
        LossError: For a setting that is not KEY=VALUE.
    """
    config = Config(_ACTOR | {"policy_loss": Config(place="policy_loss."), "global_batch_info": {}})
    for setting in settings:
        key, equals, text = setting.partition("=")
        *path, last = key.split(".")
        if not equals or not last:
            raise LossError(f"--config {setting} is not KEY=VALUE: give, for example, --config clip_ratio_high=0.28")
        level, place = config, ""
        for part in path:
            place += f"{part}."
            level = level.setdefault(part, Config(place=place))
            if not isinstance(level, Config):
                raise LossError(f"--config {setting}: {part} is a value, not a group of settings: leave it out")
        try:
            level[last] = json.loads(text)
        except ValueError:
            level[last] = text
    return config


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fspo.check_loss", description="Check a policy loss, and show what it does by response length."
    )
    parser.add_argument("loss", metavar="MODULE:FUNCTION", help="the loss, with the signature of verl's registry")
    parser.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help="a setting of the actor")
    parser.add_argument("--loss-agg-mode", default="token-mean", help="verl's averaging (default: token-mean)")
    parser.add_argument("--records", type=Path, metavar="RUN", help="also judge the clip on a run's sequences.jsonl")
    parser.add_argument("--weight", choices=get_args(UnclippedWeight), help="what the loss weighs by without its clip")
    options = parser.parse_args(arguments)
    try:
        loss = PolicyLoss(load(options.loss), configured(options.config), options.loss_agg_mode)
        checks(loss)  # before the records are read
        report = check(loss, samples_with(options.records), options.weight)
    except LossError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{options.loss}, loss_agg_mode={options.loss_agg_mode}\n\n{report.text()}")
    return 0 if report.conforms else 1
