"""``python -m fspo.check_loss MODULE:FUNCTION ...``: is a policy loss right, and what does it do by response length?

The function has the signature of verl's registry (:mod:`fspo.check_loss.call`); verl itself is not needed. Exit status:
0 if every check passed, 1 if one failed, 2 if a loss could not be checked. What it survives, and what it does by
length, is reported with ``--full`` and never failed (docs/check-loss.md). With ``--like NAME`` it is 0 only if every
check passed and the gradient equals that of NAME too (:mod:`fspo.check_loss.comparison`), and 2 if they cannot be
compared; the last line says which.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from fspo.acceptance import UnclippedWeight
from fspo.check_loss import length_bias
from fspo.check_loss.call import Config, LossError, PolicyLoss
from fspo.check_loss.checks import Check, checks
from fspo.check_loss.comparison import compare
from fspo.check_loss.length_bias import DISPERSIONS, LENGTHS, Clip
from fspo.check_loss.robust import in_words
from fspo.losses import ALGORITHMS, named_loss, resolve_settings, sequence_policy_loss
from fspo.names import did_you_mean
from fspo.responses import VIEWS
from fspo.types import BandState, eps_of_c

#: The values that verl's configuration of the actor has unless they are set, as far as its own losses read them.
_ACTOR: Final = {
    **{"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0},
    **{"tau_pos": 1.0, "tau_neg": 1.05, "loss_agg_mode": "token-mean", "loss_scale_factor": None},
}


@dataclass(frozen=True, slots=True)
class Report:
    """Results for one loss.

    ``weight`` is None if it is none of the known ones; the clip is then measured against 1. ``bound`` says in words
    where the weight is truncated.
    """

    checks: list[Check]
    robust: str = ""
    per_token: list[float] = dataclasses.field(default_factory=list)
    exponent: float = math.nan
    weight: UnclippedWeight | None = None
    bound: str = ""
    clips: dict[float, Clip] = dataclasses.field(default_factory=dict)

    @property
    def conforms(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def verdict(self) -> str:
        """Whether the loss conforms."""
        failed = ", ".join(check.name for check in self.checks if not check.passed)
        return f"does not conform: {failed}" if failed else f"conforms: {len(self.checks)} checks passed"

    def failures(self) -> list[str]:
        """A line for each check that failed."""
        return [_line(check) for check in self.checks if not check.passed]

    def text(self) -> str:
        """The verdict with all that was measured."""
        return "\n".join([self.verdict(), *self.failures(), *self.measured()])

    def measured(self) -> list[str]:
        """Lines of all but verdict and failures."""
        lines = [_line(check) for check in self.checks if check.passed]
        weight = self.weight or "another (the clip is measured against 1)"
        lines += [
            f"\nrobust, apart from right: {self.robust}\n",
            "response length, reported and not judged:",
            _row("  tokens", [str(length) for length in LENGTHS]),
            _row("  gradient per token", [f"{value:.3g}".replace("nan", "-") for value in self.per_token]),
            f"  per token ~ {f'L^{self.exponent:.2f}'.replace('L^nan', 'no power of L')}"
            " (0: every token counts alike, -1: every response does)",
            f"  weight near the old policy: {weight}{self.bound}",
        ]
        for sigma, clip in self.clips.items():
            lines += [
                f"\n  clip at {sigma:g} nats per sqrt(token): keeps {clip.kept:.1%} of a response's weight on average",
                _row("  tokens from", [str(start) for start in clip.starts]),
                _row("  kept", [f"{share:.3f}" for share in clip.kept_J]),
            ]
            for view in VIEWS:
                error, lre = clip.errors[view], clip.errors[view].debiased
                shown = f"{lre.value:.3f} [{lre.low:.3f}, {lre.high:.3f}], noise {error.noise_floor:.3f}"
                lines.append(f"  LRE {view:9}  {shown if error.is_informative else '-'}")
        return lines


def _line(check: Check) -> str:
    return f"{'ok  ' if check.passed else 'FAIL'}  {check.name:13}  {check.says}"


def _row(head: str, cells: Sequence[str]) -> str:
    return f"{head:24}" + "".join(f"{cell:>9}" for cell in cells)


def check(loss: PolicyLoss) -> Report:
    """Everything about one loss; LossError if it cannot be called."""
    results = checks(loss)
    weight, bound = length_bias.weight_and_bound(loss)
    samples = {sigma: length_bias.synthetic(sigma) for sigma in DISPERSIONS}
    clips = {sigma: length_bias.clip_by_length(loss, weight or "none", of_sigma) for sigma, of_sigma in samples.items()}
    return Report(results, in_words(loss), *length_bias.normalisation(loss), weight, bound, clips)


def load(
    name: str, settings: Sequence[str] = (), loss_agg_mode: str | None = None, actor: str | None = None
) -> PolicyLoss:
    """The loss, or the :class:`PolicyLoss`, that ``module:function`` names, with these settings; or LossError.

    actor: ``module:Class`` of the configuration, for losses that ask for one, as verl's do.
    """
    function = _function(name)
    if isinstance(function, PolicyLoss):
        if settings or loss_agg_mode or actor:
            raise LossError(f"{name} has settings of its own: leave --config, --loss-agg-mode and --actor out")
        return function
    return PolicyLoss(function, configured(settings, _class(actor)), loss_agg_mode or "token-mean")


def _class(actor: str | None) -> type | None:
    """The dataclass that ``--actor`` names, if it is given."""
    kind = _imported(actor) if actor else None
    if kind is not None and not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        remedy = "give the dataclass of the actor's settings, such as --actor verl.workers.config:ActorConfig"
        raise LossError(f"--actor {actor} is no dataclass: {remedy}")
    return kind


def named(
    name: str, settings: Sequence[str] = (), loss_agg_mode: str | None = None, actor: str | None = None
) -> PolicyLoss:
    """The loss that a name stands for, with these settings; LossError if there is none.

    ``module:function`` as in :func:`load`; a loss of :data:`fspo.losses.LOSSES`, averaged over the responses of the
    mini-batch, with its settings at ``config.policy_loss``; or one of verl's registry or a value of ``algo``
    (:mod:`recipe.fspo.check_losses`), with verl's own configuration. Without verl, ``gspo`` and the other names in
    tables are the library's losses.
    """
    if ":" in name:
        return load(name, settings, loss_agg_mode, actor)
    if name in ALGORITHMS:
        loss = _library_loss(name, actor)
    else:
        try:
            registered = _imported("recipe.fspo.check_losses:registered")
        except LossError as error:
            if (ours := named_loss(name)) is None:
                close = did_you_mean(name, ALGORITHMS)
                remedy = f"give one of ours, {', '.join(ALGORITHMS)}{close}, or MODULE:FUNCTION"
                raise LossError(f"--like {name} needs verl and this repository's recipe: {remedy}") from error
            loss = _library_loss(ours, actor)
        else:
            if actor:
                raise LossError(f"--like {name} has a class of settings of its own: leave --actor {actor} out")
            loss = registered(name)
    _set(loss.config, settings)
    return PolicyLoss(loss.function, loss.config, loss_agg_mode or loss.loss_agg_mode)


def _library_loss(name: str, actor: str | None) -> PolicyLoss:
    """A loss of :data:`ALGORITHMS`; its clip values stand where verl's losses look for theirs, too."""
    settings = ALGORITHMS[name]
    config = configured([f"policy_loss.loss_mode={name}"], _class(actor))
    _values(config.policy_loss).update(dataclasses.asdict(settings))
    if settings.exponent == 1:
        low, high = eps_of_c(settings.c_low, settings.c_high)
        _values(config).update(clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high)
    return PolicyLoss(_of_the_library, config)


