"""Clip values as overrides of verl's command line, for the audit's command (entry point ``fspo.overrides``).

Imports nothing of verl.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from fspo.conclusion import ClipValue
from fspo.losses import ALGORITHMS
from fspo.types import eps_of_c

_ACTOR: Final = "actor_rollout_ref.actor"
_LOSS: Final = f"{_ACTOR}.policy_loss"
_FOR_ANY: Final = "for verl's own trainers and this recipe's"
_SCALED: Final = "for verl's own trainers, and for this recipe's, where grad_multiplier replaces fspo.match_scale"


def override(value: ClipValue) -> str | None:
    """For which trainers, and below it the overrides that set clip values, on a line; None where verl is not installed.

    verl's own ``gspo`` takes them as eps. If the loss sums over tokens and replaces one that averages over them, the
    overrides also set ``grad_multiplier`` to 1 / mean length. Of this package's losses those with 1/L average; any
    other loss is taken to average, as by verl's default.
    """
    if find_spec("verl") is None:
        return None
    loss, settings = value.loss, value.settings
    if (loss, value.audited) == ("seq_gspo", "gspo"):
        low, high = eps_of_c(settings.c_low, settings.c_high)
        return f"{_FOR_ANY}:\n  {_ACTOR}.clip_ratio_low={low:.3g} {_ACTOR}.clip_ratio_high={high:.3g}"
    words = [] if loss == value.audited else [f"{_LOSS}.loss_mode={loss}"]
    words.append(f"{_LOSS}._target_=fspo.verl.SequencePolicyLossConfig")
    words.append(f"+{_LOSS}.exponent={settings.exponent:g}")  # always: the audited run may have had another one
    words += [f"+{_LOSS}.c_low={settings.c_low:.3g}", f"+{_LOSS}.c_high={settings.c_high:.3g}"]
    before, trainers = ALGORITHMS.get(str(value.audited)), _FOR_ANY
    if settings.grad_scale == "1" and (before is None or before.grad_scale != "1"):
        words.append(f"+{_LOSS}.grad_multiplier={1 / value.mean_length:.2g}")
        trainers = _SCALED
    return f"{trainers}:\n  {' '.join(words)}"
