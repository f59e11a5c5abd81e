"""Finite differences of a loss, with what it detaches held fixed. Defined here.

A loss such as ``-(ratio.detach() * advantages * log_prob)`` has, on purpose, another gradient than its value: the
detached ratio counts as a constant. A live tensor that enters ``detach()`` or a block without gradients is therefore
recorded in one evaluation, and put in its place in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

Value = Callable[[torch.Tensor], torch.Tensor]

#: Small enough for float64, and large enough for a loss that computes in float32.
_STEPS: Final = (1e-6, 1e-3)
_CUTS: Final = frozenset(
    [torch.detach, torch.tensor, torch.Tensor.new_tensor, torch.Tensor.data.__get__]  # type: ignore[attr-defined]
    + [getattr(torch.Tensor, name) for name in ("detach", "detach_", "item", "tolist", "numpy", "__float__")]
)


class _Held(TorchFunctionMode):
    """Records the live tensors that enter a part without a gradient, or puts recorded ones in their place."""

    def __init__(self, recorded: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self._recorded = recorded
        # Set by the loss alone: torch turns gradients off in the forward pass of a torch.autograd.Function too, in a
        # way that does not come by here, and its result has a gradient.
        self._off = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reads = getattr(func, "__name__", "") == "__get__"  # an attribute, such as the shape
        if func is torch._C._set_grad_enabled:
            self._off = not args[0]
        elif func in _CUTS or ((self._off or torch.is_inference_mode_enabled()) and not reads):
            args, kwargs = self._hold(args), self._hold(kwargs)
        return func(*args, **kwargs)

    def _hold(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not value.requires_grad:
                return value
            # A copy, before the loss may change it in place. Without a gradient in both evaluations, because under
            # no_grad a view of a live tensor counts as live; and fit for autograd outside an inference mode.
            with torch.inference_mode(False):
                self.seen.append(value.detach().clone())
                source = self._recorded or self.seen
                return source[min(len(self.seen), len(source)) - 1].clone()
        if isinstance(value, dict):
            return {key: self._hold(one) for key, one in value.items()}
        return type(value)(map(self._hold, value)) if type(value) in (list, tuple) else value


def finite_differences(value: Value, at_BT: torch.Tensor, mask_BT: torch.Tensor) -> list[torch.Tensor]:
    """Central differences by the entries of ``at_BT`` (float64) inside the mask, 0 elsewhere, one for each step."""
    with _Held() as base:
        value(at_BT.clone().requires_grad_())

    def moved(index: tuple[int, ...], by: float) -> float:
        point_BT = at_BT.clone()
        point_BT[index] += by
        with _Held(base.seen):
            result = value(point_BT.requires_grad_())
        return float(result.detach())

    differences = []
    for step in _STEPS:
        difference_BT = torch.zeros_like(at_BT)
        for index in map(tuple, mask_BT.nonzero().tolist()):
            difference_BT[index] = (moved(index, step) - moved(index, -step)) / (2 * step)
        differences.append(difference_BT)
    return differences