def _of_the_library(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    rollout_is_weights: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    values = _values(config.policy_loss)
    settings = resolve_settings(values)
    if settings is None:
        remedy = f"set policy_loss.loss_mode to one of {', '.join(ALGORITHMS)}"
        raise LossError(f"policy_loss.loss_mode={values['loss_mode']} is none of ours: {remedy}")
    tensors = log_prob, old_log_prob, advantages, response_mask
    output = sequence_policy_loss(*tensors, settings, BandState(), rollout_is_weights)
    info: dict[str, int] = config.global_batch_info
    return output.loss_B.sum() / info["global_batch_size"] * info["dp_size"]


def _function(name: str) -> Any:
    """The function, or the :class:`PolicyLoss`, that ``module:function`` names."""
    function = _imported(name)
    if not (isinstance(function, PolicyLoss) or callable(function)):
        raise LossError("this is not a function: give MODULE:FUNCTION")
    return function


def _imported(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:
        module, _, attribute = name.partition(":")
        close = did_you_mean(attribute, dir(sys.modules.get(module)))
        remedy = "give MODULE:FUNCTION, and start in the folder that holds the module, or install its package"
        raise LossError(f"{name} cannot be imported ({type(error).__name__}: {error}){close}: {remedy}") from error


def configured(settings: Sequence[str], actor: type | None = None) -> Any:
    """verl's defaults of the actor as far as a loss reads them, and what ``KEY=VALUE`` adds; a dot goes a level down.

    ``policy_loss._target_=package.module.Class`` adds the defaults of that dataclass of settings. actor: the class
    of the result, for losses that ask for one, as verl's do.
    """
    config: Any = Config(_ACTOR | {"policy_loss": Config(place="policy_loss.")})
    if actor:
        config = object.__new__(actor)  # without its own checks, which ask for settings of the whole run
        vars(config).update(_defaults(actor))
    _values(config)["global_batch_info"] = {}
    _set(config, settings)
    return config


def _set(config: Any, settings: Sequence[str]) -> None:
    for setting in settings:
        key, equals, text = setting.partition("=")
        *path, last = key.split(".")
        if not equals or not last:
            raise LossError(f"--config {setting} is not KEY=VALUE: give, for example, --config clip_ratio_high=0.28")
        level, place = config, ""
        for part in path:
            place += f"{part}."
            level = _values(level).setdefault(part, Config(place=place))
        try:
            _values(level)[last] = json.loads(text)
        except ValueError:
            _values(level)[last] = text
    if target := _values(config.policy_loss).get("_target_"):
        for name, value in _defaults(_imported(target)).items():
            _values(config.policy_loss).setdefault(name, value)


def _values(level: Any) -> Any:
    return level if isinstance(level, dict) else vars(level)


def _defaults(settings: Any) -> dict[str, Any]:
    made = {x.name: x.default_factory() for x in dataclasses.fields(settings) if callable(x.default_factory)}
    return made | {x.name: x.default for x in dataclasses.fields(settings) if x.default is not dataclasses.MISSING}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser("python -m fspo.check_loss", description="Check a policy loss, by length too.")
    parser.add_argument("losses", nargs="+", metavar="MODULE:FUNCTION", help="with the signature of verl's registry")
    what = "a setting of the actor; policy_loss._target_=CLASS: the defaults of that class"
    parser.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help=what)
    what = "dataclass of the settings, for a loss that asks for one: verl's is verl.workers.config:ActorConfig"
    parser.add_argument("--actor", metavar="MODULE:CLASS", help=what)
    parser.add_argument(
        "--loss-agg-mode", metavar="MODE", help="verl's averaging (default: token-mean, or that of --like)"
    )
    what = "compare with a loss of verl's registry, one of ours, or MODULE:FUNCTION; both get its settings"
    parser.add_argument("--like", metavar="NAME", help=what)
    parser.add_argument("--full", action="store_true", help="all checks, what the loss survives, and by length")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # small tensors
    return max(_report(name, options) for name in options.losses)


def _report(name: str, options: argparse.Namespace) -> int:
    """Print what is to be said of one loss; its exit status."""
    mode = options.loss_agg_mode
    try:
        like = None
        if options.like:  # a name has an averaging of its own, which is part of what it stands for
            like = named(options.like, options.config, mode if ":" in options.like else None, options.actor)
        loss = _with_settings_of(like, name, mode) if like else load(name, options.config, mode, options.actor)
        comparison = compare(loss, like) if like else None
        report = check(loss) if options.full else Report(checks(loss))
    except LossError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    lines = report.failures() + (report.measured() if options.full else [])
    if like and comparison:
        averages = "over responses" if like.function is _of_the_library else f"by loss_agg_mode={like.loss_agg_mode}"
        lines = [f"like {options.like}: {comparison.text()}\n({options.like} averages {averages})\n", *lines]
        verdict = report.verdict() if comparison.equal else report.verdict().removeprefix("conforms: ")
        lines.append(f"{'equal' if comparison.equal else 'not equal'} to {options.like}; {verdict}")
    else:
        lines = [report.verdict(), *lines]
    print(f"{name}, loss_agg_mode={loss.loss_agg_mode}\n", *lines, "", sep="\n", flush=True)
    return int(not report.conforms or (comparison is not None and not comparison.equal))


def _with_settings_of(like: PolicyLoss, name: str, loss_agg_mode: str | None) -> PolicyLoss:
    function = _function(name)
    if not isinstance(function, PolicyLoss):
        return PolicyLoss(function, like.config, loss_agg_mode or like.loss_agg_mode)
    if loss_agg_mode:
        raise LossError(f"{name} has settings of its own: leave --loss-agg-mode {loss_agg_mode} out")
    return function
