"""``python -m fspo.check_loss MODULE:FUNCTION ...``: is a policy loss right, and what does it do by response length?

The function has the signature of verl's registry (:mod:`fspo.check_loss.call`), or is an adapter of three lines to one
that has not; verl itself is not needed. Checks that a loss must pass come first; then, reported and never failed, what
its normalisation and its clip do to responses of different lengths. docs/algorithms.md explains each line.

Exit status: 0 if every check passed, 1 if one failed, 2 if a loss could not be checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fspo.acceptance import UnclippedWeight
from fspo.check_loss.call import Config, LossError, PolicyLoss
from fspo.check_loss.checks import Check, checks
from fspo.check_loss.length_bias import (
    DISPERSIONS,
    LENGTHS,
    VIEWS,
    Clip,
    clip_by_length,
    find_weight,
    normalisation,
    synthetic,
)
from fspo.names import did_you_mean

#: The values that verl's configuration of the actor has unless they are set, as far as its own losses read them.
_ACTOR: Final = {
    **{"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0},
    **{"tau_pos": 1.0, "tau_neg": 1.05, "loss_agg_mode": "token-mean", "loss_scale_factor": None},
}


@dataclass(frozen=True, slots=True)
class Report:
    """What was found of one loss.

    Attributes:
        checks: Each property that a loss must have.
        per_token: Gradient of a token on policy, by the length of its response (LENGTHS).
        exponent: a in ``per_token ~ L**a``.
        weight: What it weighs by; None if that was not found, and 1 was taken.
        clips: What it keeps, by the dispersion of the log-ratios (DISPERSIONS).
    """

    checks: list[Check]
    per_token: list[float]
    exponent: float
    weight: UnclippedWeight | None
    clips: dict[float, Clip]

    @property
    def conforms(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def text(self) -> str:
        """For the terminal."""
        lines = [f"{'ok  ' if each.passed else 'FAIL'}  {each.name:13}  {each.says}" for each in self.checks]
        lines += [
            "",
            "response length, reported and not judged:",
            _row("  tokens", [str(length) for length in LENGTHS]),
            _row("  gradient per token", [f"{value:.3g}" for value in self.per_token]),
            f"  per token ~ L^{self.exponent:.2f} (0: every token counts alike, -1: every response does)",
            f"  weight near the old policy: {self.weight or 'another (the clip is measured against 1)'}",
        ]
        for sigma, clip in self.clips.items():
            lines += [
                "",
                f"  clip at {sigma:g} nats per sqrt(token): keeps {clip.kept:.1%} of a response's weight on average",
                _row("  tokens from", [str(start) for start in clip.starts]),
                _row("  kept", [f"{share:.3f}" for share in clip.kept_J]),
            ]
            for view in VIEWS:
                lre, noise = clip.errors[view].debiased, clip.errors[view].noise_floor
                lines.append(f"  LRE {view:9}  {lre.value:.3f} [{lre.low:.3f}, {lre.high:.3f}], noise {noise:.3f}")
        failed = [each.name for each in self.checks if not each.passed]
        verdict = f"does not conform: {', '.join(failed)}" if failed else f"conforms: {len(self.checks)} checks passed"
        return "\n".join([*lines, "", verdict])


def _row(head: str, cells: Sequence[str]) -> str:
    return f"{head:24}" + "".join(f"{cell:>9}" for cell in cells)


def check(loss: PolicyLoss) -> Report:
    """Everything about one loss.

    Raises:
        LossError: If it cannot be called.
    """
    results = checks(loss)
    per_token, exponent = normalisation(loss)
    weight = find_weight(loss)
    clips = {sigma: clip_by_length(loss, weight or "none", synthetic(sigma)) for sigma in DISPERSIONS}
    return Report(results, per_token, exponent, weight, clips)


def load(name: str, settings: Sequence[str] = (), loss_agg_mode: str | None = None) -> PolicyLoss:
    """The loss that ``module:function`` names.

    Args:
        name: Of a function, or of a :class:`PolicyLoss`, which has its settings already.
        settings: Of the actor, each ``KEY=VALUE``.
        loss_agg_mode: verl's averaging; None: token-mean.

    Raises:
        LossError: If it cannot be imported, is not there, cannot be called, or does not take the settings.
    """
    function = _imported(name)
    if isinstance(function, PolicyLoss):
        if settings or loss_agg_mode:
            raise LossError(f"{name} has settings of its own: leave --config and --loss-agg-mode out")
        return function
    if not callable(function):
        raise LossError("this is not a function: give MODULE:FUNCTION")
    return PolicyLoss(function, configured(settings), loss_agg_mode or "token-mean")


def _imported(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:
        module, _, attribute = name.partition(":")
        close = did_you_mean(attribute, dir(sys.modules.get(module)))
        raise LossError(
            f"{name} cannot be imported ({type(error).__name__}: {error}){close}: give MODULE:FUNCTION, and start in "
            "the folder that holds the module, or install its package"
        ) from error


def configured(settings: Sequence[str]) -> Config:
    """verl's defaults of the actor as far as a loss reads them, and what ``KEY=VALUE`` adds; a dot goes a level down.

    ``policy_loss._target_=package.module.Class`` adds the defaults of that dataclass of settings.

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
        try:
            level[last] = json.loads(text)
        except ValueError:
            level[last] = text
    if target := config.policy_loss.get("_target_"):
        for each in dataclasses.fields(_imported(target)):
            if each.default is not dataclasses.MISSING:
                config.policy_loss.setdefault(each.name, each.default)
    return config


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fspo.check_loss", description="Check a policy loss, and show what it does by response length."
    )
    parser.add_argument("losses", nargs="+", metavar="MODULE:FUNCTION", help="with the signature of verl's registry")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the actor; policy_loss._target_=CLASS: the defaults of that class",
    )
    parser.add_argument("--loss-agg-mode", metavar="MODE", help="verl's averaging (default: token-mean)")
    options = parser.parse_args(arguments)
    status = 0
    for name in options.losses:
        try:
            loss = load(name, options.config, options.loss_agg_mode)
            report = check(loss)
        except LossError as error:
            print(f"{name}: {error}", file=sys.stderr)
            status = 2
            continue
        print(f"{name}, loss_agg_mode={loss.loss_agg_mode}\n\n{report.text()}\n", flush=True)
        status = max(status, int(not report.conforms))
    return status
