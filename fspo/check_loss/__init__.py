"""Checks anyone's policy loss: ``python -m fspo.check_loss MODULE:FUNCTION`` (docs/check-loss.md)."""

from __future__ import annotations

import dataclasses
import json
import math
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from fspo.check_loss import by_length
from fspo.check_loss.by_length import DISPERSIONS, LENGTHS, Clip
from fspo.check_loss.call import TENSORS, Config, LossError, PolicyLoss
from fspo.check_loss.checks import Check, checks
from fspo.kept import UnclippedWeight
from fspo.losses import ALGORITHMS, named_loss, resolve_settings, sequence_policy_loss
from fspo.types import BandState, eps_of_c

__all__ = ["LossError", "PolicyLoss", "Report", "check", "configured", "load"]

#: The values that verl's configuration of the actor has unless they are set, as far as its own losses read them.
_ACTOR: Final = {
    **{"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0},
    **{"tau_pos": 1.0, "tau_neg": 1.05, "loss_agg_mode": "token-mean", "loss_scale_factor": None},
}


@dataclass(frozen=True, slots=True)
class Report:
    """Results for one loss: the checks, and what :mod:`fspo.check_loss.by_length` has measured.

    ``clips`` is what the clip keeps by length, at each of DISPERSIONS, measured against 1 if the weight is None.
    """

    checks: list[Check]
    per_token: Sequence[float] = ()
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

    def lines(self, passed: bool) -> list[str]:
        """A line for each check that passed, or that did not."""
        return [f"{'ok  ' if passed else 'FAIL'}  {x.name:13}  {x.says}" for x in self.checks if x.passed == passed]

    def text(self) -> str:
        """The verdict with all that was measured."""
        return "\n".join([self.verdict(), *self.lines(False), *self.measured()])

    def measured(self) -> list[str]:
        """Lines of the checks that passed, and of what was measured by length."""
        lines = [
            *self.lines(True),
            "\nresponse length, reported and not judged:",
            _row("  tokens", map(str, LENGTHS)),
            _row("  gradient per token", (f"{value:.3g}".replace("nan", "-") for value in self.per_token)),
            f"  per token ~ {by_length.power(self.exponent)} (0: every token counts alike, -1: every response does)",
            f"  weight near the old policy: {self.weight or 'another (the clip is measured against 1)'}{self.bound}",
        ]
        for sigma, (error, starts) in self.clips.items():
            lines += [
                f"\n  clip at {sigma:g} nats per sqrt(token): a response keeps {error.rate:.1%} on average",
                _row("  tokens from", map(str, starts)),
                _row("  kept", (f"{share:.3f}" for share in error.rate_K)),
                f"  LRE of what is kept: {error.words}",
            ]
        return lines


def _row(head: str, cells: Iterable[str]) -> str:
    return f"{head:24}" + "".join(f"{cell:>9}" for cell in cells)


def check(loss: PolicyLoss) -> Report:
    """Everything about one loss; LossError if it cannot be called."""
    results, (weight, bound) = checks(loss), by_length.weight_and_bound(loss)
    clips = {s: by_length.clip_by_length(loss, weight or "none", by_length.synthetic(s)) for s in DISPERSIONS}
    return Report(results, *by_length.normalisation(loss), weight, bound, clips)


def load(
    name: str, settings: Sequence[str] = (), loss_agg_mode: str | None = None, actor: str | None = None
) -> PolicyLoss:
    """The loss that a name stands for, with these settings; LossError if there is none.

    Args:
        name: ``module:function``, or a loss of :data:`fspo.losses.LOSSES` by its key or its name in tables, which has
            its settings at ``config.policy_loss``, and averages over the responses of the mini-batch.
        settings: As in :func:`configured`.
        loss_agg_mode: verl's averaging, for losses that read it.
        actor: ``module:Class`` of the configuration, for losses that ask for one, as verl's do.
    """
    kind = imported(actor) if actor else None
    if (ours := named_loss(name)) is None:
        return PolicyLoss(imported(name), configured(settings, kind), loss_agg_mode or "token-mean")
    values = ALGORITHMS[ours]
    own = {f"policy_loss.{key}": value for key, value in {"loss_mode": ours, **dataclasses.asdict(values)}.items()}
    if values.exponent == 1:  # where verl's losses look for their clip values, too
        low, high = eps_of_c(values.c_low, values.c_high)
        own |= {"clip_ratio": low, "clip_ratio_low": low, "clip_ratio_high": high}
    config = configured([*(f"{key}={json.dumps(value)}" for key, value in own.items()), *settings], kind)
    mode = "seq-mean-token-mean" if values.grad_scale == "1/L" else "seq-mean-token-sum"
    return PolicyLoss(_of_the_library, config, loss_agg_mode or mode)


def _of_the_library(config: Any, rollout_is_weights: Any, **given: Any) -> torch.Tensor:
    settings = resolve_settings(_values(config.policy_loss))
    assert settings is not None, f"policy_loss.loss_mode has to be one of {', '.join(ALGORITHMS)}"
    old_BT, new_BT, a_BT, mask_BT = (given[name] for name in TENSORS)
    output = sequence_policy_loss(new_BT, old_BT, a_BT, mask_BT, settings, BandState(), rollout_is_weights)
    info: dict[str, int] = config.global_batch_info
    return output.loss_B.sum() / info["global_batch_size"] * info["dp_size"]


def imported(name: str) -> Callable[..., Any]:
    """The function or class that ``module:name`` stands for; LossError if there is none."""
    try:
        value = pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:
        remedy = "give MODULE:FUNCTION, and start in the folder that holds the module, or install its package; or give "
        remedy += f"one of ours, {', '.join(ALGORITHMS)}"
        raise LossError(f"{name} cannot be imported ({type(error).__name__}: {error}): {remedy}") from error
    if not callable(value):
        raise LossError(f"{name} is no function: give MODULE:FUNCTION")
    return value  # type: ignore[no-any-return]


def configured(settings: Sequence[str], actor: Any = None) -> Any:
    """verl's defaults of the actor as far as a loss reads them, and what ``KEY=VALUE`` adds; a dot goes a level down.

    ``policy_loss._target_=package.module.Class`` adds the defaults of that dataclass. ``actor`` is the class of the
    result, a dataclass too, for losses that ask for one, as verl's do.
    """
    config: Any = Config(_ACTOR, policy_loss=Config())
    if actor:
        defaults = _defaults(actor)
        config = object.__new__(actor)  # without its own checks, which ask for settings of the whole run
        vars(config).update(defaults)
    for setting in settings:
        key, equals, text = setting.partition("=")
        *path, last = key.split(".")
        if not equals or not last:
            raise LossError(f"--config {setting} is not KEY=VALUE: give, for example, --config clip_ratio_high=0.28")
        level = _values(config)
        for part in path:
            level = _values(level.setdefault(part, Config()))
        try:
            level[last] = json.loads(text)
        except ValueError:
            level[last] = text
    _values(config)["global_batch_info"] = {}
    own = _values(config.policy_loss)
    if target := own.get("_target_"):
        own.update(_defaults(imported(target)) | own)
    return config


def _values(level: Any) -> Any:
    if isinstance(level, dict):
        return level
    if not hasattr(level, "__dict__"):
        raise LossError(f"--config: {level!r} has no settings below it, and one is read or given there")
    return vars(level)


def _defaults(settings: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(settings):
        raise LossError(f"{settings} is no dataclass of settings")
    made = {x.name: x.default_factory() for x in dataclasses.fields(settings) if callable(x.default_factory)}
    return made | {x.name: x.default for x in dataclasses.fields(settings) if x.default is not dataclasses.MISSING}
